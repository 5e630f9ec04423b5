"""Our server of torch's TCPStore protocol over real sockets: what it answers, and that nobody can make it wait or grow."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from tests.store.tcp_peers import TOKEN, ServerApart, TcpPeer

from rallypoint.net import acceptor as doorway
from rallypoint.net.acceptor import Doorway
from rallypoint.net.endpoint import open_listeners
from rallypoint.net.wake_fd import WakeFd
from rallypoint.store import tcp_protocol as wire
from rallypoint.store import tcp_server, tcp_serving
from rallypoint.store.tcp_protocol import packed, request
from rallypoint.store.tcp_server import TcpStoreServer
from rallypoint.store.tcp_serving import TcpConnection, TcpServingLoop
from rallypoint.store.values import Values

Start = Callable[..., TcpStoreServer]
Connect = Callable[..., TcpPeer]
NOTHING = b""
MANY_KEYS = 100_000
MANY_PEERS = 1000
MIB = 1 << 20


def i64(number: int) -> bytes:
    return wire.I64.pack(number)


def listeners(port: int = 0) -> list[Any]:
    sockets = open_listeners("127.0.0.1", port, is_host=True, wildcard_allowed=False)
    assert sockets is not None
    return sockets


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(limit_bytes)`` serves a store on loopback until the test ends."""
    with contextlib.ExitStack() as servers:

        def start(limit_bytes: int = 1 << 30, port: int = 0) -> TcpStoreServer:
            server = TcpStoreServer(listeners(port), limit_bytes)
            servers.callback(server.close)
            server.start()
            return server

        yield start


@pytest.fixture
def stranger() -> Iterator[Connect]:
    """``stranger(server)`` is connected, and has said nothing yet."""
    with contextlib.ExitStack() as sockets:

        def connect(server: Any, receive_bytes: int = 0) -> TcpPeer:
            one = TcpPeer(server.addresses[0][1], receive_bytes)
            sockets.enter_context(one.socket)
            return one

        yield connect


@pytest.fixture
def peer(stranger: Connect) -> Connect:
    """``peer(server)`` is connected and was let in."""
    return lambda server, receive_bytes=0: stranger(server, receive_bytes).greet()


@pytest.fixture
def many_files() -> Iterator[None]:
    """As many file descriptors as a thousand connections need, which all have both ends in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * MANY_PEERS + 500
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"{MANY_PEERS} connections need more than {hard} file descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def apart() -> Iterator[Callable[[int], ServerApart]]:
    """``apart(limit_bytes)`` is a server in a process of its own."""
    with contextlib.ExitStack() as servers:

        def start(limit_bytes: int) -> ServerApart:
            server = ServerApart(limit_bytes)
            servers.callback(server.close)
            return server

        yield start


def assert_serves(one: TcpPeer) -> None:
    one.set(b"still", b"here")
    assert one.get(b"still") == b"here"


# --- every operation -------------------------------------------------------------------------------------------------------

Exchange = tuple[bytes, bytes]


def after_set(*pairs: bytes) -> Exchange:
    return request(wire.MULTI_SET, pairs), NOTHING


def after_one(key: bytes, value: bytes) -> Exchange:
    return request(wire.SET, [key, value]), NOTHING


def deleted(key: bytes, *, found: bool) -> Exchange:
    return request(wire.DELETE_KEY, [key]), i64(found)


def popped(key: bytes, length: int, value: bytes | None = None) -> Exchange:
    return request(wire.QUEUE_POP, [key]), i64(length) + (b"" if value is None else packed(value))


def got(key: bytes, value: bytes) -> Exchange:
    return request(wire.GET, [key]), packed(value)


def added(key: bytes, amount: int, count: int) -> Exchange:
    return request(wire.ADD, [key], amount), i64(count)


def swapped(key: bytes, expected: bytes, desired: bytes, reply: bytes) -> Exchange:
    return request(wire.COMPARE_SET, [key, expected, desired]), packed(reply)


def checked(*keys: bytes, ready: bool) -> Exchange:
    return request(wire.CHECK, keys), wire.READY if ready else wire.NOT_READY


PUSH_Q1, PUSH_Q2 = (request(wire.QUEUE_PUSH, [b"q", value]) for value in (b"1", b"22"))
COUNT_KEYS, LIST_KEYS = request(wire.GETNUMKEYS), request(wire.LIST_KEYS)

CONVERSATIONS: dict[str, list[Exchange]] = {
    "set": [after_one(b"k", b"v"), got(b"k", b"v"), after_one(b"k", b""), got(b"k", b"")],
    "an empty key": [after_set(b"", b"v"), got(b"", b"v"), checked(b"", ready=True), (LIST_KEYS, i64(1) + packed(b""))],
    "any bytes": [after_set(b"\0\xff/", bytes(range(256))), got(b"\0\xff/", bytes(range(256)))],
    "get of a missing key": [got(b"k", b""), checked(b"k", ready=False)],
    "compare_set of a missing key": [swapped(b"k", b"", b"v", b"v"), got(b"k", b"v")],
    "compare_set of a missing key that should be there": [swapped(b"k", b"x", b"v", b"x"), checked(b"k", ready=False)],
    "compare_set": [
        after_set(b"k", b"v"), swapped(b"k", b"v", b"w", b"w"), swapped(b"k", b"v", b"x", b"w"), swapped(b"k", b"", b"x", b"w"),
        got(b"k", b"w"),
    ],
    "compare_set of an empty value": [after_set(b"k", b""), swapped(b"k", b"", b"v", b"v"), got(b"k", b"v")],
    "add": [added(b"k", 5, 5), added(b"k", -7, -2), added(b"k", 0, -2), got(b"k", b"-2")],
    "add to what C reads as a number": [
        after_set(b"a", b" \t\n12x", b"b", b"+7", b"c", b"-3 ", b"d", b"0009"),
        added(b"a", 1, 13), added(b"b", 1, 8), added(b"c", 1, -2), added(b"d", 1, 10), got(b"a", b"13"),
    ],
    "add beyond 64 bits": [after_set(b"k", b"%d" % (2**63 - 1)), added(b"k", 1, -(2**63)), added(b"k", -1, 2**63 - 1)],
    "check": [after_set(b"a", b"1"), checked(ready=True), checked(b"a", ready=True), checked(b"a", b"b", ready=False)],
    "wait": [after_set(b"a", b"", b"b", b""), (request(wire.WAIT, [b"a", b"b", b"a"]), b"\0"), (request(wire.WAIT), b"\0")],
    "getnumkeys": [(COUNT_KEYS, i64(0)), after_set(b"a", b"", b"b", b""), (PUSH_Q1, NOTHING), (COUNT_KEYS, i64(2))],
    "delete_key": [
        after_set(b"k", b"v"), deleted(b"k", found=True), deleted(b"k", found=False), got(b"k", b""), (COUNT_KEYS, i64(0)),
    ],
    "append": [(request(wire.APPEND, [b"k", b"ab"]), NOTHING), (request(wire.APPEND, [b"k", b"c"]), NOTHING), got(b"k", b"abc")],
    "append of nothing": [(request(wire.APPEND, [b"k", b""]), NOTHING), checked(b"k", ready=True)],
    "multi_get": [
        after_set(b"a", b"1", b"b", b""), (request(wire.MULTI_GET), NOTHING),
        (request(wire.MULTI_GET, [b"b", b"a", b"missing", b"a"]), packed(b"") + packed(b"1") + packed(b"") + packed(b"1")),
    ],
    "multi_set": [
        after_set(), after_set(b"a", b"1", b"b", b"2", b"a", b"3"), got(b"a", b"3"), got(b"b", b"2"), (COUNT_KEYS, i64(2)),
    ],
    "cancel_wait, and nobody waits": [(request(wire.CANCEL_WAIT), b"\1"), (request(wire.CANCEL_WAIT), b"\1")],
    "ping": [(request(wire.PING, number=number), wire.U32.pack(number)) for number in (0, 1, 2**32 - 1)],
    "queues": [
        (PUSH_Q1 + PUSH_Q2, NOTHING), (request(wire.QUEUE_LEN, [b"q"]), i64(2)), popped(b"q", 2, b"1"), popped(b"q", 1, b"22"),
        popped(b"q", 0), (request(wire.QUEUE_LEN, [b"q"]), i64(0)),
    ],
    "a queue is there while it holds something, but is no value": [
        (PUSH_Q1, NOTHING), checked(b"q", ready=True), (request(wire.WAIT, [b"q"]), b"\0"), got(b"q", b""), (LIST_KEYS, i64(0)),
        deleted(b"q", found=False), popped(b"q", 1, b"1"), checked(b"q", ready=False),
    ],
    "a queue and a value of one name": [
        (PUSH_Q1, NOTHING), after_set(b"q", b"v"), got(b"q", b"v"), deleted(b"q", found=True),
        checked(b"q", ready=True), (request(wire.QUEUE_LEN, [b"q"]), i64(1)),
    ],
    "list_keys": [(LIST_KEYS, i64(0)), after_set(b"a", b"1", b"b", b"2"), (LIST_KEYS, i64(2) + packed(b"a") + packed(b"b"))],
    "a barrier of one": [
        (request(wire.BARRIER, [b"b"], 1), b"\0"), got(b"b", b"1"), (LIST_KEYS, i64(1) + packed(b"b")),
        (request(wire.BARRIER, [b"b"], 1), b"\0"), got(b"b", b"2"), (request(wire.BARRIER, [b"c"], 0), b"\0"),
        (request(wire.BARRIER, [b"c"], -1), b"\0"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", CONVERSATIONS)
def test_operation(start: Start, peer: Connect, what: str) -> None:
    one = peer(start())
    for asked, reply in CONVERSATIONS[what]:
        one.socket.sendall(asked)
        assert one.take(len(reply)) == reply
    one.ping()


@pytest.mark.parametrize("turn_s", [tcp_serving.TURN_S, -1.0], ids=["in one turn", "in many"])
@pytest.mark.parametrize("piece_bytes", [1, 5, MIB])
def test_requests_in_a_row_are_answered_in_their_order(
    start: Start, peer: Connect, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, turn_s: float
) -> None:
    """However they are cut, and whether or not others have their turn meanwhile."""
    monkeypatch.setattr(tcp_serving, "TURN_S", turn_s)
    for conversation in CONVERSATIONS.values():
        one = peer(start())
        asked, replies = (b"".join(column) for column in zip(*conversation, strict=True))
        for place in range(0, len(asked), piece_bytes):
            one.socket.sendall(asked[place : place + piece_bytes])
        assert one.take(len(replies)) == replies
        one.ping()


def test_what_one_says_another_hears(start: Start, peer: Connect) -> None:
    server = start()
    one, other = peer(server), peer(server)
    one.set(b"k", b"v")
    assert other.get(b"k") == b"v"
    assert [counted(who) for who in (one, other, one)] == [1, 2, 3]


def counted(one: TcpPeer) -> int:
    one.say(wire.ADD, b"counter", number=1)
    return one.take_number()


# --- waiting ---------------------------------------------------------------------------------------------------------------


def wait_for(one: TcpPeer, *keys: bytes) -> None:
    """The server knows of it when this returns."""
    one.say(wire.WAIT, *keys)
    one.ping()


def is_released(one: TcpPeer) -> bool:
    """Whether one that waited was let go by what was done until now; whoever did it must have had an answer."""
    one.say(wire.PING, number=TOKEN)
    if (first := one.take(1)) == wire.STOP_WAITING:
        assert one.take(4) == wire.U32.pack(TOKEN)
        return True
    assert first + one.take(3) == wire.U32.pack(TOKEN)
    return False


@pytest.mark.parametrize(
    "change",
    [
        request(wire.SET, [b"k", b""]), request(wire.ADD, [b"k"], 1), request(wire.APPEND, [b"k", b""]),
        request(wire.COMPARE_SET, [b"k", b"", b"v"]), request(wire.MULTI_SET, [b"a", b"", b"k", b""]),
    ],
    ids=["set", "add", "append", "compare_set", "multi_set"],
)  # fmt: skip
def test_a_change_lets_all_go_who_wait_for_the_key(start: Start, peer: Connect, change: bytes) -> None:
    server = start()
    waiting, elsewhere, writer = [peer(server) for _ in range(5)], peer(server), peer(server)
    for one in waiting:
        wait_for(one, b"k")
    wait_for(elsewhere, b"another")
    writer.socket.sendall(change)
    for one in waiting:
        assert one.take(1) == wire.STOP_WAITING
        one.ping()
    assert not is_released(elsewhere)


def test_what_changes_nothing_lets_nobody_go(start: Start, peer: Connect) -> None:
    """Here we differ from torch, whose COMPARE_SET wakes waiters even if nothing was written: they then find no key."""
    server = start()
    waiting, other = peer(server), peer(server)
    wait_for(waiting, b"k")
    other.say(wire.COMPARE_SET, b"k", b"expected", b"v")
    assert other.take_text() == b"expected"
    for operation in (wire.GET, wire.CHECK, wire.DELETE_KEY, wire.QUEUE_POP, wire.QUEUE_LEN):
        other.say(operation, b"k")
    other.take(8 + 1 + 8 + 8 + 8)
    assert not is_released(waiting)
    other.set(b"k", b"v")
    assert is_released(waiting)


def test_a_waiter_is_let_go_when_each_key_was_there_once(start: Start, peer: Connect) -> None:
    server = start()
    waiting, writer = peer(server), peer(server)
    writer.set(b"already", b"")
    wait_for(waiting, b"a", b"already", b"b", b"a")
    writer.set(b"a", b"")
    writer.set(b"a", b"again")
    assert not is_released(waiting)
    writer.say(wire.DELETE_KEY, b"a")
    assert writer.take_number() == 1
    writer.set(b"b", b"")
    assert is_released(waiting)
    writer.set(b"a", b"")
    assert not is_released(waiting), "it is told once"


def test_a_pushed_value_lets_one_go_and_a_set_value_all(start: Start, peer: Connect) -> None:
    server = start()
    first, second, third, writer = (peer(server) for _ in range(4))
    for one in (first, second, third):
        wait_for(one, b"q")
    writer.say(wire.QUEUE_PUSH, b"q", b"1")
    writer.ping()
    assert [is_released(one) for one in (third, second, first)] == [False, False, True]
    writer.set(b"q", b"")
    assert [is_released(one) for one in (third, second)] == [True, True]


def test_one_that_waits_is_served_all_the_while(start: Start, peer: Connect) -> None:
    server = start()
    waiting, writer = peer(server), peer(server)
    wait_for(waiting, b"k")
    for number in range(3):
        assert counted(waiting) == number + 1
    waiting.set(b"mine", b"v")
    assert waiting.get(b"mine") == b"v"
    writer.set(b"k", b"v")
    assert is_released(waiting)


def test_one_can_let_itself_go(start: Start, peer: Connect) -> None:
    one = peer(start())
    wait_for(one, b"k")
    one.say(wire.ADD, b"k", number=5)
    assert one.take(9) == wire.STOP_WAITING + i64(5)
    one.ping()


def test_who_has_cancelled_is_not_let_go_any_more(start: Start, peer: Connect) -> None:
    server = start()
    waiting, writer = peer(server), peer(server)
    wait_for(waiting, b"k", b"q")
    waiting.say(wire.CANCEL_WAIT)
    assert waiting.take(1) == wire.WAIT_CANCELED
    writer.set(b"k", b"v")
    writer.say(wire.QUEUE_PUSH, b"q", b"v")
    writer.ping()
    assert not is_released(waiting)
    wait_for(waiting, b"another")
    writer.set(b"another", b"")
    assert is_released(waiting)


def test_a_barrier_lets_all_go_when_the_last_has_come(start: Start, peer: Connect) -> None:
    server = start()
    members, waiting = [peer(server) for _ in range(4)], peer(server)
    wait_for(waiting, b"b")
    for one in members[:3]:
        one.say(wire.BARRIER, b"b", number=4)
        one.ping()
    assert not any(is_released(one) for one in [*members[:3], waiting])
    assert waiting.get(b"b") == b"3"
    members[3].say(wire.BARRIER, b"b", number=4)
    assert [one.take(1) for one in [*members, waiting]] == [wire.STOP_WAITING] * 5
    members[0].say(wire.BARRIER, b"b", number=4)
    assert members[0].take(1) == wire.STOP_WAITING, "who comes later does not wait"
    for one in [*members, waiting]:
        one.ping()


def test_who_left_a_barrier_stays_counted_and_a_value_lets_all_go(start: Start, peer: Connect) -> None:
    server = start()
    first, second, writer = (peer(server) for _ in range(3))
    first.say(wire.BARRIER, b"b", number=3)
    first.say(wire.CANCEL_WAIT)
    assert first.take(1) == wire.WAIT_CANCELED
    second.say(wire.BARRIER, b"b", number=3)
    second.ping()
    writer.set(b"b", b"anything")
    assert [is_released(one) for one in (first, second)] == [False, True]


def test_a_thousand_waiters(start: Start, peer: Connect, stranger: Connect, many_files: None) -> None:
    server = start()
    writer = peer(server)
    waiting = [stranger(server) for _ in range(MANY_PEERS)]
    for one in waiting:
        one.socket.sendall(wire.GREETING + request(wire.WAIT, [b"k"]) + request(wire.PING, number=TOKEN))
    for one in waiting:
        assert one.take(4) == wire.U32.pack(TOKEN)
    writer.say(wire.SET, b"k", b"v")
    for one in waiting:
        assert one.take(1) == wire.STOP_WAITING
    writer.ping()
    for one in waiting[::100]:
        assert one.get(b"k") == b"v"


# --- greetings -------------------------------------------------------------------------------------------------------------

PING = request(wire.PING, number=TOKEN)
NOT_A_GREETING = {
    "a request": request(wire.SET, [b"k", b"v"]) + wire.GREETING,
    "a ping": PING,
    "another number": bytes([wire.VALIDATE]) + wire.U32.pack(wire.MAGIC + 1),
    "the number the other way round": bytes([wire.VALIDATE]) + wire.U32.pack(wire.MAGIC)[::-1],
    "http": b"GET / HTTP/1.1\r\nHost: store\r\n\r\n",
    "tls": bytes.fromhex("16030100f8010000f40303"),
    "no operation": b"\xff" * 8,
    "twice": wire.GREETING * 2,
    "twice, and something between": wire.GREETING + PING + wire.GREETING,
}


@pytest.mark.parametrize("what", NOT_A_GREETING)
def test_who_greets_wrongly_is_cut_off(
    start: Start, peer: Connect, stranger: Connect, warnings: list[str], wait_until: Any, what: str
) -> None:
    server = start()
    good = peer(server)
    rude = stranger(server)
    rude.socket.sendall(NOT_A_GREETING[what])
    assert rude.is_cut_off()
    assert good.keys() == []
    assert_serves(good)
    wait_until(lambda: warnings)
    assert len(warnings) == 1
    assert warnings[0].startswith(f"the store has turned away {rude.name}: ")


def test_a_greeting_may_come_byte_by_byte(start: Start, stranger: Connect) -> None:
    one = stranger(start())
    for byte in wire.GREETING + PING:
        one.socket.sendall(bytes([byte]))
    assert one.take(4) == wire.U32.pack(TOKEN)


def test_a_silent_stranger_is_cut_off_and_a_silent_client_is_not(
    start: Start, peer: Connect, stranger: Connect, warnings: list[str], wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_serving, "GREETING_S", 0.3)
    server = start()
    client = peer(server)
    before = time.monotonic()
    silent, half = stranger(server), stranger(server)
    half.socket.sendall(wire.GREETING[:3])
    assert silent.is_cut_off()
    assert half.is_cut_off()
    assert time.monotonic() - before > 0.25
    wait_until(lambda: warnings)
    assert "it did not say a word of the protocol within 0.3 s" in warnings[0]
    client.ping()


# --- who breaks the format -------------------------------------------------------------------------------------------------

BROKEN = {
    "there is no operation 19": bytes([19]),
    "there is no operation 255": b"\xff",
    "SET with a key of 8193 bytes, and 8192 is the most": bytes([wire.SET]) + wire.U64.pack(8193),
    "GET with a key of 18446744073709551615 bytes, and 8192 is the most": bytes([wire.GET]) + b"\xff" * 8,
    "APPEND with a value of 8388609 bytes, and 8388608 is the most": bytes([wire.APPEND])
    + packed(b"k")
    + wire.U64.pack(8 * MIB + 1),
    "WAIT of 131073 keys at once, and 131072 is the most": bytes([wire.WAIT]) + wire.U64.pack(131_073),
    "MULTI_SET of 9223372036854775808 keys at once, and 131072 is the most": bytes([wire.MULTI_SET]) + wire.U64.pack(2**63),
    "cannot add to 'text': its value b'many' is not a number": request(wire.ADD, [b"text"], 1),
    "cannot add to 'empty': its value b'' is not a number": request(wire.BARRIER, [b"empty"], 2),
}


@pytest.mark.parametrize("why", BROKEN)
def test_who_breaks_the_format_is_cut_off_and_one_line_says_why(
    start: Start, peer: Connect, warnings: list[str], wait_until: Any, why: str
) -> None:
    server = start()
    good, bad = peer(server), peer(server)
    good.say(wire.MULTI_SET, b"text", b"many", b"empty", b"")
    good.ping()
    bad.socket.sendall(request(wire.SET, [b"before", b"done"]) + BROKEN[why] + request(wire.SET, [b"after", b"not done"]))
    assert bad.is_cut_off()
    assert_serves(good)
    assert good.get(b"before") == b"done"
    assert good.get(b"after") == b""
    wait_until(lambda: warnings)
    assert warnings == [f"the store has turned away {bad.name}: {why}"]


# --- much at once ----------------------------------------------------------------------------------------------------------


def test_a_large_value_both_ways(start: Start, peer: Connect) -> None:
    server = start()
    one, other = peer(server), peer(server)
    value = os.urandom(3_000_000)
    one.set(b"large", value)
    assert other.get(b"large") == value
    one.say(wire.APPEND, b"large", value)
    one.say(wire.COMPARE_SET, b"large", b"", value)
    assert one.take_text() == value + value
    one.say(wire.QUEUE_PUSH, b"q", value)
    one.ping()
    other.say(wire.QUEUE_POP, b"q")
    assert (other.take_number(), other.take_text()) == (1, value)


def test_the_largest_request_is_served(start: Start, peer: Connect) -> None:
    one = peer(start())
    key, value = b"k" * wire.MAX_KEY_BYTES, bytes(wire.MAX_VALUE_BYTES)
    one.set(key, value)
    assert one.get(key) == value


def test_a_hundred_thousand_keys_at_once(start: Start, peer: Connect) -> None:
    server = start()
    one, other = peer(server), peer(server)
    keys = [b"/key/%06d" % number for number in range(MANY_KEYS)]
    one.say(wire.MULTI_SET, *(text for key in keys for text in (key, key[::-1])))
    one.say(wire.GETNUMKEYS)
    assert one.take_number() == MANY_KEYS
    other.say(wire.MULTI_GET, *keys)
    answer = b"".join(packed(key[::-1]) for key in keys)
    assert other.take(len(answer)) == answer
    other.say(wire.LIST_KEYS)
    answer = i64(MANY_KEYS) + b"".join(map(packed, keys))
    assert other.take(len(answer)) == answer
    other.say(wire.CHECK, *keys)
    assert other.take(1) == wire.READY
    other.ping()


def test_one_key_many_times_in_one_request_is_not_copied_so_often(apart: Callable[[int], ServerApart]) -> None:
    """A request of a megabyte may ask for a terabyte: what waits to be sent are references."""
    server = apart(64 * MIB)
    greedy, good = TcpPeer(server.port).greet(), TcpPeer(server.port).greet()
    with greedy.socket, good.socket:
        good.set(b"k", bytes(MIB))
        before_kb = server.resident_kb()
        greedy.say(wire.MULTI_GET, *([b"k"] * wire.MAX_KEYS))
        for _ in range(20):
            good.ping()
        assert server.resident_kb() - before_kb < 64 * 1024
        assert greedy.take(8 + MIB) == packed(bytes(MIB))
        assert_serves(good)


def test_p23_a_thousand_connect_at_once(start: Start, many_files: None) -> None:
    """P23: all are greeted and answered."""
    server = start()
    poll = select.epoll()
    with contextlib.ExitStack() as sockets:
        sockets.callback(poll.close)
        storm: dict[int, socket.socket] = {}
        for _ in range(MANY_PEERS):
            one = sockets.enter_context(socket.socket())
            one.setblocking(False)
            assert one.connect_ex(server.addresses[0]) in (0, errno.EINPROGRESS)
            poll.register(one, select.EPOLLOUT)
            storm[one.fileno()] = one
        unanswered = set(storm)
        deadline = time.monotonic() + 30
        while unanswered:
            assert time.monotonic() < deadline, f"{len(unanswered)} have no answer"
            for fd, events in poll.poll(1.0):
                assert not events & (select.EPOLLERR | select.EPOLLHUP)
                if events & select.EPOLLOUT:
                    storm[fd].sendall(wire.GREETING + request(wire.ADD, [b"here"], 1))
                    poll.modify(fd, select.EPOLLIN)
                else:
                    assert len(storm[fd].recv(100)) == 8
                    unanswered.remove(fd)
                    poll.unregister(fd)
        with TcpPeer(server.addresses[0][1]).greet().socket as last:
            last.sendall(request(wire.GET, [b"here"]))
            assert last.recv(100) == packed(b"%d" % MANY_PEERS)


def test_endless_requests_of_one_do_not_starve_another(start: Start, peer: Connect) -> None:
    server = start()
    greedy, good = peer(server), peer(server)
    greedy.socket.settimeout(None)
    batch = request(wire.SET, [b"k", b"v"]) * 5000
    is_over = threading.Event()

    def flood() -> None:
        while not is_over.is_set():
            greedy.socket.sendall(batch)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        for _ in range(100):
            good.ping()
        assert good.get(b"k") == b"v"
    finally:
        is_over.set()
        thread.join()
    greedy.ping()


# --- who dies --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("sent_bytes", [1, 5, 9, 12, 25, 1000, 200_000])
def test_a_request_that_never_ends_is_forgotten(start: Start, peer: Connect, sent_bytes: int, is_reset: bool) -> None:
    server = start()
    good, dying = peer(server), peer(server)
    dying.socket.sendall(request(wire.SET, [b"key", bytes(300_000)])[:sent_bytes])
    if is_reset:
        dying.reset()
    dying.socket.close()
    assert_serves(good)
    assert good.keys() == [b"still"]


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
def test_who_dies_while_it_waits_is_forgotten(start: Start, peer: Connect, is_reset: bool) -> None:
    server = start()
    good, also_waiting = peer(server), peer(server)
    wait_for(also_waiting, b"k")
    for _ in range(20):
        dying = peer(server)
        wait_for(dying, b"k", b"other")
        if is_reset:
            dying.reset()
        dying.socket.close()
    good.set(b"other", b"")
    good.set(b"k", b"")
    assert is_released(also_waiting)
    assert_serves(good)


def test_a_new_connection_does_not_inherit_what_a_dead_one_waited_for(start: Start, peer: Connect) -> None:
    """It may well get the same file descriptor."""
    server = start()
    good, dying = peer(server), peer(server)
    wait_for(dying, b"k")
    dying.socket.sendall(b"\xff")
    assert dying.is_cut_off()
    newcomers = [peer(server) for _ in range(3)]
    good.set(b"k", b"")
    assert not any(is_released(one) for one in newcomers)


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
def test_who_dies_while_a_large_answer_is_on_its_way_harms_nobody(start: Start, peer: Connect, is_reset: bool) -> None:
    server = start()
    good, dying = peer(server), peer(server, receive_bytes=4096)
    good.set(b"large", bytes(8 * MIB))
    dying.say(wire.MULTI_GET, *([b"large"] * 100))
    assert dying.take(1000)
    for _ in range(5):
        assert_serves(good)
    if is_reset:
        dying.reset()
    dying.socket.close()
    for _ in range(5):
        assert_serves(good)
    other = peer(server)
    assert other.get(b"large") == bytes(8 * MIB)


# --- who does not read -----------------------------------------------------------------------------------------------------


def test_who_never_reads_is_not_read_from_either_and_others_are_served(apart: Callable[[int], ServerApart]) -> None:
    """At most one answer waits for each, in pieces that are counted once, and the rest of what it asks waits with the kernel."""
    server = apart(64 * MIB)
    with contextlib.ExitStack() as sockets:
        good = TcpPeer(server.port).greet()
        sockets.enter_context(good.socket)
        good.set(b"large", bytes(8 * MIB))
        before_kb = server.resident_kb()
        for _ in range(4):
            deaf = TcpPeer(server.port, receive_bytes=4096).greet()
            sockets.enter_context(deaf.socket)
            deaf.socket.sendall(request(wire.GET, [b"large"]) * 200)
            deaf.socket.setblocking(False)
            with contextlib.suppress(BlockingIOError):  # until the kernel takes no more of it
                while deaf.socket.send(request(wire.LIST_KEYS) * 10_000):
                    pass
        for _ in range(50):
            assert_serves(good)
        assert server.resident_kb() - before_kb < (4 * 8 + 24) * 1024


def test_who_reads_late_gets_everything_in_order(start: Start, peer: Connect) -> None:
    """Also what it is told on behalf of another, between two answers."""
    server = start()
    good, late = peer(server), peer(server, receive_bytes=4096)
    value = b"x" * (3 * MIB - 1)
    good.set(b"large", value)
    wait_for(late, b"k")
    late.socket.sendall(b"".join(request(wire.GET, [b"large"]) + request(wire.PING, number=1 + one) for one in range(10)))
    good.set(b"k", b"")
    released = 0
    for number in range(10):
        for answer in (packed(value), wire.U32.pack(1 + number)):
            if (first := late.take(1)) == wire.STOP_WAITING:
                released += 1
                first = late.take(1)
            assert first + late.take(len(answer) - 1) == answer
    late.ping()
    assert released == 1


def test_who_has_said_much_and_is_silent_keeps_nothing(apart: Callable[[int], ServerApart]) -> None:
    server = apart(64 * MIB)
    value = bytes(8 * MIB)
    with contextlib.ExitStack() as sockets:
        first = TcpPeer(server.port).greet()
        sockets.enter_context(first.socket)
        first.set(b"k", value)
        before_kb = server.resident_kb()
        for _ in range(20):
            one = TcpPeer(server.port).greet()
            sockets.enter_context(one.socket)
            one.set(b"k", value)
        assert server.resident_kb() - before_kb < 40 * 1024
        assert_serves(first)


def test_half_a_connection_is_noticed_by_the_kernel() -> None:
    """What is accepted has the options of its listener: unanswered data and unanswered probes end it."""
    sockets = [socket.socket(fileno=one.detach()) for one in listeners()]
    poll = select.epoll()
    door = Doorway(sockets, poll)
    sockets[0].setblocking(False)
    try:
        with socket.create_connection(sockets[0].getsockname()):
            ((fd, _),) = poll.poll(10)
            ((accepted, _),) = door.accept(fd, 0.0)
            with accepted:
                options = [
                    accepted.getsockopt(level, option)
                    for level, option in [
                        (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
                        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
                        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
                        (socket.IPPROTO_TCP, socket.TCP_NODELAY),
                    ]
                ]
    finally:
        door.close()
        poll.close()
    assert options == [1, 10, 3, 3, 15_000, 1]


# --- limits ----------------------------------------------------------------------------------------------------------------


def test_a_full_store_cuts_off_who_would_add_to_it_and_one_line_says_so(
    start: Start, peer: Connect, warnings: list[str], wait_until: Any
) -> None:
    server = start(limit_bytes=100_000)
    good, bad = peer(server), peer(server)
    good.set(b"mine", b"x" * 60_000)
    bad.say(wire.SET, b"more", b"x" * 60_000)
    assert bad.is_cut_off()
    assert good.keys() == [b"mine"]
    assert good.get(b"mine") == b"x" * 60_000
    good.set(b"mine", b"y" * 60_000)
    good.set(b"mine", b"")
    good.set(b"more", b"x" * 60_000)
    wait_until(lambda: warnings)
    assert warnings == [f"the store has turned away {bad.name}: the store may hold 100000 bytes, and this would be more"]


@pytest.mark.parametrize(
    "more",
    [
        request(wire.APPEND, [b"k", b"x" * 900]), request(wire.QUEUE_PUSH, [b"k", b"x" * 900]),
        request(wire.COMPARE_SET, [b"new", b"", b"x" * 2000]), request(wire.MULTI_SET, [b"new", b"x" * 2000]),
        b"".join(request(wire.ADD, [b"%d" % number], 1) for number in range(10)),
    ],
    ids=["append", "queue_push", "compare_set", "multi_set", "add"],
)  # fmt: skip
def test_nothing_goes_beyond_the_limit(start: Start, peer: Connect, more: bytes) -> None:
    server = start(limit_bytes=3000)
    good, bad = peer(server), peer(server)
    good.set(b"still", b"x" * 1200)
    bad.socket.sendall(more * 10)
    assert bad.is_cut_off()
    good.set(b"still", b"y" * 1200)
    assert good.get(b"still") == b"y" * 1200


def test_requests_that_are_not_complete_count(start: Start, peer: Connect, warnings: list[str], wait_until: Any) -> None:
    server = start(limit_bytes=MIB)
    good, first, second = (peer(server) for _ in range(3))
    asked = request(wire.SET, [b"k", b"x" * 800_000])
    first.socket.sendall(asked[:600_000])
    second.socket.sendall(asked[:600_000])
    cut_off, _, _ = select.select([first.socket, second.socket], [], [], 10)
    assert len(cut_off) == 1
    left = second if cut_off == [first.socket] else first
    left.socket.sendall(asked[600_000:])
    left.ping()
    assert good.get(b"k") == b"x" * 800_000
    wait_until(lambda: warnings)
    assert len(warnings) == 1
    assert "the store may hold 1048576 bytes, and with this request it would be more" in warnings[0]


def test_many_small_strings_of_one_request_count(start: Start, peer: Connect) -> None:
    server = start(limit_bytes=MIB)
    good, bad = peer(server), peer(server)
    bad.socket.sendall(request(wire.MULTI_GET, [b"%0100d" % number for number in range(15_000)]))
    assert bad.is_cut_off()
    assert_serves(good)


def test_there_is_a_limit_to_connections(
    start: Start, peer: Connect, stranger: Connect, warnings: list[str], wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "LEAST_CONNECTIONS", 3)
    monkeypatch.setattr(tcp_server, "MOST_FILES", 0)
    server = start()
    good, leaving, _ = (peer(server) for _ in range(3))
    assert stranger(server).is_cut_off()
    wait_until(lambda: warnings)
    assert "there are 3 connections already" in warnings[0]
    leaving.socket.close()
    assert_serves(good)
    peer(server)


def test_out_of_file_descriptors_it_waits_instead_of_spinning(
    start: Start, peer: Connect, wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    pause = Doorway._pause

    def noted(self: Doorway, now: float) -> None:
        pauses.append(time.monotonic())
        pause(self, now)

    monkeypatch.setattr(Doorway, "_pause", noted)
    server = start()
    good = peer(server)
    with socket.socket() as newcomer, contextlib.ExitStack() as files:
        with no_more_files(files):
            newcomer.settimeout(20)
            newcomer.connect(server.addresses[0])
            newcomer.sendall(wire.GREETING + PING)
            wait_until(lambda: len(pauses) >= 3)
            assert_serves(good)
        assert newcomer.recv(4) == wire.U32.pack(TOKEN)
    assert all(later - earlier > 0.9 * doorway.PAUSE_S for earlier, later in pairwise(pauses))


@contextlib.contextmanager
def no_more_files(files: contextlib.ExitStack) -> Iterator[None]:
    """This process can open nothing, until it is over."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                files.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        files.close()


# --- turn by turn ----------------------------------------------------------------------------------------------------------


class Turns:
    """A server whose turns are taken by the test, so that several things happen in one of them."""

    def __init__(self, limit_bytes: int) -> None:
        sockets = [socket.socket(fileno=one.detach()) for one in listeners()]
        for one in sockets:
            one.setblocking(False)
        self.addresses = [one.getsockname() for one in sockets]
        self._bell = WakeFd()
        self.loop = TcpServingLoop(sockets, self._bell, deque(), limit_bytes, 100)

    def ask(self, one: TcpPeer, data: bytes, reply: bytes) -> None:
        """Ask, and take turns until the answer is there."""
        one.socket.sendall(data)
        heard = b""
        while heard != reply:
            ready, _, _ = select.select([self.loop._poll, one.socket], [], [], 10)
            assert ready, f"nothing happens after {heard!r}"
            if one.socket in ready:
                heard += one.socket.recv(len(reply))
            if self.loop._poll in ready:
                self.loop.turn()
            assert reply.startswith(heard)

    def welcome(self, one: TcpPeer) -> TcpPeer:
        self.ask(one, wire.GREETING + PING, wire.U32.pack(TOKEN))
        return one

    def close(self) -> None:
        for listener in self.loop.close():
            listener.close()
        self._bell.close()


@pytest.fixture
def turns() -> Iterator[Turns]:
    by_hand = Turns(200_000)
    yield by_hand
    by_hand.close()


def test_one_that_has_gone_and_would_let_itself_go_harms_nobody(turns: Turns, stranger: Connect) -> None:
    """What it had asked for before it went is done, and it is not told of anything that comes later."""
    dying, good = (turns.welcome(stranger(turns)) for _ in range(2))
    dying.socket.sendall(request(wire.WAIT, [b"a"]) + request(wire.SET, [b"a", b"1"]) + request(wire.WAIT, [b"b"]))
    dying.reset()
    turns.loop.turn()
    turns.ask(good, request(wire.GET, [b"a"]), packed(b"1"))
    turns.ask(good, request(wire.SET, [b"b", b"2"]) + PING, wire.U32.pack(TOKEN))
    turns.ask(good, request(wire.GET, [b"b"]), packed(b"2"))


@pytest.mark.parametrize("is_first", [False, True])
def test_one_that_is_let_go_in_the_turn_in_which_it_speaks_is_not_taken_for_gone(
    turns: Turns, stranger: Connect, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """Whoever of them the server looks at first, and although the kernel takes nothing for it just then."""
    pair = [turns.welcome(stranger(turns)) for _ in range(2)]
    waiting, good = pair if is_first else pair[::-1]
    turns.ask(waiting, request(wire.WAIT, [b"k"]) + PING, wire.U32.pack(TOKEN))
    send = TcpConnection._try_to_send
    full = {waiting.name}
    monkeypatch.setattr(TcpConnection, "_try_to_send", lambda self, data: 0 if self.peer in full else send(self, data))
    good.socket.sendall(request(wire.SET, [b"k", b"v"]))
    waiting.socket.sendall(request(wire.SET, [b"mine", b""]))
    turns.loop.turn()
    turns.ask(good, PING, wire.U32.pack(TOKEN))
    full.clear()
    turns.ask(waiting, PING, wire.STOP_WAITING + wire.U32.pack(TOKEN))


def test_much_work_for_one_is_done_a_piece_at_a_time(turns: Turns, stranger: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte may ask for a long answer, so it is time that counts, and all of it is over here."""
    monkeypatch.setattr(tcp_serving, "TURN_S", -1.0)
    greedy, good = (turns.welcome(stranger(turns)) for _ in range(2))
    answers: list[int] = []
    say = TcpConnection.say

    def counting(self: TcpConnection, reply: bytes | list[bytes]) -> None:
        answers.append(self.peer == greedy.name)
        say(self, reply)

    monkeypatch.setattr(TcpConnection, "say", counting)
    greedy.socket.sendall(request(wire.LIST_KEYS) * 1000)
    for number in range(10):
        turns.ask(good, PING, wire.U32.pack(TOKEN))
        assert sum(answers) <= 4 * (number + 1)
    turns.ask(greedy, b"", i64(0) * 1000)


@pytest.mark.parametrize(
    "last",
    [b"", b"\xff", request(wire.ADD, [b"k"], 1), request(wire.SET, [b"more", bytes(150_000)])],
    ids=["complete", "broken", "not a number", "too much"],
)
def test_what_was_counted_is_given_back_however_it_ends(turns: Turns, stranger: Connect, last: bytes) -> None:
    good = turns.welcome(stranger(turns))
    asked = request(wire.SET, [b"k", b"x" * 100_000])
    for _ in range(3):
        one = turns.welcome(stranger(turns))
        one.socket.sendall(asked[:-1000])
        while turns.loop._kept_bytes < len(asked) - 1000:
            turns.loop.turn()
        with contextlib.suppress(ConnectionError):
            one.socket.sendall(asked[-1000:] + last)
        one.socket.close()
        while len(turns.loop._connections) > 1:
            turns.loop.turn()
        turns.ask(good, request(wire.DELETE_KEY, [b"k"]), i64(1))
        assert turns.loop._kept_bytes == 0


# --- coming and going ------------------------------------------------------------------------------------------------------


def test_a_connection_that_was_accepted_elsewhere_is_served(start: Start, peer: Connect) -> None:
    server = start()
    pairs = [socket.socketpair() for _ in range(3)]
    for number, (ours, theirs) in enumerate(pairs):
        theirs.setblocking(False)
        ours.settimeout(20)
        ours.sendall(wire.GREETING + request(wire.ADD, [b"here"], 1))
        server.adopt(theirs, f"number {number}")
        assert ours.recv(8) == i64(number + 1)
    assert peer(server).get(b"here") == b"3"
    server.close()
    for ours, _ in pairs:
        assert ours.recv(1) == b""
        ours.close()


def test_whom_it_adopts_when_it_has_ended_is_sent_away() -> None:
    server = TcpStoreServer(listeners())
    early, its_end = socket.socketpair()
    server.adopt(its_end, "early")
    server.close()
    late, its_other_end = socket.socketpair()
    server.adopt(its_other_end, "late")
    with early, late:
        assert (early.recv(1), late.recv(1)) == (b"", b"")


def test_closing_ends_the_connections_and_frees_the_port(start: Start, peer: Connect, stranger: Connect) -> None:
    server = start()
    waiting, half, deaf, silent = peer(server), peer(server), peer(server, receive_bytes=4096), stranger(server)
    waiting.set(b"large", bytes(8 * MIB))
    wait_for(waiting, b"k")
    half.socket.sendall(request(wire.SET, [b"key", b"value"])[:-1])
    deaf.say(wire.GET, b"large")
    port = server.addresses[0][1]
    server.close()
    server.close()
    again = start(port=port)
    assert again.addresses == [("127.0.0.1", port)]
    assert all(one.is_cut_off() for one in (waiting, half, deaf, silent))
    assert peer(again).keys() == [], "it begins with an empty store"


def test_it_can_be_closed_before_it_was_started_or_anybody_came() -> None:
    TcpStoreServer(listeners()).close()
    server = TcpStoreServer(listeners())
    server.start()
    server.close()


def test_it_can_be_closed_by_several_threads_at_once(start: Start, peer: Connect) -> None:
    server = start()
    one = peer(server)
    threads = [threading.Thread(target=server.close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert one.is_cut_off()


def test_a_fork_does_not_hold_its_connections_open(start: Start, peer: Connect) -> None:
    server = start()
    one = peer(server)
    ours, the_forks = socket.socketpair()
    with ours, the_forks:
        if (child := os.fork()) == 0:
            the_forks.send(b"here")
            the_forks.recv(1)
            os._exit(0)
        try:
            assert ours.recv(4) == b"here"
            one.ping()
            server.close()
            assert one.is_cut_off()
            start(port=server.addresses[0][1])
        finally:
            ours.send(b".")
            os.waitpid(child, 0)


def test_many_servers_in_one_process_have_nothing_to_do_with_each_other(start: Start, peer: Connect) -> None:
    peers = [peer(start()) for _ in range(30)]
    for number, one in enumerate(peers):
        one.set(b"k", b"%d" % number)
    assert [one.get(b"k") for one in peers] == [b"%d" % number for number in range(30)]


def test_sockets_that_are_given_back_listen_still(start: Start, peer: Connect, stranger: Connect) -> None:
    """P16: whoever came in between is served by the next server, whose store is another one."""
    server = start()
    old = peer(server)
    old.set(b"/k", b"stale")
    with contextlib.closing(TcpStoreServer(server.end())) as successor:
        assert old.is_cut_off()
        early = stranger(server)
        successor.start()
        assert successor.addresses == server.addresses
        assert early.greet().keys() == []


def test_who_waits_for_very_much_is_counted(start: Start, peer: Connect) -> None:
    """What is waited for takes memory too, as much as what is kept."""
    server = start(limit_bytes=1 << 20)
    greedy, modest = peer(server), peer(server)
    greedy.socket.sendall(wire.request(wire.WAIT, [b"/%d" % number for number in range(10_000)]))
    assert greedy.is_cut_off()
    modest.set(b"/k", b"v")
    assert modest.get(b"/k") == b"v"


def test_a_mistake_of_ours_ends_one_connection_and_not_the_store(
    start: Start, peer: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(values: object, key: bytes, amount: int) -> int:
        raise ZeroDivisionError(key)

    monkeypatch.setattr(Values, "add", fail)
    server = start()
    unlucky, other = peer(server), peer(server)
    unlucky.socket.sendall(wire.request(wire.ADD, [b"/c"], 1))
    assert unlucky.is_cut_off()
    other.ping()
