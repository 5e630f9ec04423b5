"""The jobs in examples/ do what their docstrings say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_job_loses_a_worker_and_recovers(rallyrun: Any, tmp_path: Path) -> None:
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


@pytest.mark.torch
def test_ddp_goes_on_where_it_was_and_ends_with_the_same_bits(rallyrun: Any) -> None:
    size = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    flags = [*size, "--preload", "torch,torch._dynamo", "--checkpoint-memory", "64M"]  # the second is what an optimizer imports
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    killed, undisturbed = (rallyrun([*flags, EXAMPLES / "ddp_resume.py", *step], env, 100) for step in (["12"], []))
    assert [one.returncode for one in (killed, undisturbed)] == [0, 0], killed.stderr
    assert {"rank 0 begins at step 0", "rank 1 begins at step 0"} <= set(killed.stdout.splitlines())
    again = re.findall(r"rank (\d) begins at step (\d+)$", killed.stdout, re.MULTILINE)[2:]
    assert sorted(again) in ([("0", "12"), ("1", "12")], [("0", "13"), ("1", "13")]), "at most one step is repeated"
    (loss,) = (line for line in killed.stdout.splitlines() if line.startswith("the loss is"))
    assert loss in undisturbed.stdout.splitlines()
