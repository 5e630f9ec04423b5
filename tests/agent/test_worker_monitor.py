"""The agent's watch over its workers: what makes it look, and that nothing does where workers say nothing."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.agent.test_local_agent import LocalRendezvous

from rallypoint.agent import worker_monitor
from rallypoint.agent.peers import NoJob
from rallypoint.agent.records import RunRecord
from rallypoint.agent.worker_monitor import WorkerMonitor
from rallypoint.agent.workers import Worker, WorkerGroup, WorkerSpec
from rallypoint.base.defaults import ENV_PULSE
from rallypoint.hangs.pulse import PulseMapping, open_mapping
from rallypoint.protocol import pace

WORKERS = 3
Begin = Callable[..., tuple[WorkerMonitor, list[PulseMapping]]]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """``begin(workers=3, is_asked_for_progress=False)``: a watch over workers that have just started, and their pages."""
    monitors: list[WorkerMonitor] = []

    def begin(workers: int = WORKERS, is_asked_for_progress: bool = False) -> tuple[WorkerMonitor, list[PulseMapping]]:
        spec = WorkerSpec("trainer", workers, LocalRendezvous("job"), entrypoint="true")
        record = RunRecord(spec)
        monitor = WorkerMonitor(spec, record, lambda: None)
        monitors.append(monitor)
        monitor.open(is_asked_for_progress)
        places = [monitor.add_env(rank, {})[ENV_PULSE] for rank in range(workers)]
        group = WorkerGroup(spec)
        group.workers = [Worker(rank, rank) for rank in range(workers)]
        record.board.status = record.board.status.replace(ranks=tuple(range(workers)))
        monitor.watch(group, dict.fromkeys(range(workers), 1), None, NoJob())
        pages = [open_mapping(place, time.monotonic(), lambda: None) for place in places]
        return monitor, [page for page in pages if page is not None]

    yield begin
    for one in monitors:
        one.close()


def has_rung(monitor: WorkerMonitor) -> bool:
    fd = monitor.news_fd()
    return fd is not None and bool(select.select([fd], [], [], 0)[0])


@pytest.mark.parametrize("is_asked", [False, True], ids=["nobody asks", "with a health endpoint"])
def test_who_tells_of_no_step_is_never_looked_at(begin: Begin, is_asked: bool) -> None:
    """P38: signs of life alone are nothing to compare."""
    monitor, pages = begin(is_asked_for_progress=is_asked)
    for page in pages:
        page.beat(time.monotonic())
    monitor.look()
    assert monitor.next_look_at() is None
    assert not has_rung(monitor)


@pytest.mark.parametrize("is_asked", [False, True], ids=["nobody asks", "with a health endpoint"])
def test_the_first_step_wakes_the_agent_once(begin: Begin, is_asked: bool) -> None:
    monitor, pages = begin(is_asked_for_progress=is_asked)
    pages[1].tell_step(0, time.monotonic())
    assert has_rung(monitor)
    before = time.monotonic()
    monitor.look()
    look_at = monitor.next_look_at()
    assert look_at is not None
    assert before <= look_at - worker_monitor.PACE_PAUSE_S <= time.monotonic()
    pages[0].tell_step(0, time.monotonic())
    assert monitor.news_fd() is None
    monitor.stop_watching()
    assert monitor.next_look_at() is None


def test_one_worker_is_compared_with_nobody(begin: Begin) -> None:
    monitor, [page] = begin(workers=1)
    page.tell_step(0, time.monotonic())
    monitor.look()
    assert (monitor.news_fd(), monitor.next_look_at()) == (None, None)


def test_a_page_that_names_no_pipe_is_not_written_to(begin: Begin, tmp_path: Any) -> None:
    """What is in a page may be anybody's."""
    monitor, pages = begin()
    with (tmp_path / "file").open("wb+") as file:
        pages[0]._numbers[worker_monitor.BELL_OFFSET // 8] = file.fileno()
        pages[0].tell_step(0, 1.0)
        pages[1]._numbers[worker_monitor.BELL_OFFSET // 8] = 1 << 40
        pages[1].tell_step(0, 1.0)
    assert (tmp_path / "file").read_bytes() == b""
    assert not has_rung(monitor)


def test_a_rank_that_is_slow_is_told_of_once(begin: Begin, monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    monkeypatch.setattr(worker_monitor, "PACE_PAUSE_S", 0.0)
    monkeypatch.setattr(pace, "pause_of", lambda nodes: 0.0)
    monitor, pages = begin()
    for rank, page in enumerate(pages):
        for step in range(30):
            page.tell_step(step, 1.0 + step * (0.3 if rank == 2 else 0.1))
    for _ in range(5):
        monitor.look()
    assert warnings == ["rank 2 is slow: it takes 3.0 times as long for a step as the median (0.3 s, not 0.1 s)"]
