"""Who waits for which keys, and whom a change lets go.

A waiter is let go when each of its keys has been changed once, in whatever order. It need not look again, so a thousand that
wait for one key cost the one who sets it a thousand answers, and nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Waiters"]


class Waiters:
    """Waiters by number, in the order in which they came; each waits once."""

    __slots__ = ("_left", "by_key", "pairs")

    def __init__(self) -> None:
        self.by_key: dict[bytes, dict[int, None]] = {}
        self._left: dict[int, set[bytes]] = {}
        self.pairs = 0  # of a waiter and a key: what all this takes in memory

    def __len__(self) -> int:
        return len(self._left)

    def add(self, who: int, keys: Iterable[bytes]) -> None:
        """Let `who` wait for `keys`, instead of what it waited for before."""
        self.forget(who)
        left = self._left[who] = set(keys)
        self.pairs += len(left)
        for key in left:
            self.by_key.setdefault(key, {})[who] = None

    def forget(self, who: int) -> None:
        left = self._left.pop(who, ())
        self.pairs -= len(left)
        for key in left:
            waiting = self.by_key[key]
            del waiting[who]
            if not waiting:
                del self.by_key[key]

    def changed(self, key: bytes) -> list[int]:
        """Those who have nothing left to wait for now that `key` is there."""
        return [who for who in self.by_key.pop(key, ()) if self._is_free(who, key)]

    def pushed(self, key: bytes) -> list[int]:
        """The same for one more value in a queue: the first for whom it was the last that was missing, and nobody behind it."""
        waiting = self.by_key.pop(key, {})
        while waiting:
            who = next(iter(waiting))
            del waiting[who]
            if self._is_free(who, key):
                if waiting:
                    self.by_key[key] = waiting
                return [who]
        return []

    def _is_free(self, who: int, key: bytes) -> bool:
        left = self._left[who]
        left.discard(key)
        self.pairs -= 1
        if left:
            return False
        del self._left[who]
        return True
