"""A store inside one process: the keys and values of `store.values`, a lock, and a bell that rings at each change.

It serves a job on one machine, where the agents that have to meet are one, and tests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Sequence

from rallypoint.store.interface import QueueEmptyError, Store, StoreError, StoreTimeoutError, as_bytes, as_keys, as_seconds
from rallypoint.store.values import NotANumber, Values

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import timedelta

__all__ = ["HashStore", "count_on"]


class HashStore(Store):
    """Keys and values in memory, for the threads of one process.

    >>> from rallypoint import HashStore
    >>> store = HashStore()
    >>> store.set("loss", "0.5")
    >>> store.get("loss")
    b'0.5'
    >>> store.add("epoch", 2)
    2
    """

    def __init__(self) -> None:
        self._values = Values()
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes | str) -> None:
        with self._changed:
            self._values.set(key.encode(), as_bytes(value))
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            self._wait_for([key], self._values.values, self.timeout_s)
            return self._values.values[key.encode()]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            count = count_on(self._values, key.encode(), int(amount))
            self._changed.notify_all()
            return count

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        expected, desired = as_bytes(expected_value), as_bytes(desired_value)
        with self._changed:
            value, is_written = self._values.compare_set(key.encode(), expected, desired)
            if is_written:
                self._changed.notify_all()
            return value

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return not _missing(as_keys(keys), self._values)

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        timeout_s = self.timeout_s if timeout is None else as_seconds(timeout)
        with self._changed:
            self._wait_for(as_keys(keys), self._values, timeout_s)

    def delete_key(self, key: str) -> bool:
        with self._changed:
            return self._values.delete(key.encode())

    def num_keys(self) -> int:
        return len(self._values.values)

    def list_keys(self) -> list[str]:
        with self._changed:
            return [key.decode() for key in self._values.values]

    def append(self, key: str, value: bytes | str) -> None:
        with self._changed:
            self._values.append(key.encode(), as_bytes(value))
            self._changed.notify_all()

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        with self._changed:
            super().multi_set(keys, values)

    def queue_push(self, key: str, value: bytes | str) -> None:
        with self._changed:
            self._values.push(key.encode(), as_bytes(value))
            self._changed.notify_all()

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        with self._changed:
            if block:
                self._wait_for([key], self._values.queues, self.timeout_s)
            first = self._values.pop(key.encode())
        if first is None:
            raise QueueEmptyError(f"the queue {key!r} is empty")
        return first

    def queue_len(self, key: str) -> int:
        with self._changed:
            return self._values.queue_length(key.encode())

    def clone(self) -> HashStore:
        twin = HashStore()
        twin._values, twin._changed = self._values, self._changed
        twin.set_timeout(self.timeout_s)
        return twin

    def has_extended_api(self) -> bool:
        return True

    def _wait_for(self, keys: list[str], there: Container[bytes], timeout_s: float) -> None:
        """Wait, with the lock held, until every key is there; other threads get the lock meanwhile."""
        deadline = time.monotonic() + timeout_s
        while missing := _missing(keys, there):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise StoreTimeoutError.of_keys(keys, missing, timeout_s)
            self._changed.wait(min(left_s, threading.TIMEOUT_MAX))


def count_on(values: Values, key: bytes, amount: int) -> int:
    """Add to a counter as torch's stores do in which no server has a say: an empty value counts as 0."""
    if values.values.get(key) == b"":
        values.set(key, b"0")
    try:
        return values.add(key, amount)
    except NotANumber as error:
        raise StoreError(str(error)) from None


def _missing(keys: list[str], there: Container[bytes]) -> list[str]:
    return [key for key in keys if key.encode() not in there]
