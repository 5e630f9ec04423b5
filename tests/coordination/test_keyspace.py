"""The keyspace: its rules one by one, and long random histories against a model that is only a list of events."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.coordination.keyspace import (
    AWAY_S,
    FIRST_REVISION,
    ITEM_OVERHEAD_BYTES,
    LOOK_EVERY_S,
    Compacted,
    Keyspace,
    Leases,
    UnknownLease,
)
from rallypoint.coordination.model import Compare, Delete, EndLease, Event, Get, Item, Operation, Outcome, Put, Transaction

ABSENT = 0


def do(space: Keyspace, *operations: Operation) -> Outcome:
    return space.transact(Transaction((), operations))


def keys(space: Keyspace, prefix: str = "") -> list[str]:
    return [item.key for item in space.read(prefix).items]


def told(space: Keyspace) -> list[tuple[int, str, str]]:
    return [(event.revision, event.key, event.cause) for event in space.take_changes()]


# --- transactions ----------------------------------------------------------------------------------------------------------


def test_the_empty_store() -> None:
    space = Keyspace()
    space.check()
    assert (space.revision, len(space), space.size_bytes, space.lease_count) == (FIRST_REVISION, 0, 0, 0)
    assert list(space.read("")) == [FIRST_REVISION, ()]
    assert (space.changes("", 0), space.take_changes(), space.next_expiry()) == ([], [], None)


def test_puts_and_deletes_make_revisions() -> None:
    space = Keyspace()
    assert [do(space, Put("a", b"1")).revision, do(space, Put("a", b"2")).revision] == [2, 3]
    assert space.read("").items == (Item("a", b"2", 2, 3),)
    assert [do(space, Delete("a")).revision, do(space, Delete("a")).revision, do(space, Put("a", b"3")).revision] == [4, 4, 5]
    assert space.read("").items == (Item("a", b"3", 5, 5),)
    assert told(space) == [(2, "a", "put"), (3, "a", "put"), (4, "a", "deleted"), (5, "a", "put")]


def test_the_same_value_again_is_a_change_and_nothing_else_is() -> None:
    space = Keyspace()
    do(space, Put("a", b"1"))
    assert [do(space).revision, do(space, Get("a")).revision, do(space, Delete("x", True)).revision] == [2, 2, 2]
    assert do(space, Put("a", b"1")).revision == 3


@pytest.mark.parametrize(
    ("compare", "holds"),
    [
        (Compare("a", "create", 2), True),
        (Compare("a", "create", 3), False),
        (Compare("a", "create", ABSENT), False),
        (Compare("a", "mod", 3), True),
        (Compare("a", "mod", 2), False),
        (Compare("b", "create", ABSENT), True),
        (Compare("b", "mod", ABSENT), True),
        (Compare("b", "mod", 2), False),
    ],
)
def test_comparisons_choose_the_list(compare: Compare, holds: bool) -> None:
    space = Keyspace()
    do(space, Put("a", b"1"))
    do(space, Put("a", b"2"))
    outcome = space.transact(Transaction((compare,), (Put("then", b""), Get("a")), (Put("else", b""), Get("x"), Get("else"))))
    assert (outcome.succeeded, outcome.revision, keys(space)) == (holds, 4, ["a", "then" if holds else "else"])
    assert outcome.items == ((Item("a", b"2", 2, 3),) if holds else (None, Item("else", b"", 4, 4)))


def test_a_get_sees_what_stands_before_it() -> None:
    space = Keyspace()
    do(space, Put("a", b"1"), Put("d/1", b""))
    outcome = do(space, Get("a"), Put("a", b"2"), Get("a"), Delete("d/", True), Get("d/1"))
    assert outcome.items == (Item("a", b"1", 2, 2), Item("a", b"2", 2, 3), None)


def test_a_prefix_is_deleted_in_the_order_of_its_keys() -> None:
    space = Keyspace()
    do(space, *(Put(key, b"") for key in ("p/b", "p", "p0", "p/", "q", "p/a", "p/🚀", "o")))
    space.take_changes()
    do(space, Delete("q"), Delete("p/", True), Delete("o"))
    assert told(space) == [(3, key, "deleted") for key in ("q", "p/", "p/a", "p/b", "p/🚀", "o")]
    assert keys(space) == ["p", "p0"]
    space.check()


@pytest.mark.parametrize(
    "operations",
    [
        (Put("a", b"1"), Put("b", b""), Put("a", b"2")),
        (Put("a", b"1"), Delete("a")),
        (Delete("a"), Put("a", b"1")),
        (Put("a/b", b"1"), Delete("a/", True)),
        (Delete("", True), Put("a", b"1")),
    ],
)
def test_a_key_is_changed_once_in_a_transaction(operations: tuple[Operation, ...]) -> None:
    space = Keyspace()
    for transaction in (Transaction((), operations), Transaction((), (), operations)):
        with pytest.raises(ValueError, match="duplicate key"):
            space.transact(transaction)
    assert (space.revision, len(space)) == (FIRST_REVISION, 0)


def test_sizes_are_counted() -> None:
    space = Keyspace()
    do(space, Put("abc", b"12345"), Put("x", b""))
    do(space, Put("abc", b"1"))
    assert (len(space), space.size_bytes) == (2, 5 + 2 * ITEM_OVERHEAD_BYTES)
    do(space, Delete("", True))
    assert (len(space), space.size_bytes) == (0, 0)


def test_a_contradiction_is_found() -> None:
    space = Keyspace()
    do(space, Put("a", b"1"))
    space.check()
    space._items["b"] = space._items["a"]
    with pytest.raises(ValueError, match="keys out of order, items under another key, wrong size"):
        space.check()


# --- changes ---------------------------------------------------------------------------------------------------------------


def test_changes_from_a_revision_on() -> None:
    space = Keyspace()
    for key in ("a/1", "b/1", "a/2"):
        do(space, Put(key, b""))
    assert [event.key for event in space.changes("a/", 0)] == ["a/1", "a/2"]
    assert [event.key for event in space.changes("", 3)] == ["b/1", "a/2"]
    assert (space.changes("a/", 5), space.changes("a/", 99)) == ([], [])


def test_old_changes_are_forgotten_by_whole_revisions() -> None:
    space = Keyspace(history_events=10)
    for revision in range(2, 6):
        do(space, *(Put(f"{revision}/{number}", b"") for number in range(3)))
        space.check()
    with pytest.raises(Compacted) as caught:
        space.changes("", 2)
    oldest = caught.value.oldest
    assert 2 < oldest <= 5
    assert len(space.changes("", oldest)) == 3 * (6 - oldest)
    assert len(space.take_changes()) == 12, "who is told at once misses nothing"


def test_the_history_is_bounded_in_bytes_whatever_comes() -> None:
    space = Keyspace(history_bytes=10_000)
    do(space, Put("a", b""))
    do(space, Put("large", bytes(20_000)))
    with pytest.raises(Compacted, match="before revision 4"):
        space.changes("", 3)
    assert space.changes("", 4) == []
    do(space, Put("a", b"2"))
    assert [event.key for event in space.changes("", 4)] == ["a"]
    space.check()


# --- leases ----------------------------------------------------------------------------------------------------------------


def test_items_end_with_their_lease_as_one_change() -> None:
    space = Keyspace()
    lease, other = space.grant(3.0, 0.0), space.grant(30.0, 0.0)
    do(space, Put("b", b"", lease), Put("free", b""), Put("a", b"", lease), Put("c", b"", other))
    space.take_changes()
    while space.lease_count == 2:
        space.tick(space.next_expiry() or 0.0)
    assert told(space) == [(3, "a", "expired"), (3, "b", "expired")]
    assert keys(space) == ["c", "free"]
    space.check()


@pytest.mark.parametrize("cause", ["deleted", "vouched"])
def test_items_say_why_they_went(cause: str) -> None:
    space = Keyspace()
    lease = space.grant(3.0, 0.0)
    do(space, Put("a", b"", lease))
    space.take_changes()
    if cause == "deleted":
        space.revoke(lease)
    else:
        space.vouch(lease)
    assert told(space) == [(3, "a", cause)]
    assert not space.keep_alive(lease, 0.4)
    assert not space.keep_alive(lease, 0.4)
    space.revoke(lease)
    assert (space.revision, space.lease_count) == (3, 0)


def test_a_store_that_was_away_takes_nobody_for_dead() -> None:
    """Whether what was sent meanwhile is read before or after the clock is looked at."""
    space = Keyspace()
    lease, other = space.grant(3.0, 0.0), space.grant(3.0, 0.0)
    do(space, Put("a", b"", lease), Put("b", b"", other))
    space.tick(0.2)
    space.tick(60.0)
    assert keys(space) == ["a", "b"]
    assert space.keep_alive(lease, 60.1)
    assert space.keep_alive(other, 60.1)


def test_a_lease_without_items_ends_without_a_change() -> None:
    space = Keyspace()
    space.revoke(space.grant(1.0, 0.0))
    assert (space.revision, space.take_changes()) == (FIRST_REVISION, [])


def test_a_put_binds_anew() -> None:
    space = Keyspace()
    one, two = space.grant(3.0, 0.0), space.grant(3.0, 0.0)
    do(space, Put("to two", b"", one), Put("freed", b"", one), Put("kept", b"", one))
    do(space, Put("to two", b"", two), Put("freed", b""), Put("kept", b"new", one))
    space.revoke(one)
    assert keys(space) == ["freed", "to two"]
    space.revoke(two)
    assert keys(space) == ["freed"]
    space.check()


def test_a_put_under_a_lease_that_ended_changes_nothing() -> None:
    space = Keyspace()
    lease = space.grant(3.0, 0.0)
    space.revoke(lease)
    with pytest.raises(UnknownLease) as caught:
        do(space, Put("a", b""), Put("b", b"", lease))
    assert (caught.value.lease, space.revision, len(space)) == (lease, FIRST_REVISION, 0)
    assert space.transact(Transaction((Compare("a", "mod", 9),), (Put("b", b"", lease),))).revision == FIRST_REVISION


# --- histories -------------------------------------------------------------------------------------------------------------


class Model:
    """A list of events is all that it keeps; everything is found by going through it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.revision = FIRST_REVISION

    def items(self, prefix: str = "") -> dict[str, Item]:
        found = {event.key: event.item for event in self.events}
        return {key: item for key, item in sorted(found.items()) if item is not None and key.startswith(prefix)}

    def transact(self, transaction: Transaction) -> Outcome:
        now, gets, before = self.items(), [], len(self.events)
        held = [
            compare.revision == (getattr(now[compare.key], f"{compare.target}_revision") if compare.key in now else ABSENT)
            for compare in transaction.compares
        ]
        for operation in transaction.then if all(held) else transaction.otherwise:
            match operation:
                case Put(key, value, lease):
                    old = self.items().get(key)
                    created = old.create_revision if old else self.revision + 1
                    self._add(key, Item(key, value, created, self.revision + 1, lease), "put")
                case Delete(key, is_prefix):
                    for one in [one for one in self.items(key) if is_prefix or one == key]:
                        self._add(one, None, "deleted")
                case Get(key):
                    gets.append(self.items().get(key))
                case EndLease(lease):
                    for one in [key for key, item in self.items().items() if lease and item.lease == lease]:
                        self._add(one, None, "expired")
        self.revision += len(self.events) > before
        return Outcome(all(held), self.revision, tuple(gets))

    def end(self, lease: int, cause: str) -> None:
        bound = [key for key, item in self.items().items() if lease and item.lease == lease]
        for key in bound:
            self._add(key, None, cause)
        self.revision += bool(bound)

    def _add(self, key: str, item: Item | None, cause: str) -> None:
        self.events.append(Event(self.revision + 1, key, item, cause))


names = st.sampled_from(["", "a", "a/", "a/a", "a/b", "a0", "b", "b/\U0010ffff", "é"])
lease_numbers = st.integers(0, 3)
operations = st.lists(
    st.builds(Put, names, st.binary(max_size=2), lease_numbers)
    | st.builds(Delete, names, st.booleans())
    | st.builds(Get, names)
    | st.builds(EndLease, lease_numbers),
    max_size=4,
).map(tuple)
compares = st.lists(st.builds(Compare, names, st.sampled_from(["create", "mod"]), st.integers(0, 8)), max_size=2).map(tuple)
transactions = st.builds(Transaction, compares, operations, operations)
story_steps = transactions | st.tuples(st.sampled_from(["grant", "revoke", "vouch", "keep_alive", "tick"]), lease_numbers)


def refused(space: Keyspace, transaction: Transaction) -> bool:
    """Whether it was, in which case nothing may have changed."""
    before = space.read("")
    try:
        space.transact(transaction)
    except ValueError:
        assert space.read("") == before
        return True
    return False


@settings(max_examples=300, deadline=None)
@given(st.lists(story_steps, max_size=30), st.integers(0, 20), names)
def test_it_does_what_the_list_of_events_says(story: list[object], from_revision: int, prefix: str) -> None:
    space, twin, model, now, taken = Keyspace(), Keyspace(), Model(), 0.0, list[Event]()
    for step in story:
        now += 0.2
        match step:
            case Transaction():
                if not refused(twin, step):
                    assert space.transact(step) == model.transact(step)
            case ("grant", _):
                assert space.grant(1.0, now) == twin.grant(1.0, now)
            case ("revoke", lease):
                space.revoke(lease)
                twin.revoke(lease)
                model.end(lease, "deleted")
            case ("vouch", lease):
                space.vouch(lease)
                twin.vouch(lease)
                model.end(lease, "vouched")
            case ("keep_alive", lease):
                assert space.keep_alive(lease, now) == twin.keep_alive(lease, now)
        space.tick(now)
        twin.tick(now)
        for event in (news := space.take_changes()):
            if event.cause == "expired" and event not in model.events:
                model.end(model.items()[event.key].lease, event.cause)
        taken += news
        space.check()
        assert (space.read("").items, space.revision) == (tuple(model.items().values()), model.revision)
    assert taken == model.events == space.changes("", 0)
    assert space.read(prefix).items == tuple(model.items(prefix).values())
    later = [event for event in model.events if event.revision >= from_revision and event.key.startswith(prefix)]
    assert space.changes(prefix, from_revision) == later


def test_ten_thousand_nodes_are_no_burden() -> None:
    """P22: what one node does costs no more because there are many others; a thousandth of a second is already generous."""
    space, nodes = Keyspace(), 10_000
    leases = [space.grant(30.0, 0.0) for _ in range(nodes)]
    for number, lease in enumerate(leases):
        do(space, Put(f"nodes/{number}", b"x" * 200, lease))
    begun_at = time.process_time()
    for number, lease in enumerate(leases):
        now = 1.0 + number / 1000
        assert space.keep_alive(lease, now)
        space.tick(now)
        do(space, Put(f"nodes/{number}", b"y" * 200, lease), Get("generation"))
        assert len(space.read(f"nodes/{number}").items) < 1200
        assert len(space.changes("nodes/", space.revision)) == 1
    assert time.process_time() - begun_at < nodes / 1000
    space.check()


# --- leases: when they end, and absences of whoever looks at them ----------------------------------------------------------


TTL_S = 3.0


def ended(leases: Leases, until: float) -> list[tuple[float, int]]:
    """Everything that ends until then, with a loop that looks when it is told to."""
    found = []
    while (now := leases.look_at()) is not None and now <= until:
        for number in leases.due(now):
            found.append((round(now, 6), number))
            leases.end(number)
        leases.check()
    return found


def granted(count: int = 1, ttl_s: float = TTL_S, now: float = 100.0) -> Leases:
    leases = Leases()
    assert [leases.grant(ttl_s, now) for _ in range(count)] == list(range(1, count + 1))
    return leases


def test_there_is_nothing_to_look_at_without_leases() -> None:
    leases = Leases()
    assert (leases.look_at(), leases.due(50.0), leases.look_at(), len(leases)) == (None, [], None, 0)


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan")])
def test_a_lease_must_live_for_a_time(ttl_s: float) -> None:
    with pytest.raises(ValueError, match="live for a time"):
        Leases().grant(ttl_s, 0.0)


def test_a_lease_ends_when_its_time_is_over_and_its_number_is_not_used_again() -> None:
    leases = granted()
    assert ended(leases, 102.9) == []
    assert ended(leases, 200.0) == [(103.0, 1)]
    assert (leases.renew(1, 103.0), leases.look_at(), leases.grant(TTL_S, 103.0)) == (False, None, 2)


def test_a_renewed_lease_runs_from_then_on() -> None:
    leases = granted(2)
    ended(leases, 102.0)
    assert leases.renew(1, 102.0)
    assert ended(leases, 200.0) == [(103.0, 2), (105.0, 1)]


def test_a_renewal_that_was_there_before_anybody_looked_counts() -> None:
    leases = granted()
    ended(leases, 102.8)
    assert leases.renew(1, 103.2), "over since 103, but nobody has ended it"
    assert ended(leases, 200.0) == [(106.2, 1)]


# --- absences --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("away_s", [0.6, 2.0, 3600.0])
def test_an_absence_extends_all_leases_by_its_length(away_s: float) -> None:
    """A host that was stopped takes nobody for dead when it goes on."""
    leases = granted()
    ended(leases, 101.0)
    assert leases.due(101.0 + away_s) == []
    assert ended(leases, 9999.0) == [(103.0 + away_s, 1)]


def test_a_loop_that_is_a_little_late_was_not_away() -> None:
    leases = granted()
    ended(leases, 102.8)
    assert leases.due(102.75 + AWAY_S) == [1]


def test_an_absence_is_not_given_to_those_who_were_renewed_after_it() -> None:
    """Else a node that died just after a long absence would be taken for alive as long again."""
    leases = granted(2)
    ended(leases, 101.0)
    leases.renew(1, 3600.0)
    assert leases.due(3600.1) == []
    assert ended(leases, 9999.0) == [(3602.0, 2), (3603.0, 1)]


def test_time_without_leases_is_no_absence_of_anybody() -> None:
    leases = granted()
    ended(leases, 200.0)
    leases.grant(TTL_S, 1000.0)
    assert ended(leases, 9999.0) == [(1003.0, 2)]


# --- histories -------------------------------------------------------------------------------------------------------------

steps = st.lists(st.tuples(st.sampled_from(["grant", "renew", "end", "look"]), st.integers(1, 6), st.integers(0, 9)), max_size=80)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_a_loop_that_looks_in_time_ends_each_lease_at_its_end(story: list[tuple[str, int, int]]) -> None:
    """Against a dictionary of ends, for a loop that is never away: it looks every 0.1 s, or more often."""
    leases, now = Leases(), 0.0
    model: dict[int, float] = {}
    ttls: dict[int, float] = {}
    for what, number, pause in story:
        for _ in range(pause):
            now += 0.1
            over = sorted((end, one) for one, end in model.items() if end <= now)
            assert leases.due(now) == [one for _, one in over]
            for _, one in over:
                leases.end(one)
                del model[one]
        match what:
            case "grant":
                model[leases.grant(0.2 * number, now)] = now + 0.2 * number
                ttls[len(ttls) + 1] = 0.2 * number
            case "renew" if leases.renew(number, now) or number in model:
                model[number] = now + ttls[number]
            case "end":
                leases.end(number)
                model.pop(number, None)
        leases.check()
        assert len(leases) == len(model)
        look_at = leases.look_at()
        assert (look_at is None) == (not model)
        assert look_at is None or look_at <= min(model.values()) + 1e-9
        assert look_at is None or look_at <= now + LOOK_EVERY_S


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(0.01, 5.0)), max_size=40))
def test_nobody_ends_within_its_time_of_being_heard_whatever_the_loop_does(story: list[tuple[bool, float]]) -> None:
    """The owner's side of the promise: a renewal that was answered is good for the whole time to live."""
    leases, now, heard_at = granted(now=0.0), 0.0, 0.0
    for renews, pause_s in story:
        now += pause_s
        if renews and leases.renew(1, now):
            heard_at = now
        for number in leases.due(now):
            leases.end(number)
            assert now >= heard_at + TTL_S - 1e-9
        leases.check()
