"""Stacks of many workers, read from what faulthandler writes, and those that are the same told once.

What hangs is seldom the one worker whose stack is seen first: thirty wait in the same line, and one is elsewhere. So every stack
is told once, with the ranks that have it, and the one of the worker that hangs comes first.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence

from rallypoint.base.records import Value
from rallypoint.base.text import plural, ranges

__all__ = [
    "ProcessStacks",
    "ThreadStack",
    "WorkerStacks",
    "brief_lines",
    "grouped_lines",
    "parse_faulthandler",
    "rank_ranges",
    "standing",
]

MAX_THREADS = 1000  # of one process; faulthandler itself stops at 100
BRIEF_FRAMES = 4
BRIEF_GROUPS = 8
_HEADING_END = " (most recent call first):"
_FRAME_BEGIN = '  File "'
MAIN, OTHER, CHILD = "main thread", "another thread", "child process"


class ThreadStack(Value):
    """One thread; the innermost frame is the first."""

    name: str
    frames: tuple[str, ...]


class ProcessStacks(Value):
    """One process of a worker: its Python stacks, or why there are none, and what the kernel shows."""

    pid: int
    command: str = ""
    threads: tuple[ThreadStack, ...] = ()  # the main thread is the last
    why_none: str = ""
    text: str = ""  # as faulthandler wrote it
    kernel: tuple[str, ...] = ()
    waits_in: str = ""  # of the main thread, as the kernel sees it


class WorkerStacks(Value):
    rank: int  # the global one
    processes: tuple[ProcessStacks, ...]  # the worker's own is the first

    @property
    def speaker(self) -> ProcessStacks | None:
        """The process that stands for the worker: its own, or where that is a shell or the like, the first that has stacks."""
        speaking = [one for one in self.processes if one.threads]
        return next(iter([*speaking, *self.processes]), None)


def parse_faulthandler(text: str) -> tuple[ThreadStack, ...]:
    """The threads in the order in which they stand; lines that are not understood are kept as frames or left out."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.endswith(_HEADING_END) and not line.startswith(" "):
            if len(found) == MAX_THREADS:
                break
            found.append((_thread_name(line.removesuffix(_HEADING_END)), []))
        elif found and line.startswith("  "):
            found[-1][1].append(_frame(line))
    return tuple(ThreadStack(name, tuple(frames)) for name, frames in found)


def _thread_name(heading: str) -> str:
    """Its own name, which the newest interpreters tell, else its number."""
    number, bracket, name = heading.partition(" [")
    return name.removesuffix("]") if bracket else number.rpartition(" ")[2]


def _frame(line: str) -> str:
    path, found, rest = line.removeprefix(_FRAME_BEGIN).rpartition('", line ')
    number, _, function = rest.partition(" in ")
    return f"{function} ({path}:{number})" if found and line.startswith(_FRAME_BEGIN) else line.strip()


def standing(worker: WorkerStacks) -> Hashable:
    """Where the worker stands, to be compared with others: its main thread's stack, else where it waits in the kernel."""
    speaker = worker.speaker
    if speaker is None:
        return None
    return speaker.threads[-1].frames if speaker.threads else speaker.waits_in or None


def rank_ranges(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-2,5``."""
    distinct = set(ranks)
    return f"{plural(len(distinct), 'rank')} {ranges(distinct)}"


class _Group(Value):
    where: str
    frames: tuple[str, ...]
    ranks: tuple[int, ...]


def _groups(workers: Sequence[WorkerStacks], first: Collection[int]) -> list[_Group]:
    """Main threads before others, those of `first` before others, large groups before small ones."""
    members: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for worker in workers:
        for where, frames in _stacks_of(worker):
            members.setdefault((where, frames), []).append(worker.rank)
    groups = [_Group(where, frames, tuple(ranks)) for (where, frames), ranks in members.items()]

    def place(group: _Group) -> tuple[int, bool, int, int]:
        is_first = bool(set(group.ranks) & set(first))
        return (MAIN, OTHER, CHILD).index(group.where), not is_first, -len(group.ranks), min(group.ranks)

    return sorted(groups, key=place)


def _stacks_of(worker: WorkerStacks) -> list[tuple[str, tuple[str, ...]]]:
    found = []
    for process in worker.processes:
        is_speaker = process is worker.speaker
        if not process.threads and is_speaker:
            where_it_waits = (f"in the kernel: {process.waits_in}",) if process.waits_in else ()
            found.append((MAIN, (f"no Python stack: {process.why_none}", *where_it_waits)))
        for place, thread in enumerate(process.threads, 1):
            is_main = is_speaker and place == len(process.threads)
            found.append((MAIN if is_main else OTHER if is_speaker else CHILD, thread.frames))
    return found


def grouped_lines(workers: Sequence[WorkerStacks], first: Collection[int]) -> list[str]:
    """Each different stack once, whole, below the ranks that have it."""
    lines: list[str] = []
    for group in _groups(workers, first):
        lines += ["", f"{rank_ranges(group.ranks)}, {group.where}:", *(f"  {frame}" for frame in group.frames or ("no frame",))]
    return lines


def brief_lines(workers: Sequence[WorkerStacks], first: Collection[int]) -> list[str]:
    """A line for each different stack of main threads: where it is, and who called."""
    groups = [group for group in _groups(workers, first) if group.where == MAIN]
    lines = [f"{rank_ranges(group.ranks)}: {_brief(group.frames)}" for group in groups[:BRIEF_GROUPS]]
    left = len(groups) - len(lines)
    return [*lines, f"and {left} more"] if left else lines


def _brief(frames: tuple[str, ...]) -> str:
    shown = " < ".join(frames[:BRIEF_FRAMES]) or "no frame"
    return f"{shown} < ..." if len(frames) > BRIEF_FRAMES else shown
