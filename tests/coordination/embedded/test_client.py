"""A node's side of the embedded store: it connects in spite of everything, notices a break, and goes on where it was."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.ports import free_port

from rallypoint.coordination.embedded import dialling
from rallypoint.coordination.embedded.client import EmbeddedCoordination
from rallypoint.coordination.embedded.dialling import dial
from rallypoint.coordination.embedded.server import CoordinationServer
from rallypoint.coordination.engine import LeaseLostError, RefusedError, StoreGoneError, StoreReplacedError, UnreachableError
from rallypoint.coordination.fence import Connection
from rallypoint.coordination.model import Event, Get, Put, Transaction

Start = Callable[..., CoordinationServer]
Connect = Callable[..., EmbeddedCoordination]
Soon = Callable[[], float]


def put(key: str, value: bytes = b"", lease: int = 0) -> Transaction:
    return Transaction((), (Put(key, value, lease),))


def events_until(client: EmbeddedCoordination, done: Callable[[list[Event]], object]) -> list[Event]:
    """What the client is told, however often its line breaks meanwhile, until `done`."""
    deadline = time.monotonic() + 10
    events: list[Event] = []
    while not done(events):
        assert time.monotonic() < deadline, events
        with contextlib.suppress(UnreachableError):
            events += client.take_events()
        select.select([client.fileno()], [], [], max(0.0, min(0.05, client.wake_at() - time.monotonic())))
    return events


@contextlib.contextmanager
def held(server: CoordinationServer) -> Iterator[None]:
    """The server does nothing, as on a machine that stands still; what is sent to it waits."""
    is_over = threading.Event()
    started = threading.Event()

    def wait() -> list[Event]:
        started.set()
        is_over.wait(10)
        return take_changes()

    keyspace = server._service.keyspace
    take_changes, keyspace.take_changes = keyspace.take_changes, wait  # type: ignore[method-assign]
    server._thread.wake_fd.set()
    assert started.wait(10)
    try:
        yield
    finally:
        keyspace.take_changes = take_changes  # type: ignore[method-assign]
        is_over.set()


class Cable:
    """The way between a client and a store, which can be cut, or fall silent."""

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []
        self.is_down = False

    def dial(self, address: Any) -> socket.socket:
        if self.is_down:
            raise OSError(101, "Network is unreachable")
        self.sockets.append(dial(address))
        return self.sockets[-1]

    def cut(self) -> None:
        """Both sides are told, as by a reset."""
        with contextlib.suppress(OSError):  # it is being dialled just now
            self.sockets[-1].shutdown(socket.SHUT_RDWR)


@pytest.fixture
def cable() -> Cable:
    return Cable()


@pytest.fixture
def wired(cable: Cable, soon: Soon) -> Iterator[Callable[[CoordinationServer], EmbeddedCoordination]]:
    """``wired(server)`` is a client on the `cable`."""
    with contextlib.ExitStack() as clients:

        def connect(server: CoordinationServer) -> EmbeddedCoordination:
            client = EmbeddedCoordination(*server.addresses[0], "job", None, dial=cable.dial)
            clients.callback(client.close)
            client.connect(soon())
            return client

        yield connect


Wired = Callable[[CoordinationServer], EmbeddedCoordination]


# --- connecting ------------------------------------------------------------------------------------------------------------


def test_nobody_there(connect: Connect) -> None:
    client = EmbeddedCoordination("127.0.0.1", free_port(), "job", None)
    try:
        with pytest.raises(UnreachableError, match=r"the store at 127.0.0.1:\d+ cannot be reached: connection refused"):
            client.connect(time.monotonic() + 0.2)
        state = client.connection()
        assert state.trouble == "connection refused"
        assert state.refused_since is not None
        assert state.unreachable_since is not None
    finally:
        client.close()


def test_p06_a_name_that_resolves_only_later(start_server: Start, soon: Soon, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server()
    tries = []

    def look_up(host: str, port: int) -> list[Any]:
        tries.append(host)
        if len(tries) < 3:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, ("127.0.0.1", 1)), (socket.AF_INET, server.addresses[0])]

    monkeypatch.setattr(dialling, "look_up", look_up)
    client = EmbeddedCoordination("store.example", 29400, "job", None)
    with contextlib.closing(client):
        client.connect(soon())
        assert client.identity() == server.incarnation
        assert client.local_address() == "127.0.0.1"
    assert tries == ["store.example"] * 3


def test_the_store_may_come_later(start_server: Start, soon: Soon) -> None:
    port = free_port()
    client = EmbeddedCoordination("localhost", port, "job", None)
    later = threading.Timer(0.3, start_server, kwargs={"port": port})
    later.start()
    with contextlib.closing(client):
        client.connect(soon())
    later.join()


def test_somebody_who_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "HANDSHAKE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = EmbeddedCoordination("127.0.0.1", silent.getsockname()[1], "job", None)
        with contextlib.closing(client), pytest.raises(UnreachableError, match=r"no answer within 0\.1 s"):
            client.connect(time.monotonic() + 0.3)


@pytest.mark.parametrize(
    ("run_id", "secret", "why"),
    [
        ("other", b"s", "the secret, or the name of the job, is not the same"),
        ("job", b"t", "the secret, or the name of the job, is not the same"),
        ("job", None, "this store asks for a secret, and the node has none"),
    ],
)
def test_p13_p36_refused_with_a_secret(
    start_server: Start, connect: Connect, run_id: str, secret: bytes | None, why: str
) -> None:
    with pytest.raises(RefusedError, match=why):
        connect(start_server("job", b"s"), run_id, secret)


def test_p13_another_jobs_store_refuses_by_name(start_server: Start, connect: Connect) -> None:
    with pytest.raises(RefusedError, match="this is the store of job 'theirs', and the node belongs to job 'ours'"):
        connect(start_server("theirs"), "ours")


def test_p13_what_is_no_store_at_all_is_called_so(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as web:

        def answer() -> None:
            accepted, _ = web.accept()
            with accepted:
                accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                accepted.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RefusedError, match="is not a rallypoint store"):
            connect(web.getsockname()[1])
        thread.join()


# --- breaks ----------------------------------------------------------------------------------------------------------------


def test_after_a_break_it_goes_on_where_it_was(
    start_server: Start, connect: Connect, wired: Wired, cable: Cable, soon: Soon
) -> None:
    """A reset costs nothing: the lease is taken up on the next connection."""
    server = start_server()
    client, other = wired(server), connect(server)
    lease = client.grant(30, soon())
    client.transact(put("nodes/a", b"", lease), soon())
    client.watch("log/", 1, soon())
    cable.is_down = True  # or it may have dialled again and been welcomed before it looks
    cable.cut()
    with pytest.raises(UnreachableError):
        client.take_events()
    cable.is_down = False
    assert client.valid_until() > time.monotonic() + 5
    other.transact(put("log/a"), soon())
    assert [event.key for event in events_until(client, len)] == ["log/a"]
    assert client.valid_until() > time.monotonic() + 5
    assert client.connection() == Connection(client.valid_until())
    assert [(item.key, item.lease) for item in other.read("nodes/", soon()).items] == [("nodes/a", lease)]


def test_no_event_is_lost_or_doubled_by_breaks(
    start_server: Start, connect: Connect, wired: Wired, cable: Cable, soon: Soon
) -> None:
    server = start_server()
    client, other = wired(server), connect(server)
    client.watch("log/", 1, soon())
    told: list[Event] = []
    for number in range(100):
        other.transact(Transaction((), tuple(Put(f"log/{number:03}/{part}", b"x" * 500) for part in range(3))), soon())
        if number % 7 == 3:
            cable.cut()
        with contextlib.suppress(UnreachableError):
            told += client.take_events()
    told += events_until(client, lambda events: len(told) + len(events) >= 300)
    assert [event.key for event in told] == [f"log/{number:03}/{part}" for number in range(100) for part in range(3)]


def test_a_call_under_way_when_the_line_breaks_is_not_repeated(
    start_server: Start, wired: Wired, cable: Cable, soon: Soon
) -> None:
    server = start_server()
    client = wired(server)
    with held(server):
        threading.Timer(0.05, cable.cut).start()
        with pytest.raises(UnreachableError, match=r"the connection to the store at .* broke during a call"):
            client.transact(put("a"), soon())
    (found,) = client.transact(Transaction((), (Put("b", b""), Get("a"))), soon()).items
    assert found is None or found.mod_revision == found.create_revision


def test_a_lease_that_ended_meanwhile_is_known_to_be_lost(
    start_server: Start, connect: Connect, wired: Wired, cable: Cable, soon: Soon
) -> None:
    server = start_server()
    client, other = wired(server), connect(server)
    client.transact(put("nodes/a", b"", client.grant(1.0, soon())), soon())
    other.watch("nodes/", other.read("nodes/", soon()).revision + 1, soon())
    cable.is_down = True
    cable.cut()
    (gone,) = events_until(other, len)
    assert (gone.key, gone.cause) == ("nodes/a", "expired")
    for _ in range(2):
        with pytest.raises(UnreachableError):
            client.take_events()
    assert client.connection().trouble == "network is unreachable"
    cable.is_down = False
    with pytest.raises(LeaseLostError):
        events_until(client, lambda _: False)
    assert client.valid_until() == -math.inf
    assert client.wake_at() == 0.0
    client.revoke(soon())
    assert client.valid_until() == math.inf
    assert client.grant(30, soon()) > 1


def test_a_session_that_got_a_lease_unheard_is_still_the_same_session(
    start_server: Start, wired: Wired, cable: Cable, soon: Soon
) -> None:
    """The answer to a grant was lost. The next connection took up the session, and took it for another: at the one after that,
    the lease that it had got meanwhile was given up while it lived. (Seed 1000813.)
    """
    client = wired(start_server())
    client.grant(30, soon())
    client._line.ask(lambda *_: None, "grant", 30.0)  # whose answer nobody hears
    client.read("", soon())
    cable.cut()
    with pytest.raises(LeaseLostError):
        events_until(client, lambda _: False)
    lease = client.grant(30, soon())
    cable.cut()
    with contextlib.suppress(UnreachableError):
        client.take_events()
    client.transact(put("nodes/a", b"", lease), soon())
    assert client.take_events() == []


def test_a_store_that_falls_silent_is_dialled_anew(
    wait_until: Any, soon: Soon, start_server: Start, wired: Wired, cable: Cable
) -> None:
    """No reset comes from a machine that is gone: only that keepalives are not answered tells."""
    server = start_server()
    client = wired(server)
    client.grant(0.6, soon())
    valid_until = client.valid_until()
    with held(server):
        while client.connection().unreachable_since is None:
            assert time.monotonic() < valid_until + 5
            with contextlib.suppress(UnreachableError):
                client.take_events()
            select.select([client.fileno()], [], [], max(0.0, min(0.05, client.wake_at() - time.monotonic())))
        assert client.connection().trouble == "no answer for 0.6 s"
        assert client.valid_until() == valid_until


def test_p16_another_store_at_the_same_address_is_the_end(start_server: Start, connect: Connect, soon: Soon) -> None:
    """P16: what the old store knew is gone, so nobody goes on as if it were not."""
    server = start_server()
    client = connect(server)
    server._say_farewell = lambda reason: None  # type: ignore[method-assign]  # as when it is killed
    server.stop()
    start_server(port=server.addresses[0][1])
    with pytest.raises(StoreReplacedError, match="has ended, and was started anew"):
        events_until(client, lambda _: False)
    with pytest.raises(StoreGoneError):
        client.read("", soon())


def test_p04_a_host_that_is_gone_refuses(start_server: Start, connect: Connect, wait_until: Any) -> None:
    server = start_server()
    client = connect(server)
    server._say_farewell = lambda reason: None  # type: ignore[method-assign]  # as when it is killed
    server.stop()

    def is_refused() -> bool:
        with contextlib.suppress(UnreachableError):
            client.take_events()
        return client.connection().refused_since is not None

    wait_until(is_refused)
    assert client.connection().trouble == "connection refused"


# --- watches and waiting ---------------------------------------------------------------------------------------------------


def test_what_comes_during_a_call_can_be_waited_for(start_server: Start, connect: Connect, soon: Soon) -> None:
    client = connect(start_server())
    client.watch("a", 1, soon())
    client.transact(put("a"), soon())
    client.read("", soon())
    assert client.wake_at() == 0.0
    assert select.select([client.fileno()], [], [], 0)[0]
    assert [event.key for event in client.take_events()] == ["a"]
    assert client.wake_at() == math.inf
    assert not select.select([client.fileno()], [], [], 0)[0]


def test_a_call_sleeps_although_there_is_news(
    start_server: Start, connect: Connect, soon: Soon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes that had come, and that nobody can take before the answer is there, kept a core busy until then."""
    server = start_server()
    client = connect(server)
    client.watch("a", 1, soon())
    client.transact(put("a"), soon())
    client.read("", soon())
    waits = []
    wait = client._wait
    monkeypatch.setattr(client, "_wait", lambda deadline: (waits.append(deadline), wait(deadline)))
    with held(server), pytest.raises(UnreachableError, match="did not answer in time"):
        client.read("", time.monotonic() + 0.2)
    assert len(waits) < 20
    assert select.select([client.fileno()], [], [], 0)[0]
    assert [event.key for event in client.take_events()] == ["a"]


def test_a_watch_begun_anew_begins_at_the_revision_given(start_server: Start, connect: Connect, soon: Soon) -> None:
    client = connect(start_server())
    for key in ("a", "b", "a"):
        client.transact(put(key), soon())
    client.watch("", 1, soon())
    client.watch("", 3, soon())
    assert [event.revision for event in events_until(client, len)] == [3, 4]
    client.unwatch("")
    client.transact(put("a"), soon())
    client.read("", soon())
    assert client.take_events() == []


def test_too_many_watches(start_server: Start, connect: Connect, soon: Soon) -> None:
    client = connect(start_server())
    for number in range(16):
        client.watch(str(number), 1, soon())
    with pytest.raises(ValueError, match="more than 16 watches"):
        client.watch("16", 1, soon())
    client.watch("15", 1, soon())


def test_a_store_that_does_not_answer_in_time(start_server: Start, connect: Connect, soon: Soon) -> None:
    server = start_server()
    client = connect(server)
    with pytest.raises(UnreachableError, match="did not answer in time"):
        client.read("", time.monotonic() - 1)
    client.read("", soon())


def test_a_request_that_is_too_large_is_not_sent(start_server: Start, connect: Connect, soon: Soon) -> None:
    client = connect(start_server())
    with pytest.raises(ValueError, match="more than a store takes"):
        client.transact(Transaction((), tuple(Put(str(number), b"\xff" * 100_000) for number in range(20))), soon())
    assert client.read("", soon()).items == ()


def test_it_can_be_closed_twice(start_server: Start, connect: Connect) -> None:
    client = connect(start_server())
    client.close()
    client.close()
