"""Where workers stand, as whoever asks is told: for each process of a worker its stacks, who has told them, and if none, why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rallypoint.base.json_text import clip
from rallypoint.base.records import Value
from rallypoint.hangs.stacks import ProcessStacks, WorkerStacks, grouped_lines, parse_faulthandler, rank_ranges
from rallypoint.inspection.view import FORMAT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.base.text import Run

__all__ = [
    "BY_KERNEL", "BY_PY_SPY", "BY_SIGNAL", "BY_SOCKET", "ProcessDump", "StacksView", "WorkerDump", "grouped", "lines_of",
    "missing", "read_dump", "shortened", "stacks_view",
]  # fmt: skip

BY_SOCKET, BY_SIGNAL, BY_PY_SPY, BY_KERNEL = "socket", "signal", "py-spy", "kernel"
TEXT_CHARACTERS = 1 << 20
WORD_CHARACTERS = 4096
MOST_PROCESSES = 256
CUT = "\n(cut short)"


class ProcessDump(Value):
    """One process. `how` says who has told its stacks: itself, at its control socket or by a signal; py-spy; or the kernel, which
    sees no Python.
    """

    pid: int
    how: str
    text: str = ""
    command: str = ""
    socket: str = ""
    why: str = ""  # it has no Python stacks to show


class WorkerDump(Value):
    """A worker with the processes that it consists of; `error` is why they, or some of them, could not be asked."""

    job: str
    node: str
    rank: int | None
    pid: int
    processes: tuple[ProcessDump, ...] = ()
    error: str = ""


class StacksView(Value):
    """The workers that were asked, by their ranks, and the names of nodes that have not answered."""

    workers: tuple[WorkerDump, ...]
    silent: tuple[str, ...] = ()
    note: str = ""  # why not all nodes were asked
    format: int = FORMAT


def stacks_view(workers: Iterable[WorkerDump], silent: Sequence[str] = (), note: str = "") -> StacksView:
    return StacksView(tuple(sorted(workers, key=lambda one: (one.rank is not None, one.rank or 0))), tuple(silent), note)


def missing(ranks: Iterable[Run], known: Sequence[Run]) -> list[Run]:
    """Those that are not among the known, which are in order."""
    found: list[Run] = []
    for first, last in ranks:
        left = first
        for begin, end in known:
            if left <= end and begin <= last:
                found += [(left, begin - 1)] if left < begin else []
                left = end + 1
        found += [(left, last)] if left <= last else []
    return found


def lines_of(process: ProcessDump) -> list[str]:
    """As a person reads it."""
    of = {
        BY_SOCKET: f"process {process.pid} at {process.socket}",
        BY_SIGNAL: f"process {process.pid} {process.command}".rstrip(),
        BY_PY_SPY: f"process {process.pid}, by py-spy",
    }
    kernel = f"process {process.pid}, as the kernel sees it; its Python stacks are not known: {process.why}"
    text = process.text or (f"no stacks: {process.why}" if process.how == BY_SIGNAL else "")
    return [f"=== {of.get(process.how, kernel)}", *text.split("\n")]


def grouped(view: StacksView) -> list[str]:
    """Each different stack once, with the ranks that have it; before that, whose stacks could not be had, and why."""
    lines = [f"no answer from {', '.join(view.silent)}"] if view.silent else []
    lines += [view.note] if view.note else []
    troubles: dict[str, list[int]] = {}
    for worker in view.workers:
        if worker.error and worker.rank is not None:
            troubles.setdefault(worker.error, []).append(worker.rank)
    lines += [f"{rank_ranges(ranks)}: {why}" for why, ranks in troubles.items()]
    found = [WorkerStacks(one.rank, tuple(map(_stacks_in, one.processes))) for one in view.workers if one.rank is not None]
    return [*lines, *grouped_lines(found, ())]


def _stacks_in(process: ProcessDump) -> ProcessStacks:
    if process.how == BY_KERNEL:
        main_thread = process.text.partition("\n")[0]
        return ProcessStacks(process.pid, why_none=process.why, waits_in=main_thread.rpartition("): ")[2])
    threads = _py_spy_threads(process.text) if process.how == BY_PY_SPY else parse_faulthandler(process.text)
    return ProcessStacks(process.pid, process.command, threads, process.why)


def _py_spy_threads(text: str) -> tuple[tuple[str, ...], ...]:
    """The frames of each, the main thread's the last."""
    found: list[tuple[bool, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("Thread "):
            found.append((line.endswith('"MainThread"'), []))
        elif found and line.startswith("    "):
            found[-1][1].append(line.strip())
    return tuple(tuple(frames) for _, frames in sorted(found, key=lambda one: one[0]))


def shortened(workers: Sequence[WorkerDump], most: int) -> tuple[WorkerDump, ...]:
    """The same with so many characters of each text at the most."""

    def short(text: str) -> str:
        return text if len(text) <= most else text[: max(0, most - len(CUT))] + CUT

    def cut(worker: WorkerDump) -> WorkerDump:
        return worker.replace(processes=tuple(one.replace(text=short(one.text)) for one in worker.processes))

    return tuple(map(cut, workers))


def read_dump(found: object) -> WorkerDump:
    """ValueError: that is none."""
    fields = _fields(found)
    rank, processes = fields.get("rank"), fields.get("processes", [])
    if not isinstance(processes, list) or len(processes) > MOST_PROCESSES:
        raise ValueError("processes must be a list")
    job, node, error = _words(fields, ("job", "node", "error"))
    pid = _integer(fields.get("pid"))
    return WorkerDump(job, node, None if rank is None else _integer(rank), pid, tuple(map(_read_process, processes)), error)


def _read_process(found: object) -> ProcessDump:
    fields = _fields(found)
    text = fields.get("text", "")
    if not isinstance(text, str):
        raise ValueError("a text is no text")
    how, command, socket, why = _words(fields, ("how", "command", "socket", "why"))
    return ProcessDump(_integer(fields.get("pid")), how, text[:TEXT_CHARACTERS], command, socket, why)


def _fields(found: object) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError("it is not an object")
    return found


def _words(fields: dict[str, Any], names: Iterable[str]) -> list[str]:
    found = [fields.get(name, "") for name in names]
    if not all(isinstance(one, str) for one in found):
        raise ValueError("a word is no text")
    return [clip(one, WORD_CHARACTERS) for one in found]


def _integer(value: object) -> int:
    if type(value) is not int or abs(value) > 1 << 62:
        raise ValueError(f"{value!r:.40} is no number")
    return value
