"""Who is slower than the others: by how long each rank takes for a step, as workers tell by `worker.progress`.

A rank is slow if it has taken at least a quarter longer than the median for its last steps, and much longer than ranks differ
anyway. It is told of once it was slow in two looks running, and once in a generation. Ranks that wait for each other in every
step take equally long, whoever holds them up: there, nothing but their stacks can tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rallypoint.base.records import Value

__all__ = ["LEAST_STEPS", "Pace", "Slow", "follow", "slow_ones", "slowness"]

SLOW = 1.25  # times the median
NOISE = 5.0  # times what ranks differ by from the median, at the median
LEAST_STEPS = 8  # before that, the first step and what it compiled still weighs too much
LEAST_STEP_S = 0.001  # whatever is quicker is no step of a training
LOOKS = 2


class Pace(Value):
    """How long one rank takes for a step, over its last ones; `steps` is how many were measured."""

    rank: int
    step_s: float
    steps: int


class Slow(Value):
    """One that is slower than the others."""

    rank: int
    step_s: float
    median_s: float

    @property
    def factor(self) -> float:
        return self.step_s / self.median_s

    @property
    def text(self) -> str:
        return f"takes {self.factor:.1f} times as long for a step as the median ({self.step_s:.3g} s, not {self.median_s:.3g} s)"


def slowness(paces: Iterable[Pace]) -> dict[int, float]:
    """How many times the median each rank takes for a step, where there are two or more to compare."""
    measured = [one for one in paces if one.steps >= LEAST_STEPS and one.step_s >= LEAST_STEP_S]
    if len(measured) < 2:
        return {}
    median_s = _median(one.step_s for one in measured)
    return {one.rank: one.step_s / median_s for one in measured}


def slow_ones(paces: Iterable[Pace]) -> tuple[Slow, ...]:
    """Those that are clearly slower than the others, the slowest first."""
    known = {one.rank: one for one in paces}
    factors = slowness(known.values())
    if not factors:
        return ()
    noise = _median(abs(factor - 1.0) for factor in factors.values())
    found = [
        Slow(rank, known[rank].step_s, known[rank].step_s / factor)
        for rank, factor in factors.items()
        if factor >= SLOW and factor - 1.0 > NOISE * noise
    ]
    return tuple(sorted(found, key=lambda one: (-one.factor, one.rank)))


def follow(seen: Mapping[int, int], slow: Iterable[Slow]) -> tuple[dict[int, int], tuple[Slow, ...]]:
    """In how many looks running each rank was slow, after another look; and those that are to be told of now."""
    slow = tuple(slow)
    told = {rank: times for rank, times in seen.items() if times >= LOOKS}
    now = {one.rank: seen.get(one.rank, 0) + 1 for one in slow}
    return {**told, **now}, tuple(one for one in slow if now[one.rank] == LOOKS)


def _median(values: Iterable[float]) -> float:
    """The lower one of two: that of two ranks is the quicker one's."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]
