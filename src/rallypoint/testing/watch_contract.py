"""What an engine's watches have to be: every change once, in order, from exactly the revision that was asked for."""

from __future__ import annotations

import time
from unittest import SkipTest

from rallypoint.coordination.engine import CompactedError, Coordination
from rallypoint.coordination.model import Delete, Event, Put
from rallypoint.testing.driving import MOST_PUTS, TIMEOUT_S, at_once, do, events_until, keys, put, raises, read, same, soon, wait

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.testing.driving import Connect

__all__ = ["WatchContract"]


def values(events: list[Event]) -> list[bytes]:
    return [event.item.value for event in events if event.item is not None]


def count(number: int, client: Coordination, prefix: str) -> None:
    for one in range(number):
        put(client, f"{prefix}/{one % 7}", str(one).encode())


class WatchContract:
    """Watches."""

    can_compact = False  # whether `compact` makes the engine forget its oldest changes

    def compact(self, client: Coordination) -> None:
        """Make the store forget; here by very many changes."""
        for _ in range(300):
            do(client, *(Put(f"filler/{number}", b"") for number in range(MOST_PUTS)))

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
