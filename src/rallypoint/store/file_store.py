"""A store in a file that processes share, on one machine or on a shared file system: torch's FileStore, on torch's files.

The file and what is written in it is the affair of `store.journal`. A file tells nobody that it has grown: whoever waits for a
key looks again, soon at first, and then a hundred times a second.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from rallypoint.core.values import Values
from rallypoint.store.hash_store import count_on
from rallypoint.store.interface import Store, StoreError, StoreTimeoutError, as_bytes, as_keys, as_seconds
from rallypoint.store.journal import USERS, Journal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import timedelta
    from typing import TypeVar

    T = TypeVar("T")

__all__ = ["FileStore"]

FIRST_PAUSE_S, LAST_PAUSE_S = 0.001, 0.01  # between two looks at the file


class FileStore(Store):
    """Keys and values in the file `file_name`; whoever is the last of `world_size` users deletes it, and nobody if that is -1.

    A user is a store that was opened, with its clones; a process that was forked off may use it and is not counted. It leaves
    when nobody refers to it any more, or when the process ends in an orderly way.
    """

    def __init__(self, file_name: str | os.PathLike[str], world_size: int = -1) -> None:
        self._user = User(os.path.abspath(file_name), int(world_size))

    @property
    def path(self) -> str:
        return self._user.journal.path

    def set(self, key: str, value: bytes | str) -> None:
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        return self._wait_for([key], self.timeout_s)[0]

    def add(self, key: str, amount: int) -> int:
        return self._change(key, lambda values, name: count_on(values, name, int(amount)))

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        expected, desired = as_bytes(expected_value), as_bytes(desired_value)
        return self._change(key, lambda values, name: values.compare_set(name, expected, desired))[0]

    def check(self, keys: Sequence[str]) -> bool:
        names = [_name(key) for key in as_keys(keys)]
        return self._user.journal.look(lambda values: not values.missing(names))

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        self._wait_for(as_keys(keys), self.timeout_s if timeout is None else as_seconds(timeout))

    def delete_key(self, key: str) -> bool:
        return self._change(key, Values.delete)

    def num_keys(self) -> int:
        """How many keys have a value, with those of the store itself, as torch counts."""
        return self._user.journal.look(lambda values: len(values.values))

    def list_keys(self) -> list[str]:
        names = self._user.journal.look(lambda values: list(values.values))
        return [name[len(USERS) :].decode(errors="replace") for name in names if name.startswith(USERS)]

    def append(self, key: str, value: bytes | str) -> None:
        more = as_bytes(value)
        self._change(key, lambda values, name: values.append(name, more))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._wait_for(as_keys(keys), self.timeout_s)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        if len(keys) != len(values):
            raise ValueError(f"multi_set got {len(keys)} keys and {len(values)} values")
        new = {_name(key): as_bytes(value) for key, value in zip(keys, values, strict=True)}

        def write(values: Values) -> None:
            for name, value in new.items():
                values.set(name, value)

        self._user.journal.change(list(new), write)

    def clone(self) -> FileStore:
        twin = object.__new__(FileStore)
        twin._user = self._user
        twin.set_timeout(self.timeout_s)
        return twin

    def _change(self, key: str, change: Callable[[Values, bytes], T]) -> T:
        name = _name(key)
        return self._user.journal.change([name], lambda values: change(values, name))

    def _wait_for(self, keys: list[str], timeout_s: float) -> list[bytes]:
        """The values of `keys`, as soon as they are all there."""
        names = [_name(key) for key in keys]
        deadline, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
        while True:
            found = self._user.journal.look(lambda values: [values.values.get(name) for name in names])
            missing = [key for key, value in zip(keys, found, strict=True) if value is None]
            if not missing:
                return [value for value in found if value is not None]
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise StoreTimeoutError.of_keys(keys, missing, timeout_s)
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LAST_PAUSE_S)


class User:
    """One of those whom the file counts: a store and its clones."""

    def __init__(self, path: str, world_size: int) -> None:
        self._journal = Journal(path)
        self._journal.enter()
        weakref.finalize(self, leave, self._journal, world_size)

    @property
    def journal(self) -> Journal:
        """The file. A process that was forked off reads it from the start: what it was born with may be half done, or locked."""
        if self._journal.pid != os.getpid():
            self._journal = Journal(self._journal.path, self._journal.identity)
        return self._journal


def leave(journal: Journal, world_size: int) -> None:
    """Count the user out. A file that cannot be written any more is left to itself: there is nobody to be told."""
    if journal.pid == os.getpid():
        with suppress(StoreError):
            journal.leave(world_size)


def _name(key: str) -> bytes:
    return USERS + key.encode()
