"""From exec to the first line of the *last* worker."""

from __future__ import annotations

from benchmarks.contestants import FLOOR, PROGRAMS, TORCHRUN, Contestant, floor, in_turn
from benchmarks.figures import Figure, Target, ratio_at_most
from benchmarks.jobs import Job
from benchmarks.predecessor import launchers_and_predecessor

__all__ = ["measure"]

ROUNDS = 15
TORCHRUN_EVERY = 3  # it takes seconds
WORKERS = (1, 4, 8)
TARGETS: dict[int, tuple[Target, ...]] = {
    1: (ratio_at_most(0.1, TORCHRUN),),
    8: (ratio_at_most(1.3, FLOOR),),
}


def measure() -> list[Figure]:
    return [_figure(count) for count in WORKERS]


def _figure(count: int) -> Figure:
    contestants = [floor(), *launchers_and_predecessor()]
    for contestant in contestants:
        _sample(contestant, count)  # the first one reads from the disk
    samples: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for round_number in range(ROUNDS):
        for contestant in in_turn(contestants, round_number):
            if contestant.name != TORCHRUN or round_number % TORCHRUN_EVERY == 0:
                samples[contestant.name].append(_sample(contestant, count))
    plural = "s" if count > 1 else ""
    return Figure(f"start: exec to the last first line, {count} worker{plural}", "ms", samples, TARGETS.get(count, ()))


def _sample(contestant: Contestant, count: int) -> float:
    with Job(contestant.command(count, (), [str(PROGRAMS / "first_line.py")])) as job:
        last = max(float(line) for line in job.lines(count))
        job.wait()
        return (last - job.started_at) * 1000
