"""What an agent listens on, by the kernel's own table, and what ``--dry-run`` has said of it."""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LISTENS = "0A"
LOOPBACK = {"127.0.0.1", "::1"}


def listened_at(pid: int) -> list[tuple[str, int]]:
    """Addresses and ports at which this process listens, and nothing of it by UDP."""
    inodes = {os.readlink(path)[8:-1] for path in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(path).startswith("socket:[")}
    found = []
    for family, size, name in ((socket.AF_INET, 4, "tcp"), (socket.AF_INET6, 16, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[9] in inodes and columns[3] == LISTENS:
                address, _, port = columns[1].partition(":")
                words = [int(address[start : start + 8], 16) for start in range(0, len(address), 8)]
                found.append((socket.inet_ntop(family, struct.pack(f"={size // 4}I", *words)), int(port, 16)))
    for name in ("udp", "udp6"):
        assert not [line for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] if line.split()[9] in inodes]
    return sorted(found)


@pytest.fixture
def plan(rallyrun: Callable[..., Any], script: Callable[[str], Path]) -> Callable[..., list[str]]:
    """``plan(*flags)``: what would be listened at, line by line."""

    def ask(*flags: str) -> list[str]:
        done = rallyrun(["--dry-run", *flags, script("")])
        found = re.search(r"^  listens {7}(.*(?:\n {16}.*)*)", done.stdout, re.MULTILINE)
        assert found is not None, done.stderr
        return [line.strip() for line in found[1].splitlines()]

    return ask


def names(lines: list[str]) -> list[str]:
    return [line.partition(":")[0] for line in lines]


def test_one_node_listens_on_the_loopback_alone(job: Any, plan: Any) -> None:
    flags = ["--nnodes", "1", "--web"]
    agent = job.start("--web", nnodes="1", workers=1)
    (worker,) = agent.wait_for_world(1)
    found = listened_at(agent.agent.process.pid)
    assert len(found) == 2, found
    assert ("127.0.0.1", int(worker.master[1])) in found
    assert {address for address, _ in found} == {"127.0.0.1"}
    planned = plan(*flags)
    assert names(planned) == ["the store of the workers", "health", "the web page", "commands such as ps and stop"]
    assert all("127.0.0.1, any free port" in line for line in planned[:3])
    job.finish()
    assert agent.wait() == 0


def test_a_node_of_several_listens_where_it_has_to_be_reached(job: Any, plan: Any) -> None:
    host = job.start_host(nnodes="2", workers=1)
    other = job.start(nnodes="2", workers=1)
    (worker,) = host.wait_for_world(2)
    other.wait_for_world(2)
    planned = plan("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{job.port}")
    assert names(planned) == [
        "the store of the agents, on the node whose address it is",
        "the store of the workers, on the node of rank 0",
        "commands such as ps and stop",
    ]
    assert f"localhost:{job.port}; agents of this job; they prove that they know" in planned[0]
    assert "from the addresses of the job's nodes" in planned[1]
    found = {node: listened_at(node.agent.process.pid) for node in (host, other)}
    ports = {port for _, port in [*found[host], *found[other]]}
    assert ports == {job.port, int(worker.master[1])}
    assert {address for all_of_one in found.values() for address, _ in all_of_one} <= LOOPBACK
    job.finish()
    assert (host.wait(), other.wait()) == (0, 0)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--secret", "none"], "but there is no secret, so whoever reaches it (--secret none)"),
        (["--rdzv-conf", "worker_store_from=any"], "whoever reaches it; torch's protocol has no secret"),
        (["--rdzv-conf", "is_host=true"], "the store of the agents, here: node0:29400"),
        (["--rdzv-conf", "is_host=false"], "the store of the agents, on another node: node0:29400"),
        (["--worker-store", "rank0"], "opened by its first worker: "),
        (["--worker-store-port", "29600-29700"], ", port 29600 to 29700; "),
        (
            ["--local-addr", "10.0.0.7", "--preflight", "network"],
            "measurements between nodes: 10.0.0.7, any free port",
        ),
        (["--checkpoint-memory", "1G", "--checkpoint-copies", "1"], "copies of snapshots: the address by which others reach"),
        (["--health-port", "8080", "--health-addr", "0.0.0.0"], "health: 0.0.0.0:8080; whoever reaches it may read"),
    ],
)
def test_the_plan_says_who_may_come(flags: list[str], told: str, plan: Any) -> None:
    lines = plan("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node0", *flags)
    assert [line for line in lines if told in line], lines


def test_with_static_ranks_the_plan_says_which_node_listens(plan: Any, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of some length")
    secret.chmod(0o600)
    for rank, where in ((0, "here, as this is node 0"), (1, "on node 0, and not here")):
        flags = ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", "node0", "--secret", str(secret)]
        lines = plan(*flags)
        assert lines[0].startswith(f"the store of the agents, {where}: node0:29500; agents and workers of this job; they prove")
        assert "the secret that was given" in lines[0]
        assert "node0:29500" in lines[1]
