"""The thread of a server: how it is started, woken, waited for and stopped, and what a fork does with it.

A fork has the server's descriptors and not its thread: peers would never see the server end while the copies are open, so they
are closed there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from rallypoint.base import outbox
from rallypoint.net.wake_fd import WakeFd

__all__ = ["ServiceThread", "importing"]

importing = threading.Lock()  # a fork in the middle of it would have the locks of modules that nobody there ever frees


class ServiceThread:
    """Runs `serve`, which returns soon once `is_ending` and `wake_fd` are set, and then `let_go`, which closes what it held.

    `let_go_in_child` is called in a fork instead, if there is more to close there. The descriptor is its own from now on.
    """

    def __init__(
        self,
        name: str,
        wake_fd: WakeFd,
        serve: Callable[[], None],
        let_go: Callable[[], None],
        let_go_in_child: Callable[[], None] | None = None,
    ) -> None:
        self.wake_fd = wake_fd
        self.is_ending = False
        self._serve = serve
        self._let_go = let_go
        self._let_go_in_child = let_go_in_child or let_go
        self._lock = threading.Lock()  # nobody sets the descriptor while it is being closed
        self._thread = threading.Thread(target=self._run, name=f"rallypoint-{name}", daemon=True)
        _services[id(self)] = self

    def start(self) -> None:
        self._thread.start()

    def hand_over(self, deliver: Callable[[], None]) -> bool:
        """Deliver something and wake the thread for it; False, and nothing is done, if it ends."""
        with self._lock:
            if not self.is_ending:
                deliver()
                self.wake_fd.set()
            return not self.is_ending

    def stop(self, timeout_s: float | None = None) -> None:
        """End it, and wait until it has ended, for so long at most. Twice is once."""
        with self._lock:
            self.is_ending = True
            self.wake_fd.set()
        if self._thread.ident is None:
            self._release(self._let_go)
        elif self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            outbox.settle()

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._release(self._let_go)

    def _release(self, let_go: Callable[[], None]) -> None:
        _services.pop(id(self), None)
        with self._lock:
            self.is_ending = True
            let_go()
            self.wake_fd.close()

    def forget_in_child(self) -> None:
        self._lock = threading.Lock()  # the old one may have been held by a thread that is not here
        self._release(self._let_go_in_child)


_services: dict[int, ServiceThread] = {}


def _forget_in_child() -> None:
    for service in list(_services.values()):
        service.forget_in_child()


os.register_at_fork(before=importing.acquire, after_in_parent=importing.release, after_in_child=importing.release)
os.register_at_fork(after_in_child=_forget_in_child)
