"""The benchmark with faults: what a seed gives, and what counts. Its runs take minutes; here its job is hit once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks import goodput
from benchmarks.goodput import Ran, Step, goodput_of, schedule


def test_the_same_seed_gives_the_same_faults() -> None:
    assert schedule(1) == schedule(1)
    assert schedule(1) != schedule(2)


@pytest.mark.parametrize("seed", range(20))
def test_each_part_of_the_time_has_its_fault(seed: int) -> None:
    faults = schedule(seed, window_s=30.0, faults=3, workers=2)
    assert [int(fault.at_s // 10) for fault in faults] == [0, 1, 2]
    assert {fault.rank for fault in faults} <= {0, 1}
    assert {fault.kind for fault in faults} <= set(goodput.KINDS)


def test_only_steps_that_last_count() -> None:
    done = [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (1, 5.0),
        (2, 6.0),
        (3, 7.0),
        (4, 11.0),
    ]  # two of them again after a fault; the last too late
    ran = Ran("plain", 1, [Step(number, 100.0 + at, 0.5, "0x1p0") for number, at in done], window_s=10.0, missed=0)
    assert goodput_of(ran, step_s=1.0) == 30.0


def test_a_step_that_gives_another_loss_when_it_is_done_again_ends_the_run() -> None:
    with pytest.raises(SystemExit, match="plain: step 3, done again, has another loss"):
        goodput._check("plain", [Step(3, 1.0, 0.1, "0x1p0"), Step(4, 2.0, 0.1, "0x1p0"), Step(3, 3.0, 0.1, "0x1p1")])


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_the_job_goes_on_after_a_fault_with_the_same_losses(rallyrun: Any, wait_until: Any, tmp_path: Path) -> None:
    program = [str(goodput.PROGRAMS / "trains.py"), str(tmp_path), str(goodput.STEPS_PER_FILE), "memory"]
    with goodput._job("warm", [*goodput.RESTARTS, *goodput.MEMORY], program) as job:
        goodput._first_step(tmp_path, job)
        assert goodput._hit(goodput.Fault(0.0, 1, "error"), 0.0, tmp_path)
        before = len(goodput._steps(tmp_path))
        wait_until(lambda: "restart 1 of 100" in job.errors(), 100.0)
        wait_until(lambda: len(goodput._steps(tmp_path)) > before + 5, 100.0)
        assert "an injected fault" in job.errors()
        steps = goodput._steps(tmp_path)
    goodput._check("warm", steps)
