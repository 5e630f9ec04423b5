"""The small shared memory in which agents and workers find each other, as an interface.

It has the methods of ``torch.distributed.Store``, so that either can stand where the other is expected: a function of ours
that takes a store takes torch's too (`StoreLike`), and code written for torch's finds the same names here. Values are bytes
(a str is taken as UTF-8), a missing key can be waited for, and whoever waits in vain is told for which keys.

A store implements the abstract methods; what can be made from them is written once, here. Timeouts are kept in seconds and
become a ``timedelta`` only for a caller who wants one: importing ``datetime`` costs more than all that a one-node job does
with its store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from rallypoint.base import defaults
from rallypoint.errors import RallypointError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import timedelta
    from typing import Any, NoReturn, Protocol
else:
    Protocol = object

__all__ = [
    "QueueEmptyError", "Store", "StoreError", "StoreLike", "StoreNetworkError", "StoreTimeoutError", "as_bytes", "as_keys",
    "as_pairs", "as_seconds", "check_in", "get_timeout_s", "set_timeout_s",
]  # fmt: skip

MAX_KEYS_NAMED = 16


class StoreError(RallypointError, RuntimeError):
    """A store could not do what it was asked for; a RuntimeError as well, because torch's stores raise one."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A key was waited for in vain.

    >>> from rallypoint import HashStore, StoreTimeoutError
    >>> store = HashStore()
    >>> store.set_timeout(0.01)
    >>> try:
    ...     store.get("nothing")
    ... except StoreTimeoutError as error:
    ...     print(error)
    waited 0.01 s for 'nothing' in vain
    """

    @classmethod
    def of_keys(cls, keys: Sequence[str], missing: Sequence[str], timeout_s: float) -> StoreTimeoutError:
        names = ", ".join(map(repr, missing[:MAX_KEYS_NAMED])) + (", …" if len(missing) > MAX_KEYS_NAMED else "")
        there = f" ({len(keys) - len(missing)} of {len(keys)} keys are there)" if len(keys) > 1 else ""
        return cls(f"waited {timeout_s:g} s for {names} in vain{there}")


class StoreNetworkError(StoreError):
    """The store cannot be reached, or the connection to it has ended."""


class QueueEmptyError(StoreError):
    """There was nothing in the queue, and the caller did not want to wait.

    >>> from rallypoint import HashStore, QueueEmptyError
    >>> try:
    ...     HashStore().queue_pop("work", block=False)
    ... except QueueEmptyError:
    ...     print("nothing to do")
    nothing to do
    """


class StoreLike(Protocol):
    """What we use of a store that may be torch's: every ``torch.distributed.Store`` has it, and so has every `Store`."""

    def set(self, key: str, value: Any, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], /) -> None: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def set_timeout(self, timeout: Any, /) -> None: ...
    @property
    def timeout(self) -> Any: ...


class Store(ABC):
    """A shared memory of keys and values, to be used by many threads, processes or machines at once."""

    _timeout_s: float = defaults.STORE_TIMEOUT_S

    @abstractmethod
    def set(self, key: str, value: bytes | str) -> None:
        """Write `value`, whatever was there before."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """The value of `key`, waited for if it is not there yet."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add `amount` to a counter, which begins at 0 and is kept as decimal digits, and give its new value."""

    @abstractmethod
    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        """Write `desired_value` if the value is `expected_value`, or if both it and the key are missing; give the value after.

        A missing key of which something was expected stays missing, and `expected_value` comes back.
        """

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Whether all `keys` are there, without waiting."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        """Wait until all `keys` are there, for `timeout` (a number is in seconds) or the store's own."""

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Forget the value of `key`; whether there was one."""

    @abstractmethod
    def num_keys(self) -> int:
        """How many keys have a value."""

    def append(self, key: str, value: bytes | str) -> None:
        """Write `value` at the end of what is there."""
        self._refuse("append")

    def list_keys(self) -> list[str]:
        """The keys that have a value."""
        self._refuse("list_keys")

    def queue_push(self, key: str, value: bytes | str) -> None:
        """Put `value` at the end of the queue `key`."""
        self._refuse("queue_push")

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of the queue `key`, waited for if `block`; else an empty queue is a `QueueEmptyError`."""
        self._refuse("queue_pop")

    def queue_len(self, key: str) -> int:
        """How many values are in the queue `key`."""
        self._refuse("queue_len")

    def clone(self) -> Store:
        """Another store on the same keys, with a timeout of its own."""
        self._refuse("clone")

    def has_extended_api(self) -> bool:
        """Whether ``append`` and the queues are there too."""
        return False

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of `keys`, all waited for together."""
        self.wait(keys)
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Write each of `values` under its key."""
        for key, value in as_pairs(keys, values):
            self.set(key, value)

    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        """Wait until `world_size` callers are here; a key serves once."""
        self.wait([check_in(self, key, world_size)], timeout)

    @property
    def timeout_s(self) -> float:
        """How long a missing key is waited for, in seconds."""
        return self._timeout_s

    @property
    def timeout(self) -> timedelta:
        """How long a missing key is waited for."""
        from datetime import timedelta

        return timedelta(seconds=self.timeout_s)

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Wait for a missing key as long as this; a number is in seconds."""
        self._timeout_s = as_seconds(timeout)

    def _refuse(self, operation: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} has no {operation}")


def check_in(store: StoreLike, key: str, world_size: int) -> str:
    """Count the caller in at the barrier `key`, and give the key that appears when all are there."""
    everybody_is_here = f"{key}/last_member"
    if store.add(f"{key}/num_members", 1) == world_size:
        store.set(everybody_is_here, "1")
    return everybody_is_here


def get_timeout_s(store: StoreLike) -> float:
    """A store's timeout in seconds."""
    return store.timeout_s if isinstance(store, Store) else as_seconds(store.timeout)


def set_timeout_s(store: StoreLike, timeout_s: float) -> None:
    """Set a store's timeout; torch's takes nothing but a timedelta."""
    if isinstance(store, Store):
        store.set_timeout(timeout_s)
    else:
        from datetime import timedelta

        store.set_timeout(timedelta(seconds=timeout_s))


def as_seconds(timeout: timedelta | float) -> float:
    """A timeout as a number of seconds, zero or more."""
    timeout_s = float(timeout) if isinstance(timeout, (int, float)) else timeout.total_seconds()
    if not timeout_s >= 0:
        raise ValueError(f"a timeout must be 0 s or longer, not {timeout_s:g} s")
    return timeout_s


def as_bytes(value: bytes | str) -> bytes:
    """A value as it is kept."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"a store keeps bytes or str, not {type(value).__name__}")


def as_keys(keys: Iterable[str]) -> list[str]:
    """Keys as a list; a lone str, which would be taken for its letters, is a mistake that is easily made."""
    if isinstance(keys, str):
        raise TypeError(f"expected a list of keys, not the str {keys!r}; write [{keys!r}]")
    return list(keys)


def as_pairs(keys: Sequence[str], values: Sequence[bytes | str]) -> list[tuple[str, bytes | str]]:
    """Each key with its value."""
    if len(keys) != len(values):
        raise ValueError(f"multi_set got {len(keys)} keys and {len(values)} values")
    return list(zip(keys, values, strict=True))
