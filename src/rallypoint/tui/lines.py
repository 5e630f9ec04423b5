"""The live screen as text: each part of it a function of what is known and of the room that it has.

A line is its text and its mood; what colour a mood has is the screen's affair, and no line needs one to be understood.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rallypoint.base.records import Value
from rallypoint.base.text import fitted, many, plural, ranges, size_text
from rallypoint.inspection.view import Happening, JobView, NodeView, straggling
from rallypoint.story.phases import RUNNING
from rallypoint.story.story import duration
from rallypoint.tui.model import BAD, DIM, PLAIN, WARN, Key, Row, Watch, find_worker, is_over, label_of

__all__ = [
    "GAP", "HELP", "KEYS", "Column", "Line", "LogPlace", "Placed", "Question", "Room", "age", "cells_of", "columns_for",
    "folded", "headlines", "last_words", "log_place", "log_title", "node_lines", "notice", "plain_lines", "question",
    "room_for", "stacks_of", "timeline", "titles_of", "wrapped",
]  # fmt: skip

Line = tuple[str, str]

GAP = 2
LATE_S = 5.0  # an answer that takes so long is worth a word
SIDE_COLUMNS = 110  # from here on there is room for two panels side by side
FIXED_LINES = 6  # headlines, the notice, the titles of table and panel, the keys
LEAST_PANEL = 3
SHOWN_NODES = 500
LOG_FILES = ("stdout.log", "stderr.log")
KEYS = "s Stop  d Drain  r Restart  t Stacks  / Find  o Order  Tab Panel  ? Help  q Quit"
HELP = """\
Up Down PgUp PgDn Home End: choose a rank

s        stop the job on all of its nodes     (has to be confirmed)
d        have the chosen node leave the job   (has to be confirmed)
r        restart all workers                  (has to be confirmed)
t        show the Python stacks of the chosen rank
l        its log: the other one of stdout and stderr
/        show only some ranks: 3, 0-7, part of a node's name or of a state
Esc      show all of them again
o  O     order by the next column; turn the order around
Tab      the panel below: log, restarts, nodes; Shift-Up and -Down scroll it
q        quit; the job goes on (Ctrl-Z: until fg; Ctrl-L: draw all anew)

STEP  as workers tell it with rallypoint.worker.progress(step)
RATE  steps in a second
CPU%  of one core, and of the worker's own process
GPU%  of the devices that it uses; read on this machine only
LAST  how long ago the worker gave its last sign of progress"""


# --- the table -------------------------------------------------------------------------------------------------------------


class Column(Value):
    """`most` and `least` are its widths; where there is too little room, those of the least `worth` go first."""

    title: str
    most: int
    least: int
    worth: int
    is_number: bool
    text: Callable[[Row], str | None]


def _rate(rate: float | None) -> str | None:
    if rate is None:
        return None
    return f"{rate:.0f}" if rate >= 99.95 else f"{rate:.1f}" if rate >= 9.995 else f"{rate:.2f}"


def _whole(number: int | None) -> str | None:
    return None if number is None else str(number)


_COLUMNS = (
    Column("RANK", 9, 4, 10, True, lambda row: _whole(row.rank)),
    Column("NODE", 30, 12, 9, False, lambda row: row.node),
    Column("PID", 10, 6, 2, True, lambda row: _whole(row.pid)),
    Column("STATE", 40, 12, 8, False, lambda row: row.state),
    Column("STEP", 14, 6, 7, True, lambda row: _whole(row.step)),
    Column("RATE", 7, 5, 6, True, lambda row: _rate(row.rate)),
    Column("CPU%", 6, 4, 5, True, lambda row: None if row.cpu_share is None else f"{100 * row.cpu_share:.0f}"),
    Column("MEMORY", 8, 8, 4, True, lambda row: None if row.memory_bytes is None else size_text(row.memory_bytes)),
    Column("GPU%", 4, 4, 3, True, lambda row: None if row.gpu is None else f"{row.gpu[0]:.0f}"),
    Column("GPU MEM", 8, 8, 1, True, lambda row: None if row.gpu is None else size_text(row.gpu[1])),
    Column("LAST", 6, 5, 5, True, lambda row: None if row.silent_s is None else age(row.silent_s)),
)


class Placed(Value):
    """A column in a table of a certain width."""

    column: Column
    start: int
    width: int


def columns_for(width: int, rows: Sequence[Row]) -> tuple[Placed, ...]:
    """Those that there is room for, the least worthy left out first, then the widest cut."""
    has_gpus = any(row.gpu is not None for row in rows)
    wishes = {column: _wish(column, rows) for column in _COLUMNS if has_gpus or column.title != "GPU MEM"}
    while len(wishes) > 1 and sum(_floor(column, wish) + GAP for column, wish in wishes.items()) - GAP > width:
        del wishes[min(wishes, key=lambda column: column.worth)]
    while sum(wishes.values()) + GAP * (len(wishes) - 1) > width:
        wider = [column for column, wish in wishes.items() if wish > _floor(column, wish)]
        if not wider:
            break
        wishes[max(wider, key=lambda column: wishes[column])] -= 1
    widths = list(wishes.values())
    starts = [sum(widths[:index]) + GAP * index for index in range(len(widths))]
    return tuple(map(Placed, wishes, starts, widths))


def _wish(column: Column, rows: Sequence[Row]) -> int:
    """Numbers get some room in advance, so that what stands beside them stays where it is when they grow."""
    longest = max((len(column.text(row) or "-") for row in rows), default=0)
    return min(column.most, max(column.least if column.is_number else 0, len(column.title), longest))


def _floor(column: Column, wish: int) -> int:
    """A number that is cut would be another."""
    return wish if column.is_number else min(column.least, wish)


def cells_of(row: Row, columns: Sequence[Placed]) -> tuple[str, ...]:
    """As wide as their columns."""
    return tuple(_placed(one.column.text(row) or "-", one) for one in columns)


def titles_of(columns: Sequence[Placed]) -> tuple[str, ...]:
    return tuple(_placed(one.column.title, one) for one in columns)


def _placed(text: str, place: Placed) -> str:
    text = fitted(text, place.width)
    return text.rjust(place.width) if place.column.is_number else text.ljust(place.width)


def age(seconds: float) -> str:
    """Short: ``3 s``, ``12 m``, ``5 h``, ``2 d``."""
    for unit, length_s, until_s in (("s", 1, 120), ("m", 60, 7200), ("h", 3600, 172_800)):
        if seconds < until_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


# --- the job ---------------------------------------------------------------------------------------------------------------


def headlines(watch: Watch, rows: Sequence[Row]) -> tuple[str, str]:
    """How the job is, and how it does."""
    job = watch.job
    if job is None or not job.nodes:
        return watch.name, ""
    first = (job.members or job.nodes)[0]
    workers = [row for row in rows if row.rank is not None]
    about = [f"{job.job}: {job.phase} for {duration(first.phase_s)}", many(len(job.nodes), "node"), many(len(workers), "rank")]
    about.append(f"{job.restarts} of {many(first.max_restarts, 'restart')}")
    if job.generation:
        about.append(f"generation {job.generation}")
    return ", ".join(about), ", ".join(_figures(job, workers))


def _figures(job: JobView, workers: Sequence[Row]) -> list[str]:
    found = []
    if job.step is not None:
        found.append(f"step {job.step}")
    if rates := [row.rate for row in workers if row.rate is not None]:
        found.append(f"{_rate(sorted(rates)[len(rates) // 2])} steps/s")
    if job.goodput is not None:
        found.append(f"goodput {job.goodput:.1%}")
    if shares := [row.cpu_share for row in workers if row.cpu_share is not None]:
        found.append(f"{sum(shares):.1f} cores")
    if sizes := [row.memory_bytes for row in workers if row.memory_bytes is not None]:
        found.append(size_text(sum(sizes)))
    failed, hung = sum(node.failed_workers for node in job.nodes), sum(node.hung_workers for node in job.nodes)
    if failed:
        found.append(f"{many(failed, 'worker')} failed")
    if hung:
        found.append(f"{hung} hung")
    return found


def notice(watch: Watch, now: float) -> Line:
    """The one thing about the job that has to be said now, if there is one."""
    job, late_s = watch.job, now - watch.seen_at
    if is_over(watch):
        return f"{watch.name} has ended on this machine", WARN
    if job is None or not job.nodes:
        return (watch.trouble, BAD) if watch.trouble else (f"asking {watch.name or 'the job'}...", DIM)
    if watch.missing:
        return f"no agent of {watch.name} is on this machine any more: it has ended, or is started again", WARN
    if watch.trouble:
        return f"as it was {age(late_s)} ago; it does not answer: {watch.trouble}", BAD
    if late_s > LATE_S:
        return f"as it was {age(late_s)} ago; it has not answered since", WARN
    return _about(job)


def _about(job: JobView) -> Line:
    if job.phase != RUNNING:
        first = (job.members or job.nodes)[0]
        why = job.note or next((node.why for node in job.nodes if node.phase == job.phase and node.why), "")
        return f"{job.phase} for {duration(first.phase_s)}{f': {why}' if why else ''}", WARN
    if job.note:
        return job.note, WARN
    if job.silent:
        return f"no answer from {plural(len(job.silent), 'node')} {', '.join(job.silent[:16])}", BAD
    if who := straggling(job):
        return f"behind the others: {who}", WARN
    if spares := job.spares:
        return f"{many(len(spares), 'node')} waiting as a spare: {', '.join(node.node for node in spares[:8])}", DIM
    return "", PLAIN


def last_words(watch: Watch) -> str:
    """What is left on the terminal when the job has gone."""
    job = watch.job
    if job is None or not job.nodes:
        return f"{watch.name}: {watch.trouble}"
    first = (job.members or job.nodes)[0]
    step = f" at step {job.step}" if job.step is not None else ""
    folder = next((node.log_dir for node in job.nodes if node.log_dir), "")
    more = f"; for what happened: rallypoint explain {folder}" if folder else ""
    restarts = many(first.max_restarts, "restart")
    return f"{job.job}: it has ended on this machine; last seen {job.phase}{step}, after {job.restarts} of {restarts}{more}"


# --- panels ----------------------------------------------------------------------------------------------------------------


class Room(Value):
    """How many lines the table and the panel below it have, and whether there is a second panel beside it."""

    table: int
    panel: int
    has_side: bool


def room_for(width: int, height: int, rows: int) -> Room:
    """The table gets what it needs, and the panels the rest, but no less than two fifths."""
    body = max(height - FIXED_LINES, 1)
    table = max(min(rows, body * 3 // 5), 1)
    return Room(table, max(body - table, LEAST_PANEL if body > 2 * LEAST_PANEL else 0), width >= SIDE_COLUMNS)


def timeline(watch: Watch, now: float, width: int) -> list[Line]:
    """When the workers were restarted: drawn to scale, and in words, the latest first."""
    job = watch.job
    if job is None or not job.nodes:
        return []
    passed_s = now - watch.seen_at
    eldest = max(job.nodes, key=lambda node: node.uptime_s)
    happened = max((node.history for node in job.nodes), key=len)  # of the one that remembers most; what one saw, all did
    length_s = max(eldest.uptime_s + passed_s, 0.001)
    lines: list[Line] = [(_bar(happened, passed_s, length_s, width), PLAIN), (_scale(length_s, width), DIM)]
    if not happened:
        lines.append(("no restart so far", DIM))
    for one in reversed(happened):
        lines += [(text, PLAIN) for text in wrapped(f"{duration(one.ago_s + passed_s)} ago: {one.why or one.what}", width)]
    return [(fitted(text, width), mood) for text, mood in lines]


def wrapped(text: str, width: int) -> list[str]:
    """In as many lines as it takes, the later ones a little to the right."""
    found = [""]
    for word in text.split():
        if found[-1].strip() and len(found[-1]) + 1 + len(word) > width:
            found.append(f"  {word}")
        else:
            found[-1] = f"{found[-1]} {word}" if found[-1] else word
    return found


def _bar(happened: Sequence[Happening], passed_s: float, length_s: float, width: int) -> str:
    marks = ["─"] * max(width, 1)
    for one in happened:
        share = 1 - (one.ago_s + passed_s) / length_s
        marks[min(max(int(share * width), 0), width - 1)] = "●"
    return "".join(marks)


def _scale(length_s: float, width: int) -> str:
    start = f"{duration(length_s)} ago"
    return f"{start}{'now'.rjust(max(width - len(start), 4))}"


def node_lines(watch: Watch, width: int) -> list[Line]:
    """Each node, with what is not a matter of single ranks."""
    if watch.job is None:
        return []
    titles = ("NODE", "PHASE", "FOR", "RANKS", "FAILED", "HUNG", "PID", "LOGS")
    nodes = watch.job.nodes[:SHOWN_NODES]
    table = [titles, *map(_node_cells, nodes)]
    widths = [max(len(row[index]) for row in table) for index in range(len(titles))]
    texts = ["  ".join(cell.ljust(wide) for cell, wide in zip(row, widths, strict=True)) for row in table]
    moods = [DIM, *(BAD if node.failed_workers or node.hung_workers else PLAIN for node in nodes)]
    return [(fitted(text.rstrip(), width), mood) for text, mood in zip(texts, moods, strict=True)]


def _node_cells(node: NodeView) -> tuple[str, ...]:
    return (
        label_of(node), node.phase, age(node.phase_s), ranges((worker.rank for worker in node.workers), most=4) or "-",
        str(node.failed_workers), str(node.hung_workers), str(node.pid), node.log_dir or "-",
    )  # fmt: skip


class LogPlace(Value):
    """Where the logs of a rank are; `files` is empty where there is nothing to look for, and `otherwise` says why. Of a rank on
    another host, `node_id` is the node that can be asked.
    """

    who: str
    files: tuple[str, ...] = ()
    otherwise: str = ""
    rank: int = 0
    node_id: str = ""


def log_place(watch: Watch, key: Key | None, here: str) -> LogPlace:
    """The logs of what is chosen; on a shared disk those of another host are found too."""
    node, worker = find_worker(watch.job, key) if watch.job is not None and key is not None else (None, None)
    if node is None:
        return LogPlace("", otherwise="no rank is chosen" if key is None else f"{key[0]} has not answered")
    if worker is None:
        return LogPlace(f"node {label_of(node)}", otherwise=f"it has no workers: it is {node.phase}{_because(node)}")
    who = f"rank {worker.rank}, pid {worker.pid} on {node.hostname}"
    if not node.attempt_dir:
        return LogPlace(who, otherwise="it keeps no logs: start the job with --log-dir DIR and --redirects 3, or --tee 3")
    folder = f"{node.attempt_dir}/{worker.local_rank}"
    where = f"in {folder}" if node.hostname == here else f"in {folder} on {node.hostname}, which cannot be read from here"
    advice = "; --redirects 3 or --tee 3 would keep them" if node.hostname == here else ""
    missing = f"neither {' nor '.join(LOG_FILES)} is {where}{advice}"
    files = tuple(f"{folder}/{name}" for name in LOG_FILES)
    return LogPlace(who, files, missing, worker.rank, node.id if node.hostname != here else "")


def _because(node: NodeView) -> str:
    return f", {node.why}" if node.why else ""


def log_title(place: LogPlace, file: str, size_bytes: int, written_s: float) -> str:
    return f"{place.who}: {file.rpartition('/')[2]}, {size_text(size_bytes)}, written {age(max(written_s, 0.0))} ago"


_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
TAB = 4
MOST_FOLDED = 10_000


def plain_lines(text: str, most: int) -> list[str]:
    """The last lines of a log, without anything that could act on a terminal; of a line that was drawn anew, the last form."""
    lines = text.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return [_plain(line) for line in lines[-most:]] if most > 0 else []


def _plain(line: str) -> str:
    drawn = [part for part in _ESCAPES.sub("", line).split("\r") if part.strip()]
    text = (drawn[-1] if drawn else "").expandtabs(TAB)
    return text if text.isprintable() else "".join(char if char.isprintable() else "·" for char in text)


def folded(text: str, width: int) -> list[str]:
    """A text to be read as a whole: a line that is too long goes on in the next one, where it began or a little further."""
    found = []
    for line in plain_lines(text, MOST_FOLDED):
        margin = " " * min(len(line) - len(line.lstrip()) + 2, width // 2)
        found.append(line[:width])
        rest, room = line[width:], max(width - len(margin), 1)
        found += [margin + rest[start : start + room] for start in range(0, len(rest), room)]
    return found


# --- what is asked of the job ----------------------------------------------------------------------------------------------


class Question(Value):
    """Whether to have the job do something."""

    text: str
    what: str
    node: str = ""
    is_forced: bool = False


def question(what: str, watch: Watch, key: Key | None) -> Question | str:
    """What is to be confirmed; or why it cannot be done."""
    job = watch.job
    if job is None or not job.nodes:
        return "the job has not answered yet"
    if what == "stop":
        where = f"on all of its {len(job.nodes)} nodes" if len(job.nodes) > 1 else ""
        return Question(f"Stop {job.job} {where}".rstrip() + "?", what)
    if what == "restart":
        return Question(f"Restart all workers of {job.job}? It does not count against its restarts.", what)
    node = find_worker(job, key)[0] if key is not None else None
    if node is None:
        return "no node that has answered is chosen"
    text = f"Have node {label_of(node)} stop its workers and leave {job.job}?"
    if node.hosts_store and len(job.nodes) > 1:
        return Question(f"{text} It hosts the coordination store: the job ends with it.", what, node.id or node.node, True)
    return Question(text, what, node.id or node.node)


def stacks_of(watch: Watch, key: Key | None, here: str) -> tuple[str, tuple[str, ...]] | str:
    """The title and what ``rallypoint stacks`` is to be told so that it shows these stacks; or why they cannot be."""
    node, worker = find_worker(watch.job, key) if watch.job is not None and key is not None else (None, None)
    if node is None or worker is None:
        return "no rank is chosen"
    if node.hostname != here:
        return f"stacks of rank {worker.rank} on {node.hostname}", (node.job, "--rank", str(worker.rank))
    return f"stacks of rank {worker.rank}, pid {worker.pid}", (str(worker.pid),)
