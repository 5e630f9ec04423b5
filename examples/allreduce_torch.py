"""A torch job, unchanged from torchrun: a sum over all workers.

``rallyrun --standalone --nproc-per-node 4 examples/allreduce_torch.py``
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()}: the sum of 1..{dist.get_world_size()} is {total.item()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
