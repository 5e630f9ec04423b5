"""One listener for agents and workers: whoever speaks torch's TCPStore protocol is handed over, unread, and nobody else is."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rallypoint.coordination.embedded import server as serving
from rallypoint.coordination.embedded.handshake import ClientHandshake
from rallypoint.coordination.embedded.server import CoordinationServer
from rallypoint.coordination.embedded.wire import make_frame
from rallypoint.net.endpoint import open_listeners
from rallypoint.store import tcp_protocol as wire
from rallypoint.store.tcp_server import TcpStoreServer
from rallypoint.store.tcp_store import TCPStore

TIMEOUT_S = 10.0
PING = wire.request(wire.PING, (), 7)
PONG = wire.U32.pack(7)
SECRET = b"a secret that nobody guesses"


class Door:
    """A server for agents, and those who were taken for workers."""

    def __init__(self, secret: bytes | None, take_in: Callable[[socket.socket, str], None] | None) -> None:
        self.workers: list[tuple[socket.socket, str]] = []
        sockets = open_listeners("127.0.0.1", 0, is_host=True, wildcard_allowed=False)
        assert sockets is not None
        self.server = CoordinationServer(sockets, "job", secret, take_in_worker=take_in or self._keep)
        self.addresses = self.server.addresses

    def _keep(self, sock: socket.socket, peer: str) -> None:
        self.workers.append((sock, peer))


@pytest.fixture
def make_door() -> Iterator[Callable[..., Door]]:
    """``make_door(secret=None, take_in=None)`` serves agents; who was taken for a worker is in its `workers`."""
    with contextlib.ExitStack() as doors:

        def make(secret: bytes | None = None, take_in: Callable[[socket.socket, str], None] | None = None) -> Door:
            door = Door(secret, take_in)
            doors.callback(lambda: [sock.close() for sock, _ in door.workers])
            doors.callback(door.server.stop)
            door.server.start()
            return door

        yield make


@pytest.fixture
def store_server() -> Iterator[TcpStoreServer]:
    """A workers' store without a listener of its own."""
    server = TcpStoreServer([])
    server.start()
    yield server
    server.close()


def flow(sock: socket.socket, size: int) -> bytes:
    """The next `size` bytes, or all until the end."""
    sock.settimeout(TIMEOUT_S)
    told = b""
    while len(told) < size and (more := sock.recv(size - len(told))):
        told += more
    return told


# --- told apart ------------------------------------------------------------------------------------------------------------


def test_a_worker_is_handed_over_with_all_that_it_has_said(make_door: Any, peer: Any, wait_until: Any) -> None:
    """Nothing of it is read, so that whoever serves it hears the greeting too; its name is for the log."""
    door = make_door()
    one = peer(door.server)
    one.send(wire.GREETING + PING)
    wait_until(lambda: door.workers)
    ((sock, name),) = door.workers
    assert name == f"127.0.0.1 port {one.socket.getsockname()[1]}"
    assert not sock.getblocking()
    assert flow(sock, 10) == wire.GREETING + PING
    assert door.server._living_count() == 0


def test_a_greeting_may_come_byte_by_byte(make_door: Any, peer: Any, store_server: TcpStoreServer) -> None:
    """Each in a packet of its own. As long as it could still be an agent, nobody is disturbed; then each byte counts."""
    door = make_door(take_in=store_server.adopt)
    one, agent = peer(door.server), peer(door.server).greet()
    for byte in wire.GREETING + PING:
        one.send(bytes([byte]))
        assert agent.ask("read", "")[1] == "snapshot"  # whatever has come before was looked at by now
    assert flow(one.socket, 4) == PONG
    one.send(bytes([wire.GETNUMKEYS]))  # a whole request, shorter than the greeting
    assert flow(one.socket, 8) == wire.I64.pack(0)


def test_an_agent_may_take_its_time(make_door: Any, peer: Any) -> None:
    """Its handshake comes byte by byte too, and once it is known not to be a worker the kernel tells of each."""
    door = make_door()
    slow, agent = peer(door.server), peer(door.server).greet()
    slow._handshake = ClientHandshake("job", None)
    for byte in make_frame(slow._handshake.hello(), None):
        slow.send(bytes([byte]))
        assert agent.ask("read", "")[1] == "snapshot"
    welcome = slow.receive()
    assert slow._handshake.answer(welcome) is None
    assert slow.ask("read", "")[1] == "snapshot"
    assert not door.workers


def test_agents_with_a_secret_and_workers_come_to_one_port(make_door: Any, connect: Any, store_server: TcpStoreServer) -> None:
    """A worker proves nothing, and gets nothing but its own store."""
    door = make_door(SECRET, store_server.adopt)
    port = door.addresses[0][1]
    agent = connect(port, secret=SECRET)
    stores = [TCPStore("127.0.0.1", port, timeout=TIMEOUT_S) for _ in range(3)]
    with contextlib.ExitStack() as closing:
        for store in stores:
            closing.callback(store.close)
        stores[0].set("k", "v")
        assert [store.get("k") for store in stores] == [b"v"] * 3
        assert agent.read("", time.monotonic() + TIMEOUT_S).items == ()


def test_many_come_at_once(make_door: Any, store_server: TcpStoreServer, peer: Any) -> None:
    """P23: workers and agents in one crowd; each finds what it came for."""
    door = make_door(take_in=store_server.adopt)
    port = door.addresses[0][1]
    counts: list[int] = []

    def work() -> None:
        store = TCPStore("127.0.0.1", port, timeout=TIMEOUT_S)
        counts.append(store.add("here", 1))
        store.close()

    threads = [threading.Thread(target=work) for _ in range(50)]
    for thread in threads:
        thread.start()
    agents = [peer(door.server).greet() for _ in range(50)]
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert sorted(counts) == list(range(1, 51))
    assert all(agent.ask("read", "")[1] == "snapshot" for agent in agents)


# --- neither ---------------------------------------------------------------------------------------------------------------


def test_who_says_too_little_to_be_known_is_ended(
    make_door: Any, peer: Any, warnings: list[str], monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    """The kernel does not even tell of three bytes; the time that a stranger has is over all the same."""
    monkeypatch.setattr(serving, "HANDSHAKE_S", 0.3)
    door = make_door()
    silent, short, longer = peer(door.server), peer(door.server), peer(door.server)
    short.send(wire.GREETING[:3])
    longer.send(b"\0\0\0\x40{")  # as many as a worker's greeting, but an agent's frame begins so
    assert [one.read_to_end() for one in (silent, short, longer)] == [b""] * 3
    wait_until(lambda: any("did not introduce itself" in line for line in warnings))
    assert not door.workers


def test_who_goes_before_it_is_known_is_forgotten(make_door: Any, peer: Any, wait_until: Any) -> None:
    door = make_door()
    for said in (b"", wire.GREETING[:3], wire.GREETING[:4]):
        one = peer(door.server)
        one.send(said)
        one.socket.close()
    wait_until(lambda: not door.server._connections)
    assert not door.workers


def test_who_ends_right_after_its_greeting_is_the_affair_of_the_workers_store(make_door: Any, peer: Any, wait_until: Any) -> None:
    door = make_door()
    one = peer(door.server)
    one.send(wire.GREETING)
    one.socket.close()
    wait_until(lambda: door.workers)
    assert flow(door.workers[0][0], 6) == wire.GREETING


def test_an_agent_cannot_become_a_worker(make_door: Any, peer: Any, warnings: list[str], wait_until: Any) -> None:
    """What looks like a worker's greeting is one only as the very first that is said."""
    door = make_door()
    one = peer(door.server).greet()
    one.send(wire.GREETING)
    one.read_to_end()
    late = peer(door.server)
    late.send(make_frame(b"{}", None) + wire.GREETING)
    assert b"no proper 'magic'" in late.read_to_end()
    wait_until(lambda: warnings)
    assert not door.workers


def test_where_no_worker_is_expected_it_is_refused(start_server: Any, peer: Any, warnings: list[str], wait_until: Any) -> None:
    server = start_server()
    one = peer(server)
    one.send(wire.GREETING + PING)
    assert b"refused" in one.read_to_end()
    wait_until(lambda: warnings)


# --- the end ---------------------------------------------------------------------------------------------------------------


def test_who_was_handed_over_stays_when_the_agents_store_ends(make_door: Any, store_server: TcpStoreServer) -> None:
    """Its connection belongs to the workers' store alone."""
    door = make_door(take_in=store_server.adopt)
    store = TCPStore("127.0.0.1", door.addresses[0][1], timeout=TIMEOUT_S)
    store.set("k", "v")
    door.server.stop()
    assert store.get("k") == b"v"
    store.close()
