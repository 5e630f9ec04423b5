"""Which timers run, which have expired, and how long nobody needs to look.

A timer belongs to a worker and a scope. A request with an expiration time starts it, or replaces the one that runs in that scope;
one with a negative time releases it. What asks for timers are objects with `worker_id`, `scope_id` and `expiration_time`, of
whatever kind.

Expiration times are of the wall clock, because they come from other processes. When that clock is set, the timers that run are
moved along, so that a step of the clock neither expires a timer nor keeps one from expiring.

Invariants: a worker has at most one timer in each scope; there are never more than `limit` timers; no timer expires before
`seconds_to_wait` is over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    class Request(Protocol):
        @property
        def worker_id(self) -> Any: ...
        @property
        def scope_id(self) -> str: ...
        @property
        def expiration_time(self) -> float: ...


__all__ = ["CLOCK_STEP_S", "TIMERS_MAX", "TimerTable", "first_of"]

TIMERS_MAX = 10_000
CLOCK_STEP_S = 0.5  # less than this is a clock that is kept right, not one that is set


class TimerTable:
    """The timers that run, by worker and scope."""

    __slots__ = ("_deadlines", "_limit", "_no_sooner_than", "_offset_s", "_requests")

    def __init__(self, limit: int = TIMERS_MAX) -> None:
        self._requests: dict[tuple[Any, str], Any] = {}
        self._deadlines: dict[tuple[Any, str], float] = {}
        self._limit = limit
        self._no_sooner_than = math.inf  # no deadline is earlier; it may be too early itself, until somebody waits for it
        self._offset_s: float | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def register(self, request: Request) -> bool:
        """Start, replace or release a timer; False if there is no room for one more."""
        key = (request.worker_id, request.scope_id)
        if request.expiration_time < 0:
            self._drop([key])
            return True
        if key not in self._requests and len(self._requests) >= self._limit:
            return False
        self._requests[key] = request
        self._deadlines[key] = request.expiration_time
        self._no_sooner_than = min(self._no_sooner_than, request.expiration_time)
        return True

    def expired(self, deadline: float) -> dict[Any, list[Any]]:
        """By worker, the requests of the timers that have expired at this time, in the order in which they came."""
        found: dict[Any, list[Any]] = {}
        if deadline >= self._no_sooner_than:
            for key, request in self._requests.items():
                if self._deadlines[key] <= deadline:
                    found.setdefault(key[0], []).append(request)
        return found

    def workers(self) -> set[Any]:
        """Those who have timers."""
        return {worker for worker, _ in self._requests}

    def forget(self, workers: Iterable[Any]) -> None:
        """Drop all timers of these workers."""
        gone = set(workers)
        self._drop([key for key in self._requests if key[0] in gone] if gone else ())

    def seconds_to_wait(self, now: float, most_s: float) -> float:
        """How long nothing can expire that has not expired by now."""
        if self._no_sooner_than > now:
            return min(most_s, self._no_sooner_than - now)
        deadlines = self._deadlines.values()
        self._no_sooner_than = min(deadlines, default=math.inf)
        return min(most_s, min((one for one in deadlines if one > now), default=math.inf) - now)

    def follow_clocks(self, wall: float, monotonic: float) -> None:
        """Move all timers along if the wall clock has been set since the last look."""
        offset_s = wall - monotonic
        step_s = 0.0 if self._offset_s is None else offset_s - self._offset_s
        if self._offset_s is None or abs(step_s) >= CLOCK_STEP_S:
            self._offset_s = offset_s
            self._no_sooner_than += step_s
            self._deadlines = {key: deadline + step_s for key, deadline in self._deadlines.items()}

    def _drop(self, keys: Iterable[tuple[Any, str]]) -> None:
        for key in keys:
            self._requests.pop(key, None)
            self._deadlines.pop(key, None)


def first_of(requests: Iterable[Any]) -> Any:
    """Of a worker's expired timers, the one that expired first: it says what is to be done, and why."""
    return min(requests, key=lambda request: request.expiration_time)
