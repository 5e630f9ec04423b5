"""A job that loses a worker and recovers: ``rallyrun --standalone --nproc-per-node 4 --max-restarts 3 recover.py FOLDER``.

Each worker adds up its own share of the numbers below and writes a checkpoint after every step. In the first attempt worker 2
is killed half-way, as the kernel does to a process that uses too much memory. The launcher stops the others and starts the
whole group again, and each worker goes on from its checkpoint instead of from the beginning.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

STEPS = 10
NUMBERS_PER_STEP = 1000
STEP_S = 0.05
VICTIM, FATAL_STEP = 2, 4

RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def say(text: str) -> None:
    """In one write: print() writes the end of the line by itself, and another worker could come in between."""
    os.write(1, f"worker {RANK}, attempt {ATTEMPT}: {text}\n".encode())


def load(checkpoint: Path) -> tuple[int, int]:
    """The step to go on with, and the sum so far."""
    if not checkpoint.exists():
        return 0, 0
    state = json.loads(checkpoint.read_text())
    return state["step"], state["total"]


def save(checkpoint: Path, step: int, total: int) -> None:
    """In one piece or not at all: a worker may be killed in the middle of a write."""
    draft = checkpoint.with_suffix(".draft")
    draft.write_text(json.dumps({"step": step, "total": total}))
    os.replace(draft, checkpoint)


def share(step: int) -> range:
    start = step * NUMBERS_PER_STEP
    return range(start + RANK, start + NUMBERS_PER_STEP, WORLD_SIZE)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / f"rank{RANK}.json"
    first_step, total = load(checkpoint)
    say(f"goes on from step {first_step}, found in its checkpoint" if first_step else "starts from the beginning")
    for step in range(first_step, STEPS):
        total += sum(share(step))
        time.sleep(STEP_S)
        save(checkpoint, step + 1, total)
        if (RANK, step, ATTEMPT) == (VICTIM, FATAL_STEP, 0):
            say(f"is killed after step {step}")
            os.kill(os.getpid(), signal.SIGKILL)
    say(f"has done all {STEPS} steps; its sum is {total}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
