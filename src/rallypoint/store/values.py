"""What the operations of a store mean: the rules of torch's stores, as plain objects.

The store inside one process, the one in a file and the one that workers reach over the network keep their keys in `Values`, so
that an operation means the same in all of them. A queue stands beside the values: it is there while it holds something, but is
neither counted, nor listed, nor deleted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf

__all__ = ["ITEM_OVERHEAD_BYTES", "NotANumber", "StoreFull", "Values", "Waiters", "number_in"]

ITEM_OVERHEAD_BYTES = 200  # what an item takes beside its key and value, roughly
INT64 = 1 << 64
MAX_DIGITS = len(str(INT64 // 2))
BLANKS = b" \t\n\v\f\r"


class Waiters:
    """Who waits for which keys, by number, in the order in which they came; each waits once.

    A waiter is let go when each of its keys has been changed once, in whatever order. It need not look again, so a thousand that
    wait for one key cost the one who sets it a thousand answers, and nothing more.
    """

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


class NotANumber(ValueError):
    """A counter was asked for, and the key holds something else."""

    def __init__(self, key: bytes, value: bytes) -> None:
        super().__init__(f"cannot add to {key.decode(errors='replace')!r}: its value {value[:40]!r} is not a number")


class StoreFull(Exception):
    """What is to be kept would take more memory than the store may hold."""

    def __init__(self, limit_bytes: float) -> None:
        super().__init__(f"the store may hold {limit_bytes} bytes, and this would be more")


class Values:
    """Keys, values and queues; `held_bytes` is what they take, at most `limit_bytes`."""

    __slots__ = ("held_bytes", "limit_bytes", "queues", "values")

    def __init__(self, limit_bytes: float = inf) -> None:
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}
        self.held_bytes = 0
        self.limit_bytes = limit_bytes

    def __contains__(self, key: object) -> bool:
        return key in self.values or key in self.queues

    def missing(self, keys: list[bytes]) -> list[bytes]:
        """Those of `keys` that are not there."""
        values, queues = self.values, self.queues
        return [key for key in keys if key not in values and key not in queues]

    def set(self, key: bytes, value: bytes) -> None:
        values = self.values
        before = values.get(key)
        more_bytes = len(value) + (ITEM_OVERHEAD_BYTES + len(key) if before is None else -len(before))
        if more_bytes:
            self._take(more_bytes)
        values[key] = value

    def append(self, key: bytes, more: bytes) -> None:
        self.set(key, self.values.get(key, b"") + more)

    def add(self, key: bytes, amount: int) -> int:
        """The counter after it; one that is not there begins at 0, and one that grows beyond 64 bits begins at the other end."""
        value = self.values.get(key)
        before = 0 if value is None else number_in(value)
        if before is None:
            raise NotANumber(key, value or b"")
        count = (before + amount + INT64 // 2) % INT64 - INT64 // 2
        self.set(key, b"%d" % count)
        return count

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> tuple[bytes, bool]:
        """The value after it, or `expected` where there is none; and whether `desired` was written."""
        value = self.values.get(key)
        found = expected if value is None else value
        if found != expected or (value is None and expected):
            return found, False
        self.set(key, desired)
        return desired, True

    def delete(self, key: bytes) -> bool:
        value = self.values.pop(key, None)
        if value is None:
            return False
        self.held_bytes -= ITEM_OVERHEAD_BYTES + len(key) + len(value)
        return True

    def push(self, key: bytes, value: bytes) -> None:
        queue = self.queues.get(key)
        self._take(ITEM_OVERHEAD_BYTES + len(value) + (len(key) if queue is None else 0))
        if queue is None:
            queue = self.queues[key] = deque()
        queue.append(value)

    def pop(self, key: bytes) -> bytes | None:
        """The first value of a queue, or None where there is none."""
        queue = self.queues.get(key)
        if queue is None:
            return None
        first = queue.popleft()
        self.held_bytes -= ITEM_OVERHEAD_BYTES + len(first)
        if not queue:
            del self.queues[key]
            self.held_bytes -= len(key)
        return first

    def queue_length(self, key: bytes) -> int:
        return len(self.queues.get(key, ()))

    def _take(self, more_bytes: int) -> None:
        held = self.held_bytes + more_bytes
        if held > self.limit_bytes and more_bytes > 0:
            raise StoreFull(self.limit_bytes)
        self.held_bytes = held


def number_in(value: bytes) -> int | None:
    """The whole number of 64 bits that a value begins with, after blanks, or None; what follows it is of no account.

    So does C's strtoll read. How many digits there are is looked at before they are: thousands would cost a long time.
    """
    if len(value) < MAX_DIGITS and value.isdigit():
        return int(value)
    text = value.lstrip(BLANKS)
    digits = text[1:] if text[:1] in (b"-", b"+") else text
    number = digits[: len(digits) - len(digits.lstrip(b"0123456789"))]
    significant = number.lstrip(b"0")
    if not number or len(significant) > MAX_DIGITS:
        return None
    count = int(significant or b"0") * (-1 if text[:1] == b"-" else 1)
    return count if -INT64 // 2 <= count < INT64 // 2 else None
