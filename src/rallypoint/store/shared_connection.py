"""What a `SharedStore` does through one connection with an engine: change an item exactly once, and follow what becomes of items.

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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing

from rallypoint.core.coordination import Compare, Get, Item, Operation, Put, Snapshot, Transaction
from rallypoint.store.coordination import CompactedError, Coordination, UnreachableError
from rallypoint.store.interface import StoreError, StoreTimeoutError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    from rallypoint.core.coordination import Event

    Found = TypeVar("Found")
    # What to do about an item that may not be there, if anything, and what to answer.
    Decide = Callable[[Item | None], tuple[Operation | None, bytes]]

__all__ = ["SharedConnection"]

MOST_GETS = 100  # in one transaction; where more are wanted, all that begins like them is read
TOKEN_BYTES = 8
ANSWER_S = 5.0  # what the store may take to answer, also when a key is to be waited for less long
LONGEST_CALL_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.002, 2.0


class SharedConnection:
    """One client of an engine, for one thread at a time. `mark` is a key that nobody else writes."""

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
