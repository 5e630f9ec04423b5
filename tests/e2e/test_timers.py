"""Timers that workers set, through the real command: whoever is too late is ended, and the job goes on as after any failure."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

WITH_TIMERS = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
AFTER_S = 0.5
MOST_S = 0.5 + 2.0  # from the end of the time to the end of the worker, where two cores run the tests of others besides
OURS, THEIRS = "rallypoint.timers", "torch.distributed.elastic.timer"

# Of two workers the second is too late; whoever is started again has nothing to do.
LATE = """
import os, sys, time
import {package} as timer
rank = os.environ["RANK"]
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    os.write(1, f"again {{rank}}\\n".encode())
    sys.exit(0)
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=30, scope="all of it"):
    with timer.expires(after={after_s}, scope="quick"):
        pass
    if rank == "1":
        with timer.expires(after={after_s}, scope="slow step"):
            os.write(1, f"pid {{os.getpid()}}\\nentered {{time.monotonic_ns()}}\\n".encode())
            time.sleep(60)
    time.sleep(60)
"""


def events(logs: Path) -> list[dict[str, Any]]:
    """All of the only run in this folder."""
    [file] = logs.glob("*_*/events.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def named(told: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event["metadata"] for event in told if event["name"] == name]


def expiry(message: str) -> float:
    """After how many seconds, as it is told: counted from when the agent heard of the timer, which is a little later."""
    return float(re.fullmatch(r"timer slow step expired after (\S+) s", message)[1])  # type: ignore[index]


def check_late_worker(job: Any, numbers: Any, logs: Path, restarts: int) -> None:
    """It is ended in time, and its end is told with its reason."""
    job.wait_for(lambda: "failed: timer" in job.stderr, timeout_s=30.0)
    told_at = time.monotonic()
    assert job.wait() == 1 - restarts, job.stderr
    [pid], [entered_ns] = numbers("pid", job.stdout), numbers("entered", job.stdout)
    assert AFTER_S <= told_at - entered_ns / 1e9 < AFTER_S + MOST_S
    assert sorted(numbers("again", job.stdout)) == [0, 1][: 2 * restarts]
    told = events(logs)
    [expired], [failed] = named(told, "rallypoint.timer.expired"), named(told, "rallypoint.worker.failed")
    assert (expired["pid"], expired["scope"]) == (pid, "slow step")
    assert expiry(expired["message"]) <= AFTER_S
    assert (failed["pid"], failed["rank"], failed["exitcode"]) == (pid, 1, -signal.SIGKILL)
    assert failed["message"].startswith(expired["message"])
    [killed] = named(told, "kill worker process")  # as torchrun names it
    assert json.loads(killed["metadata"])["worker_pid"] == str(pid)


def test_a_worker_that_is_too_late_is_ended_and_the_job_goes_on(
    start_rallyrun: Any, script: Any, numbers: Any, tmp_path: Path, private_tmpdir: Path
) -> None:
    """P30: torch's agent kills itself with the worker's signal."""
    logs, worker = tmp_path / "logs", script(LATE.format(package=OURS, after_s=AFTER_S))
    flags = ["--nproc-per-node", "2", "--max-restarts", "1", "--restart-backoff", "0", "--log-dir", logs]
    job = start_rallyrun(["--standalone", *flags, worker], WITH_TIMERS)
    check_late_worker(job, numbers, logs, restarts=1)
    assert list(private_tmpdir.glob("watchdog_timer_*")) == []


def test_the_summary_says_which_timer_expired(start_rallyrun: Any, script: Any, numbers: Any, tmp_path: Path) -> None:
    """P30"""
    logs, pipe, worker = tmp_path / "logs", tmp_path / "pipe", script(LATE.format(package=OURS, after_s=AFTER_S))
    job = start_rallyrun(
        ["--standalone", "--nproc-per-node", "2", "--log-dir", logs, worker],
        {**WITH_TIMERS, "TORCHELASTIC_TIMER_FILE": str(pipe)},
    )
    check_late_worker(job, numbers, logs, restarts=0)
    summary = job.stderr.partition("First cause")[2]
    assert "rank: 1 (local_rank: 1)" in summary
    assert f"error: {named(events(logs), 'rallypoint.timer.expired')[0]['message']}" in summary
    assert not pipe.exists()


# Their time is over already: that of a stranger, of the test, of the warden, the agent and process 1. The last request is for the
# worker itself, and shows that all before it were read.
FOREIGN = """
import os, sys, time
from rallypoint.timers.file_timer import FileTimerRequest
agent = int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])
with open(os.environ["TORCHELASTIC_TIMER_FILE"], "w") as pipe:
    for pid in (*map(int, sys.argv[1:]), os.getppid(), agent, 1, os.getpid()):
        pipe.write(FileTimerRequest(pid, f"of {pid}", time.time() - 1, 15 if pid != os.getpid() else 10).to_json() + "\\n")
        pipe.flush()
time.sleep(60)
"""


def test_a_request_for_a_process_outside_of_the_job_signals_nobody(
    start_rallyrun: Any, script: Any, numbers: Any, tmp_path: Path
) -> None:
    logs, worker = tmp_path / "logs", script(FOREIGN)
    with subprocess.Popen(["sleep", "60"]) as stranger:
        try:
            job = start_rallyrun(["--standalone", "--log-dir", logs, worker, str(stranger.pid), str(os.getpid())], WITH_TIMERS)
            assert job.wait() == 1  # because of its own request, the last of all
            assert stranger.poll() is None
        finally:
            stranger.kill()
    told = events(logs)
    [failed], [expired] = named(told, "rallypoint.worker.failed"), named(told, "rallypoint.timer.expired")
    assert (failed["pid"], failed["exitcode"]) == (expired["pid"], -signal.SIGUSR1)


@pytest.mark.torch
def test_torch_s_own_client_works_in_a_worker(start_rallyrun: Any, script: Any, numbers: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed")
    logs, worker = tmp_path / "logs", script(LATE.format(package=THEIRS, after_s=AFTER_S))
    flags = ["--nproc-per-node", "2", "--max-restarts", "1", "--restart-backoff", "0", "--log-dir", logs]
    job = start_rallyrun(["--standalone", *flags, worker], WITH_TIMERS)
    check_late_worker(job, numbers, logs, restarts=1)
