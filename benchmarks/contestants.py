"""Who takes part: rallyrun, the release before it, torchrun where it is installed, the floor; how each is asked for N workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "FLOOR",
    "PREDECESSOR",
    "PROGRAMS",
    "RALLYRUN",
    "TORCHRUN",
    "Contestant",
    "clean_environment",
    "floor",
    "in_turn",
    "launcher",
    "launchers",
]

RALLYRUN, PREDECESSOR, TORCHRUN, FLOOR = "rallyrun", "0.1.0", "torchrun", "floor"
PROGRAMS = Path(__file__).parent / "programs"

Command = Callable[[int, Sequence[str], Sequence[str]], list[str]]


class Contestant(NamedTuple):
    name: str
    path: Path
    command: Command  # (number of workers, options of the launcher, program and its arguments) -> argv


def launchers() -> list[Contestant]:
    """The launchers beside this interpreter, ours first."""
    folder = Path(sys.executable).parent
    found = [launcher(name, folder / name) for name in (RALLYRUN, TORCHRUN) if (folder / name).exists()]
    if not found or found[0].name != RALLYRUN:
        raise SystemExit(f"benchmarks: no {folder / RALLYRUN}; run them with 'make bench', which installs it")
    return found


def floor() -> Contestant:
    script = PROGRAMS / "floor.py"
    return Contestant(FLOOR, script, lambda count, _options, program: [sys.executable, str(script), str(count), *program])


def launcher(name: str, path: Path) -> Contestant:
    def command(count: int, options: Sequence[str], program: Sequence[str]) -> list[str]:
        return [str(path), "--standalone", "--nproc-per-node", str(count), *options, *program]

    return Contestant(name, path, command)


def in_turn(contestants: Sequence[Contestant], turn: int) -> list[Contestant]:
    """Now one is first, now the other: whoever comes after a slow one may find the machine less rested."""
    return list(contestants) if turn % 2 == 0 else list(reversed(contestants))


def clean_environment() -> dict[str, str]:
    """Ours, without what changes how Python starts and prints or what a launcher reads."""
    foreign = ("PET_", "TORCHELASTIC_", "TORCH_", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "OMP_NUM_THREADS", "LOGLEVEL")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
