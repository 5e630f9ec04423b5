"""The store that the members of one generation share, kept in the job's coordination store under a prefix of its own.

Nothing is connected until somebody uses it, for most jobs never do. A connection serves one thread at a time, so each operation
borrows one, and there are as many as there were operations at once: whoever waits for a key hinders nobody.

What is kept under the prefix:

    keys/<key>/value    a value
    keys/<key>/queue    a queue, while it holds something: each value behind its length
    marks/<random>      what the connection of this name changed last, so that nothing is done twice

A change compares what it was made from, and leaves the connection's mark, with a token of its own, in the same transaction. When
the store goes out of reach in the middle of it, the mark tells afterwards whether it was done; and since the mark is compared as
well, a request that comes late, after it was repeated, is void.
"""

from __future__ import annotations

import math
import os
import random
import select
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager

from rallypoint.base import defaults
from rallypoint.coordination.engine import CompactedError, Coordination, CoordinationError, UnreachableError
from rallypoint.coordination.model import Compare, Delete, Get, Item, Operation, Put, Snapshot, Transaction
from rallypoint.store.interface import QueueEmptyError, Store, StoreError, StoreTimeoutError, as_bytes, as_keys, as_seconds
from rallypoint.store.values import NotANumber, number_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    from rallypoint.coordination.model import Event

    Found = TypeVar("Found")
    # What to do about an item that may not be there, if anything, and what to answer.
    Decide = Callable[[Item | None], tuple[Operation | None, bytes]]
    from datetime import timedelta

__all__ = ["SharedConnection", "SharedStore"]

MOST_GETS = 100  # in one transaction; where more are wanted, all that begins like them is read
TOKEN_BYTES = 8
ANSWER_S = 5.0  # what the store may take to answer, also when a key is to be waited for less long
LONGEST_CALL_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.002, 2.0
NAME_BYTES = 1024
VALUE_BYTES = 128 * 1024  # of a value or of a whole queue; every engine takes as much
LENGTH_BYTES = 4
MARK_BYTES = 8
VALUE, QUEUE = "value", "queue"


class SharedConnection:
    """One client of an engine, for one thread at a time: it changes items exactly once, and follows what becomes of them.

    `mark` is a key that nobody else writes.
    """

    def __init__(self, client: Coordination, mark: str) -> None:
        self.client = client
        self._mark = mark

    def change(self, name: str, decide: Decide, timeout_s: float) -> tuple[bool, bytes]:
        """Do what `decide` says, once; whether it wanted anything done, and its answer."""
        token = os.urandom(TOKEN_BYTES)

        def attempt(deadline: float) -> tuple[bool, bytes] | None:
            return self._try_to_change(name, decide, token, deadline)

        return self._insist(attempt, timeout_s)

    def look(self, names: Sequence[str], timeout_s: float) -> Snapshot:
        """Those of the items `names` that are there, and perhaps others, as they were at one revision."""
        if len(names) > MOST_GETS:
            return self.read(_common_start(names), timeout_s)
        gets = Transaction((), tuple(map(Get, names)))
        outcome = self._insist(lambda deadline: self.client.transact(gets, deadline), timeout_s)
        return Snapshot(outcome.revision, tuple([item for item in outcome.items if item is not None]))

    def read(self, prefix: str, timeout_s: float) -> Snapshot:
        return self._insist(lambda deadline: self.client.read(prefix, deadline), timeout_s)

    def follow(self, names: Sequence[str], deadline: float) -> Generator[dict[str, bytes], None, None]:
        """The values of `names` that are there, and perhaps of others: at once, and then at each change, until `deadline`."""
        while True:
            snapshot = self.look(names, deadline - time.monotonic())
            found = {item.key: item.value for item in snapshot.items}
            yield found
            try:
                with closing(self._changes(_common_start(names), snapshot.revision + 1, deadline)) as changes:
                    for events in changes:
                        _apply(events, found)
                        yield found
                return
            except CompactedError:
                pass  # more has happened than the engine remembers: look again

    def _changes(self, prefix: str, from_revision: int, deadline: float) -> Generator[list[Event], None, None]:
        def watch(call_deadline: float) -> bool:
            self.client.watch(prefix, from_revision, call_deadline)
            return True

        self._insist(watch, deadline - time.monotonic())
        try:
            while time.monotonic() < deadline:
                yield self._next_events(deadline)
        finally:
            self.client.unwatch(prefix)

    def _next_events(self, deadline: float) -> list[Event]:
        """What has changed, waited for until `deadline`; the engine mends a broken connection as long as it is asked."""
        while True:
            trouble = None
            try:
                if events := self.client.take_events():
                    return events
            except UnreachableError as error:
                trouble = error
            if time.monotonic() >= deadline:
                if trouble is not None:
                    raise StoreTimeoutError(f"the shared store was out of reach when the time was over: {trouble}") from trouble
                return []
            self._wait_for_engine(deadline)

    def _wait_for_engine(self, deadline: float) -> None:
        left_s = min(deadline, self.client.wake_at()) - time.monotonic()
        poll = select.poll()
        poll.register(self.client.fileno(), select.POLLIN)
        poll.poll(math.ceil(1000 * min(max(left_s, 0.0), LONGEST_CALL_S)))

    # --- one attempt -------------------------------------------------------------------------------------------------------

    def _try_to_change(self, name: str, decide: Decide, token: bytes, deadline: float) -> tuple[bool, bytes] | None:
        """None if somebody else changed it meanwhile."""
        item, mark = self.client.transact(Transaction((), (Get(name), Get(self._mark))), deadline).items
        if mark is not None and mark.value.startswith(token):  # an earlier attempt, of which we did not hear, was done
            return True, mark.value[len(token) :]
        operation, answer = decide(item)
        if operation is None:
            return False, answer
        unchanged = (Compare(name, "mod", _revision_of(item)), Compare(self._mark, "mod", _revision_of(mark)))
        change = Transaction(unchanged, (operation, Put(self._mark, token + answer)))
        try:
            outcome = self.client.transact(change, deadline)
        except ValueError as error:
            raise StoreError(f"the engine does not take this: {error}") from error
        return (True, answer) if outcome.succeeded else None

    @staticmethod
    def _insist(attempt: Callable[[float], Found | None], timeout_s: float) -> Found:
        """The first answer of `attempt`, which gets the deadline of its calls, and gives None when it was disturbed by others."""
        timeout_s = max(timeout_s, ANSWER_S)
        trouble: UnreachableError | None = None
        for deadline in _deadlines(time.monotonic() + timeout_s):
            try:
                answer = attempt(deadline)
            except UnreachableError as error:
                trouble = error
            else:
                if answer is not None:
                    return answer
                trouble = None
        why = "others changed the same key all the time" if trouble is None else str(trouble)
        raise StoreTimeoutError(f"the shared store could not do it within {timeout_s:g} s: {why}") from trouble


def _deadlines(until: float) -> Iterator[float]:
    """One for each attempt, as long as there is time. Between them is a pause, never the same for two, and longer each time.

    It is at least about as long as an attempt takes: the more disturb each other, the rarer each of them must try.
    """
    pause_s = FIRST_PAUSE_S
    while (now := time.monotonic()) < until:
        yield min(until, now + LONGEST_CALL_S)
        pause_s = min(LONGEST_PAUSE_S, max(pause_s, time.monotonic() - now))
        time.sleep(min(pause_s * random.uniform(0.5, 1.5), max(0.0, until - time.monotonic())))
        pause_s *= 2


def _common_start(names: Sequence[str]) -> str:
    first, last = min(names), max(names)
    return first[: next((index for index, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))]


def _apply(events: list[Event], found: dict[str, bytes]) -> None:
    for event in events:
        if event.item is None:
            found.pop(event.key, None)
        else:
            found[event.key] = event.item.value


def _revision_of(item: Item | None) -> int:
    return 0 if item is None else item.mod_revision


class SharedStore(Store):
    """Keys and values under `prefix`, for everybody whose `connect` gives a client, without a lease, of the same engine.

    It may be forked, and pickled if `connect` can be: the copy connects anew.
    """

    def __init__(self, connect: Callable[[], Coordination], prefix: str, timeout_s: float = defaults.STORE_TIMEOUT_S) -> None:
        self._connect = connect
        self._prefix = prefix
        self._timeout_s = timeout_s
        # Each with the process that made it. Adding and taking is safe among threads, without a lock that a fork could copy.
        self._idle: deque[tuple[int, SharedConnection]] = deque()
        self._is_closed = False

    def __reduce__(self) -> tuple[type[SharedStore], tuple[Callable[[], Coordination], str, float]]:
        return SharedStore, (self._connect, self._prefix, self.timeout_s)

    def __del__(self) -> None:
        if hasattr(self, "_is_closed"):  # else it was never made
            self.close()

    def close(self) -> None:
        """End the connections, if there are any; one that is in use ends with what it is used for."""
        self._is_closed = True
        while (connection := self._take_idle()) is not None:
            connection.client.close()

    def set(self, key: str, value: bytes | str) -> None:
        content = as_bytes(value)
        self._change(key, VALUE, lambda _: (self._put(key, VALUE, content), b""))

    def get(self, key: str) -> bytes:
        (value,) = self.multi_get([key])
        return value

    def add(self, key: str, amount: int) -> int:
        def decide(item: Item | None) -> tuple[Operation, bytes]:
            count = str(_count(key, item) + int(amount)).encode()
            return self._put(key, VALUE, count), count

        return int(self._change(key, VALUE, decide)[1])

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        expected, desired = as_bytes(expected_value), as_bytes(desired_value)

        def decide(item: Item | None) -> tuple[Operation | None, bytes]:
            is_expected = not expected if item is None else item.value == expected
            return (self._put(key, VALUE, desired), b"") if is_expected else (None, expected if item is None else item.value)

        is_done, found = self._change(key, VALUE, decide)
        return desired if is_done else found

    def check(self, keys: Sequence[str]) -> bool:
        wanted = self._names(keys, VALUE, QUEUE)
        if not wanted:
            return True
        with self._connection() as connection:
            found = connection.look(_all_names(wanted), self.timeout_s).items
        return not _missing(wanted, {item.key for item in found})

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        self._wait_for(self._names(keys, VALUE, QUEUE), self.timeout_s if timeout is None else as_seconds(timeout))

    def delete_key(self, key: str) -> bool:
        name = self._name(key, VALUE)
        return self._change(key, VALUE, lambda item: (None if item is None else Delete(name), b""))[0]

    def num_keys(self) -> int:
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        start, end = f"{self._prefix}keys/", f"/{VALUE}"
        with self._connection() as connection:
            found = connection.read(start, self.timeout_s).items
        return [item.key[len(start) : -len(end)] for item in found if item.key.endswith(end)]

    def append(self, key: str, value: bytes | str) -> None:
        more = as_bytes(value)
        self._change(key, VALUE, lambda item: (self._put(key, VALUE, _value_of(item) + more), b""))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        wanted = self._names(keys, VALUE)
        found = self._wait_for(wanted, self.timeout_s)
        return [found[wanted[key][0]] for key in keys]

    def queue_push(self, key: str, value: bytes | str) -> None:
        content = as_bytes(value)
        packed = len(content).to_bytes(LENGTH_BYTES, "big") + content
        self._change(key, QUEUE, lambda item: (self._put(key, QUEUE, _value_of(item) + packed), b""))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        def decide(item: Item | None) -> tuple[Operation | None, bytes]:
            if item is None:
                return None, b""
            first, rest = _split(key, item.value)
            return (self._put(key, QUEUE, rest) if rest else Delete(item.key)), first

        deadline = time.monotonic() + self.timeout_s
        is_done, first = self._change(key, QUEUE, decide)
        while not is_done:
            if not block:
                raise QueueEmptyError(f"the queue {key!r} is empty")
            self._wait_for(self._names([key], QUEUE), self.timeout_s, deadline)
            is_done, first = self._change(key, QUEUE, decide)
        return first

    def queue_len(self, key: str) -> int:
        with self._connection() as connection:
            found = connection.look([self._name(key, QUEUE)], self.timeout_s).items
        rest, length = _value_of(found[0] if found else None), 0
        while rest:
            rest, length = _split(key, rest)[1], length + 1
        return length

    def clone(self) -> SharedStore:
        return SharedStore(self._connect, self._prefix, self.timeout_s)

    def has_extended_api(self) -> bool:
        return True

    # --- names and values --------------------------------------------------------------------------------------------------

    def _name(self, key: str, kind: str) -> str:
        name = f"{self._prefix}keys/{key}/{kind}"
        if len(name.encode()) > NAME_BYTES:
            raise StoreError(f"the key {key[:40]!r}… is too long: with what is put around it, it may have {NAME_BYTES} bytes")
        return name

    def _names(self, keys: Iterable[str], *kinds: str) -> dict[str, list[str]]:
        """By key, the names of which one must be there."""
        return {key: [self._name(key, kind) for kind in kinds] for key in as_keys(keys)}

    def _put(self, key: str, kind: str, value: bytes) -> Put:
        if len(value) > VALUE_BYTES:
            raise StoreError(f"the {kind} of {key!r} would have {len(value)} bytes, and may have {VALUE_BYTES}")
        return Put(self._name(key, kind), value)

    # --- what all operations are made of -----------------------------------------------------------------------------------

    def _change(self, key: str, kind: str, decide: Decide) -> tuple[bool, bytes]:
        """Do what `decide` says, exactly once; whether it wanted anything done, and its answer."""
        name = self._name(key, kind)
        with self._connection() as connection:
            return connection.change(name, decide, self.timeout_s)

    def _wait_for(self, wanted: dict[str, list[str]], timeout_s: float, deadline: float = math.inf) -> dict[str, bytes]:
        """Wait until of each key one of its names is there; the values by name."""
        if not wanted:
            return {}
        missing = list(wanted)
        deadline = min(deadline, time.monotonic() + timeout_s)
        with self._connection() as connection, closing(connection.follow(_all_names(wanted), deadline)) as states:
            for found in states:
                missing = _missing(wanted, found.keys())
                if not missing:
                    return found
        raise StoreTimeoutError.of_keys(list(wanted), missing, timeout_s)

    @contextmanager
    def _connection(self) -> Iterator[SharedConnection]:
        """A connection for the caller alone. After an error that is not the store's own its state is not known: it is ended."""
        try:
            connection = self._take_idle() or self._new_connection()
            try:
                yield connection
            except BaseException as error:
                if not isinstance(error, StoreError):
                    connection.client.close()
                    raise
                self._give_back(connection)
                raise
            self._give_back(connection)
        except CoordinationError as error:
            raise StoreError(f"the shared store failed: {error}") from error

    def _new_connection(self) -> SharedConnection:
        if self._is_closed:
            raise StoreError("the shared store was closed")
        return SharedConnection(self._connect(), f"{self._prefix}marks/{os.urandom(MARK_BYTES).hex()}")

    def _take_idle(self) -> SharedConnection | None:
        """One that is not in use. What a fork has copied belongs to another process, and is only forgotten."""
        while self._idle:
            try:
                pid, connection = self._idle.pop()
            except IndexError:  # another thread was quicker
                return None
            if pid == os.getpid():
                return connection
        return None

    def _give_back(self, connection: SharedConnection) -> None:
        self._idle.append((os.getpid(), connection))
        if self._is_closed:
            self.close()


def _all_names(wanted: dict[str, list[str]]) -> list[str]:
    return [name for names in wanted.values() for name in names]


def _missing(wanted: dict[str, list[str]], found: Collection[str]) -> list[str]:
    return [key for key, names in wanted.items() if not any(name in found for name in names)]


def _value_of(item: Item | None) -> bytes:
    return b"" if item is None else item.value


def _count(key: str, item: Item | None) -> int:
    value = _value_of(item) or b"0"
    count = number_in(value)
    if count is None:
        raise StoreError(str(NotANumber(key.encode(), value)))
    return count


def _split(key: str, queue: bytes) -> tuple[bytes, bytes]:
    """The first value of a queue, and the rest of it."""
    end = LENGTH_BYTES + int.from_bytes(queue[:LENGTH_BYTES], "big")
    if end > len(queue):
        raise StoreError(f"the queue {key!r} holds something that was not pushed")
    return queue[LENGTH_BYTES:end], queue[end:]
