"""P40: binding, virtual local ranks and the dry run, through the real command."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rallypoint.hardware.topology import read_topology

WORKER = """
    import json, os, subprocess, sys
    grandchild = subprocess.check_output([sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"], text=True)
    facts = {name: os.environ.get(name) for name in ("LOCAL_RANK", "RANK", "CUDA_VISIBLE_DEVICES")}
    facts.update(cpus=sorted(os.sched_getaffinity(0)), grandchild=json.loads(grandchild))
    print(json.dumps(facts))
"""
CORES = len({cpu.core for cpu in read_topology().cpus})


def answers(stdout: str) -> list[dict[str, Any]]:
    """What each worker printed, without the prefix of its lines, in the order of ranks."""
    return sorted((json.loads(line.partition("]:")[2]) for line in stdout.splitlines()), key=lambda facts: facts["RANK"])


@pytest.mark.skipif(CORES < 2, reason="needs two cores")
@pytest.mark.parametrize("form", [[], ["--run-path", "--start-method", "fork"]], ids=["script", "function"])
def test_p40_workers_are_bound_near_their_devices(rallyrun: Any, script: Callable[..., Path], form: list[str]) -> None:
    answer = rallyrun(["--nproc-per-node", "2", "--numa-binding", "exclusive", "--tee", "1", *form, script(WORKER)])
    assert answer.returncode == 0, answer.stderr
    first, second = answers(answer.stdout)
    assert first["cpus"] == first["grandchild"]
    assert second["cpus"] == second["grandchild"]
    assert not set(first["cpus"]) & set(second["cpus"])
    assert {*first["cpus"], *second["cpus"]} <= os.sched_getaffinity(0)


def test_p40_too_few_cores_are_an_error_of_usage(rallyrun: Any, script: Callable[..., Path]) -> None:
    workers = str(CORES + 1)
    answer = rallyrun(["--nproc-per-node", workers, "--numa-binding", "exclusive", script("print('started')")])
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert " that may be used; start fewer workers" in answer.stderr


def test_p40_each_worker_believes_to_be_the_first(rallyrun: Any, script: Callable[..., Path]) -> None:
    arguments = ["--nproc-per-node", "2", "--virtual-local-rank", "--tee", "1", script(WORKER)]
    answer = rallyrun(arguments, env={"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"})
    assert answer.returncode == 0, answer.stderr
    seen = [(facts["LOCAL_RANK"], facts["CUDA_VISIBLE_DEVICES"]) for facts in answers(answer.stdout)]
    assert seen == [("0", "GPU-a"), ("0", "GPU-b")]


def test_p40_a_dry_run_starts_nothing(rallyrun: Any, script: Callable[..., Path], tmp_path: Path) -> None:
    flags = ["--dry-run", "--nproc-per-node", "2", "--numa-binding", "node", "--log-dir", tmp_path / "logs", "--tee", "3"]
    secret = "a very long secret of the job"
    answer = rallyrun([*flags, script("print('started')"), "--lr", "1"], env={"RALLYPOINT_SECRET": secret})
    assert answer.returncode == 0, answer.stderr
    assert "started" not in answer.stdout.splitlines()
    assert "worker 1\n" in answer.stdout
    assert f"-u {tmp_path / 'worker.py'} --lr 1" in answer.stdout
    assert answer.stdout.count(": all of node ") == 2
    assert secret not in answer.stdout + answer.stderr
    assert not (tmp_path / "logs").exists()
