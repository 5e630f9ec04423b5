"""A small HTTP/1.1 server: one thread, and a limit on everything.

It is for short answers that are made at once, such as how the agent is: `answer` is called on the server's thread, and whoever
else asks waits meanwhile. Listeners may be of TCP or Unix sockets. ``Request`` and ``Response`` are in ``core.http_request``.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence

from rallypoint import outbox
from rallypoint.serving.http_loop import Admits, Answer, HttpLimits, HttpLoop
from rallypoint.store.bell import Bell

__all__ = ["HttpServer"]

STOPPING_S = 5.0  # an answer is a matter of milliseconds


class HttpServer:
    """Serves on sockets that listen already, which it owns from now on, until it is stopped.

    `answer` makes the answers, and `admits` says who is heard at all, by the accepted socket. Its thread is named after `name`.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        answer: Answer,
        name: str,
        *,
        admits: Admits = lambda _: True,
        limits: HttpLimits = HttpLimits(),  # noqa: B008  # a value
    ) -> None:
        self._bell = Bell()
        self._loop = HttpLoop(listeners, self._bell, answer, admits, limits)
        self._lock = threading.Lock()  # nobody rings the bell while it is being closed
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name=f"rallypoint-{name}", daemon=True)
        _open_servers[id(self)] = self

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = STOPPING_S) -> None:
        """End all connections, and listen no more. An answer that is being made is waited for so long; after that the thread,
        which keeps nobody from ending, does all this when the answer is made. Twice is once.
        """
        with self._lock:
            self._is_ending = True
            self._bell.ring()
        if self._thread.ident is None:
            self._let_go()
        elif self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            outbox.settle()

    def _run(self) -> None:
        try:
            while not self._is_ending:
                self._loop.turn()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        _open_servers.pop(id(self), None)
        with self._lock:
            self._is_ending = True
            self._loop.close()
            self._bell.close()

    def let_go_in_child(self) -> None:
        """In a fork, which has no thread of ours: close the copies, or peers would never see the server end."""
        self._lock = threading.Lock()  # the old one may have been held by a thread that is not here
        self._let_go()


_open_servers: dict[int, HttpServer] = {}


def _let_go_in_child() -> None:
    for server in list(_open_servers.values()):
        server.let_go_in_child()


os.register_at_fork(after_in_child=_let_go_in_child)
