"""What every engine of the coordination store has to do, as tests that its author runs.

Derive a test class from `CoordinationContract` in a module of your tests, and give it the fixture `connect`: a function each call
of which gives a new client of one store, a new and empty one for each test:

    class TestMyEngine(CoordinationContract):
        @pytest.fixture
        def connect(self, my_server):
            with contextlib.ExitStack() as clients:
                yield lambda: clients.enter_context(contextlib.closing(MyCoordination(my_server.address)))

Set the class's attributes where your engine differs. A test may close a client itself, so closing twice must do no harm.
All waiting ends by a deadline; what waits for leases takes a few of `least_ttl_s`.
"""

from __future__ import annotations

import math
import select
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import SkipTest

from rallypoint.coordination.engine import CompactedError, Coordination, LeaseLostError
from rallypoint.coordination.model import Compare, Delete, EndLease, Event, Get, Outcome, Put, Snapshot, Transaction

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rallypoint.coordination.model import Item, Operation

    Connect = Callable[[], Coordination]

__all__ = [
    "EVERY_BYTE", "MOST_PUTS", "TIMEOUT_S", "CoordinationContract", "at_once", "do", "events_until", "get", "keys", "put",
    "raises", "read", "same", "soon", "wait",
]  # fmt: skip

TIMEOUT_S = 10.0
EVERY_BYTE = bytes(range(256))
MOST_PUTS = 100  # in one transaction


def events_until(
    client: Coordination,
    predicate: Callable[[list[Event]], object],
    timeout_s: float = TIMEOUT_S,
    keep: Sequence[Coordination] = (),
) -> list[Event]:
    """What `client` is told until `predicate` holds for all of it; the leases of those in `keep` are kept meanwhile."""
    deadline = time.monotonic() + timeout_s
    events = client.take_events()
    while not predicate(events):
        assert time.monotonic() < deadline, f"not told in {timeout_s:g} s; told was {events!r:.2000}"
        wait([client, *keep], deadline)
        events += client.take_events()
        for other in keep:
            other.take_events()
    return events


def wait(clients: Sequence[Coordination], deadline: float) -> bool:
    """Until one has something to say, or wants to be called, or the deadline; whether one has something."""
    poll = select.poll()
    for client in clients:
        poll.register(client.fileno(), select.POLLIN)
    wake_at = min(deadline, *(client.wake_at() for client in clients))
    return bool(poll.poll(max(0, math.ceil(1000 * (wake_at - time.monotonic())))))


def raises(error: type[Exception], call: Callable[..., object], *args: object) -> bool:
    try:
        call(*args)
    except error:
        return True
    return False


def at_once(*jobs: Callable[[], object]) -> None:
    """Each in a thread of its own, to the end; an error of one is raised here."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        for running in [pool.submit(job) for job in jobs]:
            running.result()


def same(got: object, expected: object) -> None:
    """An assertion that says both sides also where pytest does not rewrite it."""
    assert got == expected, f"\ngot      {got!r:.2000}\nexpected {expected!r:.2000}"


def soon() -> float:
    return time.monotonic() + TIMEOUT_S


def do(client: Coordination, *operations: Operation) -> Outcome:
    return client.transact(Transaction((), operations), soon())


def put(client: Coordination, key: str, value: bytes = b"", lease: int = 0) -> int:
    """The revision that it made."""
    return do(client, Put(key, value, lease)).revision


def get(client: Coordination, key: str) -> Item | None:
    return do(client, Get(key)).items[0]


def read(client: Coordination, prefix: str) -> Snapshot:
    return client.read(prefix, soon())


def keys(found: Snapshot | list[Event]) -> list[str]:
    return [one.key for one in (found.items if isinstance(found, Snapshot) else found)]


def values(events: list[Event]) -> list[bytes]:
    return [event.item.value for event in events if event.item is not None]


def count(number: int, client: Coordination, prefix: str) -> None:
    for one in range(number):
        put(client, f"{prefix}/{one % 7}", str(one).encode())


def watching(client: Coordination) -> Coordination:
    client.watch("n/", read(client, "n/").revision + 1, soon())
    return client


def is_deleted(key: str, events: list[Event]) -> bool:
    return any(event.key == key and event.item is None for event in events)


def causes(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.key, event.cause) for event in events]


def wait_for_loss(client: Coordination) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not raises(LeaseLostError, client.take_events):
        assert time.monotonic() < deadline, "the owner is not told that its lease has ended"
        wait([client], deadline)


class CoordinationContract:
    """All tests of an engine, with the attributes that an author may set."""

    least_ttl_s = 1.0  # the shortest lease that the engine keeps to
    can_compact = False  # whether `compact` makes the engine forget its oldest changes

    def compact(self, client: Coordination) -> None:
        """Make the store forget; here by very many changes."""
        for _ in range(300):
            do(client, *(Put(f"filler/{number}", b"") for number in range(MOST_PUTS)))

    # --- transactions and reads: compared, ordered, all or nothing ---------------------------------------------------------

    def test_an_item_knows_when_it_was_created_and_changed(self, connect: Connect) -> None:
        client = connect()
        first, second = put(client, "a", b"1"), put(client, "a", b"2")
        assert 0 < first < second, "revisions grow"
        item = get(client, "a")
        assert item is not None
        same((item.value, item.create_revision, item.mod_revision, item.lease), (b"2", first, second, 0))
        do(client, Delete("a"))
        again = put(client, "a", b"3")
        same([item.create_revision for item in read(client, "a").items], [again])

    def test_comparisons(self, connect: Connect) -> None:
        client = connect()
        first, second = put(client, "a", b"1"), put(client, "a", b"2")
        expected = {
            Compare("a", "create", first): True, Compare("a", "create", second): False, Compare("a", "create", 0): False,
            Compare("a", "mod", second): True, Compare("a", "mod", first): False, Compare("a", "mod", 0): False,
            Compare("b", "create", 0): True, Compare("b", "mod", 0): True, Compare("b", "mod", first): False,
        }  # fmt: skip
        found = {one: client.transact(Transaction((one,), ()), soon()).succeeded for one in expected}
        same(found, expected)
        both = Transaction((Compare("a", "mod", second), Compare("b", "mod", second)), (Put("c", b""),))
        assert not client.transact(both, soon()).succeeded, "all comparisons have to hold"
        same(keys(read(client, "")), ["a"])

    def test_one_of_two_lists_is_done_and_its_gets_are_answered(self, connect: Connect) -> None:
        client = connect()
        put(client, "here", b"x")
        then = (Get("here"), Put("then", b"1"), Get("then"), Get("none"))
        otherwise = (Put("else", b"2"), Get("none"), Get("here"))
        yes = client.transact(Transaction((Compare("none", "mod", 0),), then, otherwise), soon())
        no = client.transact(Transaction((Compare("here", "mod", 0),), then, otherwise), soon())
        same([item and item.value for item in yes.items], [b"x", b"1", None])
        same([item and item.value for item in no.items], [None, b"x"])
        same((yes.succeeded, no.succeeded, keys(read(client, ""))), (True, False, ["else", "here", "then"]))

    def test_a_transaction_is_one_revision_and_an_idle_one_none(self, connect: Connect) -> None:
        client = connect()
        before = put(client, "a")
        outcome = do(client, Put("b", b""), Put("c", b""), Delete("a"))
        same(outcome.revision, before + 1)
        same({item.mod_revision for item in read(client, "").items}, {before + 1})
        idle = [do(client).revision, do(client, Get("b"), Delete("none")).revision, read(client, "").revision]
        same(idle, [before + 1] * 3)

    def test_only_one_of_two_creates_a_key(self, connect: Connect) -> None:
        clients, won = [connect(), connect()], list[tuple[int, bytes]]()

        def create_all(client: Coordination, name: bytes) -> None:
            for number in range(50):
                key = f"key/{number}"
                create = Transaction((Compare(key, "create", 0),), (Put(key, name),), (Get(key),))
                if client.transact(create, soon()).succeeded:
                    won.append((number, name))

        at_once(lambda: create_all(clients[0], b"one"), lambda: create_all(clients[1], b"two"))
        same(sorted(won), sorted((int(item.key[4:]), item.value) for item in read(clients[0], "key/").items))
        same(len(won), 50)

    def test_nobody_sees_half_a_transaction(self, connect: Connect) -> None:
        writer, reader = connect(), connect()
        values = [str(number).encode() for number in range(100)]

        def watch_pairs() -> None:
            seen: set[bytes] = set()
            deadline = soon()
            while values[-1] not in seen and time.monotonic() < deadline:
                seen = {item.value for item in read(reader, "pair/").items}
                assert len(seen) <= 1, f"half a transaction: {seen}"

        at_once(lambda: [do(writer, Put("pair/1", one), Put("pair/2", one)) for one in values], watch_pairs)

    def test_a_hundred_puts_and_a_prefix_deleted(self, connect: Connect) -> None:
        client = connect()
        do(client, Put("man", b""), Put("many0", b""))
        revision = do(client, *(Put(f"many/{number:02}", b"v") for number in range(MOST_PUTS))).revision
        client.watch("", revision + 1, soon())
        do(client, Delete("many/", is_prefix=True))
        events = events_until(client, lambda events: len(events) >= MOST_PUTS)
        same(keys(events), [f"many/{number:02}" for number in range(MOST_PUTS)])
        same({(event.item, event.cause, event.revision) for event in events}, {(None, "deleted", revision + 1)})
        same(keys(read(client, "")), ["man", "many0"])

    def test_a_read_is_ordered_and_has_all_under_the_prefix_and_nothing_else(self, connect: Connect) -> None:
        client = connect()
        names = ["", "/", "0", "a", "z", "é", "ключ", "日本", "\ue000", "🚀", "🚀/x"]
        for name in reversed(names):
            put(client, f"p/{name}", name.encode())
        do(client, Put("p", b""), Put("p.", b""), Put("p0", b""), Put("o", b""))
        same([(item.key, item.value) for item in read(client, "p/").items], [(f"p/{name}", name.encode()) for name in names])
        same((keys(read(client, "p/🚀")), keys(read(client, "q"))), (["p/🚀", "p/🚀/x"], []))

    def test_values_of_any_bytes_and_of_64_kib(self, connect: Connect) -> None:
        client = connect()
        values = {"v/empty": b"", "v/every": EVERY_BYTE, "v/large": 256 * EVERY_BYTE, "v/zero": b"\0"}
        before = read(client, "v/").revision
        client.watch("v/", before + 1, soon())
        for key, value in values.items():
            put(client, key, value)
        same({item.key: item.value for item in read(client, "v/").items}, values)
        told = events_until(client, lambda events: len(events) >= len(values))
        same({event.key: event.item and event.item.value for event in told}, values)

    def test_five_thousand_items_are_read_at_once(self, connect: Connect) -> None:
        client = connect()
        names = [f"node/{number:04}" for number in range(5000)]
        for first in range(0, len(names), MOST_PUTS):
            do(client, *(Put(name, name.encode() * 10) for name in names[first : first + MOST_PUTS]))
        same(keys(read(client, "node/")), names)

    # --- watches: every change once, in order, from exactly the revision that was asked for --------------------------------

    def test_a_watch_tells_what_has_been_and_what_comes(self, connect: Connect) -> None:
        client, other = connect(), connect()
        put(other, "w/old", b"0")
        first = put(other, "w/a", b"1")
        put(other, "elsewhere", b"x")
        client.watch("w/", first, soon())
        deleted = do(other, Delete("w/a")).revision
        last = put(other, "w/b", b"2")
        told = events_until(client, lambda events: len(events) >= 3)
        same([(event.revision, event.key, event.cause) for event in told],
             [(first, "w/a", "put"), (deleted, "w/a", "deleted"), (last, "w/b", "put")])  # fmt: skip
        same([event.item for event in told][1:], [None, *read(other, "w/b").items])

    def test_a_watch_from_a_revision_to_come(self, connect: Connect) -> None:
        client, other = connect(), connect()
        now = put(other, "w/a")
        client.watch("w/", now + 2, soon())
        same(client.take_events(), [])
        revisions = [put(other, f"w/{name}") for name in "bcd"]
        told = events_until(client, lambda events: len(events) >= 2)
        same([(event.key, event.revision) for event in told], [("w/c", revisions[1]), ("w/d", revisions[2])])

    def test_own_changes_are_told_too_and_the_descriptor_says_when(self, connect: Connect) -> None:
        client, other = connect(), connect()
        client.watch("w/", read(client, "w/").revision + 1, soon())
        client.take_events()
        for who, key in ((other, "w/theirs"), (client, "w/ours")):
            put(who, key)
            begun_at = time.monotonic()
            wait([client], begun_at + TIMEOUT_S)
            assert time.monotonic() < begun_at + TIMEOUT_S / 2, "it says when to call, also if it has read the event already"
            same(keys(events_until(client, bool)), [key])

    def test_a_read_and_a_watch_from_there_miss_nothing_and_repeat_nothing(self, connect: Connect) -> None:
        writer, client = connect(), connect()
        names = [f"w/{number:03}" for number in range(200)]
        found: list[str] = []

        def follow() -> None:
            deadline = soon()
            while len((snapshot := read(client, "w/")).items) < 20 and time.monotonic() < deadline:
                """In the midst of the changes."""
            found.extend(keys(snapshot))
            client.watch("w/", snapshot.revision + 1, soon())
            found.extend(keys(events_until(client, lambda events: len(events) + len(found) >= len(names))))

        at_once(lambda: [put(writer, name) for name in names], follow)
        same(found, names)

    def test_two_watchers_are_told_the_same_in_the_same_order(self, connect: Connect) -> None:
        writers, watchers = [connect(), connect()], [connect(), connect()]
        begin = read(writers[0], "").revision + 1
        for watcher in watchers:
            watcher.watch("w/", begin, soon())
        at_once(lambda: count(100, writers[0], "w/one"), lambda: count(100, writers[1], "w/two"))
        one, two = (events_until(watcher, lambda events: len(events) >= 200) for watcher in watchers)
        same(one, two)
        same([event.revision for event in one], list(range(begin, begin + 200)))
        for name in ("w/one", "w/two"):
            same(values([event for event in one if event.key.startswith(name)]), [str(number).encode() for number in range(100)])

    def test_several_prefixes_and_one_of_them_no_longer(self, connect: Connect) -> None:
        client, other = connect(), connect()
        begin = read(client, "").revision + 1
        for prefix in ("one/", "two/", "three/"):
            client.watch(prefix, begin, soon())
        do(other, Put("one/a", b""), Put("two/a", b""), Put("four/a", b""))
        told = events_until(client, lambda events: len(events) >= 2)
        same(sorted(keys(told)), ["one/a", "two/a"])
        client.unwatch("one/")
        client.unwatch("never watched/")
        put(other, "one/b")
        put(other, "two/b")
        same(keys(events_until(client, lambda events: "two/b" in keys(events))), ["two/b"])

    def test_watching_again_begins_anew(self, connect: Connect) -> None:
        client = connect()
        revision = put(client, "w/a")
        for _ in range(2):
            client.watch("w/", revision, soon())
            same(keys(events_until(client, lambda events: events)), ["w/a"])
        client.watch("w/", revision + 1, soon())
        put(client, "w/b")
        same(keys(events_until(client, lambda events: events)), ["w/b"])

    def test_changes_that_are_forgotten_are_not_passed_over_in_silence(self, connect: Connect) -> None:
        client = connect()
        first = put(client, "w/a")
        if not self.can_compact:
            raise SkipTest("this engine remembers everything")
        self.compact(client)
        assert raises(CompactedError, client.watch, "w/", first, soon()), "it cannot tell what it has forgotten"
        client.watch("w/", put(client, "w/b"), soon())
        same(keys(events_until(client, lambda events: events)), ["w/b"])

    # --- leases: kept while their owner calls, and never over before it must think so --------------------------------------

    def test_a_silent_owner_is_taken_for_dead_but_not_before_it_must_think_so(self, connect: Connect) -> None:
        owner, other = connect(), watching(connect())
        lease = owner.grant(self.least_ttl_s, soon())
        do(owner, Put("n/a", b"1", lease), Put("n/b", b"2", lease), Put("n/free", b"3"))
        same([item.lease for item in read(other, "n/").items], [lease, lease, 0])
        valid_until = owner.valid_until()
        told = events_until(other, lambda events: is_deleted("n/b", events), self.least_ttl_s + TIMEOUT_S)
        assert time.monotonic() >= valid_until, "it was taken for dead while it was valid"
        same(causes(told[3:]), [("n/a", "expired"), ("n/b", "expired")])
        same(keys(read(other, "n/")), ["n/free"])
        wait_for_loss(owner)
        assert raises(LeaseLostError, put, owner, "n/a", b"", lease), "nothing can be bound to a lease that has ended"
        same(get(other, "n/a"), None)

    def test_after_a_loss_there_can_be_another_lease(self, connect: Connect) -> None:
        owner, other = connect(), watching(connect())
        put(owner, "n/a", b"", owner.grant(self.least_ttl_s, soon()))
        events_until(other, lambda events: is_deleted("n/a", events), self.least_ttl_s + TIMEOUT_S)
        wait_for_loss(owner)
        put(owner, "n/a", b"again", owner.grant(self.least_ttl_s, soon()))
        owner.take_events()
        assert owner.valid_until() > time.monotonic(), "a new lease is valid"

    def test_a_lease_is_kept_while_its_owner_calls_and_another_is_not(self, connect: Connect) -> None:
        alive, silent, other = connect(), connect(), watching(connect())
        put(silent, "n/silent", b"", silent.grant(self.least_ttl_s, soon()))
        put(alive, "n/alive", b"", alive.grant(self.least_ttl_s, soon()))
        until = time.monotonic() + 2.5 * self.least_ttl_s

        def keeps_its_lease(_: list[Event]) -> bool:
            """At any one instant the answer to a keepalive may be late."""
            return until <= time.monotonic() < alive.valid_until()

        told = events_until(other, keeps_its_lease, 2.5 * self.least_ttl_s + TIMEOUT_S, keep=[alive])
        same(causes(told[2:]), [("n/silent", "expired")])
        same(keys(read(other, "n/")), ["n/alive"])

    def test_a_revoked_lease_takes_its_items_with_it_at_once(self, connect: Connect) -> None:
        owner, other, third = connect(), watching(connect()), connect()
        lease = owner.grant(30 * self.least_ttl_s, soon())
        do(owner, Put("n/a", b"", lease), Put("n/b", b"", lease))
        put(third, "n/c", b"", third.grant(30 * self.least_ttl_s, soon()))
        owner.revoke(soon())
        told = events_until(other, lambda events: is_deleted("n/b", events))
        same(causes(told[3:]), [("n/a", "deleted"), ("n/b", "deleted")])
        same(len({event.revision for event in told[3:]}), 1)
        same((owner.take_events(), keys(read(other, "n/"))), ([], ["n/c"]))
        assert raises(LeaseLostError, put, owner, "n/a", b"", lease), "nothing can be bound to a lease that was revoked"

    def test_a_put_decides_anew_to_what_an_item_is_bound(self, connect: Connect) -> None:
        owner = connect()
        lease = owner.grant(30 * self.least_ttl_s, soon())
        for key, leases in {"n/kept": [lease, lease], "n/bound": [0, lease], "n/freed": [lease, 0]}.items():
            for one in leases:
                put(owner, key, b"", one)
        owner.revoke(soon())
        same(keys(read(owner, "n/")), ["n/freed"])

    def test_the_lease_of_another_cannot_be_used(self, connect: Connect) -> None:
        owner, other = connect(), connect()
        lease = owner.grant(30 * self.least_ttl_s, soon())
        for foreign in (lease, lease + 1000):
            assert raises(LeaseLostError, put, other, "n/a", b"", foreign), "it is not its own lease"
        same(keys(read(other, "n/")), [])

    def test_a_client_says_when_it_is_to_be_called(self, connect: Connect) -> None:
        owner = connect()
        same(owner.valid_until(), math.inf)
        before = time.monotonic()
        owner.grant(30 * self.least_ttl_s, soon())
        assert before < owner.wake_at() < owner.valid_until(), "in time to keep the lease"
        assert owner.valid_until() <= time.monotonic() + 30 * self.least_ttl_s, "counted from when it asked"
        trouble = owner.connection()
        same((trouble.valid_until, trouble.unreachable_since, trouble.refused_since), (owner.valid_until(), None, None))
        owner.revoke(soon())
        same(owner.valid_until(), math.inf)

    def test_a_closed_connection_is_silence_and_nothing_more(self, connect: Connect) -> None:
        owner, other = connect(), watching(connect())
        put(owner, "n/a", b"", owner.grant(self.least_ttl_s, soon()))
        valid_until = owner.valid_until()
        owner.close()
        told = events_until(other, lambda events: is_deleted("n/a", events), self.least_ttl_s + TIMEOUT_S)
        assert time.monotonic() >= valid_until, "a reset may be seen by one side only: its owner may run"
        same(causes(told[1:]), [("n/a", "expired")])

    def test_a_lease_can_be_ended_by_another(self, connect: Connect) -> None:
        """Whoever did not stop in time gets no more keepalives answered."""
        owner, other = connect(), watching(connect())
        lease = owner.grant(3 * self.least_ttl_s, soon())
        do(owner, Put("n/a", b"", lease), Put("n/free", b""))
        do(other, EndLease(lease), Put("n/why", b"it was late"))
        told = events_until(other, lambda events: is_deleted("n/a", events) and "n/why" in [event.key for event in events])
        assert ("n/a", "expired") in causes(told), "as if it had run out"
        same(keys(read(other, "n/")), ["n/free", "n/why"])
        wait_for_loss(owner)
        assert raises(LeaseLostError, put, owner, "n/a", b"", lease), "nothing can be bound to it any more"
        do(other, EndLease(lease), Put("n/why", b"again"))

    # --- being a client ----------------------------------------------------------------------------------------------------

    def test_all_clients_know_the_store_by_one_name(self, connect: Connect) -> None:
        one, two = connect(), connect()
        assert one.identity(), "a store has an identity"
        same(one.identity(), two.identity())

    def test_a_client_knows_its_own_address(self, connect: Connect) -> None:
        address = connect().local_address()
        assert isinstance(address, str), "an address is text"
        assert address, "an address is not empty"

    def test_a_client_may_be_closed_twice(self, connect: Connect) -> None:
        client = connect()
        client.close()
        client.close()
