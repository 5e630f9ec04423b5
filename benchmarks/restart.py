"""From the SIGKILL of one of four workers to all four running again."""

from __future__ import annotations

import os
import random
import signal
import time

from benchmarks.contestants import TORCHRUN, Contestant, in_turn
from benchmarks.figures import Figure, at_most
from benchmarks.jobs import sleepers
from benchmarks.predecessor import launchers_and_predecessor

__all__ = ["measure"]

JOBS = 12
TORCHRUN_EVERY = 3  # it takes seconds
WORKERS = 4


def measure() -> list[Figure]:
    contestants = launchers_and_predecessor()
    samples: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for turn in range(JOBS):
        for contestant in in_turn(contestants, turn):
            if contestant.name != TORCHRUN or turn % TORCHRUN_EVERY == 0:
                samples[contestant.name].append(_restart(contestant))
    return [Figure(f"restart: SIGKILL of 1 of {WORKERS} to all running again", "ms", samples, (at_most(100, "ms"),))]


def _restart(contestant: Contestant) -> float:
    """The first restart of a job: rallyrun lets a pause go before later ones."""
    with sleepers(contestant, WORKERS, ["--max-restarts", "1"]) as job:
        running = job.reports(WORKERS)
        killed_at = time.monotonic()
        os.kill(random.choice(running).pid, signal.SIGKILL)
        return (max(report.at for report in job.reports(WORKERS)) - killed_at) * 1000
