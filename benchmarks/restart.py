"""From the SIGKILL of one of four workers to all four running again."""

from __future__ import annotations

import os
import random
import signal
import time

from benchmarks.contestants import Contestant, launchers
from benchmarks.figures import Figure, at_most
from benchmarks.jobs import sleepers

__all__ = ["measure"]

JOBS = 4
RESTARTS_PER_JOB = 3
WORKERS = 4


def measure() -> list[Figure]:
    samples: dict[str, list[float]] = {contestant.name: [] for contestant in launchers()}
    for _ in range(JOBS):
        for contestant in launchers():
            samples[contestant.name] += _restarts(contestant)
    return [Figure(f"restart: SIGKILL of 1 of {WORKERS} to all running again", "ms", samples, (at_most(100, "ms"),))]


def _restarts(contestant: Contestant) -> list[float]:
    times = []
    with sleepers(contestant, WORKERS, ["--max-restarts", str(RESTARTS_PER_JOB)]) as job:
        running = job.reports(WORKERS)
        for _ in range(RESTARTS_PER_JOB):
            killed_at = time.monotonic()
            os.kill(random.choice(running).pid, signal.SIGKILL)
            running = job.reports(WORKERS)
            times.append((max(report.at for report in running) - killed_at) * 1000)
    return times
