"""What the launcher costs while nothing happens: processor time of the launcher and its helpers, per second."""

from __future__ import annotations

import time

from benchmarks.contestants import TORCHRUN, Contestant, in_turn
from benchmarks.figures import Figure, at_most
from benchmarks.jobs import cpu_time_ms, launcher_processes, sleepers
from benchmarks.predecessor import launchers_and_predecessor

__all__ = ["measure"]

WORKERS = 4
ROUNDS = 3
SETTLE_S = 1.0
WINDOW_S = 10.0


def measure() -> list[Figure]:
    contestants = launchers_and_predecessor()
    samples: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for turn in range(ROUNDS):
        for contestant in in_turn(contestants, turn):
            if contestant.name != TORCHRUN or turn == 0:  # it looks ten times a second, each time alike
                samples[contestant.name].append(_sample(contestant))
    return [Figure("idle: processor time of launcher and helpers", "ms/s", samples, (at_most(0.3, "ms/s"),))]


def _sample(contestant: Contestant) -> float:
    with sleepers(contestant, WORKERS) as job:
        workers = {report.pid for report in job.reports(WORKERS)}
        time.sleep(SETTLE_S)
        pids = launcher_processes(job.process.pid, workers)
        before, began = cpu_time_ms(pids), time.monotonic()
        time.sleep(WINDOW_S)
        return (cpu_time_ms(pids) - before) / (time.monotonic() - began)
