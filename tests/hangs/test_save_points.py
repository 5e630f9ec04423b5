"""A worker asks whether to save, and its agent answers: both ends of the same page."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from rallypoint import worker
from rallypoint.hangs.pulse import DrainBoard, PulseBoard, open_mapping


@pytest.fixture
def agents_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[DrainBoard]:
    pages = PulseBoard(1)
    monkeypatch.setattr(worker, "_page", open_mapping(pages.place(0), time.monotonic(), at_end=lambda: None))
    monkeypatch.setattr(worker, "_steps_asked", 0)
    board = DrainBoard(pages.fileno(), 1)
    yield board
    board.close()
    monkeypatch.undo()
    pages.close()


def test_without_a_notice_nothing_is_saved(agents_end: DrainBoard) -> None:
    assert [worker.save_point(step) for step in range(3)] == [False] * 3
    assert worker.draining() is None
    worker.saved()
    assert agents_end.answers() == [(3, False, False)]


def test_a_worker_waits_until_the_step_is_known_and_is_told_once(agents_end: DrainBoard) -> None:
    worker.save_point(7)
    agents_end.hold(time.monotonic() + 60)
    assert 0 < (worker.draining() or 0) <= 60
    told: list[bool] = []
    thread = threading.Thread(target=lambda: told.extend(worker.save_point(step) for step in (8, 9, 10)))
    thread.start()
    while agents_end.answers() == [(8, False, False)]:
        time.sleep(0.001)
    assert told == []
    agents_end.let_go(9)
    thread.join(30)
    assert told == [False, True, False]
    assert agents_end.answers() == [(11, True, True)], "to go on says that it has saved"


def test_a_worker_that_skips_the_step_saves_at_the_next(agents_end: DrainBoard) -> None:
    agents_end.hold(time.monotonic() + 60)
    agents_end.let_go(41)
    assert [worker.save_point(step) for step in (30, 40, 50)] == [False, False, True]
    assert agents_end.answers() == [(51, True, False)]
    worker.saved()
    assert agents_end.answers() == [(51, True, True)]


def test_nobody_waits_longer_than_there_is_time(agents_end: DrainBoard) -> None:
    agents_end.hold(time.monotonic() - 1)
    assert worker.draining() == 0
    assert not worker.save_point()
    assert agents_end.answers() == [(1, False, False)], "it counts for itself"


def test_outside_of_a_launcher_all_of_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_page", None)
    assert (worker.save_point(), worker.draining()) == (False, None)
    worker.saved()
    worker.on_drain(lambda _: None)
