"""What the launcher itself holds while four workers sleep, every helper process counted."""

from __future__ import annotations

import time

from benchmarks.contestants import in_turn
from benchmarks.figures import Figure, at_most
from benchmarks.jobs import Memory, launcher_processes, memory, sleepers
from benchmarks.predecessor import launchers_and_predecessor

__all__ = ["measure"]

ROUNDS = 3
WORKERS = 4
SETTLE_S = 0.5


def measure() -> list[Figure]:
    contestants = launchers_and_predecessor()
    samples: dict[str, list[Memory]] = {contestant.name: [] for contestant in contestants}
    for turn in range(ROUNDS):
        for contestant in in_turn(contestants, turn):
            with sleepers(contestant, WORKERS) as job:
                workers = {report.pid for report in job.reports(WORKERS)}
                time.sleep(SETTLE_S)
                samples[contestant.name].append(memory(launcher_processes(job.process.pid, workers)))
    return [
        Figure("memory: launcher and helpers, RSS", "MB", _field(samples, "rss_mb"), (at_most(30, "MB"),)),
        Figure("memory: launcher and helpers, PSS", "MB", _field(samples, "pss_mb")),
    ]


def _field(samples: dict[str, list[Memory]], field: str) -> dict[str, list[float]]:
    return {name: [getattr(value, field) for value in values] for name, values in samples.items()}
