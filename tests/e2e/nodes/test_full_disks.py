"""The disk of one node's logs is full: what the job does then depends on who writes there, and all nodes say what it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.nodes.conftest import Job

# The workers of the second node write more than its disk can hold.
WRITES = """
import os, sys, time
if os.environ["GROUP_RANK"] == "1":
    for _ in range(100):
        print("x" * 65536, flush=True)
    open(f"{sys.argv[1]}/written.{os.environ['RANK']}", "w").close()
while not all(os.path.exists(f"{sys.argv[1]}/written.{rank}") for rank in (2, 3)):
    time.sleep(0.01)
"""


@pytest.fixture
def writers(start_rallyrun: Any, script: Any, tmp_path: Path, free_port: Callable[[], int], small_disk: Path) -> Any:
    folder = tmp_path / "orders"
    folder.mkdir()
    job = Job(start_rallyrun, script(WRITES, "writes.py"), folder, free_port())

    def start(*flags: str) -> list[Any]:
        good = job.start_host(*flags, "--node-rank", "0", "--log-dir", str(tmp_path / "logs"), nnodes="2")
        return [good, job.start(*flags, "--node-rank", "1", "--log-dir", str(small_disk / "logs"), nnodes="2")]

    return start


@pytest.mark.root
def test_f04_with_redirects_the_workers_fail_there_and_all_nodes_say_that_the_disk_is_full(writers: Any) -> None:
    """F04, P12: they write to the files themselves, and no traceback finds room; nobody on the other node is called the cause."""
    nodes = writers("--redirects", "3")
    assert [node.wait() for node in nodes] == [1, 1]
    for node in nodes:
        [cause] = [line for line in node.stderr.splitlines() if line.startswith("rallyrun: Cause: ")]
        assert re.search(r"ranks? [23](-3)? ", cause), cause
        assert "the disk of the log folder" in cause
        assert "is full" in cause


@pytest.mark.root
def test_f04_with_tee_the_job_goes_on_without_logs(writers: Any) -> None:
    """F04: the agent writes them, and does without; what the workers say still comes to the console, and they succeed."""
    nodes = writers("--tee", "3")
    assert [node.wait() for node in nodes] == [0, 0]
    assert "No space left on device" in nodes[1].stderr
    assert "space" not in nodes[0].stderr
