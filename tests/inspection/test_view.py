"""What can be seen of a job: the questions that a view answers, and what is taken for one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.json_text import to_json
from rallypoint.inspection.view import (
    FORMAT,
    Happening,
    JobView,
    NodeView,
    WorkerView,
    find_node,
    including,
    job_document,
    job_of,
    jobs_of,
    read_job,
    read_node,
    stragglers,
    straggling,
    to_document,
)

FIELDS = st.sampled_from(["job", "node", "nodes", "workers", "pid", "format"])
SIMPLE = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
ANYTHING = st.recursive(SIMPLE, lambda one: st.lists(one) | st.dictionaries(FIELDS, one))


def node(name: str, rank: int | None = 0, *, generation: int = 1, phase: str = "running", **more: object) -> NodeView:
    about = {"job": "a-job", "node": name, "hostname": f"{name}.example", "pid": 10, "id": f"{name}#1"}
    return NodeView(**{**about, "node_rank": rank, "generation": generation, "phase": phase, **more})  # type: ignore[arg-type]


def workers(*steps: int | None) -> tuple[WorkerView, ...]:
    return tuple(WorkerView(rank, rank, 100 + rank, step=step) for rank, step in enumerate(steps))


class TestAJob:
    def test_its_nodes_are_in_the_order_of_their_ranks_and_those_without_one_last(self) -> None:
        job = job_of([node("c", None), node("b", 1), node("a", 0)])
        assert [one.node for one in job.nodes] == ["a", "b", "c"]
        assert job.job == "a-job"

    def test_a_node_that_looks_is_there_whether_or_not_it_was_in_time_to_answer_itself(self) -> None:
        own, other = node("a", 0), node("b", 1)
        assert including(job_of([other], ["a", "c"], "2 of 3"), own) == job_of([own, other], ["c"], "2 of 3")
        assert including(job_of([own, other], ["c"]), own) == job_of([own, other], ["c"])

    def test_members_are_those_of_the_latest_generation(self) -> None:
        job = job_of([node("a", 0, generation=3), node("b", 1, generation=3), node("old", 2, generation=2), node("new", None)])
        assert [one.node for one in job.members] == ["a", "b"]

    def test_who_waits_while_others_run_is_a_spare(self) -> None:
        waiting = node("c", None, generation=0, phase="waiting")
        assert job_of([node("a"), waiting]).spares == (waiting,)
        assert job_of([node("a", phase="stopping"), waiting]).spares == ()

    @pytest.mark.parametrize(
        ("phases", "expected"),
        [
            (("running", "running"), "running"),
            (("running", "starting"), "starting"),
            (("running", "waiting"), "waiting"),
            (("stopping", "running"), "stopping"),
            (("done", "done"), "done"),
            ((), ""),
        ],
    )
    def test_its_phase_is_that_of_whoever_holds_the_others_up(self, phases: tuple[str, ...], expected: str) -> None:
        assert job_of([node(str(rank), rank, phase=phase) for rank, phase in enumerate(phases)]).phase == expected

    def test_its_step_is_the_one_that_all_have_reached(self) -> None:
        assert job_of([node("a", workers=workers(7, 9)), node("b", 1, workers=workers(8, None))]).step == 7
        assert job_of([node("a", workers=workers(None))]).step is None

    def test_goodput_is_the_share_of_time_that_was_not_for_nothing(self) -> None:
        half = node("a", seconds={"running": 30.0, "lost": 20.0, "starting": 10.0})
        whole = node("b", 1, seconds={"running": 60.0})
        assert job_of([half, whole]).goodput == pytest.approx(0.75)
        assert job_of([half, whole]).lost_s == 20.0
        assert job_of([node("a")]).goodput is None

    @pytest.mark.parametrize(
        ("steps", "expected"),
        [((10, 10, 10, 4), [3]), ((10, 9, 8, 10), []), ((10,), []), ((None, 10), []), ((1, 100, 100, 1), [0, 3])],
    )
    def test_a_straggler_is_clearly_behind_the_most(self, steps: tuple[int | None, ...], expected: list[int]) -> None:
        assert [worker.rank for worker in stragglers(job_of([node("a", workers=workers(*steps))]))] == expected

    def test_a_straggler_is_one_that_takes_longer_for_a_step_on_whichever_node(self) -> None:
        quick = [WorkerView(rank, rank, 100 + rank, step=50, step_s=0.1 + rank / 1000, steps=49) for rank in range(4)]
        slow = WorkerView(4, 0, 104, step=49, step_s=0.2, steps=48)
        job = job_of([node("a", workers=tuple(quick)), node("b", 1, workers=(slow,))])
        assert stragglers(job) == (slow,)
        assert straggling(job) == "rank 4 (node b); it takes 2.0 times as long for a step as the median (0.2 s, not 0.102 s)"
        assert straggling(job_of([node("a", workers=workers(10, 10, 10, 4))])) == "rank 3"
        assert straggling(job_of([node("a", workers=tuple(quick))])) == ""

    def test_a_straggler_is_one_that_is_busy_while_the_others_wait(self) -> None:
        alike = [WorkerView(rank, 0, 100 + rank, step=50, step_s=0.1, steps=49, busy=0.2) for rank in range(3)]
        job = job_of([node(name, rank, workers=(alike[rank],)) for rank, name in enumerate("abc")])
        assert straggling(job) == ""
        job = job_of(
            [node(name, rank, workers=(alike[rank].replace(busy=0.2 + 0.8 * (rank == 1)),)) for rank, name in enumerate("abc")]
        )
        assert straggling(job).startswith("rank 1 (node b); it is busy for 5.0 times as long in each step as the median")

    def test_a_node_is_found_by_its_name_its_host_its_id_or_its_rank(self) -> None:
        job = job_of([node("a", 0), node("b", 1)])
        for name in ("b", "b.example", "b#1", "1"):
            assert [one.node for one in find_node(job, name)] == ["b"]
        assert find_node(job, "2") == []
        assert len(find_node(job_of([node("a", 0), node("a", 1)]), "a")) == 2

    def test_nodes_of_several_jobs_are_told_apart(self) -> None:
        other = node("a").replace(job="other")
        assert [(job.job, len(job.nodes)) for job in jobs_of([node("a"), other, node("b", 1)])] == [("a-job", 2), ("other", 1)]


class TestAsJson:
    def test_a_job_comes_back_as_it_was(self) -> None:
        worker = WorkerView(3, 1, 77, "sleeping", "checkpoint", 12, 0.5, 3.25, 1 << 30)
        one = node("a", workers=(worker,), history=(Happening(3.5, "restart", "rank 3 failed"),), seconds={"running": 1.5})
        job = JobView("a-job", (one,), ("b",), "1 of 2 nodes")
        assert read_job(json.loads(to_json(to_document(job)))) == job

    def test_what_follows_for_the_job_as_a_whole_is_in_its_document(self) -> None:
        quick = [WorkerView(rank, rank, 100 + rank, step=50, step_s=0.1, steps=49) for rank in range(3)]
        slow = WorkerView(3, 0, 103, step=40, step_s=0.3, steps=39)
        members = node(
            "a", workers=tuple(quick), seconds={"running": 30.0, "lost": 10.0}, world_size=4, max_restarts=3, restarts=1
        )
        other = node("b", 1, workers=(slow,), seconds={"running": 40.0})
        spare = node("c", None, generation=0, phase="waiting")
        job = job_of([members, other, spare], ("d",))
        document = json.loads(to_json(job_document(job)))
        assert {name: document[name] for name in ("job", "format", "phase", "generation", "world_size", "restarts")} == {
            "job": "a-job", "format": FORMAT, "phase": "running", "generation": 1, "world_size": 4, "restarts": 1,
        }  # fmt: skip
        assert (document["max_restarts"], document["step"], document["goodput"], document["lost_s"]) == (3, 40, 0.875, 10.0)
        assert document["stragglers"] == [{"rank": 3, "step": 40, "step_s": 0.3, "times_median": 3.0}]
        assert document["spares"] == [{"node": "c", "id": "c#1", "pid": 10}]
        assert read_job(document) == job  # nothing of it has to be understood
        assert job_document(job_of(()))["goodput"] is None

    def test_what_a_later_version_adds_is_left_out(self) -> None:
        assert read_node({**to_document(node("a")), "colour": "red"}) == node("a")

    def test_another_format_is_named(self) -> None:
        with pytest.raises(ValueError, match=f"format 7, and this reads {FORMAT}: ask it with the version"):
            read_node({**to_document(node("a")), "format": 7})

    @pytest.mark.parametrize(
        "wrong",
        [
            None, [], {}, {"job": "a"}, {"pid": "10"}, {"pid": True}, {"pid": 1 << 70}, {"workers": [7]},
            {"seconds": {"running": "x"}}, {"phase_s": float("inf")}, {"history": [{}] * 65}, {"node": 7},
        ],
        ids=lambda value: repr(value)[:30],
    )  # fmt: skip
    def test_what_is_no_node_is_refused(self, wrong: object) -> None:
        found = {**to_document(node("a")), **wrong} if isinstance(wrong, dict) and wrong.keys() != {"job"} and wrong else wrong
        with pytest.raises(ValueError, match=r".+"):
            read_node(found)

    @given(ANYTHING)
    def test_nothing_that_comes_does_worse_than_a_value_error(self, found: object) -> None:
        for read in (read_node, read_job):
            try:
                read(found)
            except ValueError:
                continue
