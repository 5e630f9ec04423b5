"""A store in a file that processes share, on one machine or on a shared file system: torch's FileStore, on torch's files.

The file is a journal: records of a key and a value, each behind its length in 32 bits, of which the last counts. Keys of users
have ``/`` in front, and one more ``-`` before it deletes. Two keys without it tell when the file can go: ``refcount/`` counts
who has the store, ``cleanup/`` who had it; the last one to leave deletes the file, if as many have had it as were announced.

Whoever writes holds the lock of the file (flock), and reads only what is new to it, as everybody does. A record that is cut
off at the end was left by a writer that died: readers pass it over, and the next writer cuts it away, where torch's store waits
for the rest of it forever. A file that is deleted, replaced or cut under its users is an error, and never a guess.

A file tells nobody that it has grown: whoever waits for a key looks again, soon at first, and then a hundred times a second.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from struct import Struct

from rallypoint.store.hash_store import count_on
from rallypoint.store.interface import Store, StoreError, StoreTimeoutError, as_bytes, as_keys, as_pairs, as_seconds
from rallypoint.store.values import Values

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import timedelta
    from typing import TypeVar

    T = TypeVar("T")

__all__ = ["MAX_KEY_BYTES", "MAX_VALUE_BYTES", "USERS", "FileStore", "Journal"]

MAX_KEY_BYTES = 64 * 1024
MAX_VALUE_BYTES = 256 * 1024 * 1024
LENGTH = Struct("<I")
REFCOUNT, CLEANUP = b"refcount/", b"cleanup/"
USERS, DELETED = b"/", b"-"  # what the keys of users begin with, and what stands before a key that is deleted
TAIL_BYTES = 64  # of what was read last, to tell that it still stands there
FIRST_LOCK_PAUSE_S, LAST_LOCK_PAUSE_S = 0.0001, 0.002  # while somebody else has the lock
LOCK_TIMEOUT_S = 60.0  # it is held for a moment only, unless its holder was stopped
LEAVE_TIMEOUT_S = 5.0  # at the end of a process, which is not to be kept
FIRST_PAUSE_S, LAST_PAUSE_S = 0.001, 0.01  # between two looks at the file


class Journal:
    """The file, and what its records amount to as far as this process has read them."""

    def __init__(self, path: str, identity: tuple[int, int] | None = None) -> None:
        self.path = path
        self.pid = os.getpid()
        self.identity = identity
        self._busy = threading.RLock()
        self._forget()

    def enter(self) -> None:
        """Create the file if need be, and count the user in. The last user may be about to delete it: then there is a new one."""
        while self.identity is None:
            with self._writing(os.O_RDWR | os.O_CREAT, LOCK_TIMEOUT_S) as fd:
                if _is_at(self.path, fd):
                    self.identity = _identity(os.fstat(fd))
                    self._write(fd, [REFCOUNT], lambda values: count_on(values, REFCOUNT, 1))

    def leave(self, world_size: int) -> None:
        """Count the user out, and delete the file if it was the last."""

        def count_out(values: Values) -> bool:
            had, have = count_on(values, CLEANUP, 1), count_on(values, REFCOUNT, -1)
            return have <= 0 and 0 <= world_size <= had

        with self._writing(os.O_RDWR, LEAVE_TIMEOUT_S) as fd:
            if self._write(fd, [CLEANUP, REFCOUNT], count_out) and _is_at(self.path, fd):
                os.unlink(self.path)

    def look(self, find: Callable[[Values], T]) -> T:
        """What `find` finds among the values of now. It takes no lock to see that there is nothing new."""
        with self._busy, self._opened(os.O_RDONLY) as fd:
            if self._size(fd) > self._place:
                with self._locked(fd, fcntl.LOCK_SH, LOCK_TIMEOUT_S):
                    self._read_news(fd)
            return find(self._values)

    def change(self, names: Sequence[bytes], change: Callable[[Values], T]) -> T:
        """Let `change` work on the values of now, and write down what has become of `names`."""
        with self._writing(os.O_RDWR, LOCK_TIMEOUT_S) as fd:
            return self._write(fd, names, change)

    def _forget(self) -> None:
        self._values = Values()
        self._place = 0  # how far we have read
        self._tail = b""  # the end of what we have read

    @contextmanager
    def _opened(self, flags: int) -> Iterator[int]:
        """The file, opened anew each time: on a network file system, that is what makes the changes of others visible."""
        try:
            fd = os.open(self.path, flags, 0o644)
        except OSError as error:
            raise StoreError(self._why_not_open(error)) from error
        try:
            yield fd
        except StoreError:
            raise  # also one that is an OSError, for being a TimeoutError
        except OSError as error:
            raise StoreError(f"the file {self.path!r} of the store failed: {error.strerror}") from error
        finally:
            os.close(fd)

    @contextmanager
    def _locked(self, fd: int, how: int, timeout_s: float) -> Iterator[None]:
        deadline, pause_s = time.monotonic() + timeout_s, FIRST_LOCK_PAUSE_S
        while not _try_lock(fd, how):
            if time.monotonic() > deadline:
                raise StoreTimeoutError(f"waited {timeout_s:g} s for the lock of the store's file {self.path!r} in vain")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_LOCK_PAUSE_S)
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing would not do if a process was forked off meanwhile

    @contextmanager
    def _writing(self, flags: int, timeout_s: float) -> Iterator[int]:
        with self._busy, self._opened(flags) as fd, self._locked(fd, fcntl.LOCK_EX, timeout_s):
            yield fd

    def _why_not_open(self, error: OSError) -> str:
        folder = os.path.dirname(self.path)
        if isinstance(error, FileNotFoundError) and not os.path.isdir(folder):
            return f"the folder {folder!r}, in which a store's file is to be, does not exist"
        if isinstance(error, FileNotFoundError):
            return f"the store's file {self.path!r} was deleted while the store was in use"
        return f"cannot open the store's file {self.path!r}: {error.strerror}"

    def _size(self, fd: int) -> int:
        """How long the file is, which must be ours still."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise StoreError(f"{self.path!r} cannot be a store, because it is not a regular file")
        if _identity(status) != self.identity or status.st_size < self._place:
            raise self._replaced()
        return status.st_size

    def _replaced(self) -> StoreError:
        return StoreError(f"the store's file {self.path!r} was replaced or cut while the store was in use")

    def _read_news(self, fd: int) -> int:
        """Read the records that are new to us, and give the size of the file, which holds more if a writer died."""
        size = self._size(fd)
        start = self._place - len(self._tail)
        data = _read(fd, start, size - start)
        if not data.startswith(self._tail):
            raise self._replaced()
        place = len(self._tail)
        try:
            while record := _record_at(data, place):
                key, value, place = record
                self._apply(key, value)
            if start + place == 0 and not _packed(REFCOUNT, b"1").startswith(data):
                raise ValueError("it begins with something else")
        except ValueError as error:
            raise StoreError(f"the file {self.path!r} is not a store, or is damaged at byte {start + place}: {error}") from None
        self._place, self._tail = start + place, data[max(0, place - TAIL_BYTES) : place]
        return size

    def _apply(self, key: bytes, value: bytes) -> None:
        name = key[len(DELETED) :] if key.startswith(DELETED) else key
        if not name.startswith(USERS) and name not in (REFCOUNT, CLEANUP):
            raise ValueError(f"there is no key {key[:40]!r}")
        if name is key:
            self._values.set(name, value)
        else:
            self._values.delete(name)

    def _write(self, fd: int, names: Sequence[bytes], change: Callable[[Values], T]) -> T:
        """Carry out a change, in the file and here. If it fails, the file is as it was, and we read it again."""
        size = self._read_news(fd)
        values = self._values.values
        before = [values.get(name) for name in names]
        try:
            result = change(self._values)
            changed = [name for name, value in zip(names, before, strict=True) if values.get(name) != value]
            records = b"".join(_packed(name, values.get(name)) for name in changed)
            if records:
                self._append(fd, records, size)
        except BaseException:  # whatever it was, nothing half done may stay; it is raised again
            self._forget()
            raise
        return result

    def _append(self, fd: int, records: bytes, size: int) -> None:
        if size > self._place:
            os.ftruncate(fd, self._place)
        try:
            _write_all(fd, records, self._place)
        except BaseException:  # whatever it was, nothing half done may stay; it is raised again
            os.ftruncate(fd, self._place)  # a disk that is full takes no half of a record either
            raise
        self._place += len(records)
        self._tail = (self._tail + records)[-TAIL_BYTES:]


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _is_at(path: str, fd: int) -> bool:
    """Whether the open file is the one that is to be found there."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _try_lock(fd: int, how: int) -> bool:
    """Without waiting: a wait for a lock cannot be given a limit, and whoever holds it may have been stopped."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(fd: int, place: int, count: int) -> bytes:
    pieces: list[bytes] = []
    while count > 0 and (piece := os.pread(fd, count, place)):
        pieces.append(piece)
        place += len(piece)
        count -= len(piece)
    return b"".join(pieces)


def _write_all(fd: int, data: bytes, place: int) -> None:
    left = memoryview(data)
    while left:
        count = os.pwrite(fd, left, place)
        left = left[count:]
        place += count


def _packed(name: bytes, value: bytes | None) -> bytes:
    """A record; one without a value deletes."""
    key, value = (DELETED + name, b"") if value is None else (name, value)
    for what, length, limit in (("key", len(name), MAX_KEY_BYTES), ("value", len(value), MAX_VALUE_BYTES)):
        if length > limit:
            raise StoreError(f"a {what} of {length} bytes, and {limit} is the most")
    return LENGTH.pack(len(key)) + key + LENGTH.pack(len(value)) + value


def _record_at(data: bytes, start: int) -> tuple[bytes, bytes, int] | None:
    """Key, value and end of the record at `start`; None where it is not complete."""
    key = _string_at(data, start, len(DELETED) + MAX_KEY_BYTES)
    if key is None:
        return None
    middle = start + LENGTH.size + len(key)
    value = _string_at(data, middle, MAX_VALUE_BYTES)
    return None if value is None else (key, value, middle + LENGTH.size + len(value))


def _string_at(data: bytes, start: int, limit: int) -> bytes | None:
    begin = start + LENGTH.size
    if begin > len(data):
        return None
    (length,) = LENGTH.unpack_from(data, start)
    if length > limit:
        raise ValueError(f"there is a length of {length}, and {limit} is the most")
    return data[begin : begin + length] if begin + length <= len(data) else None


class FileStore(Store):
    """Keys and values in the file `file_name`; whoever is the last of `world_size` users deletes it, and nobody if that is -1.

    A user is a store that was opened, with its clones; a process that was forked off may use it and is not counted. It leaves
    when nobody refers to it any more, or when the process ends in an orderly way.

    >>> from rallypoint import FileStore
    >>> store = FileStore("rendezvous", world_size=1)
    >>> store.set("port", "29500")
    >>> store.get("port")
    b'29500'
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
        new = {_name(key): as_bytes(value) for key, value in as_pairs(keys, values)}

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
