"""The command ``rallypoint explain``: what became of a run, from the events that its agents left in their log folders.

It prints how the run ended, what happened and when, and where the time went: seconds of starting, waiting, stopping, running
and lost work for each node. ``--json`` gives the same as one JSON document.
"""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence

from rallypoint.base.json_text import clip
from rallypoint.base.text import many
from rallypoint.cli.command_line import closest
from rallypoint.cli.main import print_text
from rallypoint.errors import ExitCode, UsageError
from rallypoint.output.progress import Meter, metered
from rallypoint.processes.activity import runs_since
from rallypoint.story import phases, run_index
from rallypoint.story.event_logs import select
from rallypoint.story.event_records import ENDED, STARTED, count, words
from rallypoint.story.regroups import HOPS, regroups
from rallypoint.story.story import Account, Entry, EventLog, NodeRun, Present, Story, duration, launches, sentence, tell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["SCHEMA", "USAGE", "document", "explain_main", "render"]

SCHEMA = 1  # of the JSON document
USAGE = """\
usage: rallypoint explain [PATH ...] [--follow] [--timings] [--json] [--all]

Show what happened in a run, from the events in its log folders: a timeline, and a table of where the time went. Each PATH is a
run folder, an events.jsonl file, or a log folder of several runs (the newest is shown). Give the folders of all nodes to merge
them into one timeline. Without a PATH, the newest run that you started on this host is shown.

  --follow    show what happens as it happens, until the run ends
  --timings   also show how long each restart or change of membership took, hop by hop
  --json      print one JSON document instead of text
  --all       also show other events, such as those with torch's names
  --help      show this help and exit"""

_FLAGS = ("--follow", "--timings", "--json", "--all", "--help", "-h")
_WIDTH = 100
_NODE_MAX = 24
_NAMED_MAX = 10  # the table names them all
_COLUMNS = (phases.STARTING, phases.WAITING, phases.STOPPING, phases.RUNNING, phases.LOST)
_UNIT = re.compile(r"(?<=\d) (?=(?:s|min|h)\b)")
_JOINT = "\N{NO-BREAK SPACE}"
_FILES = {"log_file": "log", "stacks": "stacks"}  # facts that have a line of their own, to be copied


def explain_main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    try:
        flags, paths = _read_arguments(argv)
        if flags & {"--help", "-h"}:
            return print_text(USAGE)
        note = ""
        if not paths:
            folder = _newest_run()
            paths = [folder, os.path.dirname(folder)]  # around it, other nodes of the same run may log too
            note = f"this is your newest run on this host, in {folder}"
        with metered("reading events") as meter:
            reader = _Reader(paths, "--all" in flags, note, meter)
            stories = [] if "--follow" in flags else reader.read()
        if "--follow" in flags:
            return _follow(reader, with_timings="--timings" in flags)
        *earlier, story = stories
    except UsageError as error:
        print(f"rallypoint explain: error: {clip(str(error), 10_000)}", file=sys.stderr)
        return ExitCode.USAGE
    if "--json" in flags:
        return print_text(json.dumps({**document(story), "earlier": [document(one) for one in earlier]}, indent=2))
    return print_text("\n\n\n".join(render(one, with_timings="--timings" in flags) for one in [*earlier, story]))


def _read_arguments(argv: Sequence[str]) -> tuple[set[str], list[str]]:
    """Flags and paths in any order; after ``--`` everything is a path."""
    end = argv.index("--") if "--" in argv else len(argv)
    flags = {word for word in argv[:end] if word.startswith("-")}
    paths = [word for word in argv[:end] if not word.startswith("-")] + list(argv[end + 1 :])
    for unknown in sorted(flags - set(_FLAGS)):
        meant = closest(unknown, _FLAGS)
        raise UsageError(f"unknown flag {unknown}" + (f"; did you mean {meant}?" if meant else ""))
    if flags >= {"--follow", "--json"}:
        raise UsageError("--follow and --json exclude each other: a document is made when all is known")
    return flags, paths


def _newest_run() -> str:
    folder = run_index.newest()
    if not folder:
        raise UsageError("no run of yours on this host is on record; write rallypoint explain PATH, the log folder of a run")
    return folder


class _Reader:
    """The files of a run, which may grow, and what is told of it: its earlier launches, and the last one."""

    def __init__(self, paths: Sequence[str], show_all: bool, note: str, meter: Meter | None = None) -> None:
        self.paths = list(paths)
        self._show_all = show_all
        self._note = note
        self._chosen = select(paths, show_all, meter)

    def read_again(self) -> None:
        """Of the run that was chosen, also if there is a newer one by now; agents that have joined it are found beside it."""
        self.paths = [*(log.path for log in self._chosen.logs), *filter(os.path.isdir, self.paths)]
        self._chosen = select(self.paths, self._show_all)

    def read(self) -> list[Story]:
        chosen = self._chosen
        present = _look_around(chosen.logs, time.time() * 1000)
        *earlier, story = (tell(logs, self._show_all, present) for logs in launches(chosen.logs))
        return [*earlier, story.replace(notes=tuple(filter(None, (*story.notes, self._note, chosen.left_out))))]


def _follow(reader: _Reader, with_timings: bool) -> int:
    """Who it is, then what happens, and in the end where the time went."""
    from rallypoint.cli.follow import follow

    *earlier, story = reader.read()
    beginning = [*(render(one) for one in earlier), _header(story)]
    print_text("\n\n\n".join(beginning))
    begin_ms = story.begin_ms  # all times have one zero, also if somebody turns up who began before

    def read(is_changed: bool) -> Story:
        if is_changed:
            reader.read_again()
        return reader.read()[len(earlier)]

    def say(story: Story, news: list[Entry]) -> None:
        if news:
            print_text(_lines(story.replace(begin_ms=begin_ms), news))

    story = follow(reader.paths, read, say)
    return print_text("\n" + render(story, with_timings, with_timeline=False))


def _look_around(logs: Sequence[EventLog], now_ms: float) -> Present:
    """Which of the agents run on this host: a process of that id is there, and is not younger than the run."""
    running: set[tuple[str, int]] = set()
    for log in logs:
        for told in log.events:
            host, pid = words(told, "hostname", 60), count(told, "pid")
            if told.name == STARTED and host == os.uname().nodename and pid is not None and runs_since(pid, told.timestamp_ms):
                running.add((host, pid))
    return Present(now_ms, frozenset(running))


# --- text --------------------------------------------------------------------------------------------------------------------


def render(story: Story, with_timings: bool = False, with_timeline: bool = True) -> str:
    """The story as text, of lines that fit a terminal."""
    parts = [_header(story), *([_lines(story, story.entries)] if with_timeline else []), _table(story)]
    if with_timings:
        parts.append(_timings(story))
    if story.notes:
        parts.append("notes\n" + "\n".join(_wrap(note, "  - ", "    ") for note in story.notes))
    return "\n\n".join(parts)


def _header(story: Story) -> str:
    outcome = story.outcome
    ending = {True: "succeeded", False: "did not succeed", None: "has no end"}[outcome.succeeded]
    end = "is still running" if outcome.is_running else f"{ending}: {outcome.why or 'no reason is told'}"
    names = ", ".join(run.node for run in story.runs[:_NAMED_MAX])
    more = f" and {len(story.runs) - _NAMED_MAX} more" if len(story.runs) > _NAMED_MAX else ""
    lines = [f"run {story.run_id or '(of an unknown id)'} {end}"]
    restarts = max((entry.facts.get("restarts", 0) for entry in story.entries), default=0)
    spent = f", {many(restarts, 'restart')}" if restarts else ""
    so_far = f" so far{spent}; goodput {story.total.goodput:.1%}" if outcome.is_running else ""
    lines.append(f"from {_date(story.begin_ms)} for {duration(_since_s(story, story.end_ms))}{so_far}")
    lines.append(f"{many(len(story.runs), 'agent')}: {names}{more}")
    return "\n".join(_wrap(line, "", "  ") for line in lines)


def _date(at_ms: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_ms / 1000))


def _since_s(story: Story, at_ms: float) -> float:
    return round(max(0.0, at_ms - story.begin_ms) / 1000, 3)


def _wrap(text: str, first: str, others: str) -> str:
    """Lines of whole words, and of numbers with their units."""
    wrapper = textwrap.TextWrapper(_WIDTH, first, others, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(_UNIT.sub(_JOINT, text)).replace(_JOINT, " ")


def _lines(story: Story, entries: Sequence[Entry]) -> str:
    """The timeline, or a part of it."""
    times = [f"+{_since_s(story, entry.at_ms):.3f}s" for entry in entries]
    nodes = [_nodes(story, entry) for entry in entries]
    time_width, node_width = (max(map(len, column), default=0) for column in (times, nodes))
    indent = " " * (time_width + node_width + 4)
    lines = []
    for at, node, entry in zip(times, nodes, entries, strict=True):
        lines.append(_wrap(sentence(entry), f"{at:>{time_width}}  {node:<{node_width}}  ", indent + "  "))
        lines += [f"{indent}  {label}: {entry.facts[fact]}" for fact, label in _FILES.items() if fact in entry.facts]
    return "\n".join(lines)


def _nodes(story: Story, entry: Entry) -> str:
    if 1 < len(entry.nodes) == len(story.runs):
        return "all"
    more = f" +{len(entry.nodes) - 1}" if len(entry.nodes) > 1 else ""
    return clip(entry.nodes[0], 1000, _NODE_MAX - len(more)) + more


def _table(story: Story) -> str:
    heads = [*_COLUMNS, "wall"]
    lines = [f"{'seconds':<{_NODE_MAX + 2}}" + "".join(f"{head:>10}" for head in heads) + f"{'goodput':>10}"]
    lines += [_row(run.node, run.account, _is_open(run)) for run in story.runs]
    lines.append(_row("all", story.total, False))
    return "\n".join([*lines, *_remarks(story)])


def _row(name: str, account: Account, is_open: bool) -> str:
    numbers = [*(account.seconds[phase] for phase in _COLUMNS), account.wall_s]
    digits = 2 if account.wall_s < 100_000 else 0
    cells = "".join(f"{number:>10.{digits}f}" for number in numbers)
    return f"{clip(name, 1000, _NODE_MAX) + ' *' * is_open:<{_NODE_MAX + 2}}{cells}{account.goodput:>10.1%}"


def _is_open(run: NodeRun) -> bool:
    return run.first(ENDED) is None


def _remarks(story: Story) -> Iterator[str]:
    if any(run.runs_at_ms is not None for run in story.runs):
        yield "* still running: counted up to now"
    if any(_is_open(run) and run.runs_at_ms is None for run in story.runs):
        yield "* killed or still running: counted up to the last event"
    untold = [(run.node, run.account.untold_s) for run in story.runs if run.account.untold_s]
    for node, untold_s in untold:
        yield f"{node}: {abs(untold_s):.2f} s {'missing from' if untold_s > 0 else 'more than'} the wall time"
    if not untold:
        yield "each row adds up to its wall time; goodput is running / wall"


def _timings(story: Story) -> str:
    """A row for each regroup of each node; the reason stands below those that share it."""
    found = [(run, one) for run in story.runs for one in regroups(run.events)]
    rows = [(_since_s(story, run.begin_ms + one.begun_t * 1000), run.node, one) for run, one in found]
    rows.sort(key=lambda row: row[:2])
    if not rows:
        return "no regroup: the workers were started once"
    lines = [f"{'milliseconds':<{_NODE_MAX + 2}}{'at':>12}" + "".join(f"{hop:>10}" for hop in (*HOPS, "total"))]
    for at_s, node, one in rows:
        cells = "".join(f"{lasted_s * 1000:>10.1f}" for lasted_s in (*(one.seconds[hop] for hop in HOPS), one.total_s))
        lines.append(f"{clip(node, 1000, _NODE_MAX):<{_NODE_MAX + 2}}{f'+{at_s:.3f}s':>12}{cells}")
        lines.append(_wrap(one.why, "  ", "  "))
    return "\n".join(lines)


# --- JSON --------------------------------------------------------------------------------------------------------------------


def document(story: Story) -> dict[str, Any]:
    """The same, for programs."""
    return {
        "schema": SCHEMA,
        "run_id": story.run_id,
        "succeeded": story.outcome.succeeded,
        "is_running": story.outcome.is_running,
        "why": story.outcome.why,
        "begin_ms": round(story.begin_ms),
        "end_ms": round(story.end_ms),
        "nodes": [_node_document(run) for run in story.runs],
        "total": _account_document(story.total),
        "timeline": [_entry_document(story, entry) for entry in story.entries],
        "notes": list(story.notes),
    }


def _node_document(run: NodeRun) -> dict[str, Any]:
    who = {"node": run.node, "hostname": run.hostname, "pid": run.pid, "path": run.path}
    timings = [{"t": one.begun_t, "why": one.why, "seconds": one.seconds} for one in regroups(run.events)]
    return {**who, "has_ended": not _is_open(run), **_account_document(run.account), "regroups": timings}


def _account_document(account: Account) -> dict[str, Any]:
    return {
        "seconds": {phase: round(lasted_s, 6) for phase, lasted_s in account.seconds.items()},
        "untold_s": round(account.untold_s, 6),
        "wall_s": round(account.wall_s, 6),
        "goodput": round(account.goodput, 6),
    }


def _entry_document(story: Story, entry: Entry) -> dict[str, Any]:
    since_s = _since_s(story, entry.at_ms)
    return {"since_s": since_s, "nodes": list(entry.nodes), "kind": entry.kind, "text": sentence(entry), "facts": entry.facts}
