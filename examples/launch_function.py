"""The Python API: run a function in four processes and collect what it returns, by rank.

``python examples/launch_function.py``
"""

from __future__ import annotations

import os

from rallypoint import LaunchConfig, elastic_launch


def square(offset: int) -> int:
    return (int(os.environ["RANK"]) + offset) ** 2


if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=4, run_id="squares", rdzv_backend="c10d", rdzv_endpoint="localhost:0"
    )
    results = elastic_launch(config, square)(10)
    print(f"squares by rank: {results}")
