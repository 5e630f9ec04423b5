"""The engine in one cell over back ends that hang, fail, lose what they held, or tell half of the truth."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.cells import MemoryCell

from rallypoint.coordination import fence
from rallypoint.coordination.cell import engine
from rallypoint.coordination.cell.document import DOCUMENT_BYTES
from rallypoint.coordination.cell.engine import FIRST_PAUSE_S, CellCoordination
from rallypoint.coordination.engine import LeaseLostError, RefusedError, StoreGoneError, UnreachableError
from rallypoint.coordination.model import Compare, Put, Transaction
from rallypoint.errors import RendezvousConnectionError, RendezvousStateError
from rallypoint.testing.coordination_contract import events_until, get, keys, put, raises, read, soon, wait

LONG_TTL_S = 30.0
SHORT_S = 0.1


@pytest.fixture
def cell() -> MemoryCell:
    return MemoryCell()


@pytest.fixture
def connect(cell: MemoryCell) -> Iterator[Callable[[], CellCoordination]]:
    with contextlib.ExitStack() as clients:

        def connect() -> CellCoordination:
            client = CellCoordination(cell)
            clients.callback(client.close)
            client.connect(soon())
            return client

        yield connect


def failing(error: Exception) -> Callable[[str], None]:
    def fail(what: str) -> None:
        raise error

    return fail


def test_a_read_writes_nothing(cell: MemoryCell) -> None:
    with contextlib.closing(CellCoordination(cell)) as client:
        assert read(client, "").items == ()
        assert (cell.state, client.wake_at()) == (None, float("inf"))


@pytest.mark.parametrize(("backoff_s", "most_s"), [(0.03, 0.03), (0.0, FIRST_PAUSE_S)])
def test_the_pause_after_a_write_that_lost(
    cell: MemoryCell, backoff_s: float, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random, and at most as long as was asked for; but no longer than there is time for the change."""
    drawn: list[tuple[float, float]] = []
    monkeypatch.setattr(engine.random, "uniform", lambda *bounds: drawn.append(bounds) or bounds[1])  # type: ignore[attr-defined]

    def be_quicker(what: str) -> None:
        if what == "set" and not drawn and cell.state is not None:
            cell.version += 1

    with contextlib.closing(CellCoordination(cell, backoff_max_s=backoff_s)) as client:
        client.connect(soon())
        cell.before = be_quicker
        began_at = time.monotonic()
        put(client, "a", b"1")
        assert drawn == [(0, most_s)]
        assert time.monotonic() - began_at >= most_s


def test_a_back_end_that_hangs_does_not_keep_a_node_from_stopping_in_time(cell: MemoryCell, connect: Any) -> None:
    """P07: it is told to be unreachable, and fenced when its lease is over, though the call never comes back."""
    client, hang = connect(), threading.Event()
    client.grant(1.0, soon())
    cell.before = lambda what: hang.wait(20)
    try:
        with pytest.raises(UnreachableError, match="has not answered"):
            client.read("", time.monotonic() + SHORT_S)
        assert raises(UnreachableError, client.take_events)
        deadline = time.monotonic() + 10
        while isinstance(fence.judge(client.connection(), LONG_TTL_S, LONG_TTL_S, time.monotonic()), fence.Hold):
            assert time.monotonic() < deadline
            wait([client], min(client.valid_until(), deadline))
        assert time.monotonic() >= client.valid_until()
    finally:
        hang.set()


def test_what_was_given_up_is_not_done_later(cell: MemoryCell, connect: Any) -> None:
    """A node that has given up may have stopped its workers, and must not be found in the store afterwards."""
    client, other, hang = connect(), connect(), threading.Event()
    cell.before = lambda what: hang.wait(20)
    with pytest.raises(UnreachableError):
        client.transact(Transaction((), (Put("late", b""),)), time.monotonic() + SHORT_S)
    hang.set()
    cell.before = lambda what: None
    assert read(client, "").items == read(other, "").items == ()


class TheirError(Exception):
    """Like torch's: of another family, with the same name."""


TheirError.__name__ = "RendezvousConnectionError"


@pytest.mark.parametrize("error", [RendezvousConnectionError("away"), TheirError("away"), ConnectionResetError("away")], ids=repr)
def test_a_back_end_that_is_away_comes_back(cell: MemoryCell, connect: Any, error: Exception) -> None:
    client, other = connect(), connect()
    client.watch("", read(client, "").revision + 1, soon())
    client.grant(LONG_TTL_S, soon())
    cell.before = failing(error)
    with pytest.raises(UnreachableError, match="away"):
        put(client, "a")
    assert raises(UnreachableError, client.take_events)
    assert client.connection().unreachable_since is not None
    cell.before = lambda what: None
    put(other, "b")
    while raises(UnreachableError, client.take_events):
        wait([client], soon())
    assert client.connection().unreachable_since is None
    put(client, "c")
    assert "c" in keys(events_until(client, lambda events: "c" in keys(events)))


def test_other_errors_of_a_back_end_are_passed_on(cell: MemoryCell, connect: Any) -> None:
    client = connect()
    cell.before = failing(KeyError("mine"))
    with pytest.raises(KeyError, match="mine"):
        read(client, "")


@pytest.mark.parametrize("state", [b"", b"\x80\x04.", b"{}", b'{"format": "rallypoint-cell-1"}'], ids=repr)
def test_a_foreign_state_is_not_touched(cell: MemoryCell, state: bytes) -> None:
    cell.state, cell.version = state, 1
    with contextlib.closing(CellCoordination(cell)) as client, pytest.raises(RendezvousStateError, match="not rallypoint's"):
        client.connect(soon())
    assert cell.state == state


def test_a_state_that_is_gone_or_another_one_ends_the_job(cell: MemoryCell, connect: Any) -> None:
    client = connect()
    cell.state = None
    with pytest.raises(StoreGoneError, match="lost the state"):
        put(client, "a")
    connect()
    with pytest.raises(StoreGoneError, match="another run"):
        put(client, "a")


def test_a_back_end_that_asks_twice_by_itself_is_understood(cell: MemoryCell, connect: Any) -> None:
    """Its first try has written the state, and it tells of the second one, which has not."""
    client = connect()
    plain = cell.set_state

    def twice(state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        plain(state, token)
        return plain(state, token)

    cell.set_state = twice  # type: ignore[method-assign]
    created = Transaction((Compare("a", "create", 0),), (Put("a", b"1"),))
    assert client.transact(created, soon()).succeeded
    assert read(client, "a").revision == 2


def test_a_back_end_may_say_nothing_about_what_is_there(cell: MemoryCell, connect: Any) -> None:
    client, plain = connect(), cell.set_state
    cell.set_state = lambda state, token=None: plain(state, token) and None  # type: ignore[method-assign, func-returns-value]
    assert put(client, "a", b"1") == 2
    item = get(client, "a")
    assert item is not None
    assert item.value == b"1"


def test_a_change_that_others_forestall_again_and_again_ends_by_its_deadline(cell: MemoryCell, connect: Any) -> None:
    client = connect()
    cell.set_state = lambda state, token=None: (cell.state, cell.version, False)  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(UnreachableError):
        client.transact(Transaction((), (Put("a", b""),)), time.monotonic() + SHORT_S)


def test_what_no_cell_need_hold_is_refused(connect: Any) -> None:
    client = connect()
    with pytest.raises(RefusedError, match="may hold"):
        put(client, "a", bytes(DOCUMENT_BYTES))
    assert read(client, "").items == ()


def test_a_cell_is_written_only_when_there_is_something_to_say(cell: MemoryCell, connect: Any) -> None:
    client = connect()
    client.grant(LONG_TTL_S, soon())
    client.watch("", read(client, "").revision + 1, soon())
    asked: list[str] = []
    cell.before = asked.append
    until = time.monotonic() + 1.0
    events_until(client, lambda _: time.monotonic() >= until)
    assert set(asked) == {"get"}
    assert len(asked) < 12, "it is looked at less and less often"


def test_a_paused_observer_does_not_take_others_for_dead(cell: MemoryCell, connect: Any, wait_until: Any) -> None:
    """While it did not look, the others may have moved: the first look after a pause ends nothing."""
    owner, observer = connect(), connect()
    lease = owner.grant(1.0, soon())
    put(owner, "n", b"", lease)
    observer.watch("", 0, soon())
    events_until(observer, bool)
    until = time.monotonic() + 1.2
    while time.monotonic() < until:  # the observer is not called
        owner.take_events()
        wait([owner], until)
    told = events_until(observer, lambda _: time.monotonic() >= until + 0.2, keep=[owner])
    assert [event.cause for event in told] == []
    assert put(owner, "n", b"2", lease)


def test_a_lease_that_others_have_ended_is_lost_at_the_next_look(cell: MemoryCell, connect: Any) -> None:
    owner, observer = connect(), connect()
    lease = owner.grant(0.5, soon())
    put(owner, "n", b"", lease)
    observer.watch("", 0, soon())
    events_until(observer, lambda events: any(event.cause == "expired" for event in events))
    assert owner.valid_until() <= time.monotonic()
    with pytest.raises(LeaseLostError):
        put(owner, "n", b"", lease)
