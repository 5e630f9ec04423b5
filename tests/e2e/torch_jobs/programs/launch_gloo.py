"""One node of three; its workers are functions that meet by gloo, and leave their process group as it is."""

import json
import sys

from rallypoint.agent.launch import LaunchConfig, elastic_launch


def rank_sum() -> int:
    """Without destroy_process_group: its threads are there when the process ends."""
    import os

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(int(os.environ["RANK"]))
    dist.all_reduce(total)
    return int(total)


def launch(endpoint: str, workers: int) -> dict[int, int]:
    config = LaunchConfig(
        min_nodes=3,
        max_nodes=3,
        nproc_per_node=workers,
        run_id="leave-together",
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        max_restarts=0,
        preload="torch.distributed",
        local_addr="127.0.0.1",
    )
    return elastic_launch(config, rank_sum)()


if __name__ == "__main__":
    print("RETURNED", json.dumps(launch(sys.argv[1], int(sys.argv[2]))))
