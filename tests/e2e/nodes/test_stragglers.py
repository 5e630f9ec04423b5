"""One rank of two is slow, each on a node of its own: both nodes name it and its node, wherever one asks.

It is slow by construction, several times over, so that no machine can be too busy to tell.
"""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.nodes.test_senses_nodes import events

from rallypoint.protocol.pace import SLOW

CLEARLY = 2.0  # times the median, of what is six times as slow
# Each goes at its own pace.
APART = """
from rallypoint import worker
for step in range(10 ** 6):
    worker.progress(step)
    time.sleep(0.6 if rank == "1" else 0.1)
    if os.path.exists(f"{folder}/finish"):
        break
"""

# All meet in every step, so that all take equally long. One has ten times as much to do.
TOGETHER = """
from rallypoint import worker
from rallypoint.store.tcp_store import TCPStore
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=60)
for step in range(10 ** 6):
    until = time.thread_time() + (0.1 if rank == "1" else 0.01)
    while time.thread_time() < until:
        pass
    store.set(f"{step} {rank}", "end" if os.path.exists(f"{folder}/finish") else "on")
    words = store.multi_get([f"{step} {one}" for one in range(int(os.environ["WORLD_SIZE"]))])
    worker.progress(step)
    if b"end" in words:
        break
"""


def start_two(job: Any, tmp_path: Path, *ports: int) -> list[Any]:
    """The first is the host of the store; ranks are as the nodes are."""
    conf = "last_call_timeout=0.2"
    nodes = [
        start(
            "--node-rank",
            str(number),
            "--log-dir",
            str(tmp_path / str(number)),
            "--health-port",
            str(ports[number]),
            nnodes="2",
            workers=1,
            conf=conf,
        )
        for number, start in enumerate((job.start_host, job.start))
    ]
    for node in nodes:
        node.wait_for_world(2, timeout_s=60.0)
    return nodes


def rallypoint(*args: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "rallypoint", *args], capture_output=True, text=True, timeout=60, check=True
    ).stdout


def metrics(port: int) -> dict[str, float]:
    """Those that tell of pace, by name and rank; without prometheus-client there are none."""
    pytest.importorskip("prometheus_client")
    client = http.client.HTTPConnection("localhost", port, timeout=20)
    client.request("GET", "/metrics")
    text = client.getresponse().read().decode()
    client.close()
    found = re.findall(r"^rallypoint_(\w+?_(?:slowness|seconds|ratio))\{(?:.*rank=\"(\d+)\")?.*\} (\S+)$", text, re.MULTILINE)
    return {f"{name} {rank}".strip(): float(value) for name, rank, value in found}


def test_a_rank_that_takes_longer_is_named_on_all_nodes(job: Any, tmp_path: Path, free_port: Any) -> None:
    ports = free_port(), free_port()
    nodes = start_two(job, tmp_path, *ports)
    for rank in range(2):
        job.order(rank, APART)
    for node in nodes:
        line = node.wait_for_line(" is slow: ")
        assert "rank 1 (node rank1) is slow: it takes " in line
        assert " times as long for a step as the median (0." in line
    assert "  behind the others: rank 1 (node rank1); it takes " in (status := rallypoint("status", "a-job"))
    assert "\nrank1 on " in status.replace("(node 1", "")
    assert re.search(r"^  slow: its workers take \d\.\d times as long for a step as the median of the job$", status, re.MULTILINE)
    first, second = map(metrics, ports)
    assert first["worker_slowness 0"] < SLOW
    assert first["node_slowness"] < SLOW
    assert second["worker_slowness 1"] > CLEARLY
    assert second["node_slowness"] > CLEARLY
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]
    for number in range(2):
        [slow] = events(tmp_path / str(number), "worker.slow")
        assert (slow["rank"], slow["node"], slow["holds_up"], slow["generation"]) == (1, "rank1", False, 1)
        assert slow["step_s"] > CLEARLY * slow["median_s"]
        assert nodes[number].stderr.count(" is slow: ") == 1
    story = rallypoint("explain", *(str(next((tmp_path / str(number)).glob("*_*"))) for number in range(2)))
    assert len(re.findall(r"rank 1 \(node rank1\) is slow: it takes", " ".join(story.split()))) == 1


def test_a_rank_that_holds_up_the_others_in_every_step_is_named(job: Any, tmp_path: Path, free_port: Any) -> None:
    """Steps are equally long for all; the others are idle for most of them."""
    nodes = start_two(job, tmp_path, free_port(), free_port())
    for rank in range(2):
        job.order(rank, TOGETHER)
    for node in nodes:
        line = node.wait_for_line(" is slow: ")
        assert "rank 1 (node rank1) is slow: it is busy for " in line
        assert line.endswith(", and the others seem to wait for it")
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]
    assert [events(tmp_path / str(number), "worker.slow")[0]["holds_up"] for number in range(2)] == [True, True]
