"""The workers' store of an elastic job of several nodes: on the node of group rank 0, whichever that is."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.nodes.orders import BOOM, CONNECT, EXCHANGE, SET_LATE
from tests.ports import LISTENS, bound_at

from rallypoint.store.interface import StoreNetworkError
from rallypoint.store.tcp_store import TCPStore

HERE, THERE = "127.0.0.1", "127.0.0.5"
NOT_OURS = "192.0.2.9"
TIMEOUT_S = 10.0


def listening(node: Any) -> set[int]:
    """The ports at which this agent itself listens."""
    folder = Path(f"/proc/{node.agent.pid}/fd")
    inodes = {str(fd.readlink()).removeprefix("socket:[").removesuffix("]") for fd in folder.iterdir()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == LISTENS and row[9] in inodes}


def exchange(job: Any, nodes: list[Any], world: int) -> None:
    """Let all workers of this world exchange a key each."""
    expected = "HEARD " + " ".join(map(str, range(world))) + "\n"
    before = [node.agent.stdout.count(expected) for node in nodes]
    for rank in range(world):
        job.order(rank, CONNECT + EXCHANGE)
    for node, count in zip(nodes, before, strict=True):
        node.agent.wait_for(lambda node=node, count=count: node.agent.stdout.count(expected) == count + node.workers)


def worlds(nodes: list[Any], size: int, since: float = 0.0) -> tuple[str, int]:
    """Where the store of this world is, as all its workers were told, that it is an agent's, and that nothing else is there."""
    starts = [start for node in nodes for start in node.wait_for_world(size, since)]
    assert len({start.master for start in starts}) == 1
    assert {start.env["TORCHELASTIC_USE_AGENT_STORE"] for start in starts} == {"True"}
    address, port = starts[0].master
    assert bound_at(int(port)) == [address]
    return address, int(port)


@pytest.fixture
def connect() -> Iterator[Callable[[tuple[str, int]], TCPStore]]:
    """``connect((address, port))``: a connection of the test's own, as any other process could have."""
    stores: list[TCPStore] = []

    def connect(where: tuple[str, int]) -> TCPStore:
        stores.append(TCPStore(*where, timeout=TIMEOUT_S))
        return stores[-1]

    yield connect
    for store in stores:
        store.close()


def meet(job: Any, *flags: str, first: int = 0, workers: int = 1, **options: Any) -> list[Any]:
    """Two nodes with addresses of their own, the store's host first, which has group rank `first`; their workers run."""
    options = {"nnodes": "1:2", "workers": workers, "conf": "last_call_timeout=0.5,restart_backoff=0", **options}
    host = job.start_host("--node-rank", str(first), "--local-addr", HERE, *flags, host=HERE, **options)
    other = job.start("--node-rank", str(1 - first), "--local-addr", THERE, *flags, host=HERE, **options)
    return [host, other]


# --- where it is -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "address"), [(0, HERE), (1, THERE)], ids=["the host's", "the other's"])
def test_it_is_on_the_node_of_rank_0_at_its_address(job: Any, first: int, address: str):
    """P13: one listener for all workers; the other node has given back the port that it held for the case that it were first."""
    nodes = meet(job, first=first, workers=2)
    where = worlds(nodes, 4)
    assert where[0] == address
    exchange(job, nodes, 4)
    host, other = nodes
    assert listening(host) == {job.port} | ({where[1]} if first == 0 else set())
    assert listening(other) == (set() if first == 0 else {where[1]})
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]
    assert bound_at(where[1]) == []


def test_the_next_generation_has_another(job: Any, connect: Any):
    """P16: after a failure; what was connected to the old one is cut off, and the new one is empty."""
    nodes = meet(job, "--max-restarts", "1", first=1)
    before = worlds(nodes, 2)
    exchange(job, nodes, 2)
    outsider = connect(before)
    assert outsider.num_keys() == 2
    failed_at = time.monotonic()
    job.order(1, BOOM)
    after = worlds(nodes, 2, failed_at)
    assert after != before
    assert bound_at(before[1]) == []
    with pytest.raises(StoreNetworkError):
        outsider.num_keys()
    assert connect(after).num_keys() == 0
    exchange(job, nodes, 2)
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]


def test_it_moves_when_the_agent_of_rank_0_is_killed(job: Any, connect: Any):
    """P02, P16: the survivor has rank 0 and the store, at its own address; the old one died with its agent."""
    host, first = meet(job, first=1)
    before = worlds([host, first], 2)
    outsider = connect(before)
    assert before[0] == THERE
    killed_at = first.kill()
    after = worlds([host], 1, killed_at)
    assert after[0] == HERE
    with pytest.raises(StoreNetworkError):
        outsider.num_keys()
    exchange(job, [host], 1)
    job.finish()
    assert host.wait() == 0


def test_a_node_that_joins_finds_a_new_one(job: Any, connect: Any, free_port: Callable[[], int]):
    """P45: the larger world has a store of its own, here at a chosen port, which is the same again."""
    port = free_port()
    options = {"nnodes": "1:2", "workers": 1, "host": HERE}
    flags = ["--worker-store-port", str(port), "--local-addr"]
    host = job.start_host(*flags, HERE, "--node-rank", "0", **options)
    assert worlds([host], 1) == (HERE, port)
    exchange(job, [host], 1)
    joined_at = time.monotonic()
    other = job.start(*flags, THERE, "--node-rank", "1", **options)
    assert worlds([host, other], 2, joined_at) == (HERE, port)
    assert connect((HERE, port)).num_keys() == 0
    exchange(job, [host, other], 2)
    job.finish()
    assert [node.wait() for node in (host, other)] == [0, 0]


@pytest.mark.parametrize("first", [0, 1], ids=["the host", "another"])
def test_rank_0_stays_for_the_others(job: Any, first: int, wait_until: Any, alive: Any):
    """Its own workers are done; those of the other node go on with the store, which ends with the last of them."""
    nodes = meet(job, first=first)
    where = worlds(nodes, 2)
    (worker,) = (start for node in nodes for start in node.starts() if start.rank == 0)
    job.finish(0)
    wait_until(lambda: not alive(worker.pid))
    late = nodes[1 - first]
    job.order(1, CONNECT + SET_LATE)
    late.wait_for_line("LATE yes")
    assert bound_at(where[1]) == [where[0]]
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]


# --- what is refused -------------------------------------------------------------------------------------------------------


def test_rank_0_stays_for_the_others_where_it_is_not_the_host(job: Any):
    """Its workers have ended, and the exit barrier's time is over; those of the other node still have their store."""
    host, first = meet(job, "--exit-barrier-timeout", "0.1", first=1)
    worlds([host, first], 2)
    job.finish(0)
    first.wait_for_line("staying for the workers of other nodes")
    job.order(1, CONNECT + SET_LATE)
    host.wait_for_line("LATE yes")
    job.finish()
    assert [first.wait(), host.wait()] == [0, 0]


def test_an_address_of_another_machine_is_refused_by_name(job: Any):
    """Before any worker is started, and without harm to the job."""
    host = job.start_host("--local-addr", HERE, nnodes="1:2", workers=1, host=HERE)
    host.wait_for_world(1)
    stranger = job.start("--local-addr", NOT_OURS, nnodes="1:2", workers=1, host=HERE)
    assert stranger.wait() == 3
    (line,) = [line for line in stranger.stderr.splitlines() if line.startswith("rallyrun: error")]
    assert f"the workers' store cannot be opened at {NOT_OURS}" in line
    assert stranger.starts() == []
    job.finish()
    assert host.wait() == 0
    assert len(host.starts()) == 1


def test_a_busy_port_is_refused_by_name(job: Any, free_port: Callable[[], int]):
    """P13: by the node that cannot have it; nobody's workers have been started for it."""
    port = free_port()
    with socket.create_server((HERE, port)):
        node = job.start("--worker-store-port", str(port), "--local-addr", HERE, nnodes="1:2", workers=1, host=HERE)
        assert node.wait() == 3
    (line,) = [line for line in node.stderr.splitlines() if line.startswith("rallyrun: error")]
    assert f"cannot listen at {HERE}:{port}: Address already in use" in line
    assert node.starts() == []


# --- the worker of rank 0 --------------------------------------------------------------------------------------------------


def test_the_worker_of_rank_0_may_serve_it(job: Any):
    """As in older versions of torchrun: the port is free at the address of its node, and all are told to open or find it."""
    nodes = meet(job, "--worker-store", "rank0", first=1)
    starts = [start for node in nodes for start in node.wait_for_world(2)]
    assert {start.env["TORCHELASTIC_USE_AGENT_STORE"] for start in starts} == {"False"}
    ((address, port),) = {start.master for start in starts}
    assert address == THERE
    assert bound_at(int(port)) == []
    job.order(0, CONNECT.replace("timeout=10", "is_master=True") + EXCHANGE)
    job.order(1, CONNECT + EXCHANGE)
    for node in nodes:
        node.wait_for_line("HEARD 0 1")
    assert bound_at(int(port)) == [THERE]
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]


def test_who_differs_is_refused_unless_it_says_the_default(job: Any):
    """P19: agent is what a node means that says nothing; rank0 is something else."""
    options = {"nnodes": "2:3", "workers": 1, "host": HERE, "conf": "last_call_timeout=0.2"}
    host = job.start_host(**options)
    other = job.start("--worker-store", "rank0", **options)
    assert other.wait() == 2
    assert "worker_store is rank0 here and agent for the job" in other.stderr
    same = job.start("--worker-store", "agent", **options)
    worlds([host, same], 2)
    job.finish()
    assert [node.wait() for node in (host, same)] == [0, 0]


def test_workers_of_one_world_may_all_come_at_once(job: Any):
    """P23: before, while and after the agent of rank 0 begins to serve; it holds the port, so nobody is turned away."""
    nodes = meet(job, first=1, workers=8)
    where = worlds(nodes, 16)
    counts: list[int] = []

    def count() -> None:
        store = TCPStore(*where, timeout=TIMEOUT_S)
        counts.append(store.add("here", 1))
        store.close()

    threads = [threading.Thread(target=count) for _ in range(32)]
    for thread in threads:
        thread.start()
    exchange(job, nodes, 16)
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert sorted(counts) == list(range(1, 33))
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]
