"""What it takes to look at a job: ``rallypoint status`` of 1,000 workers, a gigabyte of logs as one, and logs that are followed.

The workers of the large job are real ones that sleep, on twenty nodes of this machine, and each sample is a process of its own.
Logs are on a memory file system where there is one, because the speed of a disk is not what is measured. Of those that are
followed, no line may be missing, come twice or out of its rank's order, while files are put aside and workers restarted.
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.contestants import PROGRAMS, RALLYRUN, clean_environment, launchers
from benchmarks.figures import Figure, at_least, at_most
from benchmarks.nodes import running_agent
from benchmarks.rendezvous import free_port
from rallypoint.base import defaults

__all__ = ["measure"]

NODES, WORKERS = 20, 50
ROUNDS = 5
TIMEOUT_S = 180.0
LOG_BYTES = 1_000_000_000
WRITERS = (8, 64)
LINES_AT_ONCE = 2000
LINES_PER_S, LINES, MOST_BYTES = 20_000, 100_000, "1M"  # of each of the workers that are followed
TALKERS = 4
MB = 1e6


def measure() -> list[Figure]:
    with _runtime_folder():
        status, lost = _status(), _lost()
    lost_by = f"{TALKERS} workers with {LINES_PER_S:,} lines/s each and two restarts"
    return [
        Figure(
            f"seen: rallypoint status, {NODES} nodes, {NODES * WORKERS:,} workers", "s", {RALLYRUN: status}, (at_most(1, "s"),)
        ),
        *map(_merged, WRITERS),
        Figure(f"seen: lines that logs --follow loses, {lost_by}", "lines", {RALLYRUN: lost}, (at_most(0, "lines"),)),
    ]


def _merged(writers: int) -> Figure:
    rates = {RALLYRUN: _merge_rates(writers)}
    return Figure(f"seen: rallypoint logs, 1 GB of {writers} ranks", "MB/s", rates, (at_least(100, "MB/s"),), more_is_better=True)


@contextmanager
def _runtime_folder() -> Iterator[None]:
    """Of ours alone: no other job of this user is asked."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[defaults.ENV_RUNTIME_DIR] = folder
        yield
        del os.environ[defaults.ENV_RUNTIME_DIR]


def _rallypoint(*words: str) -> list[str]:
    return [sys.executable, "-m", "rallypoint", *words]


def _asked(*words: str) -> subprocess.CompletedProcess[str]:
    command, env = _rallypoint(*words), clean_environment()
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


# --- a large job -----------------------------------------------------------------------------------------------------------


def _status() -> list[float]:
    size = ["--nnodes", str(NODES), "--nproc-per-node", str(WORKERS)]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "large"]
    command = [str(launchers()[0].path), *size, *meeting, "--no-python", "sleep", "3600"]
    taken = []
    with ExitStack() as agents:
        for _ in range(NODES):
            agents.enter_context(running_agent(command))
        _wait(lambda: _is_whole(_asked("status", "large").stdout))
        for _ in range(ROUNDS):
            began = time.monotonic()
            seen = _asked("status", "large").stdout
            taken.append(time.monotonic() - began)
            if not _is_whole(seen):
                raise SystemExit(f"benchmarks: a node has not answered:\n{seen[:1000]}")
    return taken


def _is_whole(seen: str) -> bool:
    return f"running, {NODES} nodes, {NODES * WORKERS} workers" in seen and "no answer" not in seen


# --- logs ------------------------------------------------------------------------------------------------------------------


def _merge_rates(writers: int) -> list[float]:
    with _memory_folder() as folder:
        files = [folder / "attempt_0" / str(rank) / "stdout.log" for rank in range(writers)]
        size = sum(_write_log(path, rank, LOG_BYTES // writers) for rank, path in enumerate(files))
        rates = []
        for _ in range(ROUNDS):
            began = time.monotonic()
            subprocess.run(_rallypoint("logs", str(folder)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
            rates.append(size / MB / (time.monotonic() - began))
        return rates


def _write_log(path: Path, rank: int, size: int) -> int:
    """Lines as Python's `logging` writes them, one every 11 ms."""
    path.parent.mkdir(parents=True)
    at, step = datetime.datetime(2026, 11, 16) + datetime.timedelta(milliseconds=7 * rank), datetime.timedelta(milliseconds=11)
    written = 0
    with path.open("wb") as file:
        while written < size:
            lines = []
            for _ in range(LINES_AT_ONCE):
                at += step
                stamp = f"{at.isoformat(' ', 'milliseconds').replace('.', ',')}"
                lines.append(f"{stamp} INFO rank {rank}: loss 0.4123, 1234.5 samples/s, gradient norm 0.87, rate 3e-4\n")
            written += file.write("".join(lines).encode())
    return written


def _lost() -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        logs = ["--redirects", "3", "--log-dir", folder, "--log-max-size", MOST_BYTES]
        size = ["--rdzv-id", "talks", "--nproc-per-node", str(TALKERS), "--max-restarts", "2"]
        command = [str(launchers()[0].path), *size, *logs, str(PROGRAMS / "talker.py"), str(LINES_PER_S), str(LINES)]
        with running_agent(command) as agent, Path(folder, "followed").open("wb+") as followed:
            _wait(lambda: _asked("status", "talks").returncode == 0)
            follower = subprocess.Popen(_rallypoint("logs", "talks", "--follow"), env=clean_environment(), stdout=followed)
            agent.wait(TIMEOUT_S)
            follower.wait(TIMEOUT_S)
            followed.seek(0)
            return [float(_wrong_lines(followed.read().decode()))]


def _wrong_lines(text: str) -> int:
    """How many are missing, torn or come in the wrong place; of an attempt that failed, up to the last that came."""
    told: dict[tuple[str, str], list[int]] = {}
    whole = re.findall(r"^\[rank \d+.*?\] <(\d+) (\d+) (\d+)> as much as a line of a log may say$", text, re.MULTILINE)
    for attempt, rank, number in whole:
        told.setdefault((attempt, rank), []).append(int(number))
    wrong = text.count("\n") - len(whole)
    last = max(attempt for attempt, _ in told)
    for (attempt, _), numbers in told.items():
        count = LINES if attempt == last else numbers[-1] + 1
        wrong += max(count - len(set(numbers)), sum(number != place for place, number in enumerate(numbers)))
    return wrong + sum(LINES for rank in range(TALKERS) if (last, str(rank)) not in told)


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("benchmarks: a job does not run")
        time.sleep(0.05)


@contextmanager
def _memory_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)
