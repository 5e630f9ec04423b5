"""Nodes tell how quick their workers are, the leader compares, and all hear the same: step by step, through the store."""

from __future__ import annotations

import pytest
from tests.simulation.script import Stage

from rallypoint.protocol import job_records as job
from rallypoint.protocol import session
from rallypoint.protocol.generation import Policy
from rallypoint.protocol.pace import JobPace, NodePace, Pace, Slow, decode_job

NAMES = ("a", "b", "c")
SLOW_C = JobPace(0.1, (Slow(2, 0.3, 0.1, node="c"),))


def formed(*names: str) -> Stage:
    stage = Stage(Policy(2, 4, last_call_s=0.0, scale_up_window_s=0.3, ready_timeout_s=10.0, join_timeout_s=60.0))
    stage.join(*names)
    stage.pass_time(1.0)
    assert [stage.kinds(name) for name in names] == [["Seated"]] * len(names)
    return stage


def tell(stage: Stage, name: str, step_s: float, generation: int = 1) -> None:
    stage.nodes[name].paced(generation, NodePace(name, (Pace(NAMES.index(name), step_s, 50),)))


def heard(stage: Stage, name: str) -> list[JobPace]:
    return [decode_job(one.found) for one in stage.news(name) if isinstance(one, session.Paced)]


def posted(stage: Stage) -> JobPace:
    return decode_job(stage.value(job.job_pace_key(1)) or b"")


def test_one_rank_a_node_and_all_nodes_name_the_slow_one() -> None:
    stage = formed(*NAMES)
    before = [node.wake_at() for node in stage.nodes.values()]
    for name, step_s in zip(NAMES, (0.1, 0.1, 0.3), strict=True):
        tell(stage, name, step_s)
    stage.pass_time(20.0)
    for name in NAMES:
        assert heard(stage, name) == [JobPace(0.1), SLOW_C]
    assert [node.wake_at() for node in stage.nodes.values()] == before  # nobody wakes for what does not change


def test_a_new_leader_compares_what_is_there() -> None:
    stage = formed(*NAMES)
    leader = stage.nodes[stage.leader()]
    for name, step_s in zip(NAMES, (0.1, 0.1, 0.3), strict=True):
        tell(stage, name, step_s)
    stage.settle()
    assert stage.value(job.job_pace_key(1)) is None
    leader.look_again()
    stage.pass_time(20.0)
    assert posted(stage) == SLOW_C


def test_the_next_generation_begins_without_it() -> None:
    stage = formed("a", "b")
    tell(stage, "a", 0.1)
    tell(stage, "b", 0.3)
    stage.pass_time(20.0)
    stage.fail("b")
    stage.settle()
    stage.ready("a", "b")
    stage.pass_time(1.0)
    assert stage.generation().number == 2
    assert stage.store.read("up/pace/").items == stage.store.read("down/pace/").items == ()
    stage.nodes["a"].take_news()
    tell(stage, "a", 0.1)  # of the one before
    stage.pass_time(20.0)
    assert stage.store.read("up/pace/").items == ()
    tell(stage, "a", 0.1, generation=2)
    tell(stage, "b", 0.1, generation=2)
    stage.pass_time(20.0)
    assert heard(stage, "a") == [JobPace(0.1)]


@pytest.mark.parametrize("junk", [b"", b"[]", b'{"node": 3, "workers": []}'])
def test_what_a_stranger_writes_there_stops_nobody(junk: bytes) -> None:
    stage = formed(*NAMES)
    stage.put(job.job_pace_key(1), junk)
    stage.put(job.node_pace_key(1, "a"), junk)
    stage.put("up/pace/x/a", b"1")
    tell(stage, "b", 0.1)
    tell(stage, "c", 0.3)
    stage.pass_time(20.0)
    assert posted(stage) == SLOW_C
