"""Where connections come in: listeners in a poll, a bounded number of newcomers at a time, and a pause when there is no room."""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Iterable, Iterator

from rallypoint.base import report
from rallypoint.base.limits import set_aside

__all__ = ["Doorway", "Refusals"]

QUIET_S = 1.0
ACCEPTS_PER_TURN = 256
PAUSE_S = 0.2  # before accepting again, when there are no file descriptors left
OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Refusals:
    """Lines about peers that were turned away: the first at once, then at most one a second, with a count.

    Whoever can connect can cause them, so they must neither fill a log nor slow the store down.
    """

    def __init__(self) -> None:
        self._untold = 0
        self._last = ""
        self._quiet_until = 0.0

    @property
    def due_at(self) -> float | None:
        """When to call `tell`; None while there is nothing to say."""
        return self._quiet_until if self._untold else None

    def add(self, peer: str, reason: str) -> None:
        self._untold += 1
        self._last = f"the store has turned away {peer}: {reason}"

    def tell(self, now: float) -> None:
        if not self._untold or now < self._quiet_until:
            return
        more = f" (and {self._untold - 1} more)" if self._untold > 1 else ""
        report.warn(self._last + more)
        self._untold = 0
        self._quiet_until = now + QUIET_S


class Doorway:
    """Listeners that do not block, registered with `poll` while they are open."""

    def __init__(self, listeners: Iterable[socket.socket], poll: select.epoll) -> None:
        self._listeners = {sock.fileno(): sock for sock in listeners}
        self._poll = poll
        self._is_open = False
        self.opens_at: float | None = None  # None while it does not pause
        self._open()

    def __contains__(self, fd: int) -> bool:
        return fd in self._listeners

    def accept(self, fd: int, now: float) -> Iterator[tuple[socket.socket, str]]:
        """Who has come, with a name for the log; the rest next time, so that those who are here already are served."""
        listener = self._listeners[fd]
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # else it is one connection that has ended before it was accepted
                if error.errno in OUT_OF_RESOURCES:
                    self._pause(now)
                    return
                continue
            sock.setblocking(False)
            name = f"{address[0]} port {address[1]}" if isinstance(address, tuple) else "a process of this machine"
            yield set_aside(sock), name

    def open_if_due(self, now: float) -> None:
        if self.opens_at is not None and now >= self.opens_at:
            self.opens_at = None
            self._open()

    def shut(self) -> None:
        """Take nobody in any more; those who come wait outside."""
        if self._is_open:
            self._is_open = False
            for fd in self._listeners:
                self._poll.unregister(fd)

    @property
    def listeners(self) -> list[socket.socket]:
        return list(self._listeners.values())

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()

    def _open(self) -> None:
        self._is_open = True
        for fd in self._listeners:
            self._poll.register(fd, select.EPOLLIN)

    def _pause(self, now: float) -> None:
        """There are no file descriptors left: those who wait are still there in a moment, and asking at once would spin."""
        self.shut()
        self.opens_at = now + PAUSE_S
