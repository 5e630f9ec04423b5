"""Who waits for which keys, and whom a change lets go.

A waiter is let go when each of its keys has been changed once, in whatever order. It need not look again, so a thousand that
wait for one key cost the one who sets it a thousand answers, and nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Waiters"]


class Waiters:
    """Waiters by number, in the order in which they came; each waits once."""

    __slots__ = ("_left", "by_key")

    def __init__(self) -> None:
        self.by_key: dict[bytes, dict[int, None]] = {}
        self._left: dict[int, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def add(self, who: int, keys: Iterable[bytes]) -> None:
        """Let `who` wait for `keys`, instead of what it waited for before."""
        self.forget(who)
        left = self._left[who] = set(keys)
        for key in left:
            self.by_key.setdefault(key, {})[who] = None

    def forget(self, who: int) -> None:
        for key in self._left.pop(who, ()):
            waiting = self.by_key[key]
            del waiting[who]
            if not waiting:
                del self.by_key[key]

    def changed(self, key: bytes) -> list[int]:
        """Those who have nothing left to wait for now that `key` is there."""
        return [who for who in self.by_key.pop(key, ()) if self._is_free(who, key)]

    def pushed(self, key: bytes) -> list[int]:
        """The same for one more value in a queue, which only the first who waits for it is told of."""
        waiting = self.by_key.get(key)
        if not waiting:
            return []
        first = next(iter(waiting))
        del waiting[first]
        if not waiting:
            del self.by_key[key]
        return [first] if self._is_free(first, key) else []

    def _is_free(self, who: int, key: bytes) -> bool:
        left = self._left[who]
        left.discard(key)
        if left:
            return False
        del self._left[who]
        return True
