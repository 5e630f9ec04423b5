"""Sums over gloo, until one rank, the last, does something else: it raises, or it goes away and never comes to the next sum."""

import sys
import time

import torch
import torch.distributed as dist
from telling import tell


def go_astray() -> None:
    tell()
    while True:
        time.sleep(0.001)  # busy enough not to be asleep


def main(how: str) -> None:
    dist.init_process_group("gloo")
    for step in range(1000):
        if dist.get_rank() == dist.get_world_size() - 1 and step == 5:
            if how == "raises":
                raise ValueError(f"the loss is nan in step {step}")
            go_astray()
        dist.all_reduce(torch.tensor([step]))


if __name__ == "__main__":
    main(sys.argv[1])
