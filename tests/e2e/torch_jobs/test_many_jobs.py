"""Many jobs on one machine at the same time: each has a port of its own for its workers' store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.e2e.torch_jobs.conftest import WITHOUT_TORCH

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("count", "with_torch", "workers", "all_there_s"),
    [
        pytest.param(12, 2, 2, 60.0, marks=pytest.mark.timeout(150)),
        pytest.param(50, 50, 1, 300.0, marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
    ],
)
def test_many_jobs_at_once(
    make_job: Callable[[], Any], listening_ports: Callable[[int], set[int]], count: int, with_torch: int, workers: int,
    all_there_s: float,
):  # fmt: skip
    """P13: no port is handed out twice; each is held by its agent as long as the job runs. Not all of the jobs load torch."""
    jobs = [make_job() for _ in range(count)]
    for number, job in enumerate(jobs):
        program = "rank_sum.py" if number < with_torch else WITHOUT_TORCH
        job.start("--standalone", "--nproc-per-node", str(workers), program=program)
    masters = []
    for job in jobs:
        told = job.wait_for_sum(0, workers, all_there_s)
        masters.append(told[0].master[1])
    assert len(set(masters)) == count
    for job, port in zip(jobs, masters, strict=True):
        assert port in listening_ports(job.agents[0].pid)
    for job in jobs:
        job.finish()
    assert [job.agents[0].wait() for job in jobs] == [0] * count
