"""What a live screen knows of a job, look by look, and the rows that it makes of that.

A look is what the job answered at a moment of our own clock. Numbers that a job does not tell, as the steps in a second, come
from two of them. Everything here is a function of what was known before, of what was answered, and of the time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from rallypoint.base.records import Value, field
from rallypoint.inspection.view import JobView, NodeView, WorkerView, stragglers
from rallypoint.story.phases import RUNNING

__all__ = [
    "BAD", "DIM", "ORDERS", "PLAIN", "WARN", "Gpu", "Key", "Order", "Row", "Track", "Watch", "arranged", "find_worker",
    "index_of", "is_over", "label_of", "missed", "name_of", "rate_of", "rows_of", "seen", "unanswered",
]  # fmt: skip

MARKS = 8  # of changes of a worker's step, from which its rate is taken
LOOKS_WITHOUT_JOB = 3  # a launcher that is being replaced is back by then
PLAIN, DIM, WARN, BAD = "plain", "dim", "warn", "bad"
SICK_STATES = ("gone", "ended", "stopped", "traced")


class Track(Value):
    """One worker over several looks: when its step was seen to change, and the processor time at the last look."""

    pid: int
    marks: tuple[tuple[float, int], ...] = ()
    cpu_at: float = 0.0
    cpu_s: float | None = None
    cpu_share: float | None = None  # 1.0 is one core


Gpu = tuple[float, int]  # how busy the device is, of a hundred, and how much of its memory a process has
Key = tuple[str, int]  # a node, and the local rank there; less than 0 for the node itself


class Watch(Value):
    """What is known after some looks. `trouble` is why the last one showed nothing; `missing` counts those that found no job."""

    name: str  # of the job, as it was asked for
    job: JobView | None = None
    seen_at: float = 0.0
    tracks: Mapping[Key, Track] = field(factory=dict)
    trouble: str = ""
    missing: int = 0


# --- looks -----------------------------------------------------------------------------------------------------------------


def seen(before: Watch, job: JobView, now: float) -> Watch:
    """The job answered."""
    tracks: dict[Key, Track] = {}
    for node in job.nodes:
        name = name_of(node)
        for worker in node.workers:
            key = (name, worker.local_rank)
            tracks[key] = _followed(before.tracks.get(key), worker, now)
    return Watch(job.job or before.name, job, now, tracks)


def unanswered(before: Watch, trouble: str) -> Watch:
    """There are agents, and none of them answered."""
    return before.replace(trouble=trouble, missing=0)


def missed(before: Watch, trouble: str) -> Watch:
    """There is no such job here."""
    return before.replace(trouble=trouble, missing=before.missing + 1)


def is_over(watch: Watch) -> bool:
    """Whether there is nothing more to be seen."""
    return watch.missing >= LOOKS_WITHOUT_JOB


def _followed(before: Track | None, worker: WorkerView, now: float) -> Track:
    if before is None or before.pid != worker.pid:
        before = Track(worker.pid)
    marks, share = before.marks, None
    if worker.step is not None and (not marks or marks[-1][1] != worker.step):
        marks = (*(mark for mark in marks if mark[1] < worker.step), (now, worker.step))[-MARKS:]  # it may go back
    if worker.cpu_s is not None and before.cpu_s is not None and now > before.cpu_at:
        share = max(worker.cpu_s - before.cpu_s, 0.0) / (now - before.cpu_at)
    return Track(worker.pid, marks, now, worker.cpu_s, share)


def rate_of(track: Track, now: float) -> float | None:
    """Steps in a second; None before there are two to compare.

    The last step counts from when it was seen, unless the next is so late that the rate has clearly fallen.
    """
    if len(track.marks) < 2:
        return None
    (first_at, first), (last_at, last) = track.marks[0], track.marks[-1]
    if last_at <= first_at:
        return None
    mean_s = (last_at - first_at) / (len(track.marks) - 1)
    until = now if now - last_at > 2 * mean_s else last_at
    return (last - first) / (until - first_at)


# --- rows ------------------------------------------------------------------------------------------------------------------


class Row(Value):
    """One line of the table: a worker, or a node that has none."""

    key: Key
    node: str
    state: str
    mood: str = PLAIN
    rank: int | None = None
    pid: int | None = None
    step: int | None = None
    rate: float | None = None
    cpu_share: float | None = None
    memory_bytes: int | None = None
    gpu: Gpu | None = None
    silent_s: float | None = None


def rows_of(watch: Watch, gpus: Mapping[int, Gpu], here: str) -> list[Row]:
    """All of them, by rank. `gpus` are those of processes of this machine, whose name is `here`."""
    job = watch.job
    if job is None:
        return []
    spares = {name_of(node) for node in job.spares}
    behind = {worker.rank for worker in stragglers(job)}
    rows: list[Row] = []
    for node in job.nodes:
        own = gpus if node.hostname == here else {}
        for worker in node.workers:
            rows.append(_worker_row(watch, node, worker, own.get(worker.pid), worker.rank in behind))
        if not node.workers:
            state = "spare" if name_of(node) in spares else node.phase
            rows.append(Row((name_of(node), -1), label_of(node), state, DIM, pid=node.pid))
    rows += [Row((name, -2 - index), f"? {name}", "no answer", BAD) for index, name in enumerate(job.silent)]
    return sorted(rows, key=lambda row: (row.rank is None, row.rank or 0))


def _worker_row(watch: Watch, node: NodeView, worker: WorkerView, gpu: Gpu | None, is_behind: bool) -> Row:
    key = (name_of(node), worker.local_rank)
    track = watch.tracks[key]
    state = f"{worker.state} ({worker.doing})" if worker.doing and worker.doing != RUNNING else worker.state
    mood = BAD if worker.state in SICK_STATES else WARN if is_behind else PLAIN if node.phase == RUNNING else DIM
    if node.phase != RUNNING:
        state = f"{node.phase}, {state}"
    elif is_behind:
        state = f"behind, {state}"
    return Row(
        key, label_of(node), state, mood, worker.rank, worker.pid, worker.step, rate_of(track, watch.seen_at), track.cpu_share,
        worker.memory_bytes, gpu, worker.silent_s,
    )  # fmt: skip


def name_of(node: NodeView) -> str:
    """What tells it from all others of its job."""
    return node.id or f"{node.hostname}:{node.pid}"


def label_of(node: NodeView) -> str:
    """Its rank and its name, as several may be on one host."""
    return f"{'-' if node.node_rank is None else node.node_rank} {node.node}"


class Order(Value):
    """By what the rows can be sorted; where `is_falling`, the largest come first."""

    title: str  # of the column
    attribute: str
    is_falling: bool = False


ORDERS = (
    Order("RANK", "rank"),
    Order("STEP", "step"),  # the slowest first
    Order("RATE", "rate"),
    Order("CPU%", "cpu_share", True),
    Order("MEMORY", "memory_bytes", True),
    Order("LAST", "silent_s", True),
    Order("STATE", "state"),
    Order("NODE", "node"),
)


def arranged(rows: Sequence[Row], order: Order, is_reversed: bool = False, wanted: str = "") -> list[Row]:
    """Those that fit the words, in this order; those of which it is not known come last."""
    words = wanted.lower().split()
    kept = [row for row in rows if all(_fits(row, word) for word in words)] if words else list(rows)
    known = [row for row in kept if getattr(row, order.attribute) is not None]
    if order != ORDERS[0] or is_reversed:  # they are by rank
        known.sort(key=lambda row: getattr(row, order.attribute), reverse=order.is_falling != is_reversed)
    return [*known, *(row for row in kept if getattr(row, order.attribute) is None)]


def _fits(row: Row, word: str) -> bool:
    """A number or a range of them means ranks; another word is part of the node's name or of the state."""
    if found := re.fullmatch(r"(\d+)(?:-(\d+))?", word):
        first, last = int(found[1]), int(found[2] or found[1])
        return row.rank is not None and first <= row.rank <= last
    return word in row.node.lower() or word in row.state.lower()


def index_of(rows: Iterable[Row], key: Key | None) -> int | None:
    """Where it is now."""
    return next((index for index, row in enumerate(rows) if row.key == key), None)


def find_worker(job: JobView, key: Key) -> tuple[NodeView | None, WorkerView | None]:
    """What a row stands for; None for what is there no longer, or has never answered."""
    for node in job.nodes:
        if name_of(node) == key[0]:
            return node, next((worker for worker in node.workers if worker.local_rank == key[1]), None)
    return None, None
