"""Training by DDP that goes on where it was when a worker is killed, without a file: its state is in the agents' memory.

    rallyrun --standalone --nproc-per-node 2 --max-restarts 3 --preload torch --checkpoint-memory 1G examples/ddp_resume.py [STEP]

With STEP, rank 1 is killed after that step, the first time it gets there.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rallypoint.worker import checkpoint

STEPS = 40


def batch(step: int) -> torch.Tensor:
    """The same whenever the step is done."""
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))


def warm_up(model: DistributedDataParallel) -> None:
    """DDP sums in another order after its first steps; if those are not ours, a step that is repeated gives the same bits."""
    for _ in range(2):
        model(batch(0)).sum().backward()


def train(killed_after: int) -> float:
    torch.manual_seed(7)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
    warm_up(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    found = checkpoint.load()
    first, loss = 0, torch.zeros(())
    if found is not None:
        model.load_state_dict(found.state["model"])
        optimizer.load_state_dict(found.state["optimizer"])
        first, loss = found.step + 1, found.state["loss"]
    print(f"rank {dist.get_rank()} begins at step {first}", flush=True)
    for step in range(first, STEPS):
        inputs = batch(step)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.square().sum(1, keepdim=True).sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpoint.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loss": loss.detach()})
        if step == killed_after and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(loss.detach())
    return loss.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    result = train(int(sys.argv[1]) if len(sys.argv) > 1 else -1)
    if dist.get_rank() == 0:
        print(f"the loss is {result.hex()}", flush=True)
    dist.destroy_process_group()
