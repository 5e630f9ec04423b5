"""Who is to be told of which change.

Connections that watch the same prefixes are one *group*: what they are told is the same, so it is written down once for all of
them. A change finds its groups by the beginnings of its key, so that it costs the same however many groups there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rallypoint.core.coordination import Event

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.store.connection import Connection

    Prefixes = frozenset[str]

__all__ = ["Watchers"]


class Watchers:
    """The prefixes that each connection watches, and the connections of each set of prefixes."""

    def __init__(self) -> None:
        self._prefixes: dict[Connection, Prefixes] = {}
        self._members: dict[Prefixes, set[Connection]] = {}
        self._groups: dict[str, set[Prefixes]] = {}  # by each of their prefixes
        self._lengths: dict[int, int] = {}  # of those prefixes, and how many have it

    def __len__(self) -> int:
        return len(self._prefixes)

    def of(self, connection: Connection) -> Prefixes:
        return self._prefixes.get(connection, frozenset())

    def assign(self, connection: Connection, prefixes: Prefixes) -> None:
        """From now on `connection` watches exactly these."""
        if old := self._prefixes.pop(connection, None):
            self._members[old].discard(connection)
            if not self._members[old]:
                self._remove_group(old)
        if prefixes:
            self._prefixes[connection] = prefixes
            if prefixes not in self._members:
                self._add_group(prefixes)
            self._members[prefixes].add(connection)

    def route(self, events: Iterable[Event]) -> Iterator[tuple[list[Event], Iterable[Connection]]]:
        """For each group that is concerned, what it is to be told, in order, and who belongs to it."""
        told: dict[Prefixes, list[Event]] = {}
        for event in events:
            for group in self._concerned(event.key):
                told.setdefault(group, []).append(event)
        for group, its_events in told.items():
            yield its_events, self._members[group]

    def _concerned(self, key: str) -> set[Prefixes]:
        found: set[Prefixes] = set()
        for length in self._lengths:
            if length <= len(key):
                found |= self._groups.get(key[:length], set())
        return found

    def _add_group(self, prefixes: Prefixes) -> None:
        self._members[prefixes] = set()
        for prefix in prefixes:
            if prefix not in self._groups:
                self._groups[prefix] = set()
                self._lengths[len(prefix)] = self._lengths.get(len(prefix), 0) + 1
            self._groups[prefix].add(prefixes)

    def _remove_group(self, prefixes: Prefixes) -> None:
        del self._members[prefixes]
        for prefix in prefixes:
            self._groups[prefix].discard(prefixes)
            if not self._groups[prefix]:
                del self._groups[prefix]
                self._lengths[len(prefix)] -= 1
                if not self._lengths[len(prefix)]:
                    del self._lengths[len(prefix)]
