"""What a node watches, how far it has been told, and what it has not taken yet.

The store tells changes in whole batches, each with the revision up to which it is complete, so that after a break each watch
goes on with the first change that it was not told. Between asking for a watch and the store's confirmation what comes for it
belongs to an earlier watch of the same prefix, and is not passed on.
"""

from __future__ import annotations

from collections.abc import Iterable

from rallypoint.core.coordination import Event

__all__ = ["Watches"]


class _Watch:
    def __init__(self, next_revision: int) -> None:
        self.next_revision = next_revision
        self.is_confirmed = False


class Watches:
    """All watches of one node."""

    def __init__(self) -> None:
        self._watches: dict[str, _Watch] = {}
        self._untaken: list[Event] = []

    def __contains__(self, prefix: str) -> bool:
        return prefix in self._watches

    def __len__(self) -> int:
        return len(self._watches)

    @property
    def has_untaken(self) -> bool:
        return bool(self._untaken)

    def begin(self, prefix: str, from_revision: int) -> None:
        """Ask for it, anew if it is watched already."""
        self.end(prefix)
        self._watches[prefix] = _Watch(from_revision)

    def end(self, prefix: str) -> None:
        """Nothing more of it, also not what has come already, unless another watch has it too."""
        if self._watches.pop(prefix, None) is not None:
            others = tuple(self._watches)
            self._untaken = [one for one in self._untaken if not one.key.startswith(prefix) or one.key.startswith(others)]

    def confirm(self, prefix: str) -> None:
        if (watch := self._watches.get(prefix)) is not None:
            watch.is_confirmed = True

    def renew(self) -> list[tuple[str, int]]:
        """The connection is a new one: what to ask for again."""
        for watch in self._watches.values():
            watch.is_confirmed = False
        return [(prefix, watch.next_revision) for prefix, watch in self._watches.items()]

    def add_past(self, prefix: str, events: Iterable[Event], through: int) -> None:
        """What had happened under one prefix when its watch began."""
        watch = self._watches.get(prefix)
        if watch is not None and watch.is_confirmed:
            self._untaken += [event for event in events if event.revision >= watch.next_revision]
            watch.next_revision = max(watch.next_revision, through + 1)

    def add(self, events: Iterable[Event], through: int) -> None:
        """What has happened since, under any of the prefixes."""
        self._untaken += filter(self._is_wanted, events)
        self.note_told(through)

    def note_told(self, through: int) -> None:
        """All changes up to this revision have been told, if there were any."""
        for watch in self._watches.values():
            if watch.is_confirmed:
                watch.next_revision = max(watch.next_revision, through + 1)

    def take(self) -> list[Event]:
        taken, self._untaken = self._untaken, []
        return taken

    def _is_wanted(self, event: Event) -> bool:
        return any(
            watch.is_confirmed and event.revision >= watch.next_revision and event.key.startswith(prefix)
            for prefix, watch in self._watches.items()
        )
