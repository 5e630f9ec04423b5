"""Who comes from machines that are not the job's: to the agents' store, and to the workers'."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

WaitUntil = Callable[..., Any]
# Greets as torch's client does, asks for the number of keys, and says how many bytes it was answered with before it was cut off.
ASK = """
import socket, struct, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30) as sock:
    try:
        sock.sendall(struct.pack("<BI", 0, 0x3C85F7CE) + bytes([7]))
        print(len(sock.recv(100)))
    except ConnectionError:
        print(0)
"""


def ask(node: Any, address: str, port: int) -> int:
    """How many bytes the workers' store answers, asked from this node."""
    command = ["ip", "netns", "exec", node.namespace, sys.executable, "-I", "-S", "-c", ASK, address, str(port)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)


@pytest.mark.parametrize("is_open", [False, True], ids=["nodes", "any"])
def test_only_the_jobs_nodes_come_to_the_workers_store(network: Any, wait_until: WaitUntil, is_open: bool) -> None:
    net = network(3)
    host, other, stranger = net.nodes
    net.nodes.remove(stranger)
    flags = ["--nnodes", "2", "--node-rank"]
    for rank, node in enumerate(net.nodes):
        node.start(*flags, str(rank), conf=f"worker_store_from={'any' if is_open else 'nodes'}")
    (worker, *_) = wait_until(lambda: net.journal.whole_world(2), 30)
    address, port = worker["master_addr"], worker["master_port"]
    assert ask(host, address, port) == 8
    assert ask(other, address, port) == 8
    assert ask(stranger, address, port) == (8 if is_open else 0)
    if not is_open:
        wait_until(lambda: f"has turned away {stranger.address} port " in host.agent.text)
        assert "no node of this job has come from that address" in host.agent.text
    net.nodes.append(stranger)
    net.journal.finish()
    assert [node.agents[-1].wait(30) for node in (host, other)] == [0, 0]


def test_a_node_with_another_home_is_let_in_and_the_host_says_so(network: Any, wait_until: WaitUntil, tmp_path: Path) -> None:
    """It would have been without all of this; its name is told once."""
    net = network(2)
    host, other = net.nodes
    host.start("--nnodes", "2")
    other.start("--nnodes", "2", env={"XDG_STATE_HOME": str(tmp_path / "another home")})
    wait_until(lambda: net.journal.whole_world(2), 30)
    net.journal.finish()
    assert [node.agents[-1].wait(30) for node in net.nodes] == [0, 0]
    assert host.agent.text.count(f"{other.address} cannot find the job's secret, and is let in without") == 1
    assert "this node cannot find the job's secret" in other.agent.text


def test_nodes_that_share_a_home_need_nothing_else(network: Any, wait_until: WaitUntil) -> None:
    net = network(2)
    for node in net.nodes:
        node.start("--nnodes", "2")
    wait_until(lambda: net.journal.whole_world(2), 30)
    net.journal.finish()
    assert [node.agents[-1].wait(30) for node in net.nodes] == [0, 0]
    assert "cannot find the job's secret" not in net.said()
