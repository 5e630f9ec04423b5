"""The files of events that agents leave in their log folders: which of them belong to one run, and what is in them.

A run folder has the events of one agent. A log folder has a run folder for each run, and for each node where several of them log
into one place; the newest run in it is meant, with all its nodes. Run ids can be used again, so runs of one id that do not
overlap in time are different runs. What is left out is always named.

Files are read line by line, with a limit on the length of a line and on the number of events: nothing that is in them can
exhaust the memory or end the reading.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence

from rallypoint.base import defaults
from rallypoint.base.json_text import clip
from rallypoint.base.records import Value
from rallypoint.base.text import many
from rallypoint.errors import UsageError
from rallypoint.output.progress import Meter
from rallypoint.story.event_records import KNOWN, SCHEMA, STARTED, Told, count, read_told, words
from rallypoint.story.story import EventLog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["FILE_NAME", "Selection", "read_log", "select"]

FILE_NAME = defaults.EVENT_FILE
LINE_MAX = 1 << 20
EVENTS_MAX = 1_000_000
_DIGITS_MAX = 19
_NAMED_MAX = 5  # of what was left out


class Selection(Value):
    """The logs of one run, and a sentence about those that were found and are not of it."""

    logs: tuple[EventLog, ...]
    left_out: str


class _Found(Value):
    """A file of events, and which run it tells of; `is_named` if the user asked for this very file or folder."""

    path: str
    is_named: bool
    run_id: str
    began_ms: float
    size: int = 0


def select(paths: Sequence[str], show_all: bool = False, meter: Meter | None = None) -> Selection:
    """The logs of the run that the paths name; UsageError if there is none, or more than one was asked for.

    The meter gets all bytes that are to be read, and those that have been.
    """
    meter = meter or Meter("")
    found = _find(paths)
    meant = [one for one in found if one.is_named] or [max(found, key=lambda one: one.began_ms)]
    run_ids = sorted({one.run_id for one in meant if one.run_id})
    if len(run_ids) > 1:
        raise UsageError(f"these are different runs: {', '.join(run_ids)}; name the folders of one")
    around = [one for one in found if one not in meant and one.run_id in run_ids]
    meter.whole += sum(one.size for one in [*meant, *around])
    seeds = [read_log(one.path, show_all, meter) for one in meant]
    others = [read_log(one.path, show_all, meter) for one in around]
    logs = sorted([*seeds, *_beside(seeds, others)], key=lambda log: log.path)
    _require_events(logs)
    told = {log.path for log in logs}
    return Selection(tuple(logs), _name([one.path for one in found if one.path not in told]))


def _require_events(logs: Sequence[EventLog]) -> None:
    if not any(log.events for log in logs):
        unreadable = sum(log.unreadable_lines + log.is_cut for log in logs)
        hint = f", but {many(unreadable, 'line')} that could not be read" if unreadable else ""
        raise UsageError(f"there are no events of a run in {', '.join(log.path for log in logs)}{hint}")


def _beside(seeds: Iterable[EventLog], others: Iterable[EventLog]) -> list[EventLog]:
    """Those that overlap in time with the seeds, or with each other: an agent that was replaced is of the same run."""
    covered = [_span(log) for log in seeds if log.events]
    rest = [log for log in others if log.events]
    chosen: list[EventLog] = []
    while near := [log for log in rest if any(_overlap(_span(log), span) for span in covered)]:
        chosen += near
        covered = [_span(log) for log in near]
        rest = [log for log in rest if log.path not in {one.path for one in near}]
    return chosen


def _span(log: EventLog) -> tuple[float, float]:
    return log.events[0].timestamp_ms, log.events[-1].timestamp_ms


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return max(one[0], other[0]) <= min(one[1], other[1])


def _name(left_out: Sequence[str]) -> str:
    if not left_out:
        return ""
    more = f" and {len(left_out) - _NAMED_MAX} more" if len(left_out) > _NAMED_MAX else ""
    return f"left out, as they are of other runs: {', '.join(left_out[:_NAMED_MAX])}{more}"


def _find(paths: Sequence[str]) -> list[_Found]:
    """Each file once, in the order of the paths."""
    found: dict[str, _Found] = {}
    for path in paths:
        for file, is_named in _files_at(path):
            real = os.path.realpath(file)
            if real not in found or is_named:
                found[real] = _look(file, is_named)
    return list(found.values())


def _files_at(path: str) -> list[tuple[str, bool]]:
    if not os.path.isdir(path):
        return [(path, True)]
    if os.path.exists(file := os.path.join(path, FILE_NAME)):
        return [(file, True)]
    try:
        inside = [os.path.join(path, name, FILE_NAME) for name in sorted(os.listdir(path)) if name != defaults.LATEST]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    files = [(file, False) for file in inside if os.path.isfile(file)]
    if not files:
        raise UsageError(f"there is no {FILE_NAME} in {path}, nor in a folder in it; name the log folder of a run")
    return files


def _look(path: str, is_named: bool) -> _Found:
    """What the first event says; a file whose beginning is missing has no run id."""
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        for line in _lines(file):
            told = _parse(line)
            if told is not None:
                run_id = words(told, "run_id", 200) if told.name == STARTED else ""
                return _Found(path, is_named, run_id, told.timestamp_ms, size)
    return _Found(path, is_named, "", 0.0)


def read_log(path: str, show_all: bool = False, meter: Meter | None = None) -> EventLog:
    """What one file tells; events of other kinds are counted only, unless all are wanted."""
    meter = meter or Meter("")
    events: list[Told] = []
    unreadable = unknown = 0
    is_cut = False
    with _open(path) as file:
        for line in _lines(file):
            meter.advance(len(line))
            told = _parse(line)
            if told is None:
                is_cut = not line.endswith(b"\n")
                unreadable += not is_cut
            elif told.name in KNOWN or show_all:
                _check_schema(path, told)
                events.append(told)
            else:
                unknown += 1
            if len(events) >= EVENTS_MAX:
                break
    return EventLog(path, tuple(events), unreadable, is_cut, len(events) >= EVENTS_MAX, unknown)


def _check_schema(path: str, told: Told) -> None:
    schema = count(told, "schema") if told.name == STARTED else None
    if schema is not None and schema > SCHEMA:
        by = words(told, "version", 50) or "a newer version"
        raise UsageError(f"{path} was written by rallypoint {by}, in schema {schema}; this version reads schemas up to {SCHEMA}")


def _open(path: str) -> BinaryIO:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe is refused, not waited for
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return open(fd, "rb")
        os.close(fd)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    raise UsageError(f"{path} is not a regular file")


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines that are not blank; of one that is too long only a part, which cannot be read."""
    while line := file.readline(LINE_MAX):
        if len(line) == LINE_MAX and not line.endswith(b"\n"):
            while (rest := file.readline(LINE_MAX)) and not rest.endswith(b"\n"):
                pass
            line = b"\n"
        elif line.isspace():
            continue
        yield line


def _parse(line: bytes) -> Told | None:
    """The event of a line, or None if there is none in it."""
    try:
        return read_told(json.loads(line, parse_int=_whole_number, parse_constant=lambda _: None))
    except (ValueError, RecursionError):
        return None


def _whole_number(digits: str) -> int:
    """Numbers of a million digits take minutes to read, and nothing has so many."""
    if len(digits) > _DIGITS_MAX + 1:
        raise ValueError(f"{clip(digits, 20)} is too large")
    return int(digits)
