"""One node of a job with static ranks, started by a call instead of a command; prints what its workers returned, by rank."""

import json
import sys

from rallypoint.agent.launch import LaunchConfig, elastic_launch


def rank_sum(folder: str) -> int:
    """torch is the workers' own business: the agent does not load it."""
    from rank_sum import rank_sum as work

    return work(folder)


def launch(folder: str, endpoint: str, nodes: int, node_rank: int, workers: int) -> dict[int, int]:
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=workers,
        run_id="rank-sum",
        rdzv_backend="static",
        rdzv_endpoint=endpoint,
        rdzv_configs={"rank": node_rank},
        max_restarts=1,
        preload="torch.distributed",
    )
    return elastic_launch(config, rank_sum)(folder)


if __name__ == "__main__":
    print("RETURNED", json.dumps(launch(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))))
