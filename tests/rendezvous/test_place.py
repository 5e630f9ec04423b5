"""What is left of a job in etcd is cleared when nobody of it is alive, and by nobody who comes too late."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from rallypoint.coordination.engine import Coordination
from rallypoint.coordination.model import Put, Transaction
from rallypoint.protocol import job_records as job
from rallypoint.rendezvous.place import clear_if_over
from rallypoint.testing.memory import MemoryEngine


def soon() -> float:
    return time.monotonic() + 5


@pytest.fixture
def engines() -> Iterator[tuple[Coordination, Coordination]]:
    store = MemoryEngine()
    one, two = store.connect(), store.connect()
    yield one, two
    one.close()
    two.close()


def put(engine: Coordination, key: str, lease: int = 0) -> None:
    engine.transact(Transaction((), (Put(key, b"x", lease),)), soon())


def keys(engine: Coordination) -> list[str]:
    return [item.key for item in engine.read("", soon()).items]


def test_what_the_dead_left_is_cleared(engines: tuple[Coordination, Coordination]) -> None:
    one, two = engines
    for key in (job.SETTINGS, "down/closed", "data/1.1/keys/k/value"):
        put(one, key)
    clear_if_over(two)
    assert keys(one) == []


def test_a_job_with_somebody_alive_is_left_alone(engines: tuple[Coordination, Coordination]) -> None:
    one, two = engines
    put(one, job.SETTINGS)
    put(one, "up/nodes/1", one.grant(5.0, soon()))
    clear_if_over(two)
    assert keys(two) == [job.SETTINGS, "up/nodes/1"]


def test_who_comes_second_does_not_clear_what_the_first_has_begun(
    engines: tuple[Coordination, Coordination], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = engines
    put(one, job.SETTINGS)
    seen = two.read("", soon())
    clear_if_over(one)
    put(one, job.SETTINGS)
    monkeypatch.setattr(two, "read", lambda prefix, deadline: seen)
    clear_if_over(two)
    assert keys(one) == [job.SETTINGS]
