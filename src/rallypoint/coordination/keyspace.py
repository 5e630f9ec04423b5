"""What the words of `coordination.model` mean: a store of items as a plain object, for a server, a simulator, or a test.

Its rules are etcd v3's, so that a job sees the same whichever engine it runs on:

- The empty store has revision 1. Every transaction that changes something, and every lease that ends with items bound to it, adds
  exactly one; what changes nothing adds none. A put always changes something, also when the value stays the same.
- A list of operations is done in its order, so that a Get sees what stands before it. It changes a key once: two puts of a key,
  or a put of what is deleted in the same list, are refused, as etcd refuses them, also in the list that would not be done.
- Events come in the order of the operations, those of one deletion in the order of the keys.
- A put decides the lease of its item anew; 0 binds it to none.

Keys are sorted as text, that is by code point. A prefix is found by bisection, so reading or deleting it costs what it
holds. The history of changes is bounded in number and in bytes; who asks for more is told that it is `Compacted`. Whoever keeps
a keyspace calls `take_changes` after each change, and `tick` at `next_expiry` at the latest.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise
from operator import attrgetter

from rallypoint.coordination.model import Compare, Delete, EndLease, Event, Get, Item, Outcome, Put, Snapshot, Transaction

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.coordination.model import Cause, Operation

__all__ = ["AWAY_S", "FIRST_REVISION", "ITEM_OVERHEAD_BYTES", "LOOK_EVERY_S", "Compacted", "Keyspace", "Leases", "UnknownLease"]

AWAY_S = 0.5  # who does not look for longer than that was away
LOOK_EVERY_S = AWAY_S / 2  # often enough that a loop which is a little late was not away
FIRST_REVISION = 1
HISTORY_EVENTS = 20_000
HISTORY_BYTES = 16 << 20
ITEM_OVERHEAD_BYTES = 500  # what an item or an event takes beside its key and value, roughly
_revision_of = attrgetter("revision")


class _Lease:
    """`ends_at` and `scheduled_at` are in lease time; the place in the schedule is never later than the end."""

    __slots__ = ("ends_at", "keys", "scheduled_at", "ttl_s")

    def __init__(self, ttl_s: float, ends_at: float) -> None:
        self.ttl_s = ttl_s
        self.ends_at = self.scheduled_at = ends_at
        self.keys: set[str] = set()


class Leases:
    """All leases of a store by their numbers, with their keys, on a clock that stands still while nobody looks at it.

    A lease that is not renewed for its time to live is *due*. Nothing ends by itself: whoever keeps the leases calls `due` often,
    ends what it names, and reads what has come in before it asks, so that a renewal which was already there counts.

    If nobody looked for more than `AWAY_S`, the fault is ours and not the owners': the process was stopped, or starved. All
    leases are then extended by as long as that was, before any becomes due. That is why their ends are kept in *lease time*,
    which is ``now`` less all such absences: to extend ten thousand leases is one addition. `look_at` lets only half of `AWAY_S`
    pass, so that whoever sleeps until then is not taken for absent.

    The schedule is a sorted list in which a renewed lease keeps its old place until that has come. So a renewal is free, and a
    lease is moved once in its time to live.
    """

    def __init__(self) -> None:
        self._leases: dict[int, _Lease] = {}
        self._schedule: list[tuple[float, int]] = []
        self._granted = 0
        self._looked_at: float | None = None
        self._away_s = 0.0

    def __contains__(self, number: int) -> bool:
        return number in self._leases

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, ttl_s: float, now: float) -> int:
        """A new lease; the numbers are 1, 2, 3 and so on, and none is used twice."""
        if not ttl_s > 0:
            raise ValueError(f"a lease must live for a time, not for {ttl_s!r} s")
        self._granted += 1
        lease = self._leases[self._granted] = _Lease(ttl_s, self._lease_time(now) + ttl_s)
        insort(self._schedule, (lease.scheduled_at, self._granted))
        return self._granted

    def take_up(self, number: int, ttl_s: float) -> None:
        """A lease that was granted elsewhere, and whose time is kept there: `due` is not asked about it."""
        self._granted = max(self._granted, number)
        lease = self._leases[number] = _Lease(ttl_s, ttl_s)
        insort(self._schedule, (lease.scheduled_at, number))

    def renew(self, number: int, now: float) -> bool:
        """The owner was heard of: its lease runs from now on. False if the lease has ended."""
        time = self._lease_time(now)
        if (lease := self._leases.get(number)) is None:
            return False
        lease.ends_at = time + lease.ttl_s
        if lease.ends_at < lease.scheduled_at:  # an absence that is noticed sets lease time back a little
            self._schedule_at(number, lease)
        return True

    def end(self, number: int) -> list[str]:
        """Forget the lease; the keys that were bound to it, sorted."""
        lease = self._leases.pop(number, None)
        return sorted(lease.keys) if lease is not None else []

    def due(self, now: float) -> list[int]:
        """The leases that are over, in the order in which they ran out; they are to be ended now."""
        self._lease_time(now)
        self._looked_at = now
        found: list[int] = []
        while self._schedule and self._schedule[0][0] + self._away_s <= now:
            at, number = self._schedule.pop(0)
            lease = self._leases.get(number)
            if lease is None or lease.scheduled_at != at:
                continue  # it has ended, or has another place
            if lease.ends_at > at:
                self._schedule_at(number, lease)
            else:
                found.append(number)
        return found

    def look_at(self) -> float | None:
        """When to call `due` at the latest; None while there are no leases."""
        if not self._leases or self._looked_at is None:
            return None
        return min(self._schedule[0][0] + self._away_s, self._looked_at + LOOK_EVERY_S)

    def bind(self, key: str, number: int) -> None:
        if number:
            self._leases[number].keys.add(key)

    def unbind(self, key: str, number: int) -> None:
        if (lease := self._leases.get(number)) is not None:
            lease.keys.discard(key)

    def bound_keys(self) -> dict[str, int]:
        """Which lease each bound key has."""
        return {key: number for number, lease in self._leases.items() for key in lease.keys}

    def check(self) -> None:
        """Raise ValueError if a lease has no place in the schedule, or one after its end."""
        places = set(self._schedule)
        if self._schedule != sorted(places):
            raise ValueError("the leases' schedule is not sorted, or names a place twice")
        for number, lease in self._leases.items():
            if (lease.scheduled_at, number) not in places or lease.scheduled_at > lease.ends_at:
                raise ValueError(f"lease {number} ends at {lease.ends_at}, and nobody would look at it then")

    def _schedule_at(self, number: int, lease: _Lease) -> None:
        """A place that the lease once had, and has again, is still there."""
        lease.scheduled_at = lease.ends_at
        place = (lease.ends_at, number)
        index = bisect_left(self._schedule, place)
        if self._schedule[index : index + 1] != [place]:
            self._schedule.insert(index, place)

    def _lease_time(self, now: float) -> float:
        """`now` in lease time. An absence is noticed by whatever is called first after it, so that it is counted once."""
        if self._looked_at is None:
            self._looked_at = now
        elif (gap_s := now - self._looked_at) > AWAY_S:
            self._away_s += gap_s
            self._looked_at = now
        return now - self._away_s


class UnknownLease(ValueError):
    """A put names a lease that has ended, or that never was."""

    def __init__(self, lease: int) -> None:
        self.lease = lease
        super().__init__(f"there is no lease {lease}")


class Compacted(Exception):
    """The changes that were asked for are no longer remembered; those from `oldest` on are."""

    def __init__(self, oldest: int) -> None:
        self.oldest = oldest
        super().__init__(f"changes before revision {oldest} are no longer remembered")


class _History:
    """The latest events. When there are too many, the older half goes, at once and by whole revisions."""

    def __init__(self, most_events: int, most_bytes: int) -> None:
        self.oldest = 0
        self.size_bytes = 0
        self.events: list[Event] = []
        self._most_events, self._most_bytes = most_events, most_bytes

    def add(self, events: list[Event]) -> None:
        self.events += events
        self.size_bytes += sum(map(_event_bytes, events))
        if self._is_too_long():
            self._forget()

    def since(self, revision: int) -> list[Event]:
        if revision < self.oldest:
            raise Compacted(self.oldest)
        return self.events[bisect_left(self.events, revision, key=_revision_of) :]

    def _is_too_long(self) -> bool:
        return len(self.events) > self._most_events or self.size_bytes > self._most_bytes

    def _forget(self) -> None:
        keep_bytes, keep_events = self._most_bytes // 2, self._most_events // 2
        count = 0
        while len(self.events) - count > keep_events or self.size_bytes > keep_bytes:
            self.size_bytes -= _event_bytes(self.events[count])
            count += 1
        self.oldest = self.events[count - 1].revision + 1
        whole = bisect_left(self.events, self.oldest, key=_revision_of)
        self.size_bytes -= sum(map(_event_bytes, self.events[count:whole]))
        del self.events[:whole]


class Keyspace:
    """Items, leases and the latest changes. Times are the caller's, of one clock that does not go back."""

    def __init__(self, history_events: int = HISTORY_EVENTS, history_bytes: int = HISTORY_BYTES) -> None:
        self.revision = FIRST_REVISION
        self.size_bytes = 0  # of the items; the history is bounded by itself
        self._items: dict[str, Item] = {}
        self._keys: list[str] = []  # the same, sorted
        self._leases = Leases()
        self._history = _History(history_events, history_bytes)
        self._untaken: list[Event] = []
        self._batch: list[Event] = []  # of the change under way

    def __len__(self) -> int:
        return len(self._items)

    @property
    def lease_count(self) -> int:
        return len(self._leases)

    def has_lease(self, lease: int) -> bool:
        return lease in self._leases

    # --- items -------------------------------------------------------------------------------------------------------------

    def transact(self, transaction: Transaction) -> Outcome:
        """Do it as one change. Raises `UnknownLease`, or ValueError for a key changed twice, before anything is changed."""
        _refuse_repeated_keys(transaction.then)
        _refuse_repeated_keys(transaction.otherwise)
        succeeded = all(map(self._holds, transaction.compares))
        operations = transaction.then if succeeded else transaction.otherwise
        ended = {operation.lease for operation in operations if isinstance(operation, EndLease)}
        for operation in operations:
            lease = operation.lease if isinstance(operation, Put) else 0
            if lease and (lease in ended or lease not in self._leases):
                raise UnknownLease(lease)
        found = [self._do(operation) for operation in operations]
        self._commit()
        gets = (isinstance(operation, Get) for operation in operations)
        return Outcome(succeeded, self.revision, tuple(item for item, is_get in zip(found, gets, strict=True) if is_get))

    def read(self, prefix: str) -> Snapshot:
        return Snapshot(self.revision, tuple(self._items[key] for key in self._keys_under(prefix)))

    # --- changes -----------------------------------------------------------------------------------------------------------

    def changes(self, prefix: str, from_revision: int) -> list[Event]:
        """The changes under `prefix` from a revision on, none if that is still to come; raises `Compacted`."""
        return [event for event in self._history.since(from_revision) if event.key.startswith(prefix)]

    def take_changes(self) -> list[Event]:
        """All changes since the last call, in order, to be told to those who watch."""
        taken, self._untaken = self._untaken, []
        return taken

    # --- leases ------------------------------------------------------------------------------------------------------------

    def grant(self, ttl_s: float, now: float) -> int:
        """A new lease: 1, 2, 3 and so on."""
        return self._leases.grant(ttl_s, now)

    def keep_alive(self, lease: int, now: float) -> bool:
        """Renew the lease; False if there is none. One that is over, but that no `tick` has ended, is saved by it."""
        return self._leases.renew(lease, now)

    def vouch(self, lease: int) -> None:
        """Somebody who must know has testified that all processes of its owner are gone."""
        self._end(lease, "vouched")

    def revoke(self, lease: int) -> None:
        """End the lease at the wish of its owner."""
        self._end(lease, "deleted")

    def tick(self, now: float) -> None:
        """End the leases that are over; if nobody ticked for `AWAY_S`, all are extended by that time first."""
        for lease in self._leases.due(now):
            self._end(lease, "expired")

    def next_expiry(self) -> float | None:
        """When to `tick` at the latest; None while there are no leases.

        It is never after a lease is over, and often before: who sleeps longer is taken for absent.
        """
        return self._leases.look_at()

    # --- invariants --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ValueError if this object contradicts itself; it looks at everything."""
        self._leases.check()
        bound = {key: item.lease for key, item in self._items.items() if item.lease}
        contradictions = {
            "keys out of order": self._keys != sorted(self._items),
            "items under another key": any(key != item.key for key, item in self._items.items()),
            "items and leases disagree": bound != self._leases.bound_keys(),
            "impossible revisions": not all(map(self._is_plausible, self._items.values())),
            "wrong size": self.size_bytes != self.measured_bytes(),
            "wrong size of history": self._history.size_bytes != sum(map(_event_bytes, self._history.events)),
            "history out of order": not _is_sorted([self._history.oldest, *map(_revision_of, self._history.events)]),
            "an unfinished change": bool(self._batch),
        }
        if found := [what for what, is_so in contradictions.items() if is_so]:
            raise ValueError(f"keyspace at revision {self.revision}: {', '.join(found)}")

    def measured_bytes(self) -> int:
        """What the items take, counted anew."""
        return sum(map(_item_bytes, self._items.values()))

    def _is_plausible(self, item: Item) -> bool:
        return FIRST_REVISION < item.create_revision <= item.mod_revision <= self.revision

    # --- one change --------------------------------------------------------------------------------------------------------

    def _holds(self, compare: Compare) -> bool:
        item = self._items.get(compare.key)
        if item is None:
            return compare.revision == 0
        return compare.revision == (item.create_revision if compare.target == "create" else item.mod_revision)

    def _do(self, operation: Operation) -> Item | None:
        match operation:
            case Put():
                self._put(operation)
            case Delete(key, is_prefix):
                self._delete(self._keys_under(key) if is_prefix else [key], "deleted")
            case Get(key):
                return self._items.get(key)
            case EndLease(lease):
                self._delete_bound(lease, "expired")
        return None

    def _put(self, put: Put) -> None:
        revision = self.revision + 1
        old = self._items.get(put.key)
        if old is None:
            insort(self._keys, put.key)
        else:
            self._leases.unbind(put.key, old.lease)
            self.size_bytes -= _item_bytes(old)
        item = Item(put.key, put.value, old.create_revision if old is not None else revision, revision, put.lease)
        self._items[put.key] = item
        self._leases.bind(put.key, put.lease)
        self.size_bytes += _item_bytes(item)
        self._batch.append(Event(revision, put.key, item, "put"))

    def _delete(self, keys: list[str], cause: Cause) -> None:
        """Keys that follow each other, as those of a prefix do, are cut out of the sorted list at once."""
        gone = [item for key in keys if (item := self._items.pop(key, None)) is not None]
        for item in gone:
            self._leases.unbind(item.key, item.lease)
            self.size_bytes -= _item_bytes(item)
            self._batch.append(Event(self.revision + 1, item.key, None, cause))
        if gone:
            first = bisect_left(self._keys, gone[0].key)
            del self._keys[first : first + len(gone)]

    def _end(self, lease: int, cause: Cause) -> None:
        self._delete_bound(lease, cause)
        self._commit()

    def _delete_bound(self, lease: int, cause: Cause) -> None:
        for key in self._leases.end(lease):
            self._delete([key], cause)

    def _commit(self) -> None:
        """What was done becomes the next revision, if it was anything."""
        if self._batch:
            self.revision += 1
            self._history.add(self._batch)
            self._untaken += self._batch
            self._batch = []

    def _keys_under(self, prefix: str) -> list[str]:
        first = last = bisect_left(self._keys, prefix)
        while last < len(self._keys) and self._keys[last].startswith(prefix):
            last += 1
        return self._keys[first:last]


def _refuse_repeated_keys(operations: tuple[Operation, ...]) -> None:
    put: set[str] = set()
    for operation in operations:
        if isinstance(operation, Put):
            if operation.key in put:
                raise ValueError(f"duplicate key: {operation.key!r} is put twice in one transaction")
            put.add(operation.key)
    for operation in operations:
        if isinstance(operation, Delete) and (key := _first_deleted(operation, put)) is not None:
            raise ValueError(f"duplicate key: {key!r} is put and deleted in one transaction")


def _first_deleted(delete: Delete, keys: set[str]) -> str | None:
    if not delete.is_prefix:
        return delete.key if delete.key in keys else None
    return next((key for key in keys if key.startswith(delete.key)), None)


def _item_bytes(item: Item) -> int:
    return len(item.key) + len(item.value) + ITEM_OVERHEAD_BYTES


def _event_bytes(event: Event) -> int:
    return len(event.key) + (len(event.item.value) if event.item is not None else 0) + ITEM_OVERHEAD_BYTES


def _is_sorted(numbers: list[int]) -> bool:
    return all(one <= other for one, other in pairwise(numbers))
