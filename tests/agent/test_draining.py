"""A node that has to leave does so, also where it cannot hear its workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from rallypoint.agent import draining
from rallypoint.agent.draining import Draining
from rallypoint.protocol.draining import Go, GoAtOnce, Stay
from rallypoint.protocol.job_records import NO_STEP, NodeDrain, Notice, Ruling
from rallypoint.protocol.session import Noticed, Ruled


class Job:
    """What the others are told."""

    def __init__(self) -> None:
        self.notices: list[int] = []
        self.drains: list[tuple[int, NodeDrain]] = []

    def give_notice(self, generation: int, why: str, left_s: float) -> None:
        self.notices.append(generation)

    def report_drain(self, generation: int, told: NodeDrain) -> None:
        self.drains.append((generation, told))

    def hosts_store(self) -> bool:
        return False


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(draining, "time", found)
    return found


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture(params=["no pages", "pages that cannot be mapped"])
def deaf(request: Any, job: Job, clock: Clock) -> Iterator[Draining]:
    """It runs workers of generation 1, and has no way to hear them."""
    fd = -1 if request.param == "no pages" else os.open("/dev/null", os.O_RDONLY)
    made: Any = job
    one = Draining(made, lambda: fd, 2, 30.0, "")
    one.begin(1)
    yield one
    one.close()
    if fd >= 0:
        os.close(fd)


def look(one: Draining) -> Stay | Go | GoAtOnce:
    return one.look(None, acts_as_one=True)


def test_the_time_runs_out_although_workers_cannot_be_heard(deaf: Draining, clock: Clock) -> None:
    assert look(deaf) == Stay()
    assert deaf.give_notice("SIGTERM was received") == 30.0
    clock.now += 29.0
    assert look(deaf) == Stay()
    assert (look_at := deaf.next_look_at()) is not None
    assert look_at <= clock.now + 1.0
    clock.now += 1.0
    assert look(deaf) == GoAtOnce("30 s after the notice not all workers have said that they have saved")


def test_a_second_notice_counts_although_workers_cannot_be_heard(deaf: Draining, clock: Clock) -> None:
    deaf.give_notice("SIGUSR1 was received")
    clock.now += 1.0
    deaf.give_notice("SIGTERM was received")
    assert look(deaf) == GoAtOnce("there was another notice, SIGTERM was received, before all workers had saved")


def test_others_may_have_heard_all(deaf: Draining) -> None:
    deaf.give_notice("SIGTERM was received")
    deaf.hear(Ruled(1, Ruling(7, True)))
    assert isinstance(look(deaf), Go)


def test_who_has_notice_says_so_at_once(deaf: Draining, job: Job) -> None:
    """Whoever counts who came and went knows why it is gone, however soon that is."""
    deaf.give_notice("SIGTERM was received")
    assert (job.notices, job.drains) == ([1], [(1, NodeDrain(True, False, NO_STEP, False))])


def test_a_notice_is_taken_along_into_the_generation_that_begins(deaf: Draining, job: Job, clock: Clock) -> None:
    """Also where another node's notice in that one is heard before its workers are started here."""
    deaf.give_notice("SIGTERM was received")
    deaf.hear(Noticed(2, Notice("it is tired", "b", 600.0)))
    deaf.begin(2)
    assert [generation for generation, _ in job.drains] == [1, 2]
    clock.now += 30.0
    assert isinstance(look(deaf), GoAtOnce)
