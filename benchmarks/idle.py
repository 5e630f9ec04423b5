"""What the launcher costs while nothing happens: processor time of the launcher and its helpers, per second."""

from __future__ import annotations

import time

from benchmarks.contestants import Contestant, launchers
from benchmarks.figures import Figure, at_most
from benchmarks.jobs import cpu_time_ms, launcher_processes, sleepers

__all__ = ["measure"]

WORKERS = 4
SETTLE_S = 1.0
WINDOW_S = 10.0


def measure() -> list[Figure]:
    samples = {contestant.name: [_sample(contestant)] for contestant in launchers()}
    return [Figure("idle: processor time of launcher and helpers", "ms/s", samples, (at_most(0.3, "ms/s"),))]


def _sample(contestant: Contestant) -> float:
    with sleepers(contestant, WORKERS) as job:
        workers = {report.pid for report in job.reports(WORKERS)}
        time.sleep(SETTLE_S)
        pids = launcher_processes(job.process.pid, workers)
        before, began = cpu_time_ms(pids), time.monotonic()
        time.sleep(WINDOW_S)
        return (cpu_time_ms(pids) - before) / (time.monotonic() - began)
