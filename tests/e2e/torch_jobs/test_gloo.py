"""Programs with torch meet in the store of their agents, lose a worker, and meet again; nothing of the old store is left."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.store.interface import StoreNetworkError
from rallypoint.store.tcp_store import TCPStore

pytestmark = pytest.mark.torch

LOADING_S = 100.0  # for torch in six workers, however busy the machine is


def kill_and_meet_again(job: Any, victims: list[int], world: int = 4) -> list[Any]:
    """The workers of the last generation, after each victim in turn was killed and all others had met again."""
    told = job.wait_for_sum(0, world)
    for generation, victim in enumerate(victims, start=1):
        killed_at = job.kill(told[victim])
        told = job.wait_for_sum(generation, world)
        took_s = max(one.at for one in told) - killed_at
        print(f"rank {victim} was killed: generation {generation} had its sum after {took_s:.2f} s")
    return list(told)


# --- two nodes that find their ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kills",
    [pytest.param(2, marks=pytest.mark.timeout(180)), pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(900)])],
)
def test_gloo_recovers_from_every_kill(job: Any, kills: int):
    """P16: the worker of rank 0, one of the node without the store, one of the node with it, and so on."""
    agents = [job.start_c10d("--nproc-per-node", "2", "--max-restarts", str(kills), "--restart-backoff", "0") for _ in range(2)]
    told = kill_and_meet_again(job, [(0, 2, 1, 3)[turn % 4] for turn in range(kills)])
    assert [one.node for one in told] == [0, 0, 1, 1]
    job.finish()
    assert [agent.wait() for agent in agents] == [0, 0]


def check_roles(told: list[Any]) -> None:
    """Three trainers on one node and a reader on the other, whichever of them has group rank 0."""
    trainers = [one for one in told if one.env["ROLE_NAME"] == "trainer"]
    readers = [one for one in told if one.env["ROLE_NAME"] == "reader"]
    assert [(one.env["ROLE_RANK"], one.env["ROLE_WORLD_SIZE"], one.env["LOCAL_RANK"]) for one in trainers] == [
        ("0", "3", "0"), ("1", "3", "1"), ("2", "3", "2"),
    ]  # fmt: skip
    assert [(one.env["ROLE_RANK"], one.env["ROLE_WORLD_SIZE"], one.env["LOCAL_RANK"]) for one in readers] == [("0", "1", "0")]
    assert [one.node for one in told] == sorted(one.node for one in told)
    assert {one.node for one in trainers} ^ {one.node for one in readers} == {0, 1}


def test_gloo_over_two_roles_of_uneven_size(job: Any):
    flags = ("--max-restarts", "1")
    trainer = job.start_c10d("--role", "trainer", "--nproc-per-node", "3", *flags)
    reader = job.start_c10d("--role", "reader", "--nproc-per-node", "1", *flags)
    told = job.wait_for_sum(0, world=4)
    check_roles(told)
    job.kill(next(one for one in told if one.env["ROLE_NAME"] == "reader"))
    check_roles(job.wait_for_sum(1, world=4))
    job.finish()
    assert [trainer.wait(), reader.wait()] == [0, 0]


# --- static ranks ----------------------------------------------------------------------------------------------------------


def returned(agent: Any) -> dict[str, int]:
    """What the call of elastic_launch gave in this agent, once it has ended."""
    assert agent.wait(LOADING_S) == 0
    lines = [line for line in agent.stdout.splitlines() if line.startswith("RETURNED ")]
    assert len(lines) == 1
    return dict(json.loads(lines[0].removeprefix("RETURNED ")))


@pytest.mark.soak  # what follows does it on two nodes
def test_static_call_on_one_node(job: Any):
    agent = job.start_call(nodes=1, node_rank=0, workers=4)
    told = job.wait_for_sum(0, world=4)
    assert told[0].master == ("127.0.0.1", job.port)
    job.finish()
    assert returned(agent) == {"0": 6, "1": 6, "2": 6, "3": 6}


@pytest.mark.parametrize(("workers", "victim"), [(2, 3), (1, 0)])
def test_static_calls_on_two_nodes_recover(job: Any, workers: int, victim: int):
    """The last worker is killed, or the first: the other node hears of it, and all meet again at the same port."""
    agents = [job.start_call(nodes=2, node_rank=rank, workers=workers) for rank in (1, 0)]
    told = kill_and_meet_again(job, [victim], world=2 * workers)
    assert told[0].master == ("127.0.0.1", job.port)
    job.finish()
    second, first = (returned(agent) for agent in agents)
    assert {*first.values(), *second.values()} == {told[0].sum}
    assert [*first, *second] == [str(rank) for rank in range(2 * workers)]


# --- leaving together ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "runs",
    [pytest.param(1, marks=pytest.mark.timeout(180)), pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])],
)
def test_f31_functions_need_not_destroy_their_process_group(make_job: Callable[[], Any], runs: int):
    """F31: three nodes with 1, 2 and 3 workers; without leaving together about half of such runs abort at their end."""
    for _ in range(runs):
        job = make_job()
        agents = [job.start_program("launch_gloo.py", f"127.0.0.1:{job.port}", workers) for workers in (1, 2, 3)]
        results = [returned(agent) for agent in agents]
        assert sorted(rank for one in results for rank in one) == ["0", "1", "2", "3", "4", "5"]
        assert {total for one in results for total in one.values()} == {15}


# --- what a generation finds -----------------------------------------------------------------------------------------------


def start_static(job: Any, node_ranks: list[int]) -> None:
    where = ("--master-addr", "127.0.0.1", "--master-port", str(job.port), "--nnodes", str(len(node_ranks)))
    for rank in node_ranks:
        workers = str(2 // len(node_ranks))
        job.start(*where, "--node-rank", str(rank), "--nproc-per-node", workers, "--max-restarts", "1", program="leave_keys.py")


def start_standalone(job: Any) -> None:
    job.start("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", program="leave_keys.py")


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(start_standalone, id="new port"),
        pytest.param(lambda job: start_static(job, [0]), id="same port", marks=pytest.mark.soak),
        pytest.param(lambda job: start_static(job, [0, 1]), id="same port, two nodes"),
    ],
)
def test_no_generation_sees_the_keys_of_another(job: Any, start: Callable[[Any], None]):
    """P16: neither keys of the program nor addresses of gloo; and whoever was connected before cannot write any more."""
    start(job)
    first = job.wait_for_generation(0, world=2)
    assert {"left by 0", "left by 1"} < set(first[0].left)
    assert len(first[0].left) > 6  # torch's own are there too
    with contextlib.closing(TCPStore(*first[0].master, timeout=10)) as old:
        assert old.get("left by 0") == b"0"
        job.kill(first[0])
        second = job.wait_for_generation(1, world=2)
        assert first[0].found == second[0].found == []
        with contextlib.suppress(StoreNetworkError):  # nothing is answered to it, so it need not find out
            old.set("left by 0", "0")
        with pytest.raises(StoreNetworkError):
            old.get("left by 0")
    with contextlib.closing(TCPStore(*second[0].master, timeout=10)) as new:
        assert new.multi_get(["left by 0", "left by 1"]) == [b"1", b"1"]
    job.finish()
    assert [agent.wait() for agent in job.agents] == [0] * len(job.agents)


# --- who serves the store --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flags", "is_agents"), [((), "True"), (("--worker-store", "rank0"), "False")])
def test_environment_tells_who_serves(
    job: Any, listening_ports: Callable[[int], set[int]], flags: tuple[str, ...], is_agents: str
):
    """torch opens the port in the worker of rank 0 exactly where the agent did not."""
    agent = job.start("--standalone", "--nproc-per-node", "2", *flags)
    told = job.wait_for_sum(0, world=2)
    assert {one.env["TORCHELASTIC_USE_AGENT_STORE"] for one in told} == {is_agents}
    port = told[0].master[1]
    servers = [pid for pid in (agent.pid, told[0].pid, told[1].pid) if port in listening_ports(pid)]
    assert servers == [agent.pid if is_agents == "True" else told[0].pid]
    job.finish()
    assert agent.wait() == 0
