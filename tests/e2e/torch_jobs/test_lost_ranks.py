"""One rank of a gloo job raises, or never comes to the collective: all nodes name it, and none of those that waited for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

WORLD = 4


def start(job: Any, how: str, *flags: str) -> list[Any]:
    """Two nodes of two workers."""
    return [job.start_c10d("--nproc-per-node", "2", *flags, program="lose_one.py", argument=how) for _ in range(2)]


def test_the_others_whose_collective_was_aborted_are_no_cause(job: Any) -> None:
    """P12"""
    agents = start(job, "raises")
    assert [agent.wait(120) for agent in agents] == [1, 1]
    for agent in agents:
        assert f"Cause: rank {WORLD - 1} (" in agent.stderr
        assert "ValueError: the loss is nan in step 5" in agent.stderr
        assert 'raise ValueError(f"the loss is nan in step {step}")' in agent.stderr  # also where nothing of it happened


def test_the_rank_that_left_a_real_collective_is_named_on_all_nodes(job: Any, tmp_path: Path) -> None:
    """P30"""
    agents = start(job, "astray", "--hang-timeout", "4", "--log-dir", str(tmp_path / "logs"))
    assert [agent.wait(120) for agent in agents] == [1, 1]
    for agent in agents:
        assert f"Cause: rank {WORLD - 1} (" in agent.stderr
        assert "in go_astray (lose_one.py:" in agent.stderr
        assert f"not in the collective in which ranks 0-{WORLD - 2} wait: all_reduce (distributed_c10d.py:" in agent.stderr
