"""Back ends for tests, as an author who knows only torch's interface would write them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rallypoint.rendezvous.dynamic_handler import RendezvousBackend


class MemoryCell(RendezvousBackend):
    """A cell in this process. `before` is called with what is asked for, and may raise, wait, or count."""

    def __init__(self) -> None:
        self.before: Callable[[str], object] = lambda what: None
        self.state: bytes | None = None
        self.version = 0
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return "memory"

    def get_state(self) -> tuple[bytes, Any] | None:
        self.before("get")
        with self._lock:
            return None if self.state is None else (self.state, self.version)

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        self.before("set")
        with self._lock:
            has_set = token == (None if self.state is None else self.version)
            if has_set:
                self.state, self.version = state, self.version + 1
            return (self.state or b"", self.version, has_set)
