"""A store inside one process: a dictionary, a lock, and a bell that rings at each change.

It serves a job on one machine, where the agents that have to meet are one, and tests. A queue stands beside the values: it can
be waited and checked for while it holds something, but it is neither counted, nor listed, nor deleted, as in torch's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from rallypoint.store.interface import QueueEmptyError, Store, StoreError, StoreTimeoutError, as_bytes, as_keys, as_seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import timedelta

__all__ = ["HashStore"]


class HashStore(Store):
    """Keys and values in memory, for the threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes | str) -> None:
        with self._changed:
            self._values[key] = as_bytes(value)
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            self._wait_for([key], self._values.__contains__, self.timeout_s)
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            count = self._count(key) + int(amount)
            self.set(key, str(count))
            return count

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        expected = as_bytes(expected_value)
        with self._changed:
            if self._values.get(key, b"") == expected and (key in self._values or not expected):
                self.set(key, desired_value)
            return self._values.get(key, expected)

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(map(self._is_there, as_keys(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        timeout_s = self.timeout_s if timeout is None else as_seconds(timeout)
        with self._changed:
            self._wait_for(as_keys(keys), self._is_there, timeout_s)

    def delete_key(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def list_keys(self) -> list[str]:
        with self._changed:
            return list(self._values)

    def append(self, key: str, value: bytes | str) -> None:
        with self._changed:
            self.set(key, self._values.get(key, b"") + as_bytes(value))

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        with self._changed:
            super().multi_set(keys, values)

    def queue_push(self, key: str, value: bytes | str) -> None:
        with self._changed:
            self._queues.setdefault(key, deque()).append(as_bytes(value))
            self._changed.notify_all()

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        with self._changed:
            if block:
                self._wait_for([key], self._queues.__contains__, self.timeout_s)
            elif key not in self._queues:
                raise QueueEmptyError(f"the queue {key!r} is empty")
            first = self._queues[key].popleft()
            if not self._queues[key]:
                del self._queues[key]
            return first

    def queue_len(self, key: str) -> int:
        with self._changed:
            return len(self._queues.get(key, ()))

    def clone(self) -> HashStore:
        twin = HashStore()
        twin._values, twin._queues, twin._changed = self._values, self._queues, self._changed
        twin.set_timeout(self.timeout_s)
        return twin

    def has_extended_api(self) -> bool:
        return True

    def _is_there(self, key: str) -> bool:
        return key in self._values or key in self._queues

    def _count(self, key: str) -> int:
        value = self._values.get(key) or b"0"
        try:
            return int(value)
        except ValueError:
            raise StoreError(f"cannot add to {key!r}: its value {value[:40]!r} is not a number") from None

    def _wait_for(self, keys: list[str], is_there: Callable[[str], bool], timeout_s: float) -> None:
        """Wait, with the lock held, until every key is there; other threads get the lock meanwhile."""
        deadline = time.monotonic() + timeout_s
        while missing := [key for key in keys if not is_there(key)]:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise StoreTimeoutError.of_keys(keys, missing, timeout_s)
            self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
