"""A small training job, by DDP, that goes on from its newest checkpoint: in a file every so many steps, and in memory at each.

torchrun runs it too, so it imports rallypoint only where state is kept in memory.

    trains.py FOLDER STEPS_PER_FILE [memory]
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER, STEPS_PER_FILE, IN_MEMORY = Path(sys.argv[1]), int(sys.argv[2]), "memory" in sys.argv[3:]
RANK = int(os.environ["RANK"])
WIDTH, HIDDEN, BATCH = 256, 512, 192


def fail(_number: int, _frame: FrameType | None) -> None:
    raise RuntimeError(f"an injected fault, after {time.monotonic()} s")


def announce() -> None:
    """Who is hit when a fault is to hit this rank: from the first line on, as on a real machine."""
    signal.signal(signal.SIGUSR1, fail)
    new = FOLDER / f"new.{os.getpid()}"
    new.write_text(str(os.getpid()))
    new.rename(FOLDER / f"worker.{RANK}")


announce()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

if IN_MEMORY:
    from rallypoint.worker import checkpoint


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    layers = torch.nn.Linear(WIDTH, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Tanh()
    model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(HIDDEN, WIDTH)))
    for _ in range(2):  # after its first steps DDP sums in another order; if those are not ours, a step done again gives the same
        torch.autograd.backward(model(torch.zeros(BATCH, WIDTH)).sum())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    step = resume(model, optimizer)
    told = os.open(FOLDER / "steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while True:
        began = time.monotonic()
        inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1000 * step + RANK))
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.roll(1, 1).sin())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        took_s = time.monotonic() - began
        keep(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        if RANK == 0:
            os.write(told, f"{step} {time.monotonic()} {took_s} {float(loss).hex()}\n".encode())
        step += 1


def resume(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> int:
    """The step to begin with."""
    found, file = (checkpoint.load() if IN_MEMORY else None), FOLDER / "checkpoint"
    if found is not None:
        step, state = found.step, found.state
    elif file.exists():
        kept = torch.load(file, weights_only=True)
        step, state = kept["step"], kept["state"]
    else:
        return 0
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return step + 1


def keep(step: int, state: dict[str, Any]) -> None:
    if IN_MEMORY:
        checkpoint.save(step, state)
    if RANK == 0 and (step + 1) % STEPS_PER_FILE == 0:
        torch.save({"step": step, "state": state}, FOLDER / "checkpoint.new")
        (FOLDER / "checkpoint.new").rename(FOLDER / "checkpoint")


main()
