"""What is told of a run: a function of its events, on each node, so that of all nodes one tells."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.json_text import to_json
from rallypoint.notices.document import Teller, hear

Document = dict[str, Any]
FIELDS = {
    "schema", "id", "event", "outcome", "text", "run_id", "role", "timestamp", "told_by", "generation", "nodes", "workers",
    "restarts", "max_restarts", "lasted_s", "why", "cause",
}  # fmt: skip


class Node:
    """One agent, by what it puts on record."""

    def __init__(self, host: str = "alpha", run_id: str = "job-7", **about: Any) -> None:
        self.teller, self.told, self.now_ms = Teller(), list[Document](), 1_000
        self.see("run.started", run_id=run_id, hostname=host, role="trainer", max_restarts=3, **about)

    def see(self, name: str, **facts: Any) -> None:
        self.now_ms += 1_000
        self.teller, document = hear(self.teller, f"rallypoint.{name}", self.now_ms, facts)
        self.told += [document] if document is not None else []

    def form(self, generation: int, rank: int = 0, nodes: int = 2, after: str = "", why: str = "") -> None:
        self.see(
            "generation", generation=generation, group_rank=rank, group_world_size=nodes, world_size=2 * nodes,
            restarts=generation - 1, after=after, why=why,
        )  # fmt: skip

    def fail(self, rank: int = 1, message: str = "ValueError: bad batch", ago_s: float = 0.1, hung: bool = False) -> None:
        self.see(
            "worker.failed", generation=1, rank=rank, local_rank=rank, pid=77, exitcode=1, message=message, place="train.py:3",
            log_file="/logs/1", ago_s=ago_s, hung=hung,
        )  # fmt: skip

    def end(self, outcome: str = "succeeded", why: str = "all workers succeeded", **facts: Any) -> None:
        self.see("run.ended", succeeded=outcome == "succeeded", outcome=outcome, why=why, wall_s=100.2, **facts)


@pytest.mark.parametrize(
    ("after", "event", "headline"),
    [
        ("failure", "failure", "workers failed; all were restarted"),
        ("hang", "hang", "workers hung; all were restarted"),
        ("loss", "failure", "a node was lost; the workers of the others were restarted"),
    ],
)
def test_a_restart_is_told_by_the_first_node_of_the_new_generation(after: str, event: str, headline: str) -> None:
    nodes = [Node(host) for host in "abc"]
    for rank, node in enumerate(nodes):
        node.form(1, rank, 3)
        node.fail()  # everywhere: most are victims, and only the job knows whose failure was the cause
        node.form(2, (rank - 1) % 3, 3, after, "rank 3 on b failed")
    assert [len(node.told) for node in nodes] == [0, 1, 0]
    document = nodes[1].told[0]
    assert set(document) == FIELDS
    assert (document["event"], document["outcome"], document["cause"]) == (event, None, {"kind": after})
    assert document["text"] == f"job-7: {headline}: rank 3 on b failed (generation 2 runs: 3 nodes, 6 workers)"
    assert document["told_by"] == {"host": "b", "group_rank": 0}
    assert (document["restarts"], document["generation"], document["timestamp"]) == (1, 2, 5_000)


@pytest.mark.parametrize("after", ["", "join", "departure", "none"])
def test_what_is_planned_is_not_told(after: str) -> None:
    node = Node()
    node.form(1)
    node.form(2, after=after, why="1 node joined")
    assert node.told == []


def test_on_one_node_the_cause_is_the_failure_that_was_first() -> None:
    node = Node()
    node.form(1, nodes=1)
    node.fail(0, "BrokenPipeError", ago_s=0.1)
    node.fail(1, "ValueError: bad batch", ago_s=0.4)
    node.form(2, nodes=1, after="failure", why="rank 1 failed")
    assert node.told[0]["cause"] == {
        "kind": "failure", "rank": 1, "local_rank": 1, "host": "alpha", "pid": 77, "exit_code": 1,
        "message": "ValueError: bad batch", "place": "train.py:3", "log_file": "/logs/1",
    }  # fmt: skip
    node.end("failed", "another reason")
    assert node.told[1]["cause"] is None  # what failed before the restart is not what ended it


def test_the_end_is_told_by_the_node_that_the_event_names() -> None:
    nodes = [Node(), Node()]
    for rank, node in enumerate(nodes):
        node.form(1, rank)
        node.end(tells=rank == 1)
    assert [len(node.told) for node in nodes] == [0, 1]
    document = nodes[1].told[0]
    assert (document["event"], document["outcome"], document["cause"]) == ("end", "succeeded", None)
    assert document["text"] == "job-7: succeeded after 1 min 40 s"
    assert document["lasted_s"] == 100.2


@pytest.mark.parametrize(("rank", "count"), [(0, 1), (1, 0), (None, 1)])
def test_where_nodes_do_not_act_as_one_the_first_tells_of_the_end(rank: int | None, count: int) -> None:
    node = Node()
    if rank is not None:
        node.form(1, rank)
    node.end("failed", "no seat")
    assert len(node.told) == count


GOES_ON = "the job goes on where enough other nodes are left"
CAUSE = {
    "rank": 5, "local_rank": 1, "host": "beta", "pid": 9, "exitcode": -9, "message": "", "place": "", "log_file": "",
    "hung": True,
}  # fmt: skip
HUNG, GONE = {"verdict": "rank 5 hung; 3 victims", "cause": CAUSE}, {"verdict": "node b was lost", "cause": None, "lost": ["b"]}


@pytest.mark.parametrize(
    ("outcome", "facts", "text", "kind"),
    [
        ("failed", HUNG, "failed after 1 min 40 s: rank 5 hung; 3 victims", "hang"),
        ("failed", GONE, "failed after 1 min 40 s: node b was lost", "loss"),
        ("failed", {}, "failed after 1 min 40 s: as it is", "failure"),
        ("stopped", {}, "was stopped after 1 min 40 s: as it is", "failure"),
        ("left", {}, f"node 0 (alpha) left after 1 min 40 s: as it is; {GOES_ON}", "failure"),
    ],
)  # fmt: skip
def test_how_a_job_ends_otherwise(outcome: str, facts: dict[str, Any], text: str, kind: str) -> None:
    node = Node()
    node.form(2)
    node.fail()
    node.end(outcome, "as it is", tells=True, **facts)
    (document,) = node.told
    assert document["text"] == f"job-7: {text} (1 of 3 restarts spent)"
    assert (document["outcome"], document["cause"]["kind"]) == (outcome, kind)
    assert document["cause"].get("exit_code") == (-9 if kind == "hang" else None if kind == "loss" else 1)


@given(st.text(), st.text(), st.text())
def test_whatever_workers_write_a_document_is_small_and_calls_nobody(run_id: str, why: str, message: str) -> None:
    node = Node(run_id=run_id)
    node.form(1, nodes=1)
    node.fail(message=100 * message)
    node.form(2, nodes=1, after="failure", why=f"<!channel> {50 * why}")
    node.fail(message=100 * message)
    node.end("failed", 100 * why)
    assert len(node.told) == 2
    for document in node.told:
        body = to_json(document)
        assert json.loads(body) == document
        assert len(body) < 30_000  # less than a pipe or any chat takes
        assert document["text"].isprintable()
        assert "<" not in document["text"]
