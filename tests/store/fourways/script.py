"""One script of store operations for the TCPStore of either kind, torch's or ours, on the server of either kind.

``script.py CLIENT SERVER`` reads the server's port from stdin, runs it and prints, as JSON, what came out of each step and what
should have. Every step says what ours gives; what torch's gives is the same, but for the few `DIFFERENCES`.
"""

from __future__ import annotations

import json
import sys
from ast import literal_eval
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from outcomes import HOST, Difference, Failure, Run, in_processes, open_as_many_files_as_allowed
from peers import Peer, greets, listens, nobody, server_that

from rallypoint.store import tcp_protocol as wire

EMPTY, NETWORK, STORE_ERROR = Failure("empty"), Failure("network"), Failure("store error")
TYPE_ERROR, VALUE_ERROR = Failure("TypeError"), Failure("ValueError")
IN_VAIN = Failure("timeout", 0.3)
AT_ONCE = Failure("timeout", 0.0)
UNREACHED = Failure("network", 1.0, slack_s=5.0)  # torch's client pauses longer and longer between its attempts
NO_TIME, SHORT, LONG = timedelta(0), timedelta(milliseconds=300), timedelta(seconds=10)
GREATEST = 2**63 - 1

DIFFERENCES = {
    "multi_set: a value too few": Difference("client", STORE_ERROR, "what is called wrongly is a ValueError in Python"),
    "add: more than 64 bits": Difference("client", TYPE_ERROR, "an int is the right type, only too large for a store"),
    "a port that cannot be": Difference("client", TYPE_ERROR, "an int is the right type, only out of range"),
    "wait: a time-out as an int": Difference("client", TYPE_ERROR, "torch's takes a timedelta or a float; we take every number"),
    "wait: no time-out": Difference("client", TYPE_ERROR, "torch's knows no None; ours is the store's own time-out"),
    "list_keys: one that is no text": Difference("client", VALUE_ERROR, "one odd key does not hide all others"),
    "queue_pop: there is a value, but no queue": Difference("client", EMPTY, "who wants to wait for a value waits"),
    "get: too long a key": Difference("client", NETWORK, "we refuse it before it is sent, torch's server by hanging up"),
    "get: after too long a key": Difference("client", NETWORK, "for nothing was sent"),
    "check: too many keys": Difference("client", NETWORK, "we refuse it before it is sent"),
    "set: after too large a value": Difference("client", NETWORK, "for nothing was sent"),
    "compare_set: who waits is not let go if nothing is written": Difference("server", b"\0", "the key is still not there"),
    "a stranger who asks without a greeting is cut off": Difference("server", False, "torch's server never answers it"),
}


def values(run: Run) -> None:
    store = run.store()
    run.step("set", None, store.set, "there", "here")
    run.step("get", b"here", store.get, "there")
    for name, value, kept in [
        ("bytes", b"\0\xff\0", b"\0\xff\0"),
        ("text", "é\0🗝", "é\0🗝".encode()),
        ("nothing", b"", b""),
        ("a bytearray", bytearray(b"x"), b"x"),
    ]:
        run.step(f"set: {name}", None, store.set, "value", value)
        run.step(f"get: {name}", kept, store.get, "value")
    keys = {"no letter": "", "NUL": "a\0b", "other letters": "ключ/🗝", "bytes": b"key", "8191 letters": "k" * 8191}
    for name, key in keys.items():
        run.step(f"set: a key of {name}", None, store.set, key, name)
        run.step(f"get: a key of {name}", name.encode(), store.get, key)
        run.step(f"list_keys: a key of {name}", True, lambda key=key: _text(key) in store.list_keys())
        run.step(f"delete_key: a key of {name}", True, store.delete_key, key)
    run.step("set: an int", TYPE_ERROR, store.set, "value", 1)
    run.step("set: None", TYPE_ERROR, store.set, "value", None)
    run.step("set: the key is an int", TYPE_ERROR, store.set, 1, "v")
    run.step("get: the key is None", TYPE_ERROR, store.get, None)
    run.step("get: called wrongly, nothing changed", b"x", store.get, "value")
    run.step("delete_key", True, store.delete_key, "value")
    run.step("delete_key: a second time", False, store.delete_key, "value")
    run.step("append: to nothing", None, store.append, "log", "a")
    run.step("append: nothing", None, store.append, "log", "")
    run.step("append: bytes", None, store.append, "log", b"\0\xff")
    run.step("get: appended", b"a\0\xff", store.get, "log")
    _many_values(run, store)
    _listings(run, store)


def _text(key: str | bytes) -> str:
    return key.decode() if isinstance(key, bytes) else key


def _many_values(run: Run, store: Any) -> None:
    run.step("multi_set", None, store.multi_set, ["m1", "m2", "m3"], ["1", b"\0", ""])
    run.step("multi_get", [b"", b"1", b"\0", b"1"], store.multi_get, ["m3", "m1", "m2", "m1"])
    run.step("multi_set: a key twice", None, store.multi_set, ["m1", "m1"], ["first", "last"])
    run.step("multi_get: a tuple", [b"last"], store.multi_get, ("m1",))
    run.step("multi_set: nothing", None, store.multi_set, [], [])
    run.step("multi_get: nothing", [], store.multi_get, [])
    run.step("multi_set: a value too few", VALUE_ERROR, store.multi_set, ["m1", "m2"], ["1"])
    run.step("multi_set: an int", TYPE_ERROR, store.multi_set, ["m1"], [1])
    run.step("multi_get: called wrongly, nothing changed", [b"last", b"\0"], store.multi_get, ["m1", "m2"])
    for name, keys, there in [
        ("nothing", [], True),
        ("one", ["m1"], True),
        ("a missing one", ["missing"], False),
        ("one of two is missing", ["m1", "missing"], False),
        ("one many times", ["m1"] * 100, True),
    ]:
        run.step(f"check: {name}", there, store.check, keys)
    run.step("check: a key for its letters", TYPE_ERROR, store.check, "m1")
    run.step("check: ints", TYPE_ERROR, store.check, [1])
    run.step("wait: a key for its letters", TYPE_ERROR, store.wait, "m1")
    run.step("wait: nothing", None, store.wait, [])
    run.step("wait: all there", None, store.wait, ["m1", "m2", "m3"])


def _listings(run: Run, store: Any) -> None:
    before = store.num_keys()
    store.multi_set(["list/a", "list/b"], ["1", "2"])
    store.queue_push("list/queue", "not counted")
    run.step("num_keys", before + 2, store.num_keys)
    run.step("list_keys", ["list/a", "list/b"], lambda: sorted(key for key in store.list_keys() if key.startswith("list/")))
    run.step("num_keys: of a deleted one", (True, before + 1), lambda: (store.delete_key("list/a"), store.num_keys()))
    store.set(b"list/\xff", "no text")
    run.step("list_keys: one that is no text", True, lambda: "list/b" in store.list_keys())
    run.step("delete_key: one that is no text", True, store.delete_key, b"list/\xff")


def counters(run: Run) -> None:
    store = run.store()
    for name, amount, count in [("a new one", 5, 5), ("less", -7, -2), ("nothing", 0, -2), ("a bool", True, -1)]:
        run.step(f"add: {name}", count, store.add, "n", amount)
    run.step("get: a counter", b"-1", store.get, "n")
    run.step("add: nothing makes one", (0, b"0"), lambda: (store.add("zero", 0), store.get("zero")))
    run.step("add: the greatest", GREATEST, store.add, "great", GREATEST)
    run.step("add: one more", -GREATEST - 1, store.add, "great", 1)
    run.step("add: one less", GREATEST, store.add, "great", -1)
    run.step("add: the least", -1, store.add, "great", -GREATEST - 1)
    run.step("add: more than 64 bits", STORE_ERROR, store.add, "great", GREATEST + 1)
    for name, wrong in [("a float", 1.5), ("text", "1"), ("None", None)]:
        run.step(f"add: {name}", TYPE_ERROR, store.add, "great", wrong)
    run.step("add: called wrongly, nothing changed", -1, store.add, "great", 0)
    for value, count in [("41", 42), (" \t12", 13), ("-3", -2), ("+4", 5), ("12x", 13), ("1.9", 2), ("0x10", 1), ("007", 8)]:
        store.set("text", value)
        run.step(f"add: to {value!r}", count, store.add, "text", 1)
    store.append("text", "99")
    run.step("add: to digits that were appended", 900, store.add, "text", 1)
    for value in ("", "text", "- 5", str(GREATEST + 1), "9" * 5000):
        store.set("text", value)
        store.num_keys()  # when this is answered, what was asked before is done
        lost, shown = run.store(), value[:20]
        run.step(f"add: to {shown!r}, no number", NETWORK, lost.add, "text", 1)
        run.step(f"get: after {shown!r}", NETWORK, lost.get, "there")
        run.step(f"get: {shown!r} is still there", value.encode(), store.get, "text")


def comparisons(run: Run) -> None:
    store = run.store()
    for name, before, expected, desired, answer, after in [
        ("missing, and nothing expected", None, "", "new", b"new", b"new"),
        ("missing, and something expected", None, "old", "new", b"old", None),
        ("missing, and nothing at all", None, "", "", b"", b""),
        ("as expected", "old", "old", b"\0\xff", b"\0\xff", b"\0\xff"),
        ("not as expected", "other", "old", "new", b"other", b"other"),
        ("there, and nothing expected", "other", "", "new", b"other", b"other"),
        ("empty as expected", "", "", "new", b"new", b"new"),
        ("empty, and something expected", "", "old", "new", b"", b""),
        ("as expected, to nothing", "old", b"old", "", b"", b""),
    ]:
        store.delete_key("c")
        if before is not None:
            store.set("c", before)
        run.step(f"compare_set: {name}", answer, store.compare_set, "c", expected, desired)
        run.step(f"compare_set: after it, {name}", after, lambda: store.get("c") if store.check(["c"]) else None)
    run.step("compare_set: ints", TYPE_ERROR, store.compare_set, "c", 1, 2)


def queues(run: Run) -> None:
    store = run.store()
    run.step("queue_len: none", 0, store.queue_len, "q")
    run.step("queue_pop: none", EMPTY, store.queue_pop, "q", False)
    for value in ("first", b"\0\xff", ""):
        run.step(f"queue_push: {value!r}", None, store.queue_push, "q", value)
    run.step("queue_len", 3, store.queue_len, "q")
    run.step("check: a queue", True, store.check, ["q"])
    run.step("wait: a queue", None, store.wait, ["q"])
    run.step("get: a queue", b"", store.get, "q")
    run.step("delete_key: a queue", False, store.delete_key, "q")
    run.step("queue_pop: waits", b"first", store.queue_pop, "q", True)
    run.step("queue_pop: does not wait", b"\0\xff", store.queue_pop, "q", False)
    run.step("queue_pop: by default", b"", store.queue_pop, "q")
    run.step("check: an empty queue", False, store.check, ["q"])
    run.step("queue_push: an int", TYPE_ERROR, store.queue_push, "q", 1)
    store.set("both", "value")
    store.queue_push("both", "queued")
    run.step("get: a queue and a value", b"value", store.get, "both")
    run.step("queue_pop: a queue and a value", b"queued", store.queue_pop, "both")
    store.set_timeout(SHORT)
    run.step("queue_pop: there is a value, but no queue", IN_VAIN, store.queue_pop, "both")


def properties(run: Run) -> None:
    store = run.store(timeout_s=7)
    run.step("timeout", timedelta(seconds=7), lambda: store.timeout)
    run.step("timeout: by default", timedelta(seconds=300), lambda: run.store_class(HOST, run.port).timeout)
    run.step("set_timeout", None, store.set_timeout, timedelta(seconds=2.5))
    run.step("timeout: as it was set", timedelta(seconds=2.5), lambda: store.timeout)
    run.step("set_timeout: a float", timedelta(seconds=0.5), lambda: (store.set_timeout(0.5), store.timeout)[1])
    run.step("host and port", (HOST, run.port), lambda: (store.host, store.port))
    run.step("has_extended_api", True, store.has_extended_api)
    clone = store.clone()
    run.step("clone", ("TCPStore", b"here"), lambda: (type(clone).__name__, clone.get("there")))
    run.step("clone: properties", (HOST, run.port, store.timeout), lambda: (clone.host, clone.port, clone.timeout))
    clone.set_timeout(LONG)
    run.step("clone: a time-out of its own", (0.5, 10.0), lambda: (store.timeout.total_seconds(), clone.timeout.total_seconds()))
    run.step("clone: outlives its original", b"here", run.store().clone().get, "there")
    run.step("by keywords", b"here", lambda: run.store(world_size=None, multi_tenant=False, use_libuv=True).get("there"))


def waiting_in_vain(run: Run) -> None:
    """Each in its own process, so that all wait at once; afterwards, the connection works."""

    def waits(operation: Callable[[Any], object], default: timedelta = LONG) -> Callable[[], object]:
        def work() -> object:
            store = run.store()
            store.set_timeout(default)
            try:
                return operation(store)
            finally:
                store.set_timeout(LONG)
                assert store.get("there") == b"here"

        return work

    def at_a_barrier_too_early(store: Any) -> object:
        with suppress(RuntimeError):
            store.barrier("early", 2, SHORT)
        return store.get("early"), store.barrier("early", 2), store.barrier("early", 2), store.get("early")

    run.steps_at_once(
        {
            "wait: in vain": (IN_VAIN, waits(lambda store: store.wait(["missing"], SHORT))),
            "wait: in vain, by default": (IN_VAIN, waits(lambda store: store.wait(["missing"]), SHORT)),
            "wait: in vain for one of two": (IN_VAIN, waits(lambda store: store.wait(["there", "missing"], SHORT))),
            "wait: in vain, and no time": (AT_ONCE, waits(lambda store: store.wait(["missing"], NO_TIME))),
            "wait: a time-out as a float": (IN_VAIN, waits(lambda store: store.wait(["missing"], 0.3))),
            "wait: a time-out as an int": (Failure("timeout", 1.0), waits(lambda store: store.wait(["missing"], 1))),
            "wait: no time-out": (IN_VAIN, waits(lambda store: store.wait(["missing"], None), SHORT)),
            "get: in vain": (IN_VAIN, waits(lambda store: store.get("missing"), SHORT)),
            "get: in vain, and no time": (AT_ONCE, waits(lambda store: store.get("missing"), NO_TIME)),
            "multi_get: in vain": (IN_VAIN, waits(lambda store: store.multi_get(["there", "missing"]), SHORT)),
            "queue_pop: in vain": (IN_VAIN, waits(lambda store: store.queue_pop("missing"), SHORT)),
            "barrier: in vain": (IN_VAIN, waits(lambda store: store.barrier("alone", 2, SHORT))),
            "barrier: in vain, by default": (IN_VAIN, waits(lambda store: store.barrier("alone by default", 2), SHORT)),
            "barrier: in vain, and no time": (AT_ONCE, waits(lambda store: store.barrier("alone at once", 2, NO_TIME))),
            "barrier: who left stays counted": ((b"1", None, None, b"3"), waits(at_a_barrier_too_early)),
            "barrier: for one": (None, waits(lambda store: store.barrier("one", 1))),
            "barrier: for nobody": (None, waits(lambda store: store.barrier("nobody", 0))),
            "barrier: by keywords": (None, waits(lambda store: store.barrier(key="keywords", world_size=1, timeout=SHORT))),
        }
    )


def connecting(run: Run) -> None:
    def to_a_closed_port() -> None:
        with nobody() as port:
            run.store(timeout_s=1, port=port)

    def after_the_server_went() -> object:
        with server_that(greets) as port:
            store = run.store(port=port)
        with suppress(RuntimeError):
            store.set("k", "v")  # which nobody answers, so that it may go unnoticed
            store.get("k")
        return store.get("k")

    def while_the_server_goes() -> None:
        with server_that(greets, listens) as port:
            run.store(port=port).wait(["k"])

    def hosting(world_size: int, **options: Any) -> Any:
        return run.store(world_size=world_size, is_master=True, wait_for_workers=True, **options)

    def with_a_client() -> object:
        master = hosting(1, port=0)
        client = run.store(port=master.port, world_size=5, wait_for_workers=True)
        client.set("k", "v")
        return master.get("k"), master.num_keys(), master.list_keys()

    run.steps_at_once(
        {
            "nobody listens": (UNREACHED, to_a_closed_port),
            "a name that nobody has": (UNREACHED, lambda: run.store(timeout_s=1, host="nobody.invalid")),
            "a port that cannot be": (VALUE_ERROR, lambda: run.store(timeout_s=1, port=70_000)),
            "a world of nobody": (VALUE_ERROR, lambda: run.store(world_size=0)),
            "the server has gone": (NETWORK, after_the_server_went),
            "the server goes": (NETWORK, while_the_server_goes),
            "a master waits in vain": (Failure("timeout", 1.0, slack_s=3.0), lambda: hosting(2, timeout_s=1, port=0)),
            "a master at an address in use": (NETWORK, lambda: hosting(1)),
            "a master and a client, which does not wait": ((b"v", 2, ["k"]), with_a_client),
        }
    )


def limits(run: Run) -> None:
    largest, store = "x" * wire.MAX_VALUE_BYTES, run.store()
    run.step("set: the largest value", None, store.set, "large", largest)
    run.step("append: to the largest value", None, store.append, "large", "more")
    run.step("get: larger than can be set", True, lambda: store.get("large") == largest.encode() + b"more")
    run.step("delete_key: the largest value", True, store.delete_key, "large")
    lost = run.store()
    with suppress(RuntimeError):  # torch's client notices it sooner or later, for nobody answers
        lost.set("too large", largest + "x")
    run.step("set: too large a value is not kept", False, store.check, ["too large"])
    run.step("set: after too large a value", b"here", lost.get, "there")
    lost = run.store()
    run.step("get: too long a key", STORE_ERROR, lost.get, "k" * wire.MAX_KEY_BYTES)
    run.step("get: after too long a key", b"here", lost.get, "there")
    run.step("check: too many keys", STORE_ERROR, run.store().check, ["there"] * (wire.MAX_KEYS + 1))
    for name, data in [
        ("an operation that there is not", b"\x13"),
        ("a second greeting", wire.GREETING),
        ("too long a key", bytes([wire.GET]) + wire.U64.pack(wire.MAX_KEY_BYTES + 1)),
        ("too large a value", bytes([wire.SET]) + wire.packed(b"/k") + wire.U64.pack(wire.MAX_VALUE_BYTES + 1)),
        ("too many keys", bytes([wire.WAIT]) + wire.U64.pack(wire.MAX_KEYS + 1)),
        ("a length that cannot be", bytes([wire.GET]) + b"\xff" * 8),
    ]:
        run.step(f"who sends {name} is cut off", True, Peer(run.port, wire.GREETING + data).is_cut_off)
    stranger = Peer(run.port, wire.request(wire.GET, [b"/there"]))
    run.step("a stranger who asks without a greeting is cut off", True, stranger.is_cut_off, 1.0)


def much(run: Run) -> None:
    store = run.store()
    large = bytes(range(256)) * 12_000  # 3 MB
    run.step("3 MB: set", None, store.set, "3 MB", large)
    run.step("3 MB: get", True, lambda: store.get("3 MB") == large)
    run.step("3 MB: multi_get", True, lambda: store.multi_get(["3 MB", "there", "3 MB"]) == [large, b"here", large])
    run.step("3 MB: compare_set", True, lambda: store.compare_set("3 MB", large, large[::-1]) == large[::-1])
    run.step("3 MB: a queue", True, lambda: (store.queue_push("3 MB", large), store.queue_pop("3 MB") == large)[1])
    keys = [f"many/{number}" for number in range(100_000)]
    before = store.num_keys()
    portions = [keys[place : place + 10_000] for place in range(0, len(keys), 10_000)]
    run.step("100,000 keys: multi_set", {None}, lambda: {store.multi_set(part, part) for part in portions})
    run.step("100,000 keys: num_keys", 100_000, lambda: store.num_keys() - before)
    run.step("100,000 keys: list_keys", True, lambda: {key for key in store.list_keys() if key.startswith("many/")} == set(keys))
    run.step("100,000 keys: check", True, store.check, keys)
    got = [value for part in portions for value in store.multi_get(part)]
    run.step("100,000 keys: multi_get", True, lambda: got == [key.encode() for key in keys])


def waiters(run: Run) -> None:
    store = run.store()

    def released_by(work: Callable[[str], object]) -> bytes:
        """What somebody is told who waits for a key with which this is done."""
        waiter = Peer(run.port).ask(wire.WAIT, b"/awaited")
        assert waiter.heard() == b""
        work("awaited")
        store.num_keys()
        told = waiter.heard()
        waiter.leave()
        store.delete_key("awaited")
        return told

    for name, work in {
        "set": lambda key: store.set(key, "v"),
        "add": lambda key: store.add(key, 0),
        "append": lambda key: store.append(key, ""),
        "multi_set": lambda key: store.multi_set(["x", key], ["1", "2"]),
        "compare_set": lambda key: store.compare_set(key, "", "v"),
        "barrier": lambda key: store.barrier(key, 1),
        "queue_push": lambda key: store.queue_push(key, "v"),
    }.items():
        run.step(f"{name}: who waits is let go", b"\0", released_by, work)
    store.queue_pop("awaited")
    name = "compare_set: who waits is not let go if nothing is written"
    run.step(name, b"", released_by, lambda key: store.compare_set(key, "old", "new"))
    _partly_released(run, store)
    crowd = [Peer(run.port).ask(wire.WAIT, b"/crowd") for _ in range(1000)]
    run.step("1,000 who wait: none is told", {b""}, lambda: {one.heard() for one in crowd})
    run.step("1,000 who wait: others are served", b"here", store.get, "there")
    store.set("crowd", "come")
    store.num_keys()
    run.step("1,000 who wait: all are told, once", {b"\0"}, lambda: {one.heard() for one in crowd})
    run.step("1,000 who wait: and not again", {b""}, lambda: (store.set("crowd", "again"), {one.heard() for one in crowd})[1])
    for one in crowd:
        one.die()
    run.step("1,000 who are reset: others are served", b"again", store.get, "crowd")


def _partly_released(run: Run, store: Any) -> None:
    first, second = (Peer(run.port).ask(wire.WAIT, b"/shared queue") for _ in range(2))
    assert (first.heard(), second.heard()) == (b"", b"")
    store.queue_push("shared queue", "v")
    store.num_keys()
    run.step("queue_push: only the first of two is let go", (b"\0", b""), lambda: (first.heard(), second.heard()))
    both = Peer(run.port).ask(wire.WAIT, b"/one", b"/two")
    run.step("wait: for two", b"", both.heard)
    store.set("one", "1")
    store.delete_key("one")
    run.step("wait: one of two came and went", b"", both.heard)
    store.set("two", "2")
    store.num_keys()
    run.step("wait: the other came as well", b"\0", both.heard)
    run.step("cancel: nothing is waited for", b"\1", both.ask(wire.CANCEL_WAIT).heard)
    both.ask(wire.WAIT, b"/three").ask(wire.CANCEL_WAIT)
    run.step("cancel: something is waited for", b"\1", both.heard)
    store.set("three", "3")
    store.num_keys()
    run.step("cancel: it came afterwards", b"", both.heard)
    for one in (first, second, both):
        one.leave()


def the_dead(run: Run) -> None:
    """Clients that go in the midst of something, with a word or without."""
    store = run.store()

    def all_heard(*peers: Peer) -> set[bytes]:
        return {one.heard() for one in peers}

    half = wire.request(wire.SET, [b"/half", b"x" * 1000])[:500]
    for name, end in {"leaves": Peer.leave, "is reset": Peer.die}.items():
        peer = Peer(run.port)
        run.step(f"who {name}: greeted", b"", peer.heard)
        peer.say(half)
        end(peer)
        run.step(f"who {name} within a request has asked for nothing", False, store.check, ["half"])
        dead, alive = (Peer(run.port).ask(wire.WAIT, b"/" + name.encode()) for _ in range(2))
        run.step(f"who {name} while it waits: nothing is told yet", {b""}, all_heard, dead, alive)
        end(dead)
        store.set(name, "come")
        store.num_keys()
        run.step(f"who {name} while it waits holds up nobody", b"\0", alive.heard)
        alive.leave()
        member = Peer(run.port).ask(wire.BARRIER, b"/barrier " + name.encode(), number=2)
        run.step(f"who {name} at a barrier: nothing is told yet", b"", member.heard)
        end(member)
        run.step(f"who {name} at a barrier stays counted", None, store.barrier, f"barrier {name}", 2)


def the_silent(run: Run) -> None:
    """Connections that are half open: nothing comes of them, until they go on."""
    store = run.store()
    request = wire.request(wire.SET, [b"/slow", b"x" * 1000])
    stranger, silent, slow = Peer(run.port, b""), Peer(run.port), Peer(run.port, wire.GREETING + request[:500])
    piecemeal = Peer(run.port)
    run.step("beside the silent: set and get", b"v", lambda: (store.set("beside", "v"), store.get("beside"))[1])
    run.step("beside the silent: a new client", b"v", lambda: run.store().get("beside"))
    run.step("beside the silent: half a request is none", False, store.check, ["slow"])
    slow.say(request[500:])
    run.step("the silent goes on within its request", b"", slow.heard)
    run.step("the silent goes on: what it asked for is done", b"x" * 1000, store.get, "slow")
    run.step("the silent goes on: it is answered", wire.packed(b"v"), silent.ask(wire.GET, b"/beside").heard)
    stranger.say(wire.GREETING)
    run.step("the silent goes on: its first word", wire.packed(b"v"), stranger.ask(wire.GET, b"/beside").heard)
    for byte in wire.request(wire.GET, [b"/beside"]):
        piecemeal.say(bytes([byte]))
    run.step("the silent goes on: a byte at a time", wire.packed(b"v"), piecemeal.heard)
    for one in (stranger, silent, slow, piecemeal):
        one.leave()


def several(run: Run) -> None:
    """Two and more processes, each with a client."""
    sent = [f"item {number}".encode() for number in range(100)]

    def sends() -> None:
        store = run.store()
        for item in sent:
            store.queue_push("between", item)
        store.num_keys()

    def receives() -> bool:
        store = run.store()
        return [store.queue_pop("between") for _ in sent] == sent

    def waits() -> object:
        store = run.store()
        store.set("about to wait", "yes")
        return store.get("late"), store.wait(["late", "later"]), store.multi_get(["late", "later"])

    def sets() -> object:
        store = run.store()
        store.wait(["about to wait"])
        return store.set("late", "1"), store.add("later", 2)

    def adds() -> list[int]:
        store = run.store()
        store.barrier("all four", 4)
        return [store.add("common", 1) for _ in range(250)]

    def meets() -> None:
        store = run.store()
        for number in range(20):
            store.barrier(f"meeting {number}", 2)

    run.steps_at_once({"two: a queue, pushed": (None, sends), "two: a queue, popped": (True, receives)})
    run.steps_at_once({"two: one waits": ((b"1", None, [b"1", b"2"]), waits), "two: one sets": ((None, 2), sets)})
    run.steps_at_once({"two: a barrier, one": (None, meets), "two: a barrier, the other": (None, meets)})
    counts = [count for outcome in in_processes([(list, adds)] * 4) for count in literal_eval(outcome)]
    run.step("four: no increment is lost", True, lambda: sorted(counts) == list(range(1, 1001)))


SECTIONS = (
    values, counters, comparisons, queues, properties, waiting_in_vain, connecting, limits, waiters, the_dead, the_silent,
    several, much,
)  # fmt: skip


if __name__ == "__main__":
    open_as_many_files_as_allowed()
    way = Run(sys.argv[1], sys.argv[2], lambda: int(sys.stdin.readline()), DIFFERENCES)
    for section in SECTIONS:
        section(way)
    unknown = DIFFERENCES.keys() - way.records.keys()
    assert not unknown, f"differences in steps that there are not: {unknown}"
    print(json.dumps(way.records))
