"""The stacks of workers on other nodes: asked for through the job's store, where each node shows what it has found.

What a node says is cut to size, so that all of them together stay small beside what the job itself keeps there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from rallypoint.base.json_text import from_json, to_json
from rallypoint.base.records import Value
from rallypoint.base.text import Run, runs
from rallypoint.coordination.engine import Coordination
from rallypoint.coordination.model import Transaction
from rallypoint.inspection import asking
from rallypoint.inspection.log_rules import has_rank
from rallypoint.inspection.stack_view import WorkerDump, read_dump, shortened
from rallypoint.inspection.store_relay import MOST_BYTES, Shelf, collect, packed, unpacked
from rallypoint.inspection.view import MOST_WORKERS, NodeView, to_document
from rallypoint.protocol import job_records as job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["PATIENCE_S", "Answers", "Others", "ask_others", "pack", "read_others", "read_runs", "unpack"]

PATIENCE_S = 20.0
ON_THE_WAY_S = 3.0  # of that: what a node has by then is what it tells
ALL_BYTES, LEAST_BYTES = 256 * 1024, 4 * 1024  # of all answers, and of each
TEXT_CHARACTERS = 256 * 1024
LONGEST_DETAIL = 3000
MOST_RUNS = 1000
MOST_LISTED = 1 << 20

Ranks = Sequence[Run] | None  # those that are wanted; None is all
Dump = Callable[[Ranks, float], Sequence[WorkerDump]]  # of these, until then


class Others(Value):
    """What other nodes have told, the names of those that have not, and the ranks that there are on all of them."""

    workers: tuple[WorkerDump, ...] = ()
    silent: tuple[str, ...] = ()
    ranks: tuple[Run, ...] = ()


def read_others(found: dict[str, Any]) -> Others:
    """As an agent has told it; ValueError: it has not."""
    workers, silent, ranks = found.get("workers"), found.get("silent"), found.get("ranks")
    for some in (workers, silent, ranks):
        if not isinstance(some, list) or len(some) > MOST_LISTED:
            raise ValueError("workers, silent and ranks must be lists")
    assert workers is not None
    assert silent is not None
    return Others(tuple(map(read_dump, workers)), tuple(map(str, silent)), tuple(read_runs(ranks)))


# --- who asks --------------------------------------------------------------------------------------------------------------


def ask_others(
    engine: Coordination, by: str, here: Collection[tuple[str, int]], ranks: Ranks, look_s: float, patience_s: float
) -> Others:
    """The workers that have these ranks, of all nodes but those whose agents, by host and process, are `here`."""
    seen = asking.survey(engine, by, look_s)
    others = {node.id: node for node in seen.nodes if (node.hostname, node.pid) not in here}
    asked = [node_id for node_id, node in others.items() if any(has_rank(ranks, worker.rank) for worker in node.workers)]
    but = [node.id for node in seen.nodes if node.id not in others]
    found = _ask_nodes(engine, by, asked, but, ranks, patience_s) if asked else {}
    workers = [one for some in found.values() for one in some if one.rank is not None and has_rank(ranks, one.rank)]
    silent = [*seen.silent, *(others[node_id].node for node_id in asked if node_id not in found)]
    return Others(tuple(workers), tuple(silent), tuple(runs(_ranks(others.values()))))


def _ranks(nodes: Iterable[NodeView]) -> list[int]:
    return [worker.rank for node in nodes for worker in node.workers]


def _ask_nodes(
    engine: Coordination, by: str, node_ids: Sequence[str], but: Sequence[str], ranks: Ranks, patience_s: float
) -> dict[str, list[WorkerDump]]:
    """Of these nodes; those that know that they are not meant do not trouble their workers."""
    deadline = time.monotonic() + patience_s
    each = min(max(ALL_BYTES // len(node_ids), LEAST_BYTES), MOST_BYTES)
    detail: dict[str, object] = {"bytes": each, "within_s": max(0.0, patience_s - ON_THE_WAY_S), "ranks": ranks, "but": but}
    for name in ("but", "ranks"):
        detail[name] = detail[name] if len(to_json(detail)) <= LONGEST_DETAIL else None
    only = node_ids[0] if len(node_ids) == 1 else ""
    asked = job.Asked("stacks", only, by, to_json(detail))
    return {node_id: unpack(told) for node_id, told in collect(engine, asked, node_ids, deadline).items()}


def unpack(value: bytes) -> list[WorkerDump]:
    """What cannot be read was not said."""
    try:
        found = unpacked(value)
        if not isinstance(found, list) or len(found) > MOST_WORKERS:
            return []
        return [read_dump(one) for one in found]
    except ValueError:
        return []


# --- who answers -----------------------------------------------------------------------------------------------------------


class Answers:
    """Of one node."""

    def __init__(self, dump: Dump) -> None:
        self._dump = dump
        self._dumping = threading.Lock()  # one question after the other: two would ask the workers at once
        self._shelf = Shelf()

    def make(self, node_id: str, number: int, detail: str) -> Transaction | None:
        """What puts the answer into the store; None where none is wanted. ValueError: that was no question."""
        ranks, but, most_bytes, deadline = _read_detail(detail)
        if node_id in but:
            return None
        with self._dumping:
            return self._shelf.put(node_id, number, pack(self._dump(ranks, deadline), most_bytes))


def pack(workers: Sequence[WorkerDump], most_bytes: int) -> bytes:
    """With as many letters of each stack as there is room for."""
    left = min(TEXT_CHARACTERS, max((len(one.text) for worker in workers for one in worker.processes), default=0))
    while True:
        told = packed([to_document(one) for one in shortened(workers, left)])
        if len(told) <= most_bytes:
            return told
        if not left:
            return pack(workers[: len(workers) // 2], most_bytes)
        left = min(left // 2, int(0.9 * left * most_bytes / len(told)))


def _read_detail(detail: str) -> tuple[Ranks, list[str], int, float]:
    try:
        asked = from_json(detail)
        ranks, most_bytes, within_s = asked["ranks"], int(asked["bytes"]), float(asked["within_s"])
        chosen, but = None if ranks is None else read_runs(ranks), list(map(str, asked["but"] or ()))
    except (TypeError, KeyError) as error:
        raise ValueError(f"that is no question for stacks: {error}") from None
    return chosen, but, min(max(most_bytes, LEAST_BYTES), MOST_BYTES), time.monotonic() + min(max(within_s, 0.0), PATIENCE_S)


def read_runs(found: Any) -> list[Run]:
    """ValueError or TypeError: these are none."""
    return [(int(first), int(last)) for first, last in found[:MOST_RUNS]]
