"""Files of faults: when, counted from the start of the drill, and which; one on a line.

    # before the first checkpoint
    +30s    kill rank 3
    +1m     stop node 1 for 8s
    +1m30s  preempt node 1

Lines stand in the order of their times. All that is wrong is found before anything is done, each with the number of its line.
"""

from __future__ import annotations

from collections.abc import Iterable

from rallypoint.base.records import Value
from rallypoint.base.text import parse_span, span_text
from rallypoint.chaos.faults import Fault, read_fault, text_of
from rallypoint.errors import UsageError

__all__ = ["Entry", "read_schedule", "schedule_text"]

LINES_MAX = 100_000
TOLD_MAX = 8
TIME_WIDTH = 8


class Entry(Value):
    """One fault, so long after the start; `line` is where it stands, 0 if nowhere."""

    at_s: float
    fault: Fault
    line: int = 0


def read_schedule(text: str, name: str) -> tuple[Entry, ...]:
    """The faults of the file of this name. UsageError: what is wrong, in which lines."""
    entries: list[Entry] = []
    wrong: list[str] = []
    lines = text.splitlines()
    if len(lines) > LINES_MAX:
        raise UsageError(f"{name} has more than {LINES_MAX} lines")
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split(None, 1)
        try:
            if words:
                entries.append(_read(words, number, entries[-1] if entries else None))
        except ValueError as error:
            wrong.append(f"{name}, line {number}: {error}")
    if wrong:
        more = f"; and {len(wrong) - TOLD_MAX} lines more" if len(wrong) > TOLD_MAX else ""
        raise UsageError("; ".join(wrong[:TOLD_MAX]) + more)
    if not entries:
        raise UsageError(f"{name} names no fault; a line of it is: +30s kill rank 3")
    return tuple(entries)


def _read(words: list[str], number: int, before: Entry | None) -> Entry:
    if not words[0].startswith("+"):
        raise ValueError(f"{words[0]!r} is no time after the start, as +30s and +1m30s are")
    at_s = parse_span(words[0][1:])
    if before is not None and at_s < before.at_s:
        raise ValueError(f"{words[0]} is before line {before.line}, and all times count from the start")
    return Entry(at_s, read_fault(words[1] if len(words) > 1 else ""), number)


def schedule_text(entries: Iterable[Entry]) -> str:
    """As `read_schedule` reads it."""
    return "".join(f"{'+' + span_text(entry.at_s):<{TIME_WIDTH}} {text_of(entry.fault)}\n" for entry in entries)
