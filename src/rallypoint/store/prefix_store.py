"""A part of a store: every key gets a prefix, so that two users of one store cannot meet by accident.

The store below may be torch's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rallypoint.store.interface import Store, as_bytes, as_keys, as_seconds, get_timeout_s, set_timeout_s

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import timedelta
    from typing import Any

__all__ = ["PrefixStore"]


class PrefixStore(Store):
    """The keys ``<prefix>/<key>`` of another store; the timeout is that store's too.

    >>> from rallypoint import HashStore, PrefixStore
    >>> whole = HashStore()
    >>> PrefixStore("generation-2", whole).set("ready", "1")
    >>> whole.get("generation-2/ready")
    b'1'
    """

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix = prefix
        self._store = store

    @property
    def underlying_store(self) -> Any:
        """The store that this one is a part of."""
        return self._store

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(self._full(key), as_bytes(value))

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(self._full(key)))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(self._full(key), amount))

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        return bytes(self._store.compare_set(self._full(key), as_bytes(expected_value), as_bytes(desired_value)))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(self._all_full(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        self._store.wait(self._all_full(keys), *self._below(timeout))

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(self._full(key)))

    def num_keys(self) -> int:
        """How many keys the underlying store has, as torch's PrefixStore counts."""
        return int(self._store.num_keys())

    def list_keys(self) -> list[str]:
        """The keys under the prefix, without it."""
        start = self._full("")
        return [key[len(start) :] for key in self._store.list_keys() if key.startswith(start)]

    def append(self, key: str, value: bytes | str) -> None:
        self._store.append(self._full(key), as_bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._store.multi_get(self._all_full(keys)))

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        self._store.multi_set(self._all_full(keys), list(map(as_bytes, values)))

    def queue_push(self, key: str, value: bytes | str) -> None:
        self._store.queue_push(self._full(key), as_bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return bytes(self._store.queue_pop(self._full(key), block))

    def queue_len(self, key: str) -> int:
        return int(self._store.queue_len(self._full(key)))

    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        """Left to the store below, whose own barrier others may be standing at."""
        self._store.barrier(self._full(key), world_size, *self._below(timeout))

    def clone(self) -> PrefixStore:
        return PrefixStore(self._prefix, self._store.clone())

    def has_extended_api(self) -> bool:
        return bool(self._store.has_extended_api())

    @property
    def timeout_s(self) -> float:
        return get_timeout_s(self._store)

    def set_timeout(self, timeout: timedelta | float) -> None:
        set_timeout_s(self._store, as_seconds(timeout))

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _all_full(self, keys: Iterable[str]) -> list[str]:
        return list(map(self._full, as_keys(keys)))

    def _below(self, timeout: timedelta | float | None) -> tuple[Any, ...]:
        """A timeout as the store below takes it; torch's takes nothing but a timedelta, and no None."""
        if timeout is None:
            return ()
        if isinstance(self._store, Store):
            return (timeout,)
        from datetime import timedelta

        return (timedelta(seconds=as_seconds(timeout)),)
