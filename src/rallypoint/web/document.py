"""What the page is told of a job, as one small document, and how fast its workers are by two looks at it.

Of a thousand workers there is a line each, every second. So a worker is a list, without names, in the order of `COLUMNS`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rallypoint.base.records import Value
from rallypoint.inspection.view import Happening, JobView, NodeView, WorkerView, slow_ranks, stragglers
from rallypoint.story.phases import Ledger

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["COLUMNS", "Looks", "Span", "describe", "look", "spans", "tidy_log"]

COLUMNS = ("rank", "pid", "state", "doing", "step", "rate", "silent_s", "cpu", "memory")
NODES_LISTED = 1_000
WORKERS_LISTED = 10_000
NAMES_LISTED = 100
RATE_OVER_S = 10.0  # the steps of so long, or up to twice as long, are counted: some take longer than a second
BEHIND_S = 2.0
LOG_LINE_CHARACTERS = 10_000
COLOUR = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")

Key = tuple[str, int, int]  # the host, the agent's process and the worker's


class Span(Value):
    """A phase of this node that is over, or goes on."""

    phase: str
    began_at: float  # on this node's monotonic clock
    ended_at: float
    generation: int
    kept_s: float | None = None  # of workers that ran: what was not lost; None is all


class Mark(Value):
    """How far a worker was, by its node and process, when it was looked at."""

    at: float
    step: int | None
    cpu_s: float | None


class Looks(Value):
    """What has to be remembered to tell how fast it goes: this look, the one before, and two that are some seconds older."""

    latest: dict[Key, Mark]
    last: dict[Key, Mark]
    newer: dict[Key, Mark]
    older: dict[Key, Mark]
    newer_at: float


def look(job: JobView, before: Looks | None, now: float) -> Looks:
    """This look, after those before."""
    marks = {key: Mark(now, worker.step, worker.cpu_s) for key, worker in _workers(job).items()}
    if before is None:
        return Looks(marks, {}, marks, marks, now)
    if now - before.newer_at >= RATE_OVER_S:
        return Looks(marks, before.latest, marks, before.newer, now)
    return Looks(marks, before.latest, before.newer, before.older, before.newer_at)


def _workers(job: JobView) -> dict[Key, WorkerView]:
    return {(node.hostname, node.pid, worker.pid): worker for node in job.nodes for worker in node.workers}


def spans(past: Sequence[Span], ledger: Ledger, generation: int, now: float) -> list[Span]:
    """The phases of this node, and the present one."""
    return [*past, Span(ledger.phase, ledger.since, now, generation)]


def describe(job: JobView, own: NodeView, looks: Looks, timeline: Sequence[Span], now: float) -> dict[str, Any]:
    """The document; `own` is this node, whose time it tells."""
    first = (job.members or job.nodes or (own,))[0]
    nodes, spares, left = [], job.spares, WORKERS_LISTED
    for node in job.nodes[:NODES_LISTED]:
        nodes.append(_node(node, node in spares, looks, left))
        left = max(0, left - len(node.workers))
    rate = min((row[5] for node in nodes for row in node["workers"] if row[5] is not None), default=None)
    return {
        "job": job.job or own.job,
        "command": first.command,
        "phase": job.phase,
        "generation": job.generation,
        "world_size": first.world_size,
        "restarts": job.restarts,
        "max_restarts": first.max_restarts,
        "failed_workers": sum(node.failed_workers for node in job.nodes),
        "hung_workers": sum(node.hung_workers for node in job.nodes),
        "step": job.step,
        "rate": rate,
        "goodput": None if job.goodput is None else round(job.goodput, 4),
        "lost_s": round(job.lost_s, 1),
        "uptime_s": round(max((node.uptime_s for node in job.nodes), default=own.uptime_s), 1),
        "note": job.note,
        "silent": list(job.silent[:NAMES_LISTED]),
        "silent_count": len(job.silent),
        "behind": _behind(job, rate)[:NAMES_LISTED],
        "node_count": len(job.nodes),
        "own": own.node,
        "seconds": {phase: round(seconds, 1) for phase, seconds in own.seconds.items()},
        "timeline": [_span(one, now) for one in timeline],
        "history": [[round(one.ago_s), one.what, one.why] for one in _history(job)],
        "nodes": nodes,
    }


def _behind(job: JobView, rate: float | None) -> list[int]:
    """The ranks that are behind by more than what lies between two looks: nodes are asked one after the other."""
    steps = sorted(worker.step for node in job.members for worker in node.workers if worker.step is not None)
    margin = BEHIND_S * (rate or 0.0)
    slow = {one.rank for one in slow_ranks(job)}
    return [one.rank for one in stragglers(job) if one.rank in slow or (one.step or 0) < steps[len(steps) // 2] - margin]


def _history(job: JobView) -> Sequence[Happening]:
    """Of the node that remembers most; what one saw, all did."""
    return max((node.history for node in job.nodes), key=len, default=())


def _node(node: NodeView, is_spare: bool, looks: Looks, most: int) -> dict[str, Any]:
    return {
        "key": f"{node.hostname}/{node.pid}",
        "node": node.node,
        "hostname": node.hostname,
        "pid": node.pid,
        "rank": node.node_rank,
        "is_spare": is_spare,
        "phase": node.phase,
        "phase_s": round(node.phase_s),
        "why": node.why,
        "log_dir": node.log_dir,
        "count": len(node.workers),
        "workers": [_worker(node, worker, looks) for worker in node.workers[:most]],
    }


def _worker(node: NodeView, worker: WorkerView, looks: Looks) -> list[Any]:
    key = (node.hostname, node.pid, worker.pid)
    now = looks.latest[key]
    last = looks.last.get(key, now)
    older = looks.older.get(key) or looks.newer.get(key) or last
    rate = _per_second(now.step, older.step, now.at - older.at)
    cpu = _per_second(now.cpu_s, last.cpu_s, now.at - last.at)
    return [
        worker.rank,
        worker.pid,
        worker.state,
        worker.doing,
        worker.step,
        None if rate is None else round(rate, 3),
        None if worker.silent_s is None else round(worker.silent_s, 1),
        None if cpu is None else round(cpu, 2),
        worker.memory_bytes,
    ]


def _per_second(more: float | None, less: float | None, seconds: float) -> float | None:
    """None where two looks tell nothing: there was only one, or the count began anew."""
    if more is None or less is None or seconds <= 0 or more < less:
        return None
    return (more - less) / seconds


def _span(span: Span, now: float) -> dict[str, Any]:
    return {
        "phase": span.phase,
        "ago_s": round(now - span.began_at, 2),
        "lasted_s": round(span.ended_at - span.began_at, 2),
        "generation": span.generation,
        "kept_s": None if span.kept_s is None else round(span.kept_s, 2),
    }


def tidy_log(text: str) -> str:
    """The lines of a log as a terminal would show them: without colours, and of a line that was written over, the last state."""
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in COLOUR.sub("", text).split("\n")]
    return "\n".join(line if len(line) <= LOG_LINE_CHARACTERS else f"{line[:LOG_LINE_CHARACTERS]} ..." for line in lines)
