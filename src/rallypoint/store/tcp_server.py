"""A server of torch's TCPStore protocol: a thread that is started and ended.

Most jobs have one and many never use it. So the thread sleeps on its listeners until somebody comes; only then is loaded what
serves it, while the one who came waits in the kernel's queue.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Sequence

from rallypoint.base import defaults
from rallypoint.net.endpoint import address_of
from rallypoint.net.service_thread import ServiceThread, importing
from rallypoint.net.wake_fd import WakeFd

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    import socket

    from rallypoint.store.tcp_serving import TcpServingLoop

__all__ = ["TcpStoreServer"]

MOST_FILES = 65_536
SPARE_FILES = 256  # for all else that this process does
LEAST_CONNECTIONS = 64
UNREAD_MS = 120_000  # a worker may be stopped, in a debugger say, with an answer half taken; agents notice a dead machine sooner


class TcpStoreServer:
    """Serves an empty store on sockets that listen already, which it owns from now on."""

    def __init__(
        self,
        sockets: Sequence[_socket.socket],
        limit_bytes: int = defaults.WORKER_STORE_BYTES,
        objection: Callable[[socket.socket], str] | None = None,
    ) -> None:
        """`objection` says why somebody is not let in; nothing where somebody is."""
        self.addresses = [address_of(sock) for sock in sockets]
        self._sockets = list(sockets)
        self._limit_bytes = limit_bytes
        self._objection = objection
        self._newcomers: deque[tuple[socket.socket, str]] = deque()
        self._loop: TcpServingLoop | None = None
        self._thread = ServiceThread("tcp-store", WakeFd(), self._run, self._let_go, self._let_go_in_child)

    def start(self) -> None:
        self._thread.start()

    def adopt(self, sock: socket.socket, peer: str) -> None:
        """Serve a connection that was accepted elsewhere, does not block, and of which nothing was read."""
        if not self._thread.hand_over(lambda: self._newcomers.append((sock, peer))):
            sock.close()

    def end(self) -> list[_socket.socket]:
        """End the server and its connections; what it kept is gone. Gives the sockets back, at which somebody may wait again."""
        self._thread.stop()
        sockets, self._sockets = self._sockets, []
        return sockets

    def close(self) -> None:
        """The same, and nobody listens any more."""
        for sock in self.end():
            sock.close()

    # --- the thread --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._wait_for_somebody()
        if not self._thread.is_ending:
            with importing:
                self._loop = self._make_loop()
            self._serve(self._loop)

    def _wait_for_somebody(self) -> None:
        somebody = select.poll()
        for fd in (self._thread.wake_fd.fileno(), *(sock.fileno() for sock in self._sockets)):
            somebody.register(fd, select.POLLIN)
        somebody.poll()

    def _make_loop(self) -> TcpServingLoop:
        import socket

        from rallypoint.base import limits
        from rallypoint.store.tcp_serving import TcpServingLoop

        listeners, self._sockets = [socket.socket(fileno=sock.detach()) for sock in self._sockets], []
        for listener in listeners:
            listener.setblocking(False)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
        most_connections = max(LEAST_CONNECTIONS, limits.as_many_as_allowed(MOST_FILES) - SPARE_FILES)
        return TcpServingLoop(
            listeners, self._thread.wake_fd, self._newcomers, self._limit_bytes, most_connections, self._objection
        )

    def _serve(self, loop: TcpServingLoop) -> None:
        try:
            while not self._thread.is_ending:
                loop.turn()
        finally:
            self._sockets = list(loop.close())

    def _let_go(self) -> None:
        """Close all but the listeners."""
        while self._newcomers:
            self._newcomers.popleft()[0].close()

    def _let_go_in_child(self) -> None:
        for sock in self._sockets if self._loop is None else self._loop.close():
            sock.close()
        self._let_go()
