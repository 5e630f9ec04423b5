"""Notice to a job of one node, and signals that are only passed on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SAVES_IN_MEMORY = """
import os, time
from rallypoint import worker
from rallypoint.worker import checkpoint

found = checkpoint.load()
step = 0 if found is None else found.step + 1
os.write(1, f"FROM {os.environ['RANK']} {step}\\n".encode())
while True:
    time.sleep(0.005)
    if worker.save_point(step):
        checkpoint.save(step, {"step": step})
        os.write(1, f"SAVED {os.environ['RANK']} {step}\\n".encode())
        time.sleep(3600)
    step += 1
"""
PASSES_TIME = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGUSR2, lambda *_: os.write(1, f"GOT {os.environ['RANK']}\\n".encode()))
child = subprocess.Popen(["sleep", "3600"])
os.write(1, f"READY {os.environ['RANK']}\\n".encode())
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
assert child.poll() is None, "it got the signal too"
"""


def test_a_snapshot_in_memory_says_that_a_worker_has_saved(
    start_rallyrun: Callable[..., Any], script: Callable[..., Path], tmp_path: Path
) -> None:
    """And the next job finds it in the folder."""
    program = script(SAVES_IN_MEMORY)
    kept = ["--checkpoint-memory", "64M", "--checkpoint-dir", str(tmp_path / "kept"), "--drain-grace", "600"]
    began = 0
    for _ in range(2):
        job = start_rallyrun(["--standalone", "--nproc-per-node", "2", *kept, program])
        assert [int(job.wait_for_line(f"FROM {rank}").split()[2]) for rank in (0, 1)] == [began] * 2
        job.send_signal(signal.SIGTERM)
        steps = {int(job.wait_for_line(f"SAVED {rank}").split()[2]) for rank in (0, 1)}
        assert job.wait() == 75
        assert len(steps) == 1
        began = steps.pop() + 1


def test_p17_chosen_signals_are_only_passed_on(
    start_rallyrun: Callable[..., Any], script: Callable[..., Path], tmp_path: Path
) -> None:
    """P17: to the workers, not to what they have started; nothing is torn down."""
    job = start_rallyrun(
        ["--standalone", "--nproc-per-node", "2", "--signals-to-forward", "USR2", script(PASSES_TIME), tmp_path / "finish"]
    )
    for rank in (0, 1):
        job.wait_for_line(f"READY {rank}")
    job.send_signal(signal.SIGUSR2)
    for rank in (0, 1):
        job.wait_for_line(f"GOT {rank}")
    (tmp_path / "finish").touch()
    assert job.wait() == 0


@pytest.mark.parametrize(
    ("flags", "told"),
    [(["--drain-grace", "5", "--drain-file", "here"], "--drain-file here is there already"),
     (["--drain-signals", "USR1"], "--drain-signals needs drain_grace"),
     (["--signals-to-forward", "USR9"], "--signals-to-forward: 'SIGUSR9' is not a signal")],
)  # fmt: skip
def test_flags_that_make_no_sense_are_refused(rallyrun: Callable[..., Any], tmp_path: Path, flags: list[str], told: str) -> None:
    (tmp_path / "here").touch()
    done = rallyrun(["--standalone", *flags, "--no-python", "true"])
    assert (done.returncode, told in done.stderr) == (2, True), done.stderr
