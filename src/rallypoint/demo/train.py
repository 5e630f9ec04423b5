"""The program of the demo: steps that all ranks make together, each of which is kept, so that a new attempt goes on from there.

As in real training, no rank is a step ahead of another: each waits for the files of all others.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from rallypoint import worker
from rallypoint.base import defaults
from rallypoint.base.environment import own

__all__: list[str] = []

STEP_S = 0.05
WAIT_S = 0.005


def main(folder: Path, steps: int, hang_at: int) -> None:
    rank, size = int(own[defaults.ENV_RANK]), int(own[defaults.ENV_WORLD_SIZE])
    first = resume_step(folder)
    say(f"pid {os.getpid()} rank {rank} of {size} from step {first}")
    for step in range(first, steps):
        time.sleep(STEP_S)
        if rank == 1 and step == hang_at and own[defaults.ENV_RESTART_COUNT] == "0":
            wait_for_a_lock_that_nobody_gives_back()
        (folder / f"{step}.{size}.{rank}").touch()
        while not all((folder / f"{step}.{size}.{other}").exists() for other in range(size)):
            worker.heartbeat()  # it is not this rank that hangs
            time.sleep(WAIT_S)
        worker.progress(step)
        if rank == 0:
            say(f"step {step + 1} of {steps}")


def resume_step(folder: Path) -> int:
    """After the last step that all ranks of some world have made."""
    made: dict[tuple[int, int], int] = {}
    for path in folder.iterdir():
        step, size, _ = map(int, path.name.split("."))
        made[step, size] = made.get((step, size), 0) + 1
    return 1 + max((step for (step, size), count in made.items() if count == size), default=-1)


def wait_for_a_lock_that_nobody_gives_back() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
