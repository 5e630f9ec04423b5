"""Workers that need torch, with ``--preload torch`` or ``--standby``: from start, and from a worker's SIGKILL, to a step in all.

Where there is a GPU, the step is done there, by one worker: its context is part of what is measured.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.contestants import PROGRAMS, RALLYRUN, Contestant, in_turn
from benchmarks.figures import Figure, Target, at_most
from benchmarks.jobs import Job
from benchmarks.predecessor import launchers_and_predecessor

__all__ = ["GIBIBYTES", "measure", "on_gpu"]

ROUNDS = 5
STARTED, RESTARTED = 8, 4
GIBIBYTES, SAVES, PINNED_AFTER = 10, 5, 2  # the first save into each of two slots makes them known to the driver
START_TARGETS = (at_most(2500, "ms"),)
RESTART_TARGETS = (at_most(150, "ms"),)
GPU_TARGETS = (at_most(700, "ms"),)
STANDBY_TARGETS = (at_most(100, "ms"),)
REGISTERED_S = 6.0  # within which a process on standby sees both slots, and makes them known to the driver

ON_STANDBY = "on standby, with"

Sample = Callable[[Contestant, int], float]


def measure() -> list[Figure]:
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed here, so there is nothing to preload;", end=" ")
        return []
    if Path("/dev/nvidiactl").exists():
        return list(on_gpu(launchers_and_predecessor(), ROUNDS))
    contestants, killed = launchers_and_predecessor(), f"SIGKILL of 1 of {RESTARTED}"
    return [
        _standby(contestants[0], f"standby: {killed} to the next step of all", RESTARTED),
        _figure(contestants, f"warm: exec to torch ready in {STARTED} workers", STARTED, START_TARGETS, _start),
        _figure(contestants, f"warm: {killed} to torch ready in all", RESTARTED, RESTART_TARGETS, _restart),
    ]


def on_gpu(contestants: Sequence[Contestant], rounds: int) -> Iterator[Figure]:
    """Those of one worker with a GPU, each when it is measured."""
    killed = "SIGKILL of a worker to its next step on the GPU"
    yield _figure(contestants, f"warm: {killed}", 1, GPU_TARGETS, _restart, rounds)
    yield _standby(contestants[0], f"standby: {killed}", 1, rounds)
    yield from _state(contestants[0], "state", 1300, [], rounds)
    yield from _state(contestants[0], "standby", 350, ["--standby"], rounds)[1:]


def _figure(
    contestants: Sequence[Contestant], name: str, workers: int, targets: tuple[Target, ...], sample: Sample, rounds: int = ROUNDS
) -> Figure:
    samples: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for turn in range(rounds):
        for contestant in in_turn(contestants, turn):
            samples[contestant.name].append(sample(contestant, workers))
    return Figure(name, "ms", samples, targets)


def _standby(ours: Contestant, name: str, workers: int, rounds: int = ROUNDS) -> Figure:
    """Only we have it; so there is nothing to compare with."""
    samples: list[float] = []
    for _ in range(rounds):
        with Job(ours.command(workers, ["--max-restarts", "1", "--standby"], [str(PROGRAMS / "torch_standby.py")])) as job:
            running = job.reports(workers)
            job.wait_for_line(ON_STANDBY)
            killed_at = time.monotonic()
            os.kill(random.choice(running).pid, signal.SIGKILL)
            samples.append((max(report.at for report in job.reports(workers)) - killed_at) * 1000)
    return Figure(name, "ms", {RALLYRUN: samples}, STANDBY_TARGETS)


def _state(ours: Contestant, name: str, most_ms: int, more: list[str], rounds: int) -> list[Figure]:
    """Only we can keep it; so there is nothing to compare with."""
    saves: list[float] = []
    returns: list[float] = []
    loads: list[float] = []
    for _ in range(rounds):
        options = ["--max-restarts", "1", "--preload", "torch", "--checkpoint-memory", "40G", *more]
        with Job(ours.command(1, options, [str(PROGRAMS / "gpu_state.py"), str(GIBIBYTES)])) as job:
            told = [line.split() for line in job.lines(SAVES)]
            if more:
                job.wait_for_line(ON_STANDBY)
                time.sleep(REGISTERED_S)
            saves += [float(took_s) * 1000 for _, _, took_s, _ in told[PINNED_AFTER:]]
            killed_at = time.monotonic()
            os.kill(int(told[-1][-1]), signal.SIGKILL)
            (_, at, took_s, _), _same = (line.split() for line in job.lines(2))
            returns.append((float(at) - killed_at) * 1000)
            loads.append(float(took_s) * 1000)
    return [
        Figure(f"{name}: save of {GIBIBYTES} GiB from the GPU", "ms", {RALLYRUN: saves}, (at_most(250, "ms"),)),
        Figure(f"{name}: SIGKILL to {GIBIBYTES} GiB back on the GPU", "ms", {RALLYRUN: returns}, (at_most(most_ms, "ms"),)),
        Figure(f"{name}: of that, load()", "ms", {RALLYRUN: loads}),
    ]


def _job(contestant: Contestant, workers: int, options: Sequence[str]) -> Job:
    """Only we can have it imported before."""
    preload = ["--preload", "torch"] if contestant.name == RALLYRUN else []
    return Job(contestant.command(workers, [*options, *preload], [str(PROGRAMS / "torch_ready.py")]))


def _start(contestant: Contestant, workers: int) -> float:
    with _job(contestant, workers, []) as job:
        return (max(report.at for report in job.reports(workers)) - job.started_at) * 1000


def _restart(contestant: Contestant, workers: int) -> float:
    with _job(contestant, workers, ["--max-restarts", "1"]) as job:
        running = job.reports(workers)
        killed_at = time.monotonic()
        os.kill(random.choice(running).pid, signal.SIGKILL)
        return (max(report.at for report in job.reports(workers)) - killed_at) * 1000
