"""The store's server over real sockets: nobody can make it wait, spend without bound, or tell what it should not."""

from __future__ import annotations

import errno
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from tests.pace import is_under

from rallypoint.coordination.embedded import server as serving
from rallypoint.coordination.embedded import service
from rallypoint.coordination.embedded.client import EmbeddedCoordination
from rallypoint.coordination.embedded.handshake import ClientHandshake
from rallypoint.coordination.embedded.server import CoordinationServer
from rallypoint.coordination.embedded.wire import VALUE_BYTES, decode, encode, make_frame
from rallypoint.coordination.engine import CoordinationError, StoreGoneError
from rallypoint.coordination.keyspace import Keyspace
from rallypoint.coordination.model import Get, Put, Transaction
from rallypoint.net import acceptor as doorway
from rallypoint.net import acceptor as refusals
from rallypoint.net.endpoint import open_listeners

SECRET = b"a secret that nobody guesses"
Start = Callable[..., CoordinationServer]
Connect = Callable[..., EmbeddedCoordination]
Soon = Callable[[], float]
GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: store\r\n\r\n",
    "zeros": bytes(64),
    "oversize": (1025).to_bytes(4, "big") + b"x" * 1025,
    "huge": b"\xff" * 64,
    "no json": make_frame(b"\x80\x04nope", None),
    "not a greeting": make_frame(b'{"magic":"rallypoint store"}', None),
    "another magic": make_frame(b'{"magic":"redis","version":1,"secret":true,"nonce":"00"}', None),
    "a short nonce": make_frame(b'{"magic":"rallypoint store","version":1,"secret":true,"nonce":"00"}', None),
    "a request": make_frame(encode([1, "read", ""]), None),
    "deeply nested": make_frame(b"[" * 1000, None),
}


def put(key: str, value: bytes = b"", lease: int = 0) -> Transaction:
    return Transaction((), (Put(key, value, lease),))


def assert_serves(client: EmbeddedCoordination, soon: Soon) -> None:
    found = client.transact(Transaction((), (Put("still", b"here"), Get("still"))), soon()).items[0]
    assert found is not None
    assert found.value == b"here"


# --- strangers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", GARBAGE)
def test_p36_garbage_is_cut_off_and_learns_nothing(
    start_server: Start, connect: Connect, peer: Any, soon: Soon, what: str
) -> None:
    server = start_server("the-run-id", SECRET)
    client = connect(server, "the-run-id", SECRET)
    stranger = peer(server)
    stranger.send(GARBAGE[what])
    told = stranger.read_to_end()
    assert b"the-run-id" not in told
    assert server.incarnation.encode() not in told
    assert told[4:].startswith(b'{"refused":')
    assert_serves(client, soon)


@pytest.mark.parametrize("secret", [None, b"another secret"])
def test_p36_without_the_secret_nothing_is_learnt_and_nothing_changed(
    start_server: Start, connect: Connect, peer: Any, soon: Soon, secret: bytes | None
) -> None:
    """P36: neither the job's name, nor the incarnation, nor a key; and a request sent along is not done."""
    server = start_server("the-run-id", SECRET)
    client = connect(server, "the-run-id", SECRET)
    client.transact(put("the-key", b"the-value"), soon())
    stranger = peer(server)
    hello = ClientHandshake("the-run-id", secret)
    stranger.send(make_frame(hello.hello(), None))
    if secret is not None:
        proof = hello.answer(stranger.receive())
        stranger.send(make_frame(proof, None))
    stranger.send(make_frame(encode([1, "transact", [], [["put", "the-key", "x", 0]], []]), None))
    told = stranger.read_to_end()
    for unknown in (b"the-run-id", server.incarnation.encode(), b"the-key", b"the-value", SECRET):
        assert unknown not in told
    assert [item.value for item in client.read("", soon()).items] == [b"the-value"]


def test_p36_a_slow_stranger_delays_nobody_and_is_cut_off(
    start_server: Start, connect: Connect, peer: Any, soon: Soon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "HANDSHAKE_S", 0.5)
    server = start_server()
    client = connect(server)
    strangers = [peer(server) for _ in range(50)]
    hello = make_frame(ClientHandshake("job", None).hello(), None)
    slowest = 0.0
    for byte in hello[:20]:
        for stranger in strangers:
            stranger.send(bytes([byte]))
        before = time.monotonic()
        client.transact(put("fast"), soon())
        slowest = max(slowest, time.monotonic() - before)
    assert slowest < 0.25
    for stranger in strangers:
        assert stranger.read_to_end() == b""
    assert_serves(client, soon)


def test_p36_too_many_strangers_push_out_the_oldest(
    start_server: Start, connect: Connect, peer: Any, soon: Soon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "STRANGERS", 3)
    server = start_server()
    client = connect(server)
    strangers = [peer(server) for _ in range(5)]
    assert [stranger.read_to_end() for stranger in strangers[:2]] == [b"", b""]
    for stranger in strangers[2:]:
        stranger.greet()
    assert_serves(client, soon)


def test_there_is_a_limit_to_connections(
    start_server: Start, connect: Connect, peer: Any, soon: Soon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "CONNECTIONS", 3)
    server = start_server()
    client = connect(server)
    others = [peer(server).greet(), peer(server).greet()]
    assert peer(server).read_to_end() == b""
    others[0].socket.close()
    assert_serves(client, soon)
    connect(server)  # there is room again, as soon as the server has noticed


def test_refusals_are_told_once_a_second(
    start_server: Start, peer: Any, warnings: list[str], wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "QUIET_S", 0.3)
    server = start_server(secret=SECRET)
    for _ in range(20):
        stranger = peer(server)
        stranger.send(GARBAGE["http"])
        stranger.read_to_end()
    wait_until(lambda: len(warnings) >= 2)
    assert "the store has turned away 127.0.0.1 port " in warnings[0]
    assert "a frame of 1195725856 bytes, where 1024 are allowed" in warnings[0]
    assert "(and " in warnings[1]
    assert len(warnings) < 10


# --- peers that are let in, and misbehave ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [["fly"], ["read"], ["read", 1], ["keep", "1"], ["grant", 0], ["resume", 5], ["watch", "", -1], ["transact", 1, 2, 3]],
)
def test_who_breaks_the_rules_is_told_and_cut_off(
    start_server: Start, connect: Connect, peer: Any, soon: Soon, request_: list[object]
) -> None:
    server = start_server(secret=SECRET)
    client = connect(server, secret=SECRET)
    rude = peer(server).greet(secret=SECRET)
    assert rude.ask(*request_)[:2] == [0, "refused"]
    assert rude.receive() is None
    assert_serves(client, soon)


def test_p36_a_replayed_frame_is_not_done(start_server: Start, connect: Connect, peer: Any, soon: Soon) -> None:
    server = start_server(secret=SECRET)
    client = connect(server, secret=SECRET)
    replayed = peer(server).greet(secret=SECRET)
    frame = make_frame(encode([1, "transact", [], [["put", "k", "", 0]], []]), replayed._handshake.outgoing)
    replayed.send(frame + frame)
    assert b"wrong seal" in replayed.read_to_end()
    assert client.transact(Transaction((), (Get("k"),)), soon()).revision == 2


def test_p36_a_frame_of_another_connection_is_not_done(start_server: Start, connect: Connect, peer: Any, soon: Soon) -> None:
    server = start_server(secret=SECRET)
    one, other = peer(server).greet(secret=SECRET), peer(server).greet(secret=SECRET)
    other.send(make_frame(encode([1, "transact", [], [["put", "k", "", 0]], []]), one._handshake.outgoing))
    assert b"wrong seal" in other.read_to_end()
    assert connect(server, secret=SECRET).read("", soon()).items == ()


def test_a_frame_that_never_ends_is_just_forgotten(start_server: Start, connect: Connect, peer: Any, soon: Soon) -> None:
    server = start_server()
    client = connect(server)
    half = peer(server).greet()
    half.send(make_frame(encode([1, "transact", [], [["put", "k", "", 0]], []]), None)[:-1])
    half.socket.close()
    assert client.read("", soon()).items == ()


def test_who_does_not_read_is_cut_off(
    start_server: Start,
    connect: Connect,
    peer: Any,
    soon: Soon,
    warnings: list[str],
    wait_until: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "OUTPUT_BYTES", 256 * 1024)
    server = start_server()
    client = connect(server)
    slow = peer(server).greet()
    slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.ask("watch", "", 1)
    for _ in range(200):
        client.transact(put("big", b"x" * 100_000), soon())
        if warnings:
            break
    wait_until(lambda: any("it does not read what it is told" in line for line in warnings))
    assert_serves(client, soon)


def test_all_connections_together_are_bounded(
    start_server: Start, connect: Connect, peer: Any, soon: Soon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "HELD_BYTES", 1024 * 1024)
    server = start_server()
    client = connect(server)
    halves = [peer(server).greet() for _ in range(3)]
    for half in halves:
        half.send((900_000).to_bytes(4, "big") + b"x" * 500_000)
    cut_off, _, _ = select.select([half.socket for half in halves], [], [], 10)
    assert cut_off
    assert_serves(client, soon)


def test_a_full_store_says_so(start_server: Start, connect: Connect, soon: Soon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.StoreService.__init__, "__defaults__", (10_000,))
    client = connect(start_server())
    client.transact(put("a", b"x" * 9000), soon())
    with pytest.raises(CoordinationError, match="the store is full: it holds at most 10000 bytes"):
        client.transact(put("b", b"x" * 2000), soon())
    client.transact(Transaction((), (Get("a"),)), soon())


def test_a_mistake_of_ours_ends_one_connection_and_not_the_store(
    start_server: Start, connect: Connect, peer: Any, soon: Soon, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server()
    client, unlucky = connect(server), peer(server).greet()

    def read(self: Keyspace, prefix: str) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Keyspace, "read", read)
    assert unlucky.ask("read", "")[:2] == [0, "refused"]
    assert_serves(client, soon)


def test_out_of_file_descriptors_it_waits_instead_of_spinning(monkeypatch: pytest.MonkeyPatch, peer: Any) -> None:
    monkeypatch.setattr(doorway, "PAUSE_S", 0.2)
    (real,) = open_listeners("127.0.0.1", 0, is_host=True, wildcard_allowed=False) or []
    tries: list[float] = []

    class Poor:
        def accept(self) -> Any:
            tries.append(time.monotonic())
            if len(tries) < 3:
                raise OSError(errno.EMFILE, "Too many open files")
            return real.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    server = CoordinationServer([Poor()], "job", None)  # type: ignore[list-item]
    server.start()
    try:
        peer(server).greet()
    finally:
        server.stop()
    assert [later - earlier > 0.15 for earlier, later in pairwise(tries[:3])] == [True, True]


# --- large answers ---------------------------------------------------------------------------------------------------------


def test_a_long_answer_is_written_as_it_is_read_and_others_are_served_meanwhile(
    start_server: Start, connect: Connect, peer: Any, soon: Soon
) -> None:
    server = start_server()
    writer = connect(server)
    for number in range(40):
        writer.transact(put(f"large/{number:02}", b"\xff" * VALUE_BYTES), soon())
    slow = peer(server).greet()
    slow.send_body(encode([1, "read", "large/"]))
    slow.send_body(encode([2, "read", "nothing/"]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(50):
        assert_serves(writer, soon)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000, "kilobytes; the answer has 40,000"
    kinds: list[list[Any]] = []
    while kinds[-1:] != [[2, "snapshot"]]:
        body = slow.receive()
        assert body is not None
        slow.received = b""
        kinds.append(decode(body)[:2])
    assert kinds == [*([[1, "part"]] * 39), [1, "snapshot"], [2, "snapshot"]]
    assert len(writer.read("large/", soon()).items) == 40


def test_what_many_watch_is_written_down_once(
    start_server: Start, connect: Connect, soon: Soon, wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(secret=SECRET)
    clients = [connect(server, secret=SECRET) for _ in range(20)]
    for client in clients:
        client.watch("generation", 1, soon())
    written = []
    encode_in_parts = service.encode_in_parts

    def counted(answer: Any, things: Any) -> Iterator[bytes]:
        written.append(answer)
        return encode_in_parts(answer, things)

    monkeypatch.setattr(service, "encode_in_parts", counted)
    clients[0].transact(put("generation", b"x" * 500), soon())
    for client in clients:
        wait_until(client.take_events)
    assert written == [(0, "events", 2)]


# --- time ------------------------------------------------------------------------------------------------------------------


class SlowLoop:
    """A server whose turns are taken by hand, on a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        sockets = open_listeners("127.0.0.1", 0, is_host=True, wildcard_allowed=False)
        assert sockets is not None
        self.server = CoordinationServer(sockets, "job", None, clock=lambda: self.now)
        self.addresses = self.server.addresses
        self.turn = self.server._turn

    def ask(self, one: Any, *request: object) -> list[Any]:
        """Ask, and let the server answer in its next turns."""
        one._asked += 1
        one.send_body(encode([one._asked, *request]))
        one.socket.setblocking(False)
        while True:
            self.turn()
            try:
                return decode(one.receive())
            except BlockingIOError:
                continue


@pytest.fixture
def slow_loop() -> Iterator[SlowLoop]:
    loop = SlowLoop()
    yield loop
    loop.server.stop()


def welcome(loop: SlowLoop, peer: Any) -> Any:
    one = peer(loop)
    one.send(make_frame(ClientHandshake("job", None).hello(), None))
    one.socket.setblocking(False)
    while True:
        loop.turn()
        try:
            assert one.receive() is not None
        except BlockingIOError:
            continue
        return one


def test_what_has_come_is_read_before_a_lease_ends(slow_loop: SlowLoop, peer: Any) -> None:
    owner = welcome(slow_loop, peer)
    lease = slow_loop.ask(owner, "grant", 0.4)[2]
    slow_loop.now += 0.3
    slow_loop.turn()
    owner.send_body(encode([77, "keep", lease]))  # in time, but the server looks when the lease is over
    slow_loop.now += 0.3
    assert slow_loop.ask(owner, "keep", lease)[:3] == [77, "kept", True]
    slow_loop.now += 0.45
    slow_loop.turn()
    owner.receive()
    assert slow_loop.ask(owner, "keep", lease)[1:3] == ["kept", False]


def test_while_the_server_was_away_no_lease_ran(slow_loop: SlowLoop, peer: Any) -> None:
    owner = welcome(slow_loop, peer)
    lease = slow_loop.ask(owner, "grant", 1)[2]
    slow_loop.now += 60
    slow_loop.turn()
    assert slow_loop.ask(owner, "keep", lease)[1:3] == ["kept", True]


# --- sessions --------------------------------------------------------------------------------------------------------------


def test_a_lease_is_taken_up_only_by_who_knows_the_token(start_server: Start, connect: Connect, peer: Any, soon: Soon) -> None:
    server = start_server()
    client = connect(server)
    first = peer(server).greet()
    token = first._handshake.welcome.session
    lease = first.ask("grant", 30)[2]
    first.ask("transact", [], [["put", "mine", "", lease]], [])
    thief = peer(server).greet()
    assert thief.ask("resume", "0" * 32)[1:] == ["resumed", 0]
    assert thief.ask("transact", [], [["put", "mine", "", lease]], [])[1:3] == ["error", "lease"]
    assert thief.ask("keep", lease)[1:3] == ["kept", False]
    thief.ask("revoke")
    second = peer(server).greet()
    assert second.ask("resume", token)[1:] == ["resumed", lease]
    assert first.receive() is None, "the old connection gives way"
    assert second.ask("keep", lease)[1:3] == ["kept", True]
    assert len(client.read("mine", soon()).items) == 1


# --- the end ---------------------------------------------------------------------------------------------------------------


def test_it_waits_until_it_is_alone(start_server: Start, connect: Connect) -> None:
    server = start_server()
    connect(server)
    other = connect(server)
    before = time.monotonic()
    assert not server.wait_until_alone(before + 0.1)
    assert time.monotonic() - before >= 0.1
    other.close()
    assert server.wait_until_alone(time.monotonic() + 10)


def test_who_is_left_when_it_stops_is_told(start_server: Start, connect: Connect, soon: Soon, wait_until: Any) -> None:
    server = start_server()
    client = connect(server)
    server.stop(0.05, "the job was cancelled")
    with pytest.raises(StoreGoneError, match=r"the store at 127.0.0.1:\d+ has ended: the job was cancelled"):
        wait_until(client.take_events)
    with pytest.raises(StoreGoneError):
        client.read("", soon())
    server.stop()


def test_it_lingers_for_those_who_are_still_there(start_server: Start, connect: Connect) -> None:
    server = start_server()
    client = connect(server)
    client.close()
    before = time.monotonic()
    server.stop(30)
    assert is_under(time.monotonic() - before, 10)


def test_it_can_be_stopped_before_it_was_started() -> None:
    sockets = open_listeners("127.0.0.1", 0, is_host=True, wildcard_allowed=False)
    assert sockets is not None
    CoordinationServer(sockets, "job", None).stop()


def test_workers_inherit_none_of_its_sockets(start_server: Start, connect: Connect) -> None:
    connect(start_server())
    program = "import os; print(*(os.readlink(entry) for entry in os.scandir('/proc/self/fd') if os.path.exists(entry)))"
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, close_fds=False, capture_output=True, text=True, check=True, timeout=30)
    assert "socket:" not in found.stdout
    assert "eventpoll" not in found.stdout
    assert "eventfd" not in found.stdout


# --- many ------------------------------------------------------------------------------------------------------------------

STORM = """
import sys, time
from rallypoint.coordination.model import Compare, Put, Transaction
from rallypoint.coordination.embedded.client import EmbeddedCoordination
from rallypoint.coordination.engine import UnreachableError

port, first, count = map(int, sys.argv[1:])
deadline = time.monotonic() + 60
clients = {number: EmbeddedCoordination("127.0.0.1", port, "job", b"secret") for number in range(first, first + count)}
left = set(clients)
while left and time.monotonic() < deadline:
    for number in list(left):
        try:
            clients[number].take_events()
        except UnreachableError:
            continue
        left.remove(number)
for number, client in clients.items():
    key = f"nodes/{number}"
    assert client.transact(Transaction((Compare(key, "create", 0),), (Put(key, b""),)), deadline).succeeded
print(len(clients) - len(left), flush=True)
sys.stdin.read()
"""


def storm(server: CoordinationServer, processes: int, count: int) -> None:
    each = count // processes
    command = [sys.executable, "-c", STORM, str(server.addresses[0][1])]
    running = [
        subprocess.Popen([*command, str(number * each), str(each)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for number in range(processes)
    ]
    connected = [one.stdout.readline().strip() for one in running if one.stdout is not None]
    assert connected == [str(each)] * processes
    for one in running:
        one.communicate(timeout=60)


@pytest.mark.parametrize(("processes", "count"), [(2, 1000), pytest.param(4, 10_000, marks=pytest.mark.soak)])
def test_p23_a_storm_of_connects(start_server: Start, connect: Connect, soon: Soon, processes: int, count: int) -> None:
    """P23: everybody comes at once, and none is lost."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < count + 200:
        pytest.skip(f"{count} connections need more than {hard} file descriptors")
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        server = start_server(secret=b"secret")
        storm(server, processes, count)
        client = connect(server, secret=b"secret")
        assert len(client.read("nodes/", soon()).items) == count
        client.close()
        assert server.wait_until_alone(time.monotonic() + 10, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)
