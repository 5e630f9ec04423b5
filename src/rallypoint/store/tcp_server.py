"""A server of torch's TCPStore protocol: a thread that is started and ended.

Most jobs have one and many never use it. So the thread sleeps on its listeners until somebody comes; only then is loaded what
serves it, while the one who came waits in the kernel's queue.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Sequence

from rallypoint.base import defaults, outbox
from rallypoint.net.listening import address_of
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

    def __init__(self, sockets: Sequence[_socket.socket], limit_bytes: int = defaults.WORKER_STORE_BYTES) -> None:
        self.addresses = [address_of(sock) for sock in sockets]
        self._sockets = list(sockets)
        self._limit_bytes = limit_bytes
        self._newcomers: deque[tuple[socket.socket, str]] = deque()
        self._wake_fd = WakeFd()
        self._lock = threading.Lock()  # nobody sets the descriptor while it is being closed
        self._is_ending = False
        self._loop: TcpServingLoop | None = None
        self._thread = threading.Thread(target=self._run, name="rallypoint-tcp-store", daemon=True)
        _open_servers[id(self)] = self

    def start(self) -> None:
        self._thread.start()

    def adopt(self, sock: socket.socket, peer: str) -> None:
        """Serve a connection that was accepted elsewhere, does not block, and of which nothing was read."""
        with self._lock:
            if not self._is_ending:
                self._newcomers.append((sock, peer))
                self._wake_fd.set()
                return
        sock.close()

    def end(self) -> list[_socket.socket]:
        """End the server and its connections; what it kept is gone. Gives the sockets back, at which somebody may wait again."""
        with self._lock:
            self._is_ending = True
            self._wake_fd.set()
        if self._thread.ident is None:
            self._let_go()
        elif self._thread is not threading.current_thread():
            self._thread.join()
            outbox.settle()
        sockets, self._sockets = self._sockets, []
        return sockets

    def close(self) -> None:
        """The same, and nobody listens any more."""
        for sock in self.end():
            sock.close()

    # --- the thread --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._wait_for_somebody()
            if not self._is_ending:
                with _importing:
                    self._loop = self._make_loop()
                self._serve(self._loop)
        finally:
            self._let_go()

    def _wait_for_somebody(self) -> None:
        somebody = select.poll()
        for fd in (self._wake_fd.fileno(), *(sock.fileno() for sock in self._sockets)):
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
        return TcpServingLoop(listeners, self._wake_fd, self._newcomers, self._limit_bytes, most_connections)

    def _serve(self, loop: TcpServingLoop) -> None:
        try:
            while not self._is_ending:
                loop.turn()
        finally:
            self._sockets = list(loop.close())

    def _let_go(self) -> None:
        """Close all but the listeners; twice is once."""
        _open_servers.pop(id(self), None)
        with self._lock:
            self._is_ending = True
            while self._newcomers:
                self._newcomers.popleft()[0].close()
            self._wake_fd.close()

    def _let_go_in_child(self) -> None:
        """In a fork, which has no thread of ours: close the copies, or peers would never see the server end."""
        self._lock = threading.Lock()  # the old one may have been held by a thread that is not here
        for sock in self._sockets if self._loop is None else self._loop.close():
            sock.close()
        self._let_go()


_open_servers: dict[int, TcpStoreServer] = {}
_importing = threading.Lock()  # a fork in the middle of it would have the locks of modules that nobody there ever frees


def _let_go_in_child() -> None:
    for server in list(_open_servers.values()):
        server._let_go_in_child()


os.register_at_fork(before=_importing.acquire, after_in_parent=_importing.release, after_in_child=_importing.release)
os.register_at_fork(after_in_child=_let_go_in_child)
