"""What can be done to a job, what would end it, and how it is expected to stand afterwards."""

from __future__ import annotations

import pytest
from tests.chaos.jobs import make_job, make_node, make_scene

from rallypoint.chaos.faults import Fault, read_fault
from rallypoint.chaos.scene import Scene, after, every_fault, find, what_ends, what_ends_drill, why_not
from rallypoint.inspection.view import NodeView

PAIR = make_job(2)
ELSEWHERE = make_scene(make_node(0), make_node(1), here=(1,))


def test_a_rank_is_found_where_it_runs() -> None:
    node = find(read_fault("kill rank 3"), PAIR)
    assert isinstance(node, NodeView)
    assert node.node == "node-1"


@pytest.mark.parametrize("name", ["1", "node-1", "host-1", "id-1"])
def test_a_node_is_found_by_any_of_its_names(name: str) -> None:
    assert find(Fault("kill", "node", name), PAIR) == PAIR.job.nodes[1]


@pytest.mark.parametrize(
    ("text", "scene", "why"),
    [
        ("kill rank 3", PAIR, ""),
        ("kill rank 4", PAIR, "there is no rank 4 now"),
        ("kill node 2", PAIR, "there is no node 2 now"),
        ("kill rank 0", ELSEWHERE, "rank 0 is on host-0; chaos has to be started there"),
        ("kill node 0", make_scene(make_node(0), make_node(1, hostname="host-0", node="node-0")), ""),
        ("kill node host", make_scene(make_node(0, hostname="host"), make_node(1, hostname="host")), "2 nodes fit 'host'"),
        ("kill warden of node 1", make_scene(make_node(0), make_node(1, workers=0)), "node 1 has no workers now"),
        ("fill disk of node 1 for 1s", make_job(2, log_dir=""), "node 1 has no log folder"),
        ("fill memory of node 1 for 1s", make_job(2, log_dir=""), ""),
        ("cut node 1 for 1s", PAIR, ""),
        ("cut node 0 for 1s", PAIR, "node 0 hosts the coordination store; cut the others instead"),
        ("cut node 0 for 1s", make_job(1, hosts_store=False), "it is the only node of its job"),
        ("cut node 1 for 1s", PAIR.replace(cannot=(("cut", "not allowed here"),)), "not allowed here"),
    ],
)  # fmt: skip
def test_what_is_not_possible_is_said(text: str, scene: Scene, why: str) -> None:
    said = why_not(read_fault(text), scene)
    assert said.startswith(why) if why else said == "" or "2 nodes fit" in said


@pytest.mark.parametrize(
    ("held", "text", "collides"),
    [
        ("stop rank 3 for 8s", "stop rank 3 for 1s", True),
        ("stop rank 3 for 8s", "slow rank 3 to 50% for 1s", True),
        ("stop rank 3 for 8s", "stop rank 2 for 1s", False),
        ("stop rank 3 for 8s", "stop agent of node 1 for 1s", False),
        ("stop node 1 for 8s", "stop rank 3 for 1s", True),
        ("stop node 1 for 8s", "stop rank 1 for 1s", False),
        ("stop node 1 for 8s", "kill rank 3", False),
        ("stop agent of node 1 for 8s", "stop node 1 for 1s", True),
        ("cut node 1 for 8s", "cut node 1 for 1s", True),
        ("cut node 1 for 8s", "stop node 1 for 1s", False),
        ("stop rank 9 for 8s", "stop rank 3 for 1s", False),
    ],
)
def test_what_lasts_on_the_same_processes_waits_for_its_turn(held: str, text: str, collides: bool) -> None:
    """The first to be over would undo the other."""
    said = why_not(read_fault(text), PAIR.replace(held=(read_fault(held),)))
    assert said == (f"{held} is not over yet" if collides else "")


@pytest.mark.parametrize(
    ("text", "scene", "why"),
    [
        ("kill rank 0", make_job(1), ""),
        ("kill rank 0", make_job(1, restarts=3), "3 of 3 restarts are spent"),
        ("kill warden of node 0", make_job(1, restarts=3), "3 of 3 restarts are spent"),
        ("kill rank 0", make_job(1, max_restarts=0), "it has no restarts (--max-restarts)"),
        ("kill node 0", make_job(1), "it is the only node of its job"),
        ("preempt node 0", make_job(1), "it is the only node of its job"),
        ("kill agent of node 0", PAIR, "it hosts the coordination store"),
        ("kill agent of node 1", PAIR, ""),
        ("kill agent of node 1", make_job(2, max_restarts=0), ""),
        ("preempt node 1", make_job(2, min_nodes=2), "1 node would be left, and the job needs 2"),
        ("stop node 0 for 8s", make_job(1, restarts=3), ""),
        ("kill rank 99", make_job(1, restarts=3), ""),
    ],
)
def test_what_ends_the_job_with_certainty(text: str, scene: Scene, why: str) -> None:
    assert what_ends(read_fault(text), scene) == why


def test_the_last_node_here_ends_the_drill() -> None:
    assert what_ends_drill(read_fault("kill node 1"), ELSEWHERE) == "no other node of the job is on this machine"
    assert what_ends_drill(read_fault("kill node 1"), PAIR) == ""
    assert what_ends_drill(read_fault("kill rank 3"), ELSEWHERE) == ""


def test_everything_that_is_thought_of_is_here() -> None:
    assert {fault.whom for fault in every_fault("stop", ELSEWHERE) if fault.what == "rank"} == {"2", "3"}
    assert {(fault.what, fault.whom) for fault in every_fault("kill", ELSEWHERE) if fault.what != "rank"} == {
        ("warden", "1"), ("agent", "1"), ("node", "1"),
    }  # fmt: skip


def test_who_has_gone_is_gone_and_ranks_have_no_gap() -> None:
    left = after(read_fault("kill node 1"), make_job(3))
    assert [(node.node, node.node_rank, [worker.rank for worker in node.workers]) for node in left.job.nodes] == [
        ("node-0", 0, [0, 1]),
        ("node-2", 1, [2, 3]),
    ]
    assert left.job.restarts == 0
    assert after(read_fault("kill rank 1"), make_job(3)).job.restarts == 1
    assert after(read_fault("stop rank 1 for 1s"), PAIR) == PAIR


def test_a_job_runs_when_all_nodes_do() -> None:
    assert PAIR.is_running
    assert not PAIR.replace(job=PAIR.job.replace(silent=("node-9",))).is_running
    assert not make_scene(make_node(0), make_node(1, phase="starting")).is_running
