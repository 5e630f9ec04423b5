"""Asking all nodes of a job, and telling them what to do, through its store.

A question is one key that every node watches anyway. Each answers under a key of its own, which its next answer replaces, so
nothing piles up; a question has the number of the change that it was, and an answer to a later one is as good. What a node sends
for it does not depend on how many there are.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable, Iterable

from rallypoint.base.json_text import from_json, to_json
from rallypoint.coordination.engine import CompactedError, Coordination
from rallypoint.coordination.model import Compare, Get, Item, Put, Transaction
from rallypoint.errors import RallypointError
from rallypoint.inspection.view import JobView, NodeView, find_node, job_of, read_node, to_document
from rallypoint.protocol import job_records as job
from rallypoint.story.phases import RUNNING, STOPPING

__all__ = [
    "AT_ONCE", "CALL_S", "answer", "ask", "ask_for_logs", "choose_node", "drain", "follow", "restart", "stop", "survey",
    "wish_to_restart",
]  # fmt: skip

CALL_S = 5.0
AT_ONCE = "now"
LISTED = 16


def survey(engine: Coordination, by: str, patience_s: float) -> JobView:
    """How the nodes of the job describe themselves; those that are members and do not answer in time are named."""
    members = _members(engine)
    if not members:  # and a job that is not there gets no key of ours
        return job_of(())
    number = ask(engine, job.Asked("look", "", by))
    deadline = time.monotonic() + patience_s
    answers: dict[str, NodeView] = {}

    def take(items: Iterable[Item]) -> None:
        for item in items:
            if (node := _answered(item, number)) is not None:
                answers[node.id] = node

    def is_complete() -> bool:
        if members.keys() <= answers.keys():
            members.update(_members(engine))
        return members.keys() <= answers.keys()

    follow(engine, job.ANSWERS, take, is_complete, deadline)
    (status,) = engine.transact(Transaction((), (Get(job.STATUS),)), time.monotonic() + CALL_S).items
    members = _members(engine)
    silent = [name for node_id, name in members.items() if node_id not in answers]
    present = [node for node_id, node in answers.items() if node_id in members]
    phases = {node.phase for node in present}
    is_waiting = RUNNING not in phases and phases != {STOPPING}  # where all stop, nobody is waited for
    return job_of(present, sorted(silent), _status_text(status) if is_waiting else "")


def answer(engine: Coordination, node: NodeView, number: int) -> None:
    """Of this node, to the question of this number."""
    told = to_json({"number": number, "node": to_document(node)}).encode()
    engine.transact(Transaction((), (Put(job.ANSWERS + node.id, told),)), time.monotonic() + CALL_S)


def stop(engine: Coordination, by: str) -> str:
    """Have all nodes leave, those that are away for a moment too; what was done."""
    unsaid = (Compare(job.STOP, "create", 0),)
    engine.transact(Transaction(unsaid, (Put(job.STOP, job.encode(job.Stop(by))),)), time.monotonic() + CALL_S)
    return "all nodes were told to stop their workers and leave"


def ask_for_logs(engine: Coordination, node_id: str, detail: str, by: str) -> None:
    """Have one node send its logs, as `log_relay` describes."""
    ask(engine, job.Asked("logs", node_id, by, detail))


def drain(engine: Coordination, name: str, by: str, patience_s: float, *, is_forced: bool, at_once: bool) -> str:
    """Have the one node leave that is meant, `at_once` also where it would let workers save first; what was done.

    RallypointError: why not.
    """
    found = survey(engine, by, patience_s)
    node = choose_node(found, name)
    if node.hosts_store and len(found.nodes) > 1 and not is_forced:
        raise RallypointError(
            f"{node.node} hosts the coordination store, and the job would end with it; stop the job, or drain it with --force"
        )
    ask(engine, job.Asked("leave", node.id, by, AT_ONCE if at_once else ""))
    return f"node {node.node} was told to stop its workers and leave"


def choose_node(found: JobView, name: str) -> NodeView:
    """The one node that is meant; RallypointError where none is, or several are."""
    meant = find_node(found, name)
    if len(meant) == 1:
        return meant[0]
    known = ", ".join(map(_who, found.nodes[:LISTED]))
    who = f"{len(meant)} nodes of {found.job} fit" if meant else f"no node of {found.job} fits"
    raise RallypointError(f"{who} {name!r}; there are: {known}")


def _who(node: NodeView) -> str:
    rank = "no rank yet" if node.node_rank is None else f"rank {node.node_rank}"
    return f"{node.node} ({rank}, pid {node.pid} on {node.hostname})"


def restart(engine: Coordination, by: str) -> str:
    """Let the job begin another generation; what was done. RallypointError: what hinders it."""
    (item,) = engine.transact(Transaction((), (Get(job.GENERATION),)), time.monotonic() + CALL_S).items
    if item is None:
        raise RallypointError("its nodes are still meeting, so there is nothing to restart")
    generation = job.decode(job.Generation, item.value)
    key = job.signal_key(generation.number)
    signal = job.encode(job.Signal("asked", wish_to_restart(by), by))
    unchanged = (Compare(key, "create", 0), Compare(job.CLOSED, "create", 0), Compare(job.GENERATION, "mod", item.mod_revision))
    outcome = engine.transact(Transaction(unchanged, (Put(key, signal),), (Get(key),)), time.monotonic() + CALL_S)
    if outcome.succeeded:
        return "all nodes restart their workers"
    found = outcome.items[0]
    why_not = job.decode(job.Signal, found.value).why if found is not None else "the job is ending"
    raise RallypointError(f"generation {generation.number} is over already: {why_not}")


def wish_to_restart(by: str) -> str:
    """Why workers are restarted, as everybody reads it."""
    return f"a restart was asked for by {by}"[: job.MAX_WHY]


def ask(engine: Coordination, asked: job.Asked) -> int:
    """Put a question; its number."""
    return engine.transact(Transaction((), (Put(job.ASKED, job.encode(asked)),)), time.monotonic() + CALL_S).revision


def _members(engine: Coordination) -> dict[str, str]:
    """The names of the nodes that are there, by their ids."""
    found = engine.read(job.NODES, time.monotonic() + CALL_S).items
    return {item.key.removeprefix(job.NODES): job.decode(job.NodeRecord, item.value).name for item in found}


def _answered(item: Item, number: int) -> NodeView | None:
    """What a node has answered to this question or a later one; what cannot be read was not said."""
    try:
        found = from_json(item.value)
        if not isinstance(found, dict) or type(found.get("number")) is not int or found["number"] < number:
            return None
        return read_node(found.get("node")).replace(id=item.key.removeprefix(job.ANSWERS))
    except (ValueError, RecursionError):  # a strange format is shown, and may be nested
        return None


def _status_text(item: Item | None) -> str:
    return job.decode(job.Status, item.value).text if item is not None else ""


def follow(
    engine: Coordination, prefix: str, take: Callable[[Iterable[Item]], None], is_over: Callable[[], bool], deadline: float
) -> None:
    """What is under the prefix and what changes there, until it is enough or the time is over."""
    while time.monotonic() < deadline:
        snapshot = engine.read(prefix, time.monotonic() + CALL_S)
        take(snapshot.items)
        if is_over():
            return
        try:
            engine.watch(prefix, snapshot.revision + 1, time.monotonic() + CALL_S)
            while time.monotonic() < deadline:
                events = engine.take_events()
                take(event.item for event in events if event.item is not None)
                if is_over():
                    return
                if not events:
                    _wait(engine, deadline)
        except CompactedError:
            continue  # more has happened than the engine remembers: look again
        finally:
            engine.unwatch(prefix)


def _wait(engine: Coordination, deadline: float) -> None:
    left_s = min(deadline, engine.wake_at()) - time.monotonic()
    poll = select.poll()
    poll.register(engine.fileno(), select.POLLIN)
    poll.poll(math.ceil(1000 * min(max(left_s, 0.0), CALL_S)))
