"""A job of one node is seen and steered while it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rallypoint import inspect

STEPS = """
import time
from rallypoint import worker
for step in range(1_000_000):
    worker.progress(step)
    time.sleep(0.01)
"""


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rallypoint", *words], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def job(start_rallyrun: Callable[..., Any], script: Callable[..., Path], wait_until: Any) -> Any:
    started = start_rallyrun(["--nproc-per-node", "2", "--rdzv-id", "solo", "--max-restarts", "1", script(STEPS)])
    wait_until(lambda: [one.job for one in inspect.jobs()] == ["solo"])
    return started


def test_steps_are_seen_without_any_preparation(job: Any, wait_until: Any) -> None:
    first = wait_until(lambda: inspect.status().step)
    wait_until(lambda: (inspect.status().step or 0) > first)
    seen = inspect.status("solo")
    assert [worker.rank for worker in seen.nodes[0].workers] == [0, 1]
    assert all(worker.memory_bytes and worker.cpu_s is not None and worker.state for worker in seen.nodes[0].workers)
    assert seen.nodes[0].command.endswith("worker.py")
    assert "step" in command("status").stdout.splitlines()[0]


def test_a_restart_and_a_stop(job: Any, wait_until: Any) -> None:
    pids = {worker.pid for worker in inspect.status().nodes[0].workers}
    assert command("restart", "so").stdout == "solo: its workers are restarted\n"
    wait_until(lambda: (now := inspect.status()).generation == 2 and now.phase == "running")
    seen = inspect.status()
    assert seen.restarts == 0
    assert not pids & {worker.pid for worker in seen.nodes[0].workers}
    stopped = json.loads(command("stop", str(job.pid), "--json").stdout)
    assert stopped == {"format": 1, "job": "solo", "done": "it was told to stop its workers and end", "has_ended": True}
    assert job.wait() == 79


def test_a_worker_that_fails_is_in_the_history(job: Any, wait_until: Any) -> None:
    os.kill(inspect.status().nodes[0].workers[1].pid, signal.SIGKILL)
    wait_until(lambda: (now := inspect.status()).restarts == 1 and now.phase == "running")
    (happened,) = inspect.status().nodes[0].history
    assert "rank 1" in happened.why
    assert inspect.status().nodes[0].failed_workers == 1


def test_an_agent_that_is_stopped_is_named(job: Any) -> None:
    """It does not answer, and nobody waits for it for ever."""
    os.kill(job.pid, signal.SIGSTOP)
    try:
        found = command("ps")
        assert f"process {job.pid}: " in found.stderr
        assert "does not answer within 10 s; is it stopped?" in found.stderr
    finally:
        os.kill(job.pid, signal.SIGCONT)


def test_a_killed_agent_is_not_seen_any_more(job: Any) -> None:
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    assert inspect.jobs() == []


def test_stacks_of_a_job_without_preparation(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By py-spy where it is installed, for which something else stands in here; else as the kernel sees it, and what to do."""
    workers = inspect.status().nodes[0].workers
    bare = command("stacks", "solo", "--rank", "1")
    assert f"--- rank 1\n=== process {workers[1].pid}, as the kernel sees it" in bare.stdout
    assert "install py-spy, or start the job with --hang-timeout" in bare.stdout
    assert "--- rank 0" not in bare.stdout
    spy = tmp_path / "py-spy"
    spy.write_text('#!/bin/sh\necho "Thread 1: $*"\n')
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    told = json.loads(command("stacks", "--json", str(workers[0].pid)).stdout)
    assert [(one["rank"], [each["how"] for each in one["processes"]]) for one in told["workers"]] == [(None, ["py-spy"])]
    spied = command("stacks")
    for worker in workers:
        heading = f"--- rank {worker.rank}\n=== process {worker.pid}, by py-spy\n"
        assert f"{heading}Thread 1: dump --native --pid {worker.pid}\n" in spied.stdout
    assert command("stacks", "--rank", "1,7-8").stderr == (
        "rallypoint stacks: error: solo has no ranks 7-8; there are ranks 0-1\n"
    )
    assert "is not a list of ranks" in command("stacks", "--rank", "x").stderr


AWAITS_WORD = """
import os, time
print("awaiting word", flush=True)
while not os.path.exists("word"):
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("flags", "env", "phase", "why"),
    [
        (["--preload", "slow"], {"PYTHONPATH": "."}, "starting", "the modules of --preload are being imported"),
        (["--preflight", "python slow.py"], {}, "waiting", "its checks (--preflight) are not done yet"),
    ],
    ids=["imports", "checks"],
)
def test_a_job_that_takes_long_to_start_is_seen(
    start_rallyrun: Callable[..., Any],
    script: Callable[..., Path],
    wait_until: Any,
    flags: list[str],
    env: dict[str, str],
    phase: str,
    why: str,
) -> None:
    folder = script(AWAITS_WORD, "slow.py").parent
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    common = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    job = start_rallyrun([*common, *flags, script("print('ran')")], {**env, "PATH": path})
    (seen,) = wait_until(inspect.jobs)
    assert (seen.phase, seen.nodes[0].pid, seen.nodes[0].workers) == (phase, job.pid, ())
    told = command("status", str(job.pid)).stdout
    assert told.startswith(f"{seen.job}: {phase}, 1 node, ")
    assert why in told
    (folder / "word").touch()
    assert job.wait() == 0, job.stderr
    assert job.stdout.count("ran") == 2


def test_a_job_that_fails_at_once_and_takes_long_to_stop_is_seen(
    start_rallyrun: Callable[..., Any], script: Callable[..., Path], wait_until: Any, tmp_path: Path
) -> None:
    """It never had the quiet moment in which an agent otherwise begins to answer."""
    worker = script("""
        import os, signal, sys, time
        if os.environ["RANK"] == "1":
            while not os.path.exists("deaf"):
                time.sleep(0.001)
            sys.exit(7)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("deaf", "w").close()
        time.sleep(600)
        """)
    job = start_rallyrun(["--standalone", "--nproc-per-node", "2", "--shutdown-timeout", "600", worker])
    (seen,) = wait_until(lambda: [one for one in inspect.jobs() if one.phase == "stopping"])
    assert "exited with code 7" in seen.nodes[0].why
    os.kill(seen.nodes[0].workers[0].pid, signal.SIGKILL)
    assert job.wait() == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("status",), "no job of this user runs on this machine"),
        (("status", "--jsn"), "unknown flag --jsn; did you mean --json?"),
        (("ps", "job"), "usage: rallypoint ps"),
        (("drain",), "usage: rallypoint drain NODE"),
    ],
)
def test_what_is_wrong_is_said(words: tuple[str, ...], error: str) -> None:
    found = command(*words)
    assert found.returncode == 2
    assert found.stderr.startswith(f"rallypoint {words[0]}: error: {error}")
    assert command(words[0], "--help").stdout.startswith(f"usage: rallypoint {words[0]}")
