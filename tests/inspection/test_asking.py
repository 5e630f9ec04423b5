"""Asking all nodes of a job through its store: who answers, who does not, and what a restart is refused for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from rallypoint.coordination.model import Put, Transaction
from rallypoint.errors import RallypointError
from rallypoint.inspection import asking
from rallypoint.inspection.view import NodeView
from rallypoint.protocol import job_records as job
from rallypoint.protocol.restarts import Purse
from rallypoint.testing.memory import MemoryCoordination, MemoryEngine

PATIENCE_S = 60.0


@pytest.fixture
def store() -> Iterator[MemoryEngine]:
    engine = MemoryEngine()
    yield engine
    engine.close()


def put(client: MemoryCoordination, key: str, value: bytes) -> None:
    client.transact(Transaction((), (Put(key, value),)), time.monotonic() + PATIENCE_S)


def add_node(client: MemoryCoordination, name: str) -> None:
    put(client, job.node_key(f"{name}#1"), job.encode(job.NodeRecord(name, "", 0, "default", 1, job.NOT_READY)))


def view(name: str) -> NodeView:
    return NodeView("a-job", name, "host", 1, id=f"{name}#1", phase="running")


def answering(store: MemoryEngine, *names: str) -> threading.Thread:
    """Nodes that answer the next question, each of them first to an older one."""
    client = store.connect()
    revision = client.read(job.DOWN, time.monotonic() + PATIENCE_S).revision
    client.watch(job.DOWN, revision + 1, time.monotonic() + PATIENCE_S)

    def answer() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not (events := client.take_events()) and time.monotonic() < deadline:
            time.sleep(0.001)
        for name in names:
            asking.answer(client, view(name).replace(phase="starting"), events[0].revision - 1)
        for name in names:
            asking.answer(client, view(name), events[0].revision)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_all_nodes_answer(store: MemoryEngine) -> None:
    client = store.connect()
    for name in ("a", "b"):
        add_node(client, name)
    thread = answering(store, "a", "b")
    found = asking.survey(store.connect(), "me", PATIENCE_S)
    thread.join()
    assert [(node.node, node.phase) for node in found.nodes] == [("a", "running"), ("b", "running")]
    assert found.silent == ()


def test_who_does_not_answer_is_named(store: MemoryEngine) -> None:
    client = store.connect()
    for name in ("a", "b"):
        add_node(client, name)
    put(client, job.STATUS, job.encode(job.Status("2 of 3 nodes")))
    found = asking.survey(store.connect(), "me", 0.05)
    assert found.nodes == ()
    assert found.silent == ("a", "b")
    assert found.note == "2 of 3 nodes"


def test_an_answer_of_a_node_that_has_left_does_not_count(store: MemoryEngine) -> None:
    client = store.connect()
    add_node(client, "a")
    thread = answering(store, "gone", "a")
    found = asking.survey(store.connect(), "me", PATIENCE_S)
    thread.join()
    assert [node.node for node in found.nodes] == ["a"]


@pytest.mark.parametrize(
    "junk", [b"", b"[]", b"{}", b'{"number": 99999}', b"[" * 100_000, b'{"number": 99999, "node": {"job": 7}}']
)
def test_what_nobody_can_read_was_not_said(store: MemoryEngine, junk: bytes) -> None:
    client = store.connect()
    add_node(client, "a")
    put(client, f"{job.ANSWERS}a#1", junk)
    assert asking.survey(store.connect(), "me", 0.05).silent == ("a",)


class TestRestart:
    GENERATION = job.Generation(4, 1, 1, 1, "", 0, "why", Purse())

    def test_the_generation_is_told_to_stop(self, store: MemoryEngine) -> None:
        client = store.connect()
        put(client, job.GENERATION, job.encode(self.GENERATION))
        assert asking.restart(client, "me") == "all nodes restart their workers"
        (item,) = client.read(job.signal_key(4), time.monotonic() + PATIENCE_S).items
        assert job.decode(job.Signal, item.value) == job.Signal("asked", "a restart was asked for by me", "me")

    def test_one_that_is_over_already_is_left_alone(self, store: MemoryEngine) -> None:
        client = store.connect()
        put(client, job.GENERATION, job.encode(self.GENERATION))
        asking.restart(client, "me")
        with pytest.raises(RallypointError, match="generation 4 is over already: a restart was asked for by me"):
            asking.restart(client, "you")

    def test_a_job_that_is_meeting_has_nothing_to_restart(self, store: MemoryEngine) -> None:
        with pytest.raises(RallypointError, match="still meeting"):
            asking.restart(store.connect(), "me")

    def test_a_job_that_is_over_is_left_alone(self, store: MemoryEngine) -> None:
        client = store.connect()
        put(client, job.GENERATION, job.encode(self.GENERATION))
        put(client, job.CLOSED, job.encode(job.Closed("finished", "done", "a")))
        with pytest.raises(RallypointError, match="the job is ending"):
            asking.restart(client, "me")
