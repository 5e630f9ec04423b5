"""The table of timers, for several threads and with the clocks of this host."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from rallypoint.base import report
from rallypoint.timers.timer_table import TimerTable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.timers.timer_table import Request

__all__ = ["TimerBook"]


class TimerBook:
    """What a server knows of timers. Each method is one step, whichever threads call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._table = TimerTable()
        self._was_full = False

    def register(self, requests: Iterable[Request]) -> None:
        """Take in requests, in their order; the first of those that there is no room for is reported."""
        with self._lock:
            self._table.follow_clocks(time.time(), time.monotonic())  # what comes now is of the clock as it is now
            refused = sum([not self._table.register(request) for request in requests])
            if refused and not self._was_full:
                report.warn(f"there are too many timers ({len(self._table)}); more are not watched until some are released")
            self._was_full = bool(refused)

    def expired(self, deadline: float) -> dict[Any, list[Any]]:
        with self._lock:
            return self._table.expired(deadline)

    def workers(self) -> set[Any]:
        with self._lock:
            return self._table.workers()

    def forget(self, workers: Iterable[Any]) -> None:
        with self._lock:
            self._table.forget(workers)

    def forget_all(self) -> None:
        with self._lock:
            self._table = TimerTable()

    def seconds_to_wait(self, most_s: float) -> float:
        """How long nothing can expire that has not expired by now."""
        with self._lock:
            return self._table.seconds_to_wait(time.time(), most_s)
