"""What the threads of an etcd client have to say to its owner: changes, and how the way to the cluster is."""

from __future__ import annotations

import threading
from operator import attrgetter

from rallypoint.core.coordination import Event
from rallypoint.store.bell import Bell
from rallypoint.store.coordination import CoordinationError, UnreachableError

__all__ = ["Reports"]

_revision_of = attrgetter("revision")


class Reports:
    """Filled by any thread, emptied by the owner's; `bell` rings when there is something to take."""

    def __init__(self) -> None:
        self.bell = Bell()
        self._lock = threading.Lock()
        self._events: dict[object, list[Event]] = {}  # by the watch that they are from
        self._troubles: dict[object, tuple[float, str]] = {}  # by whom they have befallen: since when, and what
        self._failure: CoordinationError | None = None  # of a watch
        self._end: CoordinationError | None = None

    # --- for the threads ---------------------------------------------------------------------------------------------------

    def tell(self, watch: object, events: list[Event]) -> None:
        """What is told by a watch that nobody wants any more is not passed on."""
        with self._lock:
            if events and watch in self._events:
                self._events[watch] += events
                self.bell.ring()

    def fail(self, watch: object, failure: CoordinationError) -> None:
        """The watch cannot go on."""
        with self._lock:
            if self._events.pop(watch, None) is not None:
                self._troubles.pop(watch, None)
                self._failure = failure
                self.bell.ring()

    def end(self, end: CoordinationError) -> None:
        """Nothing can go on."""
        with self._lock:
            self._end = self._end or end
            self.bell.ring()

    def trouble(self, who: object, since: float, what: str) -> None:
        with self._lock:
            if who not in self._troubles:
                self.bell.ring()
            self._troubles[who] = since, what

    def fine(self, who: object) -> None:
        with self._lock:
            if self._troubles.pop(who, None) is not None:
                self.bell.ring()

    # --- for the owner -----------------------------------------------------------------------------------------------------

    def expect(self, watch: object) -> None:
        with self._lock:
            self._events[watch] = []

    def drop(self, watch: object) -> None:
        """Nothing more of it, also not what has come already."""
        with self._lock:
            self._events.pop(watch, None)
            self._troubles.pop(watch, None)

    @property
    def has_news(self) -> bool:
        with self._lock:
            return self._end is not None or self._failure is not None or any(self._events.values())

    def oldest_trouble(self) -> tuple[float | None, str]:
        """Since when the cluster cannot be reached, and why."""
        with self._lock:
            return min(self._troubles.values()) if self._troubles else (None, "")

    def take(self) -> list[Event]:
        """What has come, ordered; raises what has happened instead."""
        with self._lock:
            self.bell.silence()
            if self._end is not None:
                raise type(self._end)(str(self._end))
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            events = sorted((event for told in self._events.values() for event in told), key=_revision_of)
            for told in self._events.values():
                told.clear()
            if not events and self._troubles:
                raise UnreachableError(min(self._troubles.values())[1])
        return events
