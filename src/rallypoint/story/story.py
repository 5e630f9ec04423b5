"""The story of a run, as all its nodes tell it: one timeline, and where the time went.

Nodes that tell the same, as all of them do of a generation or of the reason for its end, are heard once. Between nodes the order
is that of their wall clocks, which is good enough for people; where the nodes tell of one generation at moments too far
apart, the story says so. Nothing here depends on a file being complete: what is missing is missing from the story too.

The sentences of a story: each entry of the timeline in one line of plain words.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from rallypoint.base.json_text import clip
from rallypoint.base.records import Value
from rallypoint.base.text import many
from rallypoint.story import chronicle as chapter
from rallypoint.story import event_records as told_of
from rallypoint.story import phases
from rallypoint.story.chronicle import Entry, NodeRun
from rallypoint.story.event_records import Told, count, words
from rallypoint.story.goodput import Account, add_up, replay, settle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["EventLog", "Outcome", "Story", "duration", "many", "sentence", "tell"]


# --- story text ------------------------------------------------------------------------------------------------------------


_OTHER_MAX = 300
_WORTH_TELLING_S = 0.5  # of the parts of a way that is long


def duration(lasted_s: float) -> str:
    """As exact as a reader cares for."""
    if lasted_s < 60:
        return f"{lasted_s:.2f} s" if lasted_s < 10 else f"{lasted_s:.1f} s"
    minutes, rest_s = divmod(round(lasted_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min {rest_s} s" if hours else f"{minutes} min {rest_s} s"


def sentence(entry: Entry) -> str:
    """What happened, in one line; who and when stand before it."""
    facts = entry.facts
    match entry.kind:
        case chapter.STARTED:
            return _started(facts)
        case chapter.GENERATION:
            return _generation(facts)
        case chapter.FAILED:
            return f"{_who(facts)} {_end_of_worker(facts)}"
        case chapter.HUNG:
            return _hung(facts)
        case chapter.EXPIRED:
            scope = f" {facts['scope']!r}" if "scope" in facts else ""
            return f"a timer{scope} of pid {facts.get('pid', '?')} expired{_more(facts, 'message')}"
        case chapter.STOPPED:
            return _stopped(facts)
        case chapter.FINISHED:
            return facts.get("why") or "all workers of this node succeeded"
        case chapter.ENDED:
            return ("succeeded" if facts["succeeded"] else "did not succeed") + _more(facts, "why") + _lost(facts)
        case chapter.SILENT:
            return "last event (agent killed, or still running)"
    return clip(f"{facts['name']} {facts.get('metadata', '')}", 12 * _OTHER_MAX, _OTHER_MAX)


def _started(facts: Mapping[str, Any]) -> str:
    size = f" of {many(facts['local_world_size'], 'worker')}" if "local_world_size" in facts else ""
    return f"an agent{size} starts here" + (f", pid {facts['pid']}" if "pid" in facts else "")


def _generation(facts: Mapping[str, Any]) -> str:
    parts = [_size(facts), many(facts["world_size"], "worker") if "world_size" in facts else ""]
    if "ready_s" in facts:
        parts.append(f"running{' again' if facts['again'] else ''} after {duration(facts['ready_s'])}{_parts_of_way(facts)}")
    if facts.get("restarts"):
        most = f" of {facts['max_restarts']}" if "max_restarts" in facts else ""
        parts.append(f"restarts spent: {facts['restarts']}{most}")
    return f"generation {facts.get('generation', '?')}: " + ", ".join(filter(None, parts))


def _size(facts: Mapping[str, Any]) -> str:
    size = facts.get("group_world_size")
    before = facts.get("nodes_before", size)
    if size is None:
        return ""
    change = "" if size == before else f"scaled {'up' if size > before else 'down'} from {before} to "
    return change + many(size, "node")


def _parts_of_way(facts: Mapping[str, Any]) -> str:
    """What took long, if anything did."""
    way = facts["way"]
    long = [f"{phase} {duration(way[phase])}" for phase in phases.PHASES if way.get(phase, 0.0) >= _WORTH_TELLING_S]
    return f" ({', '.join(long)})" if long else ""


def _who(facts: Mapping[str, Any]) -> str:
    return f"rank {facts.get('rank', '?')} (local rank {facts.get('local_rank', '?')}, pid {facts.get('pid', '?')})"


def _end_of_worker(facts: Mapping[str, Any]) -> str:
    code = facts.get("exitcode")
    message = _more(facts, "message")
    if code is None:
        return f"failed{message}"
    if code >= 0:
        return f"failed with exit code {code}{message}"
    return f"was ended by {_signal_name(-code)}" + ("" if message.startswith(": Signal ") else message)  # it says no more


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one, or none at all
        return f"signal {number}"


def _hung(facts: Mapping[str, Any]) -> str:
    still = f" for {duration(facts['still_s'])}" if "still_s" in facts else ""
    phase = f" while {facts['phase']}" if "phase" in facts else ""
    step = f", last step {facts['step']}" if "step" in facts else ""
    return f"{_who(facts)} hung: no progress{still}{phase}{step}{_more(facts, 'message')}"


def _stopped(facts: Mapping[str, Any]) -> str:
    why = facts.get("why", "")
    if facts.get("failure_is_told"):
        why = why.rsplit("; ", 1)[-1]
    delay_s = facts.get("delay_s", 0.0)
    is_told = not delay_s or f"after {delay_s:g} s" in why
    return (why or "the workers are stopped") + ("" if is_told else f", after {duration(delay_s)}") + _lost(facts)


def _lost(facts: Mapping[str, Any]) -> str:
    return f"; {duration(facts['lost_s'])} of work lost" if facts.get("lost_s") else ""


def _more(facts: Mapping[str, Any], name: str) -> str:
    return f": {facts[name]}" if facts.get(name) else ""


# --- story -----------------------------------------------------------------------------------------------------------------


_SUSPICIOUS_MS = 2000.0  # one generation starts everywhere within this
_BRIEF_MS = 1000.0  # a wait for the others that is shorter is not worth a line
_AGREES = 0.01  # of the wall time

_ORDER = {chapter.STARTED: -2, chapter.GENERATION: -1, chapter.SILENT: 1, chapter.ENDED: 2}  # of what happens at one moment


class EventLog(Value):
    """The events of one file, and what could not be read of it."""

    path: str
    events: tuple[Told, ...]
    unreadable_lines: int = 0
    is_cut: bool = False  # the last line was not written to its end
    is_too_long: bool = False  # the rest was not read
    unknown_events: int = 0  # of other programs, not among `events`


class Outcome(Value):
    """How the run ended: as the node that spoke last has it; `succeeded` is None if it was killed or still runs."""

    succeeded: bool | None
    why: str


class Story(Value):
    """`entries` are in order; `begin_ms` and `end_ms` are the first and the last moment that is told."""

    run_id: str
    begin_ms: float
    end_ms: float
    outcome: Outcome
    runs: tuple[NodeRun, ...]
    entries: tuple[Entry, ...]
    total: Account
    notes: tuple[str, ...]


def tell(logs: Sequence[EventLog], show_all: bool = False) -> Story:
    """The story of one run from the logs of its nodes, at least one of which has events."""
    runs = _name_nodes([(log.path, events) for log in logs for events in _split(log.events)])
    entries = _prune(_merge(entry for run in runs for entry in chapter.chronicle(run, show_all)))
    _compare_generations(entries)
    _mark_repetitions(entries)
    started = [told for run in runs if (told := run.first(told_of.STARTED))]
    return Story(
        run_id=next((words(told, "run_id", 200) for told in started), ""),
        begin_ms=min(run.moments_ms[0] for run in runs),
        end_ms=max(run.moments_ms[-1] for run in runs),
        outcome=_outcome(runs),
        runs=tuple(runs),
        entries=tuple(entries),
        total=add_up(run.account for run in runs),
        notes=(*_notes_on_logs(logs), *_notes_on_runs(runs), *_notes_on_clocks(runs)),
    )


def _split(events: Sequence[Told]) -> Iterator[tuple[Told, ...]]:
    """An agent that is run again goes on in the same file; each run begins with the event that says so."""
    begins = [index for index, told in enumerate(events) if told.name == told_of.STARTED]
    for begin, end in pairwise(sorted({0, *begins, len(events)})):
        yield tuple(events[begin:end])


def _name_nodes(parts: Sequence[tuple[str, tuple[Told, ...]]]) -> list[NodeRun]:
    """By host, or by host and process where one host has several agents; in the order in which they began."""
    known = [(path, events, *_identity(path, events)) for path, events in parts]
    hosts = Counter(host for *_, host, _ in known)
    processes = Counter((host, pid) for *_, host, pid in known)
    runs = []
    for number, (path, events, host, pid) in enumerate(known, 1):
        name = host if hosts[host] == 1 else f"{host}[{pid or '?'}]"
        node = name if processes[host, pid] == 1 else f"{name}#{number}"
        runs.append(NodeRun(node, host, pid, path, events, chapter.follow(events), settle(events)))
    return sorted(runs, key=lambda run: (run.moments_ms[0], run.node))


def _identity(path: str, events: Sequence[Told]) -> tuple[str, int | None]:
    if events[0].name != told_of.STARTED:
        return clip(path, 1000, 60), None
    return words(events[0], "hostname", 60) or "?", count(events[0], "pid")


def _merge(entries: Iterable[Entry]) -> list[Entry]:
    """In order, with what several nodes tell alike in one entry."""
    found: dict[object, Entry] = {}
    for number, entry in enumerate(entries):
        key = _key(entry) or number
        known = found.get(key)
        if known is None:
            found[key] = entry
        elif entry.nodes[0] in known.nodes:  # a node does not tell the same twice, so this is something else
            found[number] = entry
        else:
            _join(known, entry)
    _begin_first(list(found.values()))
    _fall_silent_last(list(found.values()))
    return sorted(found.values(), key=lambda entry: (entry.at_ms, _ORDER.get(entry.kind, 0), entry.nodes))


def _begin_first(entries: Sequence[Entry]) -> None:
    """Nothing comes before the generation that it happens in: a worker may fail before its agent has told that it runs."""
    generations = {entry.facts.get("generation"): entry for entry in entries if entry.kind == chapter.GENERATION}
    for entry in entries:
        generation = generations.get(entry.facts.get("generation"))
        if generation is not None and 0 < generation.at_ms - entry.at_ms < _SUSPICIOUS_MS:
            generation.at_ms = entry.at_ms


def _fall_silent_last(entries: Sequence[Entry]) -> None:
    """Nothing more is told by a node after the last thing that it tells, alone or with others."""
    last_ms: dict[str, float] = {}
    for entry in entries:
        last_ms.update({node: max(entry.at_ms, last_ms.get(node, 0.0)) for node in entry.nodes})
    for entry in entries:
        if entry.kind == chapter.SILENT:
            entry.at_ms = max(last_ms[node] for node in entry.nodes)


def _key(entry: Entry) -> tuple[object, ...] | None:
    facts = entry.facts
    match entry.kind:
        case chapter.GENERATION:
            return (entry.kind, facts.get("generation"))
        case chapter.STOPPED | chapter.ENDED:
            return (entry.kind, facts.get("generation"), facts.get("succeeded"), facts.get("why"))
        case chapter.FINISHED | chapter.SILENT:
            return (entry.kind, facts.get("generation"), facts.get("why"), entry.at_ms // _BRIEF_MS)
    return None


def _join(known: Entry, more: Entry) -> None:
    """A run ends with its last node, all else begins with the first; how long it took to run is told by the slowest."""
    is_later = (more.facts.get("again", False), more.at_ms) > (known.facts.get("again", False), known.at_ms)
    last_counts = known.kind in (chapter.GENERATION, chapter.ENDED)
    leading, following = (more, known) if is_later == last_counts else (known, more)
    facts = {**following.facts, **leading.facts}
    for name in ("lost_s", "delay_s"):
        if told := [one.facts[name] for one in (known, more) if name in one.facts]:
            facts[name] = max(told)
    known.at_ms = (max if known.kind == chapter.ENDED else min)(known.at_ms, more.at_ms)
    known.nodes, known.facts = (*known.nodes, *more.nodes), facts


def _prune(entries: list[Entry]) -> list[Entry]:
    """Without what goes without saying: the start of those who were there from the beginning, and an end just before the end."""
    first_ms = next((entry.at_ms for entry in entries if entry.kind == chapter.GENERATION), None)
    end_ms = next((entry.at_ms for entry in entries if entry.kind == chapter.ENDED and entry.facts["succeeded"]), None)

    def matters(entry: Entry) -> bool:
        if entry.kind == chapter.STARTED:
            return first_ms is None or entry.at_ms > first_ms
        return entry.kind != chapter.FINISHED or end_ms is None or abs(end_ms - entry.at_ms) > _BRIEF_MS

    return [entry for entry in entries if matters(entry)]


def _compare_generations(entries: Sequence[Entry]) -> None:
    """A change of size becomes a fact of the generation that has the new one."""
    sized = [entry for entry in entries if entry.kind == chapter.GENERATION and "group_world_size" in entry.facts]
    for before, after in pairwise(sized):
        after.facts["nodes_before"] = before.facts["group_world_size"]


def _mark_repetitions(entries: Sequence[Entry]) -> None:
    """A stop whose reason is a failure that has an entry of its own need not describe it again."""
    failures = [entry.facts for entry in entries if entry.kind == chapter.FAILED]
    beginnings = tuple(f"rank {facts.get('rank')} (pid {facts.get('pid')})" for facts in failures)
    for entry in entries:
        if entry.kind == chapter.STOPPED and entry.facts.get("why", "").startswith(beginnings):
            entry.facts["failure_is_told"] = True


def _outcome(runs: Sequence[NodeRun]) -> Outcome:
    ends = [(run.moments_ms[-1], run.first(told_of.ENDED)) for run in runs]
    _, told = max(ends, key=lambda end: (end[0], end[1] is not None))
    if told is None:
        return Outcome(None, "killed or still running")
    return Outcome(told_of.truth(told, "succeeded"), words(told, "why"))


def _notes_on_logs(logs: Iterable[EventLog]) -> Iterator[str]:
    for log in logs:
        if log.unreadable_lines:
            yield f"{log.path}: {many(log.unreadable_lines, 'line')} could not be read"
        if log.is_cut:
            yield f"{log.path}: the last line was cut short, as an agent that is killed leaves it"
        if not log.events:
            yield f"{log.path}: no events of a run"
        if log.is_too_long:
            yield f"{log.path}: only the first {many(len(log.events), 'event')} of the file are told"
    if unknown := sum(log.unknown_events for log in logs):
        yield f"{many(unknown, 'event')} of other kinds not shown; --all shows them"


def _notes_on_runs(runs: Iterable[NodeRun]) -> Iterator[str]:
    for run in runs:
        if run.first(told_of.STARTED) is None:
            yield f"{run.node}: the beginning is missing"
        if run.first(told_of.ENDED) is None:
            continue
        counted = replay(run.events).seconds
        apart_s = max(abs(counted[phase] - said_s) for phase, said_s in run.account.seconds.items())
        if apart_s > max(_AGREES, _AGREES * run.account.wall_s):
            yield f"{run.node}: its totals and its changes of phase are up to {apart_s:.3f} s apart; the totals are shown"


def _notes_on_clocks(runs: Iterable[NodeRun]) -> Iterator[str]:
    told: dict[int, list[float]] = {}
    for run in runs:
        for event, at_ms in zip(run.events, run.moments_ms, strict=True):
            generation = count(event, "generation") if event.name == told_of.GENERATION else None
            if generation is not None:
                told.setdefault(generation, []).append(at_ms)
    apart_ms, generation = max(((max(times) - min(times), number) for number, times in told.items()), default=(0.0, 0))
    if apart_ms > _SUSPICIOUS_MS:
        yield (
            f"the nodes tell of generation {generation} up to {apart_ms / 1000:.1f} s apart: if their clocks disagree, "
            "so does the order of what happened on different nodes"
        )
