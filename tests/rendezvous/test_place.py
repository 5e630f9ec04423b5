"""What is left of a job in etcd is cleared when nobody of it is alive, and by nobody who comes too late.

A store that was started anew is taken only by those who wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from rallypoint.coordination.engine import Coordination, StoreReplacedError
from rallypoint.coordination.model import Put, Transaction
from rallypoint.protocol import job_records as job
from rallypoint.protocol.restarts import Purse
from rallypoint.rendezvous.place import Place, clear_if_over
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


# --- a store that was started anew -----------------------------------------------------------------------------------------


class Somewhere(Place):
    """A place whose store can be replaced by another."""

    def __init__(self, host_timeout_s: float) -> None:
        super().__init__("somewhere", 1.0, host_timeout_s=host_timeout_s)
        self.store = MemoryEngine()

    def _new_engine(self) -> Coordination:
        return self.store.connect()

    def _open(self, engine: Coordination, deadline: float) -> None:
        pass

    def close(self, close_timeout_s: float) -> None:
        self.close_store()


def join(place: Place) -> Coordination:
    connected = place.connect(5.0, 1.0, 1.0, lambda seconds: True)
    assert connected is not None
    return connected[0]


@pytest.mark.parametrize("host_timeout_s", [0.0, 60.0])
def test_another_store_is_taken_only_by_who_waits_for_one(host_timeout_s: float) -> None:
    """P16: whoever does not is told that its job is not there any more."""
    place = Somewhere(host_timeout_s)
    join(place).close()
    place.store = MemoryEngine()
    if host_timeout_s:
        join(place).close()
    else:
        with pytest.raises(StoreReplacedError, match="without the state of this job"):
            join(place)


def test_what_members_share_does_not_move_into_another_store() -> None:
    """P16: what is left of the old generation has the store of the old one, or none."""
    place = Somewhere(60.0)
    join(place).close()
    shared = place.open_store(job.Generation(3, 7, 2, 4, "", 0, "", Purse()))
    place.store = MemoryEngine()
    engine = join(place)
    with pytest.raises(Exception, match="what was shared in the old one is gone"):
        shared.set("key", b"value")
    assert keys(engine) == []
    place.new_connection().close()  # whoever asks the job as it is now gets there
    engine.close()
    place.close(0.0)
