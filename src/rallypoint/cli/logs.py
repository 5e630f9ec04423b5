"""The command ``rallypoint logs``: what the workers of a job have written to their log files, and what they go on to write.

Bytes go from the files to stdout in blocks (`inspection.log_lines`), each line with the rank that wrote it. What is to be said
besides, about nodes whose logs are elsewhere, goes to stderr.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Iterator, Sequence

from rallypoint.base import defaults, environment, report
from rallypoint.base.json_text import clip, to_json
from rallypoint.base.records import Record, field
from rallypoint.cli.command_line import closest
from rallypoint.cli.main import print_text
from rallypoint.errors import SIGNAL_BASE, ExitCode, RallypointError, UsageError
from rallypoint.inspection.log_lines import Mark, as_json, json_beginning, label, merge, prefixed
from rallypoint.inspection.log_reading import STREAMS, Logs, Wish, chosen, collapsed, find_logs, here_s, read_lines
from rallypoint.inspection.log_rules import parse_ranks
from rallypoint.inspection.log_times import parse_since
from rallypoint.inspection.view import to_document
from rallypoint.output.console import write_all
from rallypoint.output.progress import metered

__all__ = ["USAGE", "logs_main"]

USAGE = """\
usage: rallypoint logs [JOB|FOLDER] [flags]

Show what the workers of a job have written to their log files, on all of its nodes.
JOB is the job's ID, the beginning of it, or the process ID of its launcher; it can be left out where one job runs.
FOLDER is the log folder of a run, be it over or not; if it holds several runs, the newest is shown.

  --rank RANKS   only of these ranks, such as 3,8-11
  --follow, -f   go on as lines are written, through restarts, until the job has ended
  --tail N, -n   only the last N lines of each rank and stream, or the last N that match --grep
  --since WHEN   only lines since a time, such as 2026-11-16T19:08:28, or of the last 90s, 10m, 1h30m or 2d
  --grep REGEX   only lines in which this regular expression of Python is found
  --stdout       only what was written to stdout
  --stderr       only what was written to stderr
  --collapse     show a line that several ranks write, near each other, once: "ranks 1-7: ..."
  --json         print each line as a JSON object
  --help         show this help and exit

Order: attempts come one after the other. In an attempt, lines that begin with a time (2026-11-16 19:08:28,123, or ISO 8601) are
in the order of these times, and lines without one stay with the line above. A file in which no line has a time is shown as a
whole, at the time at which it was last written. Lines of one file are never reordered. --since goes by the same times. Times
without a zone are taken for this machine's. With --follow, lines come as they are written."""

_SWITCHES = ("--follow", "-f", "--stdout", "--stderr", "--collapse", "--json", "--help", "-h")
_VALUED = {"--rank": "--rank", "--tail": "--tail", "-n": "--tail", "--since": "--since", "--grep": "--grep"}
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_RED = 31
LINES_AT_ONCE = 1000
_SIGINT = 2


class _Asked(Record):
    """The command line, read."""

    job: str = ""
    flags: set[str] = field(factory=set)
    values: dict[str, str] = field(factory=dict)


class _ReaderGoneError(Exception):
    """Nobody reads what we write."""


def logs_main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    try:
        asked = _read_arguments(argv)
        if asked.flags & {"--help", "-h"}:
            return print_text(USAGE)
        wish = _wish(asked)
        logs = find_logs(asked.job, _note)
        blocks = _blocks(logs, wish, asked.flags)
        if "--follow" in asked.flags or wish.tail is not None or os.isatty(1):  # then there is no end, or little, or it is seen
            for block in blocks:
                _write(block)
        else:
            _write_metered(logs, blocks)
    except _ReaderGoneError:
        return ExitCode.SUCCESS
    except KeyboardInterrupt:
        return SIGNAL_BASE + _SIGINT
    except RallypointError as error:
        print(f"rallypoint logs: error: {clip(str(error), 10_000)}", file=sys.stderr)
        return ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.WORKER_FAILED
    except OSError as error:
        print(f"rallypoint logs: error: {error.filename or 'a log file'} cannot be read: {error.strerror}", file=sys.stderr)
        return ExitCode.WORKER_FAILED
    return ExitCode.SUCCESS


def _write_metered(logs: Logs, blocks: Iterator[bytes]) -> None:
    with metered("merging log files") as meter:
        for block in blocks:
            meter.whole = logs.whole_bytes
            meter.reach(logs.read_bytes())
            _write(block)


def _note(text: str) -> None:
    with report.stepping_aside(2):
        print(f"rallypoint logs: {clip(text, 10_000)}", file=sys.stderr)


# --- the command line ------------------------------------------------------------------------------------------------------


def _read_arguments(argv: Sequence[str]) -> _Asked:
    asked, rest = _Asked(), list(argv)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if not word.startswith("-") or word == "-":
            if asked.job:
                raise UsageError(f"one job or folder is enough: {asked.job} or {word}?")
            asked.job = word
        elif flag in _VALUED:
            if not equals and not rest:
                raise UsageError(f"{flag} needs a value")
            asked.values[_VALUED[flag]] = value if equals else rest.pop(0)
        elif word in _SWITCHES:
            asked.flags.add({"-f": "--follow"}.get(word, word))
        else:
            known = [*_SWITCHES, *_VALUED]
            meant = closest(flag, known)
            raise UsageError(
                f"unknown flag {flag}" + (f"; did you mean {meant}?" if meant else f"; there are {', '.join(known)}")
            )
    return asked


def _wish(asked: _Asked) -> Wish:
    values = asked.values
    streams = tuple(stream for stream in STREAMS if f"--{stream}" in asked.flags)
    tail = values.get("--tail")
    if tail is not None and not (tail.isascii() and tail.isdecimal() and len(tail) < 19):
        raise UsageError(f"--tail {tail!r} is not a number of lines")
    return Wish(
        ranks=tuple(parse_ranks(values["--rank"])) if "--rank" in values else None,
        streams=streams or STREAMS,
        since_us=parse_since(values["--since"], time.time(), here_s()) if "--since" in values else None,
        pattern=_pattern(values["--grep"]) if "--grep" in values else None,
        tail=int(tail) if tail is not None else None,
    )


def _pattern(text: str) -> re.Pattern[bytes]:
    try:
        return re.compile(os.fsencode(text))
    except re.error as error:
        raise UsageError(f"--grep {text!r} is not a regular expression: {error}") from None


# --- the lines -------------------------------------------------------------------------------------------------------------


def _blocks(logs: Logs, wish: Wish, flags: set[str]) -> Iterator[bytes]:
    """What is to be written; nothing where there was nothing new."""
    follow, is_coloured = "--follow" in flags, _is_coloured()
    if {"--json", "--collapse"} <= flags:
        return _gathered(_collapsed_json_lines(logs, wish, follow))
    if "--json" in flags:
        return _json_blocks(logs, wish, follow)
    if "--collapse" in flags:
        return _gathered(_collapsed_lines(logs, wish, follow, is_coloured))
    return _plain_blocks(logs, wish, follow, is_coloured)


def _gathered(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Many lines for one write."""
    some: list[bytes] = []
    for line in lines:
        some.append(line)
        if not line or len(some) >= LINES_AT_ONCE:
            yield b"".join(some)
            some.clear()


def _plain_blocks(logs: Logs, wish: Wish, follow: bool, is_coloured: bool) -> Iterator[bytes]:
    prefixes: dict[Mark, bytes] = {}
    pattern = wish.pattern

    def dress(mark: Mark, records: list[bytes], _: list[bytes]) -> Sequence[bytes | None]:
        return records if pattern is None else prefixed(records, prefixes[mark], pattern)

    for lanes in logs.passages(wish, follow):
        for lane in lanes:
            mark = lane.mark
            if mark not in prefixes:
                prefixes[mark] = _prefix(f"[{label([mark], len(wish.streams) > 1)}]", mark, is_coloured)
            lane.prefix = prefixes[mark] if pattern is None else b""
        for records in merge(lanes, dress, here_s(), wish.since_us):
            some = records if pattern is None else [record for record in records if record is not None]
            yield b"\n".join([*some, b""])
        yield b""


def _collapsed_lines(logs: Logs, wish: Wish, follow: bool, is_coloured: bool) -> Iterator[bytes]:
    for group in collapsed(logs, wish, follow):
        if group is None:
            yield b""
        else:
            text = f"{label(group.marks, len(wish.streams) > 1)}:"
            yield _prefix(text, group.marks[0], is_coloured) + group.line + b"\n"


def _json_blocks(logs: Logs, wish: Wish, follow: bool) -> Iterator[bytes]:
    def dress(mark: Mark, records: list[bytes], times: list[bytes]) -> list[str]:
        beginning = json_beginning(mark)
        some = zip(chosen(records, wish), times, strict=True)
        return [as_json(beginning, record, time) if record is not None else "" for record, time in some]

    for lanes in logs.passages(wish, follow):
        for records in merge(lanes, dress, here_s(), wish.since_us):
            yield "".join(records).encode()
        yield b""


def _collapsed_json_lines(logs: Logs, wish: Wish, follow: bool) -> Iterator[bytes]:
    for line in read_lines(logs, wish, follow, is_collapsed=True):
        yield f"{to_json(to_document(line))}\n".encode() if line is not None else b""


def _prefix(text: str, mark: Mark, is_coloured: bool) -> bytes:
    if not is_coloured:
        return f"{text} ".encode()
    colour = _RED if mark.stream == "stderr" else _COLOURS[mark.rank % len(_COLOURS)]
    return f"\x1b[{colour}m{text}\x1b[0m ".encode()


def _is_coloured() -> bool:
    """On a terminal that can, unless the user does not like it (no-color.org)."""
    dull = environment.text(defaults.ENV_TERM, "dumb") == "dumb" or environment.text(defaults.ENV_NO_COLOR)
    return os.isatty(1) and not dull


def _write(block: bytes) -> None:
    try:
        if block:
            write_all(1, block)
        else:
            _look_for_reader()
    except BrokenPipeError:
        raise _ReaderGoneError from None


def _look_for_reader() -> None:
    """Who does not write would never find out that nobody reads."""
    poll = select.poll()
    poll.register(1, 0)
    if any(events & (select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0)):
        raise _ReaderGoneError
