"""The store in memory keeps the contract of every engine, and can be cut off from its clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from rallypoint.coordination.engine import Coordination, LeaseLostError, UnreachableError
from rallypoint.coordination.model import Put, Transaction
from rallypoint.testing.coordination_contract import CoordinationContract, events_until, keys, put, read, soon
from rallypoint.testing.memory import MemoryEngine

LONG_TTL_S = 30.0


@pytest.fixture
def store() -> Iterator[MemoryEngine]:
    store = MemoryEngine()
    yield store
    store.keyspace.check()
    store.close()


class TestMemoryEngine(CoordinationContract):
    can_compact = True

    @pytest.fixture
    def connect(self, store: MemoryEngine) -> Callable[[], Coordination]:
        return store.connect


def test_who_comes_back_within_its_lease_has_lost_nothing(store: MemoryEngine) -> None:
    owner, other = store.connect(), store.connect()
    other.watch("", 0, soon())
    owner.watch("", 0, soon())
    put(owner, "n/owner", b"", owner.grant(LONG_TTL_S, soon()))
    owner.disconnect()
    with pytest.raises(UnreachableError):
        owner.take_events()
    assert owner.connection().unreachable_since is not None
    put(other, "n/other")
    owner.reconnect()
    assert owner.connection().unreachable_since is None
    assert keys(events_until(owner, lambda events: len(events) >= 2)) == ["n/owner", "n/other"]
    with pytest.raises(AssertionError, match="not told"):
        events_until(other, lambda events: len(events) > 2, 1.0, keep=[owner])
    assert owner.transact(Transaction((), (Put("n/owner", b"2", 1),)), soon()).succeeded


def test_who_comes_back_too_late_has_lost_its_lease(store: MemoryEngine) -> None:
    owner, other = store.connect(), store.connect()
    put(owner, "n/owner", b"", owner.grant(LONG_TTL_S, soon()))
    other.watch("", read(other, "").revision + 1, soon())
    owner.disconnect()
    store.vouch(owner)
    assert [event.cause for event in events_until(other, bool)] == ["vouched"]
    owner.reconnect()
    with pytest.raises(LeaseLostError):
        owner.take_events()


def test_packets_that_are_lost_are_silence(store: MemoryEngine) -> None:
    owner, other = store.connect(), store.connect()
    put(owner, "n/owner", b"", owner.grant(0.5, soon()))
    other.watch("", read(other, "").revision + 1, soon())
    owner.disconnect()
    assert [event.cause for event in events_until(other, bool)] == ["expired"]
