"""What is told of the memory of processes on standby; all else of them is shown with real ones, in e2e."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator

import pytest
from tests.conftest import WaitUntil

from rallypoint.agent.reserve import MEGABYTE, Reserve
from rallypoint.base import outbox, report
from rallypoint.hardware import gpu_use


class Waiting:
    """Two processes on standby that have become ready."""

    def __init__(self) -> None:
        self.pids, self.ended, self.is_ready = {0: 7, 1: 8}, "", False

    def look(self) -> None:
        self.is_ready = True

    def memory_bytes(self) -> int:
        return 300 * MEGABYTE

    def close(self) -> None:
        return


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    report.set_sink(lambda level, text: lines.append(text))
    yield lines
    report.set_sink(None)


@pytest.mark.parametrize("gpu_mib", [0, 1234])
def test_the_memory_on_gpus_is_told_where_the_driver_knows_it(
    gpu_mib: int, said: list[str], wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Collection[int]] = []

    class Meter:
        def memory_of(self, pids: Collection[int]) -> int:
            asked.append(pids)
            return gpu_mib * MEGABYTE

    monkeypatch.setattr(gpu_use, "GpuMeter", Meter)
    reserve = Reserve()
    with outbox.on_duty():
        reserve._look_at_standby(Waiting(), 0.0)  # type: ignore[arg-type]
        wait_until(lambda: not reserve._gpu_teller.is_busy)
    reserve.close()
    assert asked == [{7, 8}]
    gpu = ["the processes on standby have 1,234 MiB of GPU memory"] if gpu_mib else []
    assert said == ["2 processes on standby, with 300 MiB of memory", *gpu]


def test_a_driver_that_does_not_answer_keeps_nobody_waiting(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, answer = threading.Event(), threading.Event()

    class Meter:
        def memory_of(self, pids: Collection[int]) -> int:
            hangs.set()
            answer.wait(60)
            return 0

    monkeypatch.setattr(gpu_use, "GpuMeter", Meter)
    reserve = Reserve()
    try:
        with outbox.on_duty():
            reserve._look_at_standby(Waiting(), 0.0)  # type: ignore[arg-type]
            assert hangs.wait(60)
            reserve.close()
            assert outbox.flush(60.0), "what was given up is waited for no more"
    finally:
        answer.set()
    assert said == ["2 processes on standby, with 300 MiB of memory"]
