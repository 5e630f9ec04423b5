"""Torch's own agent, with rallypoint's rendezvous as its plug-in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.etcd_cluster import Cluster, start_cluster
from tests.ports import free_port

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

QUICK = "last_call_timeout=0.2,close_timeout=5"
HEARD_S = 60.0  # torch's agent looks ten times a second; the rest is for two busy cores
StartNode = Callable[..., Any]


@pytest.fixture
def start_node(launch: Any) -> StartNode:
    """``start_node(program, …)``: one node with one worker; all nodes of a test meet."""
    port = free_port()

    def start(program: Path, *arguments: Any, nnodes: str, max_restarts: int = 0, endpoint: str = "", **env: str) -> Any:
        backend = "rallypoint-etcd" if endpoint else "rallypoint"
        meeting = ["--rdzv-backend", backend, "--rdzv-endpoint", endpoint or f"127.0.0.1:{port}", "--rdzv-id", "a-job"]
        size = ["--nnodes", nnodes, "--nproc-per-node", "1", "--max-restarts", str(max_restarts)]
        return launch.torchrun(*meeting, "--rdzv-conf", QUICK, "--local-addr", "127.0.0.1", *size, program, *arguments, **env)

    return start


def test_nodes_come_and_go_under_torchs_agent(launch: Any, start_node: StartNode, programs: Path):
    """One node, then two, then one of them is gone: each time those who are there meet, and sum by gloo."""
    first = start_node(programs / "rank_sum.py", launch.finish_file, nnodes="1:2", max_restarts=3)
    assert first.wait_for_told(world=1)["sum"] == 0
    second = start_node(programs / "rank_sum.py", launch.finish_file, nnodes="1:2", max_restarts=3)
    told = [node.wait_for_told(world=2) for node in (first, second)]
    assert [(one["sum"], one["agents_store"]) for one in told] == [(1, "True"), (1, "True")]
    assert {one["rank"] for one in told} == {0, 1}
    seen = len(first.told())
    second.kill_node()
    killed_at = time.monotonic()
    first.wait_for(lambda: any(one["world"] == 1 for one in first.told()[seen:]))
    print(f"the survivor had its sum {time.monotonic() - killed_at:.2f} s after the node was killed")
    launch.finish()
    assert first.wait() == 0


def wait_for_both(nodes: list[Any], restarts: int) -> None:
    """Both nodes have a worker of one new generation: they name the same port, and no earlier one."""
    told = [node.wait_for(lambda node=node: node.told()[restarts:]) for node in nodes]
    assert len({one[0]["master"] for one in told}) == 1
    assert {one[0]["rank"] for one in told} == {0, 1}


def test_a_failure_is_heard_on_all_nodes(launch: Any, start_node: StartNode, programs: Path):
    """A worker fails and its agent begins anew: so do the others. It fails again, its agent gives up: so do the others."""
    nodes = [start_node(programs / "obedient.py", launch.folder, nnodes="2", max_restarts=1) for _ in range(2)]
    wait_for_both(nodes, restarts=0)
    (launch.folder / "fail.1").touch()
    wait_for_both(nodes, restarts=1)
    assert len({told["master"] for node in nodes for told in node.told()}) == 2  # each generation has a store of its own
    failing = next(node for node in nodes if node.told()[1]["rank"] == 1)
    other = next(node for node in nodes if node is not failing)
    (launch.folder / "fail.1").touch()
    assert failing.wait(HEARD_S) == 1
    assert other.wait(HEARD_S) == 1
    assert "ChildFailedError" in failing.printed
    assert "RendezvousClosedError: the job has ended" in other.printed


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with start_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


def test_nodes_meet_in_etcd(launch: Any, start_node: StartNode, programs: Path, cluster: Cluster):
    nodes = [start_node(programs / "obedient.py", launch.folder, nnodes="2", endpoint=cluster.endpoint) for _ in range(2)]
    wait_for_both(nodes, restarts=0)
    launch.finish()
    assert [node.wait() for node in nodes] == [0, 0]


@pytest.mark.parametrize("nnodes", ["1", "1:2"])
def test_rallyrun_knows_the_names_too(launch: Any, programs: Path, nnodes: str):
    """There it is no plug-in: the names stand for the built-in back ends."""
    endpoint = f"127.0.0.1:{free_port()}"
    meeting = ["--rdzv-backend", "rallypoint", "--rdzv-endpoint", endpoint, "--rdzv-conf", QUICK, "--nnodes", nnodes]
    launch.finish()
    node = launch.rallyrun(*meeting, programs / "obedient.py", launch.folder)
    assert node.wait() == 0
    assert node.told()[0]["world"] == 1
