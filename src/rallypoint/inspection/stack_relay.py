"""The stacks of workers on other nodes: asked for through the job's store, where each node puts what it has found, for a moment.

A question has its number, and each answer to it a key of its own, which whoever asked takes away. What a node says is packed and
cut to size, so that all of them together stay small beside what the job itself keeps there. A node has one answer at a time: a
new one replaces an older one that nobody has fetched.
"""

from __future__ import annotations

import binascii
import json
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

from rallypoint.base.json_text import to_json
from rallypoint.base.records import Value
from rallypoint.base.text import Run, runs
from rallypoint.coordination.engine import Coordination, CoordinationError
from rallypoint.coordination.model import Delete, Item, Put, Transaction
from rallypoint.inspection import asking
from rallypoint.inspection.log_rules import has_rank
from rallypoint.inspection.stack_view import WorkerDump, read_dump, shortened
from rallypoint.inspection.view import MOST_WORKERS, NodeView, to_document
from rallypoint.protocol import job_records as job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["PATIENCE_S", "Answers", "Others", "ask_others", "pack", "read_others", "read_runs", "unpack"]

PATIENCE_S = 20.0
ON_THE_WAY_S = 3.0  # of that: what a node has by then is what it tells
ALL_BYTES, MOST_BYTES, LEAST_BYTES = 256 * 1024, 96 * 1024, 4 * 1024  # of all answers, and of each
UNPACKED_BYTES = 64 * 1024 * 1024
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
    prefix = _prefix(asking.ask(engine, job.Asked("stacks", only, by, to_json(detail))))
    found: dict[str, list[WorkerDump]] = {}

    def take(items: Iterable[Item]) -> None:
        told = {item.key.removeprefix(prefix): item.value for item in items}
        found.update((node_id, unpack(told[node_id])) for node_id in node_ids if node_id in told)

    try:
        asking.follow(engine, prefix, take, lambda: found.keys() >= set(node_ids), deadline)
    finally:
        with suppress(CoordinationError):  # the next generation takes away what is left
            engine.transact(Transaction((), (Delete(prefix, is_prefix=True),)), time.monotonic() + asking.CALL_S)
    return found


def _prefix(number: int) -> str:
    return f"{job.STACKS}{number}/"


def unpack(value: bytes) -> list[WorkerDump]:
    """What cannot be read was not said."""
    try:
        data = zlib.decompressobj().decompress(binascii.a2b_base64(value), UNPACKED_BYTES)
        found = json.loads(data)
        if not isinstance(found, list) or len(found) > MOST_WORKERS:
            return []
        return [read_dump(one) for one in found]
    except (ValueError, RecursionError, zlib.error):
        return []


# --- who answers -----------------------------------------------------------------------------------------------------------


class Answers:
    """Of one node."""

    def __init__(self, dump: Dump) -> None:
        self._dump = dump
        self._dumping = threading.Lock()  # one question after the other: two would ask the workers at once
        self._last = ""

    def make(self, node_id: str, number: int, detail: str) -> Transaction | None:
        """What puts the answer into the store; None where none is wanted. ValueError: that was no question."""
        ranks, but, most_bytes, deadline = _read_detail(detail)
        if node_id in but:
            return None
        with self._dumping:
            told = pack(self._dump(ranks, deadline), most_bytes)
            replaced = (Delete(self._last),) if self._last else ()
            self._last = f"{_prefix(number)}{node_id}"
            return Transaction((), (*replaced, Put(self._last, told)))


def pack(workers: Sequence[WorkerDump], most_bytes: int) -> bytes:
    """With as many letters of each stack as there is room for."""
    left = min(TEXT_CHARACTERS, max((len(one.text) for worker in workers for one in worker.processes), default=0))
    while True:
        document = to_json([to_document(one) for one in shortened(workers, left)])
        told = binascii.b2a_base64(zlib.compress(document.encode()), newline=False)
        if len(told) <= most_bytes:
            return told
        if not left:
            return pack(workers[: len(workers) // 2], most_bytes)
        left = min(left // 2, int(0.9 * left * most_bytes / len(told)))


def _read_detail(detail: str) -> tuple[Ranks, list[str], int, float]:
    try:
        asked = json.loads(detail)
        ranks, most_bytes, within_s = asked["ranks"], int(asked["bytes"]), float(asked["within_s"])
        chosen, but = None if ranks is None else read_runs(ranks), list(map(str, asked["but"] or ()))
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"that is no question for stacks: {error}") from None
    return chosen, but, min(max(most_bytes, LEAST_BYTES), MOST_BYTES), time.monotonic() + min(max(within_s, 0.0), PATIENCE_S)


def read_runs(found: Any) -> list[Run]:
    """ValueError or TypeError: these are none."""
    return [(int(first), int(last)) for first, last in found[:MOST_RUNS]]
