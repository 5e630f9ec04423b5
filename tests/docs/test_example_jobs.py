"""The jobs in examples/ do what their docstrings say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_demo_loses_a_worker_and_recovers(rallyrun: Any, tmp_path: Path) -> None:
    answer = rallyrun(
        ["--standalone", "--nproc-per-node", "4", "--max-restarts", "3", EXAMPLES / "recover.py", tmp_path / "demo"]
    )
    assert answer.returncode == 0, answer.stderr
    assert "worker 2, attempt 0: is killed after step 4" in answer.stdout
    assert "worker 2, attempt 1: goes on from step 5, found in its checkpoint" in answer.stdout
    ends = [line.split() for line in answer.stdout.splitlines() if "its sum is" in line]
    sums = {words[1]: int(words[-1]) for words in ends}  # by rank: one that was done before the restart says so again
    assert sum(sums.values()) == sum(range(10_000))
    assert "restart 1 of 3" in answer.stderr
    assert "SIGKILL" in answer.stderr


def test_function_returns_by_rank() -> None:
    command = [sys.executable, str(EXAMPLES / "launch_function.py")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert "squares by rank: [100, 121, 144, 169]" in answer.stdout, answer.stderr


@pytest.mark.torch
def test_torch_job_runs_unchanged(rallyrun: Any) -> None:
    answer = rallyrun(["--standalone", "--nproc-per-node", "4", EXAMPLES / "allreduce_torch.py"], timeout=100)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("the sum of 1..4 is 10") == 4
