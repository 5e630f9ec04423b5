"""What an engine's transactions and reads have to be: compared, ordered, all or nothing."""

from __future__ import annotations

import time

from rallypoint.coordination.engine import Coordination
from rallypoint.coordination.model import Compare, Delete, Get, Put, Transaction
from rallypoint.testing.driving import EVERY_BYTE, MOST_PUTS, at_once, do, events_until, get, keys, put, read, same, soon

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.testing.driving import Connect

__all__ = ["TransactionContract"]


class TransactionContract:
    """Transactions and reads."""

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
