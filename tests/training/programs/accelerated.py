"""Trains a line by Hugging Face Accelerate, on data that it makes; it knows nothing of who launched it."""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from telling import tell
from torch.utils.data import DataLoader, TensorDataset

STEPS = 30


def make_data() -> DataLoader:
    inputs = torch.linspace(-1, 1, 64).unsqueeze(1)
    return DataLoader(TensorDataset(inputs, 3 * inputs + 1), batch_size=8)


def train() -> tuple[int, float]:
    """How many processes took part, and the slope that they found."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3), make_data())
    for _ in range(STEPS):
        for inputs, wanted in data:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), wanted))
            optimizer.step()
    slopes = accelerator.gather(accelerator.unwrap_model(model).weight.detach().reshape(1))
    assert len(set(slopes.tolist())) == 1, slopes
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return accelerator.num_processes, round(slopes[0].item(), 3)


def launcher() -> str:
    """Programs are children of rallypoint's warden; functions are run by its code."""
    parent = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    is_ours = parent == "rally-warden" or "rallypoint.processes.function_worker" in sys.modules
    return "rallypoint" if is_ours else "another"


def main() -> None:
    processes, slope = train()
    tell(processes=processes, slope=slope, launcher=launcher())


if __name__ == "__main__":
    main()
    # Accelerate's models refer to themselves, so torch's threads live on while the interpreter goes, and now and then abort it.
    os._exit(0)
