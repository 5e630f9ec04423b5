"""Static rendezvous of several nodes: the user gives the ranks, and agents and workers meet at one port."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.nodes.orders import BOOM, CONNECT, EXCHANGE, SET_LATE

from rallypoint.store import tcp_protocol as wire
from rallypoint.store.interface import StoreNetworkError
from rallypoint.store.tcp_store import TCPStore

HERE = "127.0.0.1"
TIMEOUT_S = 10.0
LISTENS, ESTABLISHED = "0A", "01"
SECRET = "correct horse battery staple"
SERVING = "this node hosts the coordination store"


def connections(port: int, state: str) -> list[str]:
    """The addresses of this machine at which this port is in this state."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == state]
    return [socket.inet_ntoa(bytes.fromhex(address)[::-1]) for address, number in places if int(number, 16) == port]


def errors(node: Any) -> list[str]:
    """What the launcher has to say about its own end."""
    return [line for line in node.stderr.splitlines() if line.startswith("rallyrun: error")]


def start(job: Any, rank: int, *flags: str, nodes: int = 2, conf: str = "restart_backoff=0", **options: Any) -> Any:
    """The agent of this rank."""
    master = ["--rdzv-backend", "static", "--rdzv-endpoint", "", "--master-addr", HERE, "--master-port", str(job.port)]
    size = {"nnodes": str(nodes), "workers": 1, **options}
    return job.start(*master, "--node-rank", str(rank), *flags, conf=conf, **size)


def meet(job: Any, *flags: str, nodes: int = 2, **options: Any) -> list[Any]:
    """All nodes of a job, by rank; their workers run."""
    agents = [start(job, rank, *flags, nodes=nodes, **options) for rank in range(nodes)]
    for agent in agents:
        agent.wait_for_world(nodes)
    return agents


def exchange(job: Any, nodes: list[Any]) -> None:
    """Let the workers, one on each node, exchange a key each."""
    expected = "HEARD " + " ".join(map(str, range(len(nodes)))) + "\n"
    before = [node.agent.stdout.count(expected) for node in nodes]
    for rank in range(len(nodes)):
        job.order(rank, CONNECT + EXCHANGE)
    for node, count in zip(nodes, before, strict=True):
        node.agent.wait_for(lambda node=node, count=count: node.agent.stdout.count(expected) == count + 1)


def finish(job: Any, nodes: list[Any]) -> None:
    """All end well, and give the port back."""
    job.finish()
    assert [node.wait() for node in nodes] == [0] * len(nodes)
    with socket.create_server((HERE, job.port)):
        pass


@pytest.fixture
def connect() -> Iterator[Callable[[int], TCPStore]]:
    """``connect(port)``: a connection of the test's own to the workers' store, as any other process could have."""
    stores: list[TCPStore] = []

    def connect(port: int) -> TCPStore:
        stores.append(TCPStore(HERE, port, timeout=TIMEOUT_S))
        return stores[-1]

    yield connect
    for store in stores:
        store.close()


# --- meeting ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (2, 1, 0)], ids=str)
def test_ranks_are_those_that_were_given(job: Any, order: tuple[int, ...], wait_until: Any):
    """P13, P27: whoever comes first; there is one listener, at the master address, for all agents and all workers."""
    count = len(order)
    by_rank = {rank: start(job, rank, nodes=count) for rank in order}
    nodes = [by_rank[rank] for rank in range(count)]
    starts = [node.wait_for_world(count)[0] for node in nodes]
    assert [(one.rank, one.node) for one in starts] == [(rank, rank) for rank in range(count)]
    assert {one.master for one in starts} == {(HERE, str(job.port))}
    assert {one.env["TORCHELASTIC_USE_AGENT_STORE"] for one in starts} == {"True"}
    assert connections(job.port, LISTENS) == [HERE]
    wait_until(lambda: len(connections(job.port, ESTABLISHED)) == count)  # the agents; a slow one may have dialled twice
    exchange(job, nodes)
    wait_until(lambda: len(connections(job.port, ESTABLISHED)) == 2 * count)
    assert connections(job.port, LISTENS) == [HERE]
    assert [SERVING in node.stderr for node in nodes] == [True] + [False] * (count - 1)
    finish(job, nodes)


def test_a_worker_that_comes_before_there_is_a_store_waits(job: Any):
    """It is told apart from an agent, and served when the agent of rank 0 has its seat; it need not come again."""
    nodes = [start(job, 0)]
    nodes[0].wait_for_line(SERVING)
    with socket.create_connection((HERE, job.port), timeout=TIMEOUT_S) as early:
        early.sendall(wire.GREETING + wire.request(wire.PING, (), 7))
        nodes.append(start(job, 1))
        for node in nodes:
            node.wait_for_world(2)
        assert early.recv(4) == wire.U32.pack(7)
    exchange(job, nodes)
    finish(job, nodes)


def test_rank_0_stays_until_the_others_are_done(job: Any):
    """Its workers have ended, and the exit barrier's time is over; those of the other node still have their store."""
    nodes = meet(job, "--exit-barrier-timeout", "0.1")
    job.finish(0)
    nodes[0].wait_for_line("staying for the workers of other nodes")
    job.order(1, CONNECT + SET_LATE)
    nodes[1].wait_for_line("LATE yes")
    finish(job, nodes)


def test_only_who_knows_the_secret_may_join(job: Any, tmp_path: Path):
    """P36: agents prove that they know it; workers find their store as ever, and do not see it."""
    secret_file = tmp_path / "secret"
    secret_file.write_text(SECRET + "\n")
    secret_file.chmod(0o600)
    host = start(job, 0, "--secret-file", str(secret_file))
    host.wait_for_line(SERVING)
    without = start(job, 1)
    assert without.wait() == 3
    assert "asks for a secret" in errors(without)[0]
    nodes = [host, start(job, 1, env={"RALLYPOINT_SECRET": SECRET})]
    starts = [node.wait_for_world(2)[0] for node in nodes]
    assert not [name for one in starts for name in one.env if "SECRET" in name]
    exchange(job, nodes)
    finish(job, nodes)


# --- failures --------------------------------------------------------------------------------------------------------------


def test_a_failure_restarts_all_with_one_budget(job: Any, connect: Any):
    """P14, P16: the count is the job's, not the node's; each time the store is another, at the same port."""
    nodes = meet(job, "--max-restarts", "2")
    for count, rank in enumerate((1, 0), 1):
        exchange(job, nodes)
        outsider = connect(job.port)
        assert outsider.num_keys() == 2
        failed_at = time.monotonic()
        job.order(rank, BOOM)
        again = [node.wait_for_world(2, failed_at)[0] for node in nodes]
        assert [(one.rank, one.restarts) for one in again] == [(0, count), (1, count)]
        with pytest.raises(StoreNetworkError):
            outsider.num_keys()
        assert connect(job.port).num_keys() == 0
        assert connections(job.port, LISTENS) == [HERE]
    job.order(1, BOOM)
    assert [node.wait() for node in nodes] == [1, 1]
    assert all("ValueError: boom" in node.stderr for node in nodes)


def test_a_killed_agent_that_is_started_anew_goes_on(job: Any, within: Any, connect: Any):
    """P02, P27: the others wait for it; it has its rank again, and nobody's restart is spent."""
    nodes = meet(job, nodes=3)
    exchange(job, nodes)
    outsider = connect(job.port)
    nodes[1].kill()
    back_at = time.monotonic()
    nodes[1] = start(job, 1, nodes=3)
    again = [node.wait_for_world(3, back_at)[0] for node in nodes]
    within("from the start of the new agent to the new world", max(one.at for one in again) - back_at, 2.0)
    assert [(one.rank, one.restarts) for one in again] == [(0, 0), (1, 0), (2, 0)]
    with pytest.raises(StoreNetworkError):
        outsider.num_keys()
    exchange(job, nodes)
    finish(job, nodes)


def test_rank_0_may_be_started_anew_too(job: Any):
    """P04: the agent that all meet at is killed; they wait for it, and go on with it, with the ranks they have."""
    nodes = meet(job)
    (before,) = nodes[1].starts()
    nodes[0].kill()
    nodes[1].wait_for_line("waiting up to 60 s for it")
    nodes[0] = start(job, 0)
    again = [node.wait_for_world(2, before.at + 1e-6)[0] for node in nodes]
    assert [(one.rank, one.restarts, one.generation) for one in again] == [(0, 0, 2), (1, 0, 2)]
    exchange(job, nodes)
    finish(job, nodes)


def test_the_end_of_rank_0_ends_the_job_for_all(job: Any, within: Any, wait_until: Any, alive: Any):
    """P04: where nobody is to wait for the agent that all meet at: they end within seconds, with one line, workers gone."""
    nodes = meet(job, nodes=3, conf="host_timeout=0")
    workers = [one for node in nodes for one in node.starts()]
    killed_at = nodes[0].kill()
    for node in nodes[1:]:
        assert node.wait() == 3
        (line,) = errors(node)
        assert f"the coordination store at {HERE}:{job.port} is gone" in line
    within("from kill -9 of rank 0's agent to the end of the others", time.monotonic() - killed_at, 7.0)
    wait_until(lambda: not any(alive(worker.pid) for worker in workers), 5.0)


def test_a_signal_to_rank_0_ends_the_job_for_all(job: Any, within: Any):
    """P04: the others are told why, and end at once."""
    host, other = meet(job)
    asked_at = time.monotonic()
    assert host.end(signal.SIGTERM) == 128 + signal.SIGTERM
    assert other.wait() == 128 + signal.SIGTERM
    within("from the signal to the end of the other node", time.monotonic() - asked_at, 1.0)
    (line,) = errors(other)
    assert "the job was stopped on purpose: SIGTERM was received by node 0 (" in line
    with socket.create_server((HERE, job.port)):
        pass


# --- what is refused -------------------------------------------------------------------------------------------------------


def test_no_two_nodes_have_one_rank(job: Any):
    """P13, P27: the second is refused, by rank or by port, and the job does not notice."""
    nodes = meet(job)
    twins = [start(job, 0), start(job, 1)]
    assert [twin.wait() for twin in twins] == [3, 2]
    assert f"cannot listen at {HERE}:{job.port}: Address already in use" in errors(twins[0])[0]
    assert "rank 1 is held by rank1 at" in errors(twins[1])[0]
    assert [twin.starts() for twin in twins] == [[], []]
    exchange(job, nodes)
    finish(job, nodes)
    assert [len(node.starts()) for node in nodes] == [1, 1]


@pytest.mark.parametrize(
    ("flags", "options", "code", "told"),
    [
        (["--rdzv-id", "another-job"], {}, 3, ["'a-job'", "'another-job'"]),
        (["--max-restarts", "3"], {}, 2, ["max_restarts is 3 here and 0 for the job"]),
        ([], {"nodes": 3}, 2, ["nnodes is 3:3 here and 2:2 for the job"]),
    ],
    ids=["run id", "restarts", "nodes"],
)
def test_nodes_of_one_job_were_told_the_same(job: Any, flags: list[str], options: dict[str, Any], code: int, told: list[str]):
    """P13, P19: else they are refused, with both values."""
    start(job, 0).wait_for_line(SERVING)
    other = start(job, 1, *flags, **options)
    assert other.wait() == code
    assert all(part in errors(other)[0] for part in told)
    assert other.starts() == []


@pytest.mark.parametrize("flags", [["--worker-store", "rank0"], ["--worker-store-port", "29600"]], ids=["who", "port"])
def test_the_workers_store_is_nowhere_else(job: Any, flags: list[str]):
    """With static ranks there is one port; what would ask for another is refused, before anything is opened."""
    node = start(job, 0, *flags)
    assert node.wait() == 2
    (line,) = errors(node)
    assert "static rendezvous of 2 nodes: agents and workers meet at the master port" in line
    assert "--worker-store" in line
    assert SERVING not in node.stderr


def test_a_busy_master_port_is_refused_by_name(job: Any):
    """P13: no worker is started; the other node does not take whoever listens there for its master."""
    with socket.create_server((HERE, job.port)):
        host, other = start(job, 0), start(job, 1, conf="join_timeout=1")
        assert host.wait() == 3
        assert f"cannot listen at {HERE}:{job.port}: Address already in use" in errors(host)[0]
        assert other.wait() == 3
    assert f"{HERE}:{job.port}" in errors(other)[0]
    assert host.starts() == other.starts() == []


# --- waiting ---------------------------------------------------------------------------------------------------------------


def test_who_waits_says_for_whom(job: Any, free_port: Callable[[], int]):
    """P19: a line each 10 s: for a node that is missing by its rank, for a master that is missing by its address."""
    nodes = [start(job, 0, nodes=3), start(job, 2, nodes=3)]
    job.port = free_port()
    lost = start(job, 1)
    for node in nodes:
        node.wait_for_line("waiting: 2 of 3 nodes; here: rank0, rank2; missing: rank 1")
    assert f"{HERE}:{job.port}" in lost.wait_for_line("trying for another")
    for node in (lost, *reversed(nodes)):
        assert node.end(signal.SIGINT) == 130
        assert "Traceback" not in node.stderr


@pytest.mark.parametrize(
    ("rank", "told"), [(0, "waited 1 s for enough nodes in vain"), (1, "was not reached within 1 s")], ids=["rank 0", "rank 1"]
)
def test_a_wait_has_an_end(job: Any, within: Any, rank: int, told: str):
    """P19: after torchrun's rendezvous timeout, with exit code 3."""
    began_at = time.monotonic()
    lonely = start(job, rank, conf="timeout=1")
    assert lonely.wait() == 3
    within("a wait of 1 s", time.monotonic() - began_at, 2.0)
    assert told in errors(lonely)[0]
    assert "join_timeout 1 s" in lonely.stderr
