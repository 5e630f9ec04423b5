"""Two launchers in the environment that srun gives them, without Slurm."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests import ports

from rallypoint.schedulers.found import port_of

WORKER = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_RUN_ID"])
"""


def test_f29_launchers_of_a_step_meet_without_flags(start_rallyrun: Any, script: Any) -> None:
    """F29: at the step's first node, and at a port of this job's own; the variable that said so is named."""
    job = next(job for job in map(str, range(os.getpid(), os.getpid() + 100)) if ports.is_free_everywhere(port_of(job)))
    port = port_of(job)
    step = {
        "SLURM_JOB_ID": job, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "localhost,elsewhere",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_NUM_NODES": "2",
    }  # fmt: skip
    worker: Path = script(WORKER)
    nodes = [start_rallyrun([worker], {**step, "SLURM_NODEID": str(node)}) for node in range(2)]
    assert [node.wait() for node in nodes] == [0, 0]
    for node, first in zip(nodes, (0, 2), strict=True):
        ranks = sorted(node.stdout.splitlines())
        assert ranks == [f"rank {rank} of 4 slurm-{job}" for rank in (first, first + 1)]
        assert f"meeting at localhost:{port} (SLURM_STEP_NODELIST)" in node.stderr
        assert "2 workers per node (SLURM_GPUS_ON_NODE)" in node.stderr
