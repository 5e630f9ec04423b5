"""Trains a small network by DDP over gloo, with a checkpoint every few steps, from which it goes on when it is started again.

Each step's data is made from the number of the step and the rank, so a step is the same whenever it is done. Before its last
steps it waits until a file is there. Then it trains once more from the beginning, in one go and without checkpoints. Of both,
rank 0 writes the loss and a digest of the parameters, bit for bit.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from telling import tell
from torch.nn.parallel import DistributedDataParallel

CHECKPOINT_STEPS = 5
LAST_STEPS = 5
BATCH = 16
PAUSE_S = 0.02


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    made_from = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(BATCH, 8, generator=made_from)
    return inputs, inputs.square().sum(1, keepdim=True).sin()


def make_model() -> DistributedDataParallel:
    """After a first step DDP arranges its buckets anew, and sums in another order from then on: that step is not one of ours."""
    torch.manual_seed(7)
    layers = (torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    for _ in range(2):
        model(batch(0, dist.get_rank())[0]).sum().backward()
    return model


class Training:
    def __init__(self, checkpoint: Path | None) -> None:
        self.checkpoint = checkpoint
        self.model = make_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.step, self.loss = 0, torch.zeros(())
        if checkpoint is not None and checkpoint.exists():
            self._load(torch.load(checkpoint, weights_only=True))

    def run(self, steps: int) -> None:
        while self.step < steps:
            self._do_step()
            if self.checkpoint is not None and self.step % CHECKPOINT_STEPS == 0:
                self._save(self.checkpoint)
                time.sleep(PAUSE_S)

    def result(self) -> str:
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return f"{self.loss.item().hex()} {digest.hexdigest()}"

    def _do_step(self) -> None:
        inputs, wanted = batch(self.step, dist.get_rank())
        loss = torch.nn.functional.mse_loss(self.model(inputs), wanted)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()
        dist.all_reduce(self.loss)
        self.step += 1

    def _save(self, checkpoint: Path) -> None:
        """Under another name first: whoever is killed meanwhile leaves the last one whole."""
        if dist.get_rank() == 0:
            draft = checkpoint.with_suffix(".draft")
            torch.save({"step": self.step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, draft)
            draft.rename(checkpoint)
        tell(step=self.step)

    def _load(self, saved: dict) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step = saved["step"]


def train(folder: Path, steps: int) -> tuple[str, str]:
    killed, undisturbed = Training(folder / "checkpoint.pt"), Training(None)
    tell(resumed=killed.step)
    killed.run(steps - LAST_STEPS)
    while not os.path.exists(folder / "finish"):
        time.sleep(PAUSE_S)
    killed.run(steps)
    undisturbed.run(steps)
    return killed.result(), undisturbed.result()


def main(folder: Path, steps: int) -> None:
    """The models are gone before the group is: DDP that outlives its group can hang when it is freed."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    killed, undisturbed = train(folder, steps)
    if dist.get_rank() == 0:
        (folder / "result.killed").write_text(killed)
        (folder / "result.undisturbed").write_text(undisturbed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
