"""How much of its time a job spends on work that lasts while faults hit it: goodput, with the same faults for every launcher.

A fault kills a worker or has it raise an error. When, which and how is drawn from a seed: one fault in each equal part of the
time, somewhere in it. The time runs from the first step of the job: what a start takes is measured by itself. Steps count that
the job is ahead at the end, each with the time that a step takes when nothing goes wrong, the median of all runs. Steps that are
lost and done again do not count twice; and they must give the same loss, bit for bit, or the run is worth nothing.

    python -m benchmarks.goodput --seeds 1 2 3
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.contestants import PROGRAMS, RALLYRUN, TORCHRUN, launchers
from benchmarks.figures import Figure
from benchmarks.jobs import Job

__all__ = ["OWN_STORE", "Fault", "Ran", "Step", "goodput_of", "main", "measure", "schedule"]

SEEDS = (1, 2, 3)
WORKERS = 2
WINDOW_S = 20.0
FAULTS = 3
STEPS_PER_FILE = 50
PATIENCE_S = 120.0
KINDS = {"kill": signal.SIGKILL, "error": signal.SIGUSR1}
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"  # without it torchrun's workers wait for dead ones after a restart, with gloo
RESTARTS = ["--max-restarts", "100"]
AT_ONCE = ["--restart-backoff", "0"]  # as torchrun: faults as close as these would be taken for a job that cannot run
WARM = [*AT_ONCE, "--preload", "torch"]
MEMORY = [*WARM, "--checkpoint-memory", "256M"]
WAYS: dict[str, tuple[list[str], list[str]]] = {  # what our launcher is given, and what the program is
    "plain": (AT_ONCE, []),
    "warm": (WARM, []),
    "warm, with state in memory": (MEMORY, ["memory"]),
}


class Fault(NamedTuple):
    at_s: float  # after the first step
    rank: int
    kind: str


class Step(NamedTuple):
    """As rank 0 tells of it when it is done, and kept."""

    number: int
    at: float
    took_s: float
    loss: str


class Ran(NamedTuple):
    name: str
    seed: int
    steps: list[Step]
    window_s: float
    missed: int  # faults that found no worker: the job had not yet recovered from the one before


def schedule(seed: int, window_s: float = WINDOW_S, faults: int = FAULTS, workers: int = WORKERS) -> list[Fault]:
    draw, part_s = random.Random(seed), window_s / faults
    drawn = [(draw.random(), draw.randrange(workers), draw.choice(sorted(KINDS))) for _ in range(faults)]
    return [Fault(round((part + where) * part_s, 3), rank, kind) for part, (where, rank, kind) in enumerate(drawn)]


def goodput_of(ran: Ran, step_s: float) -> float:
    """The share of the time, in per cent, that went into steps that last."""
    begin = ran.steps[0].at
    last = [step for step in ran.steps if step.at <= begin + ran.window_s][-1]
    return 100 * (last.number - ran.steps[0].number) * step_s / ran.window_s


def measure(seeds: Sequence[int] = SEEDS, window_s: float = WINDOW_S) -> list[Figure]:
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed here, so there is nothing to train;", end=" ")
        return []
    rans = [_run(name, seed, window_s) for seed in seeds for name in _names()]
    step_s = median(step.took_s for ran in rans for step in ran.steps)
    found = {name: [goodput_of(ran, step_s) for ran in rans if ran.name == name] for name in _names()}
    of_torchrun = {TORCHRUN: found[TORCHRUN]} if TORCHRUN in found else {}
    return [Figure(f"goodput: {name}", "%", {RALLYRUN: found[name], **of_torchrun}, more_is_better=True) for name in WAYS]


def _names() -> list[str]:
    return [TORCHRUN, *WAYS] if any(one.name == TORCHRUN for one in launchers()) else list(WAYS)


def _run(name: str, seed: int, window_s: float) -> Ran:
    flags, words = WAYS.get(name, ([], []))
    with tempfile.TemporaryDirectory(prefix="rallypoint-goodput-") as temporary:
        folder = Path(temporary)
        program = [str(PROGRAMS / "trains.py"), str(folder), str(STEPS_PER_FILE), *words]
        with _job(name, [*RESTARTS, *flags], program) as job:
            begin = _first_step(folder, job)
            missed = sum(not _hit(fault, begin, folder) for fault in schedule(seed, window_s))
            _sleep_until(begin + window_s)
            if job.process.poll() is not None:
                raise SystemExit(f"benchmarks: {name} gave up, seed {seed}\n{job.errors()}")
        steps = _steps(folder)
    _check(name, steps)
    return Ran(name, seed, steps, window_s, missed)


def _job(name: str, options: Sequence[str], program: Sequence[str]) -> Job:
    contestant = next(one for one in launchers() if one.name == (TORCHRUN if name == TORCHRUN else RALLYRUN))
    command = contestant.command(WORKERS, options, program)
    return Job(["env", OWN_STORE, *command] if name == TORCHRUN else command)


def _first_step(folder: Path, job: Job) -> float:
    deadline = time.monotonic() + PATIENCE_S
    while not (steps := _steps(folder)):
        if time.monotonic() > deadline or job.process.poll() is not None:
            raise SystemExit(f"benchmarks: {job.process.args!r} made no step\n{job.errors()}")
        time.sleep(0.01)
    return steps[0].at


def _hit(fault: Fault, begin: float, folder: Path) -> bool:
    """Whether there was somebody to hit."""
    _sleep_until(begin + fault.at_s)
    try:
        os.kill(int((folder / f"worker.{fault.rank}").read_text()), KINDS[fault.kind])
    except ProcessLookupError:
        return False
    return True


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _steps(folder: Path) -> list[Step]:
    text = (folder / "steps").read_text() if (folder / "steps").exists() else ""
    words = [line.split() for line in text.splitlines()]
    return [Step(int(number), float(at), float(took_s), loss) for number, at, took_s, loss in words]


def _check(name: str, steps: Iterable[Step]) -> None:
    losses: dict[int, str] = {}
    for step in steps:
        if losses.setdefault(step.number, step.loss) != step.loss:
            raise SystemExit(f"benchmarks: {name}: step {step.number}, done again, has another loss")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description="Goodput under faults, for each launcher.")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--window", type=float, default=WINDOW_S, help="seconds of each run (default: %(default)s)")
    options = parser.parse_args()
    for seed in options.seeds:
        faults = "; ".join(f"{fault.kind} of rank {fault.rank} at {fault.at_s:.1f} s" for fault in schedule(seed, options.window))
        print(f"seed {seed}: {faults}", flush=True)
    rans = []
    for seed in options.seeds:
        for name in _names():
            rans.append(_run(name, seed, options.window))
            print(f"seed {seed}, {name}: {len(rans[-1].steps)} steps done", flush=True)
    step_s = median(step.took_s for ran in rans for step in ran.steps)
    print(f"a step takes {step_s * 1000:.1f} ms")
    for ran in rans:
        missed = f"; {ran.missed} of {FAULTS} faults found no worker" if ran.missed else ""
        print(f"seed {ran.seed}, {ran.name}: goodput {goodput_of(ran, step_s):.0f} %{missed}")


if __name__ == "__main__":
    main()
