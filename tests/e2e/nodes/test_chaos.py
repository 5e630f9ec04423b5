"""Drills on a real job of two agents: what is hurt recovers, what is stopped goes on, and all of it is told."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import process_state

from rallypoint import inspect
from rallypoint.errors import UsageError

CHAOS = (sys.executable, "-m", "rallypoint", "chaos")


def drill(schedule: str, *flags: str) -> tuple[int, list[dict[str, Any]], str]:
    """A drill by a schedule: its exit code, what it told, and its last words."""
    command = [*CHAOS, "a-job", "--schedule", "-", "--json", *flags]
    done = subprocess.run(command, input=schedule, capture_output=True, text=True, timeout=110)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.fixture
def two(job: Any, wait_until: Any) -> tuple[Any, int]:
    """Two nodes of two workers each: the host of the store, and the rank of the other, which can be asked too."""
    host = job.start_host("--max-restarts", "3")
    other = job.start("--max-restarts", "3")
    for node in (host, other):
        node.wait_for_world(4, timeout_s=60)
    wait_until(lambda: (seen := inspect.jobs()) and len(seen[0].nodes) == 2 and seen[0].phase == "running")
    (rank,) = (node.node_rank for node in inspect.status().nodes if not node.hosts_store)
    assert rank is not None
    return host, rank


def test_a_job_stands_a_worker_killed_an_agent_stopped_and_a_node_preempted(two: tuple[Any, int]) -> None:
    host, other = two
    generation = inspect.status().generation
    killed = inspect.hurt("kill rank 3", "a-job")
    assert (killed.kind, killed.restarts, killed.standing.generation) == ("recovered", 1, generation + 1)
    code, told, error = drill(f"+0.1s stop agent of node {other} for 6s\n+8s preempt node {other}\n")
    assert code == 0, (told, error)
    assert [one["event"] for one in told if one["event"] != "waits"] in (
        ["begin", "fault", "undone", "outcome", "fault", "outcome", "end"],
        ["begin", "fault", "undone", "fault", "outcome", "outcome", "end"],  # on a slow machine
    )
    outcomes = {one["fault"]: one for one in told if one["event"] == "outcome"}
    stopped, preempted = (outcomes[one] for one in (f"stop agent of node {other} for 6s", f"preempt node {other}"))
    assert stopped["outcome"] == preempted["outcome"] == "recovered"
    assert stopped["generation"] > generation + 1  # its licence was over
    assert told[-1]["given"] == 2
    assert told[-1]["unjudged"] == 0
    host.wait_for_world(2, timeout_s=60)
    assert inspect.status().restarts == 1


def test_nobody_stays_stopped_after_ctrl_c_nor_after_kill_9(
    two: tuple[Any, int], start_command: Callable[..., Any], tmp_path: Path, wait_until: Any
) -> None:
    workers = {worker.rank: worker.pid for node in inspect.status().nodes for worker in node.workers}
    schedule = tmp_path / "drill.txt"
    schedule.write_text("+0s stop rank 3 for 10m\n+0s stop rank 1 for 10m\n")

    def states() -> list[str]:
        return [state[0] if (state := process_state(workers[rank])) else "" for rank in (1, 3)]

    for number in (signal.SIGINT, signal.SIGKILL):
        started = start_command([*CHAOS, "--schedule", str(schedule)])
        wait_until(lambda: states() == ["T", "T"])
        started.process.send_signal(number)
        wait_until(lambda: set(states()) <= {"S", "R"})
        code = started.wait()
        assert code == (130 if number == signal.SIGINT else -9)
        if number == signal.SIGINT:
            assert "stop rank 3 for 10m: it is undone" in started.stdout
            assert started.stdout.endswith("faults: 2 given, 2 unjudged\n")


def test_what_would_end_the_job_is_refused_before_anything_is_done(two: tuple[Any, int]) -> None:
    """And with ``--force`` it is done."""
    host, other = two
    code, told, error = drill(f"+1s kill rank 1\n+2s kill agent of node {1 - other}\n+3s kill rank 9\n")
    assert (code, told) == (2, [])
    assert f"line 2: kill agent of node {1 - other}: a-job would end: it hosts the coordination store" in error
    assert "line 3: kill rank 9: there is no rank 9 now" in error
    with pytest.raises(UsageError, match="a-job would end: it hosts the coordination store"):
        inspect.hurt(f"preempt node {1 - other}", "a-job")
    code, told, error = drill(f"+0s kill node {1 - other}\n", "--force", "--patience", "8s")
    assert code == 1, (told, error)
    (lost,) = (one for one in told if one["event"] == "outcome")
    assert lost["outcome"] == "lost"  # the other waits for the host to be started again
    assert host.wait() == -9
