"""A store whose name has several addresses, some of which lead nowhere; and names that nobody answers for."""

from __future__ import annotations

import contextlib
import errno
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pace import is_under
from tests.relay import black_hole, relay

from rallypoint.coordination.embedded import dialling
from rallypoint.coordination.embedded.client import EmbeddedCoordination
from rallypoint.coordination.embedded.dialling import (
    CONNECT_S,
    MOST_UNDER_WAY,
    REPEAT_S,
    STAGGER_S,
    Dialler,
    LinkBroken,
    advice,
    interleave,
    next_dial_at,
)
from rallypoint.coordination.embedded.server import CoordinationServer
from rallypoint.coordination.engine import RefusedError, UnreachableError

Start = Callable[..., CoordinationServer]
Soon = Callable[[], float]


@pytest.fixture
def client() -> Iterator[EmbeddedCoordination]:
    with contextlib.closing(EmbeddedCoordination("store.example", 29400, "job", None)) as made:
        yield made


def named(monkeypatch: pytest.MonkeyPatch, *places: tuple[str, int]) -> None:
    """The name of the store stands for these; a host may stand in several families."""
    found = [(int(socket.AF_INET6), (*one, 0, 0)) if ":" in one[0] else (int(socket.AF_INET), one) for one in places]
    monkeypatch.setattr(dialling, "look_up", lambda host, port: found)


def test_m7_an_address_that_is_a_black_hole_holds_nobody_up(
    client: EmbeddedCoordination, start_server: Start, soon: Soon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M7: the next one is called a moment later, and the one that leads nowhere is let go."""
    server = start_server()
    with black_hole("127.0.0.2") as nowhere:
        named(monkeypatch, ("127.0.0.2", nowhere), server.addresses[0])
        client.connect(soon())
        assert client.identity() == server.incarnation
        assert len(client._line.dialler._calls) == 0
        client.read("", soon())


def test_m7_many_black_holes(
    client: EmbeddedCoordination, start_server: Start, soon: Soon, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server()
    with contextlib.ExitStack() as holes:
        nowhere = [(f"127.0.0.{n}", holes.enter_context(black_hole(f"127.0.0.{n}"))) for n in range(2, 5)]
        named(monkeypatch, *nowhere, server.addresses[0])
        client.connect(soon())
    assert client.identity() == server.incarnation


def test_m7_the_first_to_welcome_us_wins(
    client: EmbeddedCoordination, start_server: Start, soon: Soon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M7: a slow way to the store and a quick one: the quick one is taken, and the store sees one client."""
    server = start_server()
    port = server.addresses[0][1]
    with relay(port, delay_s=3.0) as slow:
        named(monkeypatch, ("127.0.0.1", slow), ("127.0.0.1", port))
        client.connect(soon())
        assert client._line.dialler.home == (socket.AF_INET, ("127.0.0.1", port))


def test_m7_a_stranger_at_one_address_does_not_speak_for_the_others(
    client: EmbeddedCoordination, start_server: Start, soon: Soon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M7: it refuses us at once, in whatever language; the store at the other address welcomes us."""
    theirs, ours = start_server("another"), start_server("job")
    named(monkeypatch, theirs.addresses[0], ours.addresses[0])
    client.connect(soon())
    assert client.identity() == ours.incarnation


def test_m7_a_refusal_stands_when_nobody_else_answers(
    client: EmbeddedCoordination, start_server: Start, soon: Soon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M7: it is told although another address says nothing at all."""
    server = start_server("another")
    with black_hole("127.0.0.2") as nowhere:
        named(monkeypatch, ("127.0.0.2", nowhere), server.addresses[0])
        with pytest.raises(RefusedError, match="this is the store of job 'another'"):
            client.connect(soon())


def test_m7_a_network_that_mends_is_noticed_soon(
    client: EmbeddedCoordination, start_server: Start, soon: Soon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M7: a first call that is lost goes on, and others are made beside it."""
    server = start_server()
    with black_hole("127.0.0.2") as nowhere:
        lost = [(int(socket.AF_INET), ("127.0.0.2", nowhere))]
        answers = iter([lost, lost])
        found = [(int(socket.AF_INET), server.addresses[0])]
        monkeypatch.setattr(dialling, "look_up", lambda host, port: next(answers, found))
        client.connect(soon())
    assert client.identity() == server.incarnation


def test_m6_a_slow_way_is_waited_for(start_server: Start, soon: Soon) -> None:
    """M6: round trips of two seconds, with a secret."""
    server = start_server("job", b"secret")
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(relay(server.addresses[0][1], delay_s=1.0))
        client = stack.enter_context(contextlib.closing(EmbeddedCoordination("127.0.0.1", port, "job", b"secret")))
        deadline = soon()
        while not client.identity() and time.monotonic() < deadline:
            with contextlib.suppress(UnreachableError):
                client.connect(time.monotonic() + 0.2)  # in slices, as somebody does who has other things to look after
        assert client.identity() == server.incarnation


# --- names -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def silent_name_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[Any] | None], None]]:
    """Nobody answers for a name, until ``answer(addresses)``."""
    answered = threading.Event()
    given: list[Any] = []

    def look_up(host: str, port: int) -> list[Any]:
        answered.wait(30)
        return given

    def answer(addresses: list[Any] | None) -> None:
        given.extend(addresses or [])
        answered.set()

    monkeypatch.setattr(dialling, "look_up", look_up)
    yield answer
    answered.set()


def test_m7_a_name_server_that_is_silent_holds_nobody(
    client: EmbeddedCoordination, start_server: Start, soon: Soon, silent_name_server: Callable[[list[Any] | None], None]
) -> None:
    """M7: who waits for it can do other things, is told what is waited for, and goes on as soon as it answers."""
    began = time.monotonic()
    with pytest.raises(UnreachableError, match=r"no name server has answered where store.example is"):
        client.connect(began + 0.1)
    assert is_under(time.monotonic() - began, 5)
    assert "check the spelling of store.example" in client.advice()
    server = start_server()
    silent_name_server([(int(socket.AF_INET), server.addresses[0])])
    client.connect(soon())
    assert client.identity() == server.incarnation


def test_m7_a_silent_name_server_does_not_matter_once_it_has_answered(
    client: EmbeddedCoordination, start_server: Start, soon: Soon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M7: the addresses that the name had the last time are tried again."""
    released = threading.Event()
    asked: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as later:
        where = later.getsockname()

    def look_up(host: str, port: int) -> list[Any]:
        asked.append(host)
        if len(asked) > 1:
            released.wait(30)
        return [(int(socket.AF_INET), where)]

    monkeypatch.setattr(dialling, "look_up", look_up)
    monkeypatch.setattr(dialling, "STALE_NAME_S", 0.1)
    try:
        with pytest.raises(UnreachableError, match="connection refused"):
            client.connect(time.monotonic() + 0.2)
        server = start_server(port=where[1])
        client.connect(soon())
        assert client.identity() == server.incarnation
    finally:
        released.set()


V4, V6 = 2, 10


@pytest.mark.parametrize(
    ("given_order", "expected"),
    [
        ([], []),
        ([(V4, "a")], [(V4, "a")]),
        ([(V6, "a"), (V6, "b"), (V4, "c")], [(V6, "a"), (V4, "c"), (V6, "b")]),
        ([(V4, "a"), (V4, "b"), (V4, "c"), (V6, "d")], [(V4, "a"), (V6, "d"), (V4, "b"), (V4, "c")]),
    ],
)
def test_m7_families_take_turns(given_order: list[Any], expected: list[Any]) -> None:
    """M7: where one family leads nowhere, the second call is of the other."""
    assert interleave(given_order) == expected


@given(st.lists(st.tuples(st.sampled_from([V4, V6]), st.integers()), unique=True))
def test_m7_nobody_is_forgotten_or_called_twice(addresses: list[tuple[int, int]]) -> None:
    assert sorted(interleave(addresses)) == sorted(addresses)


@pytest.mark.parametrize(
    ("state", "at"),
    [
        ({"untried": 0, "under_way": 0}, -math.inf),  # nothing has been done yet
        ({"untried": 1, "under_way": 1, "last_began_at": 5.0}, 5.0 + STAGGER_S),
        ({"untried": 1, "under_way": 1, "last_began_at": 5.0, "last_failed_at": 4.0}, 5.0 + STAGGER_S),
        ({"untried": 1, "under_way": 1, "last_began_at": 5.0, "last_failed_at": 5.1}, -math.inf),
        ({"untried": 1, "under_way": 0, "last_began_at": 5.0}, -math.inf),
        ({"untried": 1, "under_way": 1, "last_began_at": 5.0, "is_connected": True}, 5.0 + STAGGER_S),
        ({"untried": 0, "under_way": 2, "last_began_at": 5.0}, 5.0 + REPEAT_S),
        ({"untried": 0, "under_way": 2, "last_began_at": 5.0, "is_connected": True}, math.inf),
        ({"untried": 0, "under_way": 0, "last_began_at": 5.0, "last_failed_at": 7.0, "pause_s": 0.5}, 7.5),
        ({"untried": 3, "under_way": MOST_UNDER_WAY, "last_began_at": 5.0}, math.inf),
    ],
)
def test_m7_when_the_next_one_is_dialled(state: dict[str, Any], at: float) -> None:
    """M7: a moment after the last, at once when one fails; none is waited for."""
    nothing = {"is_connected": False, "last_began_at": -math.inf, "last_failed_at": -math.inf, "pause_s": 0.0}
    assert next_dial_at(**{**nothing, **state}) == at


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        ({"is_known": False}, "check the spelling of store"),
        ({"is_connected": True}, "another program may have port 29400"),
        ({}, "a firewall may drop what is sent to port 29400"),
        ({"is_refused": True}, "its own /etc/hosts may say that store is 127.0.1.1; then use its address as the endpoint"),
        ({"is_refused": True, "is_name": False}, "is the agent on store started?"),
    ],
)
def test_m9_f20_what_is_advised(seen: dict[str, bool], told: str) -> None:
    everything_else = {"is_name": True, "is_known": True, "is_refused": False, "is_connected": False}
    assert told in advice("store", 29400, **{**everything_else, **seen})


class Call:
    """A call that is not answered, or refused."""

    is_connected, welcome = False, None

    def __init__(self, begun_at: float, is_refused: bool) -> None:
        self.begun_at, self.is_refused = begun_at, is_refused

    def pump(self) -> list[bytes]:
        if self.is_refused:
            raise LinkBroken("connection refused", errno.ECONNREFUSED)
        return []

    def watch(self, poll: object) -> None:
        """Nothing comes of it."""

    def close(self, poll: object) -> None:
        """There is nothing to close."""


def test_p04_a_call_from_before_does_not_hide_that_the_host_refuses_us_now() -> None:
    """Of a network that was cut and mends when the store is gone, the calls of the cut run out one by one (seed 276726)."""
    refuses_from = 2.0
    with contextlib.closing(select.epoll()) as poll:
        call: Any = lambda address, now: Call(now, is_refused=now == refuses_from)  # noqa: E731
        dialler = Dialler("127.0.0.1", 1, call, poll)
        with contextlib.closing(dialler):
            for now in (0.0, 1.0, refuses_from):
                dialler.pump(now)
            assert dialler.refused_since == refuses_from
            dialler.pump(CONNECT_S + 1.0)
            assert dialler.refused_since == refuses_from, "those that began at 0 and 1 have run out"
            assert dialler.trouble == "connection refused"
            dialler.pump(2 * CONNECT_S + 1.0)
            assert dialler.refused_since is None, "one that began later was not refused"
