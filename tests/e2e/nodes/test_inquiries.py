"""One rank of three nodes leaves the collective that all others wait in: it is named, wherever it is, on all screens (P30)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 3.0
ON_TOP_S = 2.0  # to find a hang, as is promised
NODES, WORKERS = 3, 2
WORLD = NODES * WORKERS

# Plain Python: all meet at a store, in a function whose name says so. One goes elsewhere: into a lock, or on and on in a loop.
LEAVES = """
import threading
from rallypoint.store.tcp_store import TCPStore
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=60)
def barrier(step):
    store.set(f"{step} {rank}", "here")
    store.wait([f"{step} {other}" for other in range(int(os.environ["WORLD_SIZE"]))])
def load():
    os.write(1, f"last {time.monotonic_ns()}\\n".encode())
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
def spin():
    os.write(1, f"last {time.monotonic_ns()}\\n".encode())
    while True:
        pass
for step in range(10 ** 6):
    if int(rank) == LEAVER and step == 5:
        HOW()
    barrier(step)
"""


def start_three(job: Any, tmp_path: Path) -> list[Any]:
    """Agents of three nodes that watch for hangs; the first is the host of the store."""
    flags = [["--hang-timeout", f"{LIMIT_S:g}", "--log-dir", str(tmp_path / str(node))] for node in range(NODES)]
    starts = [job.start_host, job.start, job.start]
    nodes = [start(*flags[node], "--node-rank", str(node), nnodes=str(NODES)) for node, start in enumerate(starts)]
    for node in nodes:
        node.wait_for_world(WORLD, timeout_s=60.0)
    return nodes


def check_named(nodes: list[Any], leaver: int, numbers: Any, tmp_path: Path, where: str) -> float:
    """How long it took after the rank had left, until every node named it."""
    home = nodes[leaver // WORKERS]
    for node in nodes:
        node.wait_for_line(") hangs: ", 60.0)
    named_at = time.monotonic()
    [last_ns] = numbers("last", home.agent.stdout)
    assert [node.wait() for node in nodes] == [1] * NODES
    others = "not in the collective in which ranks " + ", ".join(
        f"{first}-{last}" if first < last else str(first)
        for first, last in ((0, leaver - 1), (leaver + 1, WORLD - 1))
        if first <= last
    )
    for number, node in enumerate(nodes):
        [line] = [line for line in node.stderr.splitlines() if ") hangs: " in line]
        assert f"rank {leaver} (" in line
        assert f"{others} wait: " in line
        assert f"Cause: rank {leaver} (" in node.stderr
        [stacks] = (tmp_path / str(number)).glob("*_*/attempt_0/stacks.txt")
        assert "barrier (" in stacks.read_text()
    assert f"{where} (" in home.stderr
    return named_at - last_ns / 1e9


def order_all(job: Any, leaver: int, how: str) -> None:
    for rank in range(WORLD):
        job.order(rank, f"LEAVER = {leaver}\n" + LEAVES.replace("HOW", how))


@pytest.mark.parametrize(("leaver", "how"), [(3, "load"), (4, "spin")])
def test_p30_the_one_that_left_is_named_on_all_nodes(
    job: Any, numbers: Any, tmp_path: Path, leaver: int, how: str, within: Any
) -> None:
    """P30: asleep elsewhere; or busy elsewhere, so that nobody on its own node would have called it hung."""
    nodes = start_three(job, tmp_path)
    order_all(job, leaver, how)
    took_s = check_named(nodes, leaver, numbers, tmp_path, how)
    within("from when a rank left the collective until all nodes named it", took_s, LIMIT_S + ON_TOP_S)


@pytest.mark.soak
@pytest.mark.parametrize("turn", range(20))
def test_p30_twenty_of_twenty(job: Any, numbers: Any, tmp_path: Path, turn: int) -> None:
    """P30: each rank in its turn, asleep or busy elsewhere."""
    nodes = start_three(job, tmp_path)
    leaver, how = turn % WORLD, ("load", "spin")[turn // WORLD % 2]
    order_all(job, leaver, how)
    took_s = check_named(nodes, leaver, numbers, tmp_path, how)
    print(f"rank {leaver} ({how}) was named after {took_s:.2f} s")
    assert took_s < LIMIT_S + ON_TOP_S + 3.0  # as a busy machine may need
