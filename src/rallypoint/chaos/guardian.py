"""The guardian: the process that holds what has to be undone, so that it is undone whatever becomes of ``rallypoint chaos``.

It has its own session, does what it is told through a socket, and keeps the time itself. When a hold's time is over, when it
is asked to, and when the other end of the socket is gone, by `kill -9` too, it undoes what it holds. It waits for nothing but
the next event. Should somebody kill the guardian, the other end sees that, and undoes the same (`guard`).

A request is one packet of JSON with files: a number, what to do, for how many seconds, and the processes. Files that do not
fit into one packet come before it, in packets of their own. An answer is a packet too.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time

from rallypoint.base import limits
from rallypoint.chaos.holds import Cut, Filled, Hold, Slowed, Stopped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["ANSWER_BYTES", "FDS_MAX", "MOST_FILES", "PROGRAM", "main"]

PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from rallypoint.chaos.guardian import main; main()"
FDS_MAX = 200  # in one packet; the kernel takes 253
MOST_FILES = 8192
REQUEST_BYTES = ANSWER_BYTES = 16 * 1024
_DEAF_TO = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTSTP, signal.SIGTTOU, signal.SIGTTIN)


class _Held:
    def __init__(self, hold: Hold, until: float, fds: list[int]) -> None:
        self.hold, self.until, self.fds = hold, until, fds


class _Guardian:
    def __init__(self, sock: socket.socket, quit_fd: int) -> None:
        self._sock, self._quit_fd = sock, quit_fd
        self._held: dict[int, _Held] = {}
        self._fds: list[int] = []  # that have come before their request

    def run(self) -> None:
        """Until the other end is gone, or somebody wants this process to end."""
        try:
            while self._step():
                continue
        finally:
            for number in list(self._held):
                self._undo(number)

    def _step(self) -> bool:
        ready = self._wait()
        now = time.monotonic()
        for number, held in list(self._held.items()):
            if now >= held.until:
                self._undo(number)
                self._tell(number, "off")
            elif held.hold.next_at <= now:
                held.hold.turn(now)
            if held.hold.fd in ready and (news := held.hold.news()):
                self._tell(number, "news", news)
        if self._quit_fd in ready:
            return False
        return self._sock.fileno() not in ready or self._hear()

    def _wait(self) -> set[int]:
        poll = select.poll()
        for fd in (self._sock.fileno(), self._quit_fd, *(held.hold.fd for held in self._held.values())):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        wake_at = min((min(held.until, held.hold.next_at) for held in self._held.values()), default=None)
        left_ms = None if wake_at is None else max(0.0, (wake_at - time.monotonic()) * 1000)
        return {fd for fd, _ in poll.poll(left_ms)}

    def _hear(self) -> bool:
        """Do what is asked; False: nobody is there any more."""
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, REQUEST_BYTES, FDS_MAX)
        except OSError:
            data, fds = b"", []
        if not data:
            return False
        self._fds += fds
        asked = json.loads(data)
        number = asked.get("number")
        if number is None:
            return True
        if asked["do"] == "undo":
            self._undo(number)
            self._tell(number, "off")
            return True
        fds, self._fds = self._fds, []
        try:
            hold = _make(asked, fds)
        except OSError as error:
            self._tell(number, "failed", error.strerror or str(error))
            _close(fds)
            return True
        self._held[number] = _Held(hold, time.monotonic() + asked["seconds"], fds)
        self._tell(number, "on", f"{hold.count}" if isinstance(hold, Cut) else "")
        return True

    def _undo(self, number: int) -> None:
        held = self._held.pop(number, None)
        if held is not None:
            held.hold.undo()
            _close(held.fds)

    def _tell(self, number: int, what: str, text: str = "") -> None:
        """To somebody who may not read; what is done does not depend on it."""
        try:
            self._sock.send(json.dumps({"number": number, "is": what, "text": text}).encode(), socket.MSG_DONTWAIT)
        except OSError:
            return


def _make(asked: dict[str, Any], fds: list[int]) -> Hold:
    match asked["do"]:
        case "stop":
            return Stopped(fds)
        case "slow":
            return Slowed(fds, asked["percent"], time.monotonic())
        case "cut":
            return Cut(list(zip(fds, asked["pids"], strict=True)), time.monotonic())
    return Filled(asked["folder"], asked["size"])


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def main() -> None:
    """Run as a program; the last argument is the number of the socket."""
    limits.as_many_as_allowed(MOST_FILES)
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    quit_read, quit_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(quit_write)
    signal.signal(signal.SIGTERM, lambda *_: None)
    fd = int(sys.argv[-1])
    os.set_inheritable(fd, False)
    _Guardian(socket.socket(fileno=fd), quit_read).run()
