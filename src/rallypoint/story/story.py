"""The story of a run, as all its nodes tell it: one timeline, each entry in a line of plain words, and where the time went.

An agent tells more than a reader wants to know. The changes of phase between two generations become one fact of the second one,
how long it took until workers ran; the order to restart joins the stop that it follows; and the start of the run is the first
generation's. The moments are those of the node's own clock, put on the wall by the time at which the run began there, so within a
node nothing is ever out of order.

Nodes that tell the same, as all of them do of a generation or of the reason for its end, are heard once. Between nodes the order
is that of their wall clocks, which is good enough for people; where the nodes tell of one generation at moments too far
apart, the story says so. Nothing here depends on a file being complete: what is missing is missing from the story too.

Where the time went is counted anew. Every change of phase tells which phase it ends and how long that lasted, so that a file of
which lines are missing still gives the rest. Time that no line speaks for is *untold*; seconds of all phases, and those, add up
to the wall time. An agent that ends by itself tells its own totals, and those count then; a file without them is counted up to
its last event, or up to now if it is known that its agent runs. *Goodput* is the part of the wall time in which workers ran and
what they did was kept.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from rallypoint.base.json_text import clip
from rallypoint.base.records import Record, Value, field
from rallypoint.base.text import failure_kind, many, runs, who_of
from rallypoint.story import event_records as told_of
from rallypoint.story import phases
from rallypoint.story.event_records import Told, as_seconds, count, integers, seconds, truth, words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "Account", "Entry", "EventLog", "Kind", "NodeRun", "Outcome", "Present", "Story", "duration", "follow", "launches", "replay",
    "sentence", "settle", "tell",
]  # fmt: skip

_CLOSE_S = 0.01  # a gap below this is no gap
_SUSPICIOUS_MS = 2000.0  # one generation starts everywhere within this
_BRIEF_MS = 1000.0  # a wait for the others, or a stop before the end, that is shorter is not worth a line
_AGREES = 0.01  # of the wall time
_WORTH_TELLING_S = 0.5  # of the parts of a way that is long
_OTHER_MAX = 300


class Kind:
    """What an entry can tell of."""

    STARTED, GENERATION, FAILED, HUNG, EXPIRED = "started", "generation", "failed", "hung", "expired"
    SLOW = "slow"
    STOPPED, FINISHED, ENDED, SILENT, OTHER = "stopped", "finished", "ended", "silent", "other"


_ORDER = {Kind.STARTED: -2, Kind.GENERATION: -1, Kind.SILENT: 1, Kind.ENDED: 2}  # of what happens at one moment


# --- where the time went ---------------------------------------------------------------------------------------------------


class Account(Value):
    """The seconds of a run by phase, of its whole wall time."""

    seconds: dict[str, float]
    wall_s: float

    @property
    def untold_s(self) -> float:
        """What the phases do not account for; a run of which everything is told has none."""
        gap_s = self.wall_s - sum(self.seconds.values())
        return gap_s if abs(gap_s) > max(_CLOSE_S, self.wall_s / 10_000) else 0.0

    @property
    def goodput(self) -> float:
        """Between 0 and 1; of a run that took no time it is 0."""
        return min(1.0, self.seconds[phases.RUNNING] / self.wall_s) if self.wall_s > 0 else 0.0


class _Replay(Record):
    """The count so far: everything before `until` is counted, and `phase` is the one since then."""

    phase: str = phases.STARTING
    until: float = 0.0
    seconds: dict[str, float] = field(factory=lambda: dict.fromkeys(phases.PHASES, 0.0))

    def change(self, told: Told, now: float) -> None:
        """A phase ends, and with it perhaps a gap of which nothing is told."""
        previous = words(told, "previous") or self.phase
        lasted_s = seconds(told, "lasted_s")
        since = self.until if lasted_s is None else min(max(self.until, now - lasted_s), now)
        if since - self.until < _CLOSE_S:
            since = self.until
        self._add(previous, now - since, seconds(told, "kept_s"))
        self.phase, self.until = words(told, "phase"), now

    def finish(self, now: float) -> None:
        self._add(self.phase, now - self.until, None)
        self.until = now

    def _add(self, phase: str, lasted_s: float, kept_s: float | None) -> None:
        if phase not in self.seconds:
            return
        kept_s = lasted_s if kept_s is None or phase != phases.RUNNING else min(kept_s, lasted_s)
        self.seconds[phase] += kept_s
        self.seconds[phases.LOST] += lasted_s - kept_s


def replay(run: Sequence[Told], until: float = 0.0) -> Account:
    """Count the phases of one run on one node, up to its last event, or until then; its beginning may be missing."""
    begin = next((_begin(told) for told in run if told.t is not None), 0.0)
    counted = _Replay(until=begin)
    now = begin
    for told in run:
        now = max(now, told.t or 0.0)  # lines that were tampered with cannot turn the time back
        if told.name == told_of.PHASE:
            counted.change(told, now)
    if counted.phase != phases.DONE:
        counted.finish(max(now, until))
    return Account(counted.seconds, counted.until - begin)


def _begin(first: Told) -> float:
    """When the run began, as far as the first event knows that."""
    if first.name == told_of.STARTED:
        return 0.0
    lasted_s = seconds(first, "lasted_s") if first.name == told_of.PHASE else None
    return max(0.0, (first.t or 0.0) - (lasted_s or 0.0))


def settle(run: Sequence[Told], until: float = 0.0) -> Account:
    """What the agent said at its end, if it did; else what the phases tell, until then if it still runs."""
    last = next((told for told in reversed(run) if told.name == told_of.ENDED), None)
    wall_s = seconds(last, "wall_s") if last else None
    said = _said(last.metadata.get("seconds")) if last else None
    return replay(run, until) if wall_s is None or said is None else Account(said, wall_s)


def _said(value: object) -> dict[str, float] | None:
    """The seconds of all phases; None if one is missing or is no duration."""
    if not isinstance(value, Mapping):
        return None
    found = {phase: as_seconds(value.get(phase)) for phase in phases.PHASES}
    durations = {phase: lasted_s for phase, lasted_s in found.items() if lasted_s is not None}
    return durations if len(durations) == len(found) else None


def add_up(accounts: Iterable[Account]) -> Account:
    """All nodes together: seconds of nodes, not of the clock on the wall."""
    total = Account(dict.fromkeys(phases.PHASES, 0.0), 0.0)
    for one in accounts:
        total = Account({phase: total.seconds[phase] + one.seconds[phase] for phase in phases.PHASES}, total.wall_s + one.wall_s)
    return total


# --- one node --------------------------------------------------------------------------------------------------------------


class Entry(Record):
    """One thing that happened, and on which nodes."""

    at_ms: float
    nodes: tuple[str, ...]
    kind: str
    facts: dict[str, Any]


class NodeRun(Value):
    """One agent's run: its events in the order of its file, and the moment of each."""

    node: str
    hostname: str
    pid: int | None
    path: str
    events: tuple[Told, ...]
    begin_ms: float
    moments_ms: tuple[float, ...]
    account: Account
    runs_at_ms: float | None = None  # when its agent was seen to run, if it was

    @property
    def end_ms(self) -> float:
        """The last moment that is known of it."""
        return max(self.moments_ms[-1], self.runs_at_ms or 0.0)

    def first(self, name: str) -> Told | None:
        return next((told for told in self.events if told.name == name), None)


def follow(events: Sequence[Told]) -> tuple[float, ...]:
    """The moment of each event on the wall clock, never going back; the clock on the wall may be set, the node's own is not."""
    begin_ms = _begin_ms(events)
    moments: list[float] = []
    for told in events:
        at_ms = told.timestamp_ms if told.t is None else begin_ms + 1000 * told.t
        moments.append(max(at_ms, moments[-1]) if moments else at_ms)
    return tuple(moments)


def _begin_ms(events: Sequence[Told]) -> float:
    """When the run began on this node, by the clock on the wall: the zero of all that is told of it."""
    return next((told.timestamp_ms - 1000 * told.t for told in events if told.t is not None), events[0].timestamp_ms)


def chronicle(run: NodeRun, show_all: bool = False) -> list[Entry]:
    """The entries of one node, in the order in which they were told."""
    reader = _Reader(run.node, run.begin_ms)
    for told, at_ms in zip(run.events, run.moments_ms, strict=True):
        reader.read(told, at_ms)
        if show_all and told.name not in told_of.KNOWN:
            reader.add(at_ms, Kind.OTHER, {"name": told.name[:200], "metadata": told.metadata})
    if run.first(told_of.ENDED) is None:
        reader.add(run.end_ms, Kind.SILENT, {"pid": run.pid, "runs": True} if run.runs_at_ms is not None else {})
    return reader.entries


class _Reader(Record):
    """Where the reading of one node's events stands."""

    node: str
    begin_ms: float
    entries: list[Entry] = field(factory=list)
    generation: int = 0
    max_restarts: int | None = None
    ways: dict[str, float] = field(factory=dict)  # the seconds of each phase since workers ran last
    ran_before: bool = False
    way_there: dict[str, Any] | None = None  # how long it took until they ran, as long as no generation has that fact
    newest: Entry | None = None  # the last generation, as long as it does not run
    stop: Entry | None = None  # the last one, until the next generation

    def add(self, at_ms: float, kind: str, facts: dict[str, Any]) -> Entry:
        known = {key: value for key, value in facts.items() if value not in (None, "", [])}
        entry = Entry(at_ms, (self.node,), kind, {"generation": self.generation, **known} if self.generation else known)
        self.entries.append(entry)
        return entry

    def read(self, told: Told, at_ms: float) -> None:
        match told.name:
            case told_of.STARTED:
                self._read_start(told, at_ms)
            case told_of.PHASE:
                self._read_phase(told, at_ms)
            case told_of.GENERATION:
                self._read_generation(told, at_ms)
            case told_of.RESTART:
                self._read_restart(told, at_ms)
            case told_of.FAILED:
                ended_ms = max(self.begin_ms, at_ms - 1000 * (seconds(told, "ago_s") or 0.0))
                how: dict[str, Any] = {"exitcode": count(told, "exitcode"), "place": words(told, "place", 500)}
                self._add_worker(told, ended_ms, Kind.FAILED, **how, log_file=words(told, "log_file"))
            case told_of.HUNG:
                where: dict[str, Any] = {"phase": words(told, "phase", 200), "step": count(told, "step")}
                self._add_worker(told, at_ms, Kind.HUNG, **where, still_s=seconds(told, "still_s"), stacks=words(told, "stacks"))
            case told_of.SLOW:
                self._add_worker(told, at_ms, Kind.SLOW, home=words(told, "node", 255))
            case told_of.EXPIRED:
                self._add_worker(told, at_ms, Kind.EXPIRED, scope=words(told, "scope", 200))
            case told_of.ENDED:
                self._read_end(told, at_ms)

    def _read_start(self, told: Told, at_ms: float) -> None:
        self.max_restarts = count(told, "max_restarts")
        facts: dict[str, Any] = {key: words(told, key, 500) for key in ("entry_point", "version", "rdzv_backend")}
        self.add(at_ms, Kind.STARTED, {**facts, **{key: count(told, key) for key in ("pid", "local_world_size")}})

    def _add_worker(self, told: Told, at_ms: float, kind: str, **facts: object) -> None:
        who = {key: count(told, key) for key in ("rank", "local_rank", "pid", "generation")}
        self.add(at_ms, kind, {**who, "message": words(told, "message", 1000), **facts})

    def _read_generation(self, told: Told, at_ms: float) -> None:
        self.generation = count(told, "generation") or self.generation + 1
        names = ("group_rank", "group_world_size", "world_size", "restarts")
        facts = {**{key: count(told, key) for key in names}, "ranks": integers(told, "ranks"), "pids": integers(told, "pids")}
        entry = self.add(at_ms, Kind.GENERATION, {**facts, "max_restarts": self.max_restarts, "folder": words(told, "folder")})
        entry.facts.update(self.way_there or {})
        self.newest = None if self.way_there else entry
        self.way_there = self.stop = None

    def _read_end(self, told: Told, at_ms: float) -> None:
        """The stop that is the end goes without saying, unless it takes its time and all is not well."""
        facts: dict[str, Any] = {"succeeded": truth(told, "succeeded"), "why": words(told, "why")}
        stop = self.stop
        is_brief = stop is not None and (facts["succeeded"] or at_ms - stop.at_ms < _BRIEF_MS)
        if stop is not None and is_brief and stop.facts.get("why", "") == facts["why"]:
            self.entries.remove(stop)
            facts["lost_s"] = stop.facts.get("lost_s")
        self.add(at_ms, Kind.ENDED, facts)

    def _read_phase(self, told: Told, at_ms: float) -> None:
        phase, previous, lasted_s = words(told, "phase"), words(told, "previous"), seconds(told, "lasted_s") or 0.0
        if previous == phases.RUNNING:
            self.ways, self.ran_before, self.way_there = {}, True, None
        elif previous in phases.PHASES:
            self.ways[previous] = self.ways.get(previous, 0.0) + lasted_s
        kept_s = seconds(told, "kept_s")
        lost_s = max(0.0, lasted_s - kept_s) if kept_s is not None and previous == phases.RUNNING else None
        if phase == phases.RUNNING:
            self._run(at_ms)
        elif phase == phases.STOPPING:
            self._stop(at_ms, {"why": words(told, "why"), "lost_s": lost_s})
        elif previous == phases.RUNNING and kept_s is None and phase == phases.WAITING:
            self.add(at_ms, Kind.FINISHED, {"why": words(told, "why")})

    def _run(self, at_ms: float) -> None:
        way: dict[str, Any] = {"ready_s": sum(self.ways.values()), "way": self.ways, "again": self.ran_before}
        if self.newest is None:
            self.way_there = way
            return
        self.newest.facts.update(way)
        self.newest.at_ms, self.newest = at_ms, None

    def _read_restart(self, told: Told, at_ms: float) -> None:
        facts = {"why": words(told, "why"), "restarts": count(told, "restarts"), "delay_s": seconds(told, "delay_s") or None}
        self._stop(at_ms, facts)

    def _stop(self, at_ms: float, facts: dict[str, Any]) -> None:
        """The order to restart and the phase that it begins tell of the same stop."""
        if self.stop is not None and self.stop.facts.get("why", "") == facts["why"]:
            self.stop.facts.update({key: value for key, value in facts.items() if value is not None})
        else:
            self.stop = self.add(at_ms, Kind.STOPPED, facts)


# --- all nodes -------------------------------------------------------------------------------------------------------------


class EventLog(Value):
    """The events of one file, and what could not be read of it."""

    path: str
    events: tuple[Told, ...]
    unreadable_lines: int = 0
    is_cut: bool = False  # the last line was not written to its end
    is_too_long: bool = False  # the rest was not read
    unknown_events: int = 0  # of other programs, not among `events`


class Present(Value):
    """Now, and the agents that are known to run, by host and process id."""

    now_ms: float = 0.0
    running: frozenset[tuple[str, int]] = frozenset()


class Outcome(Value):
    """How the run ended: as the node that spoke last has it; `succeeded` is None if it was killed or still runs."""

    succeeded: bool | None
    why: str
    is_running: bool = False  # for sure


_UNKNOWN = Present()


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


def tell(logs: Sequence[EventLog], show_all: bool = False, present: Present = _UNKNOWN) -> Story:
    """The story of one run from the logs of its nodes, at least one of which has events."""
    agents = _name_nodes([(log.path, events) for log in logs for events in _split(log.events)], present)
    entries = _join_alike(_prune(_merge(entry for run in agents for entry in chronicle(run, show_all))))
    _compare_generations(entries)
    _mark_repetitions(entries)
    started = [told for run in agents if (told := run.first(told_of.STARTED))]
    return Story(
        run_id=next((words(told, "run_id", 200) for told in started), ""),
        begin_ms=min(run.begin_ms for run in agents),
        end_ms=max(run.end_ms for run in agents),
        outcome=_outcome(agents),
        runs=tuple(agents),
        entries=tuple(entries),
        total=add_up(run.account for run in agents),
        notes=(*_notes_on_logs(logs), *_notes_on_runs(agents), *_notes_on_clocks(agents)),
    )


def launches(logs: Sequence[EventLog]) -> list[list[EventLog]]:
    """What one process did first, second, and so on are launches of their own, each a run.

    Where the same was done on several nodes, those belong together that were at it at the same time.
    """
    parts = [part for log in logs for part in _parts(log)]
    found: list[list[EventLog]] = [[]]
    numbers: Counter[tuple[str, int | None]] = Counter()
    for part in sorted(parts, key=lambda part: _begin_ms(part.events)):
        who = _identity(part.path, part.events)
        number = numbers[who]
        if number == 0 or who[1] is None:  # the first of its process, or of one that nobody knows
            number = next((at for at, launch in enumerate(found) if any(_overlap(part, one) for one in launch)), 0)
        numbers[who] = number + 1
        found += [[] for _ in range(number + 1 - len(found))]
        found[number].append(part)
    found[-1] += [log for log in logs if not log.events]
    return found


def _parts(log: EventLog) -> list[EventLog]:
    """One for each run; what is wrong with the file is said with the last."""
    parts = [EventLog(log.path, events) for events in _split(log.events)]
    return [*parts[:-1], *(log.replace(events=part.events) for part in parts[-1:])]


def _overlap(one: EventLog, other: EventLog) -> bool:
    return _begin_ms(one.events) <= follow(other.events)[-1] and _begin_ms(other.events) <= follow(one.events)[-1]


def _split(events: Sequence[Told]) -> Iterator[tuple[Told, ...]]:
    """An agent that is run again goes on in the same file; each run begins with the event that says so."""
    begins = [index for index, told in enumerate(events) if told.name == told_of.STARTED]
    for begin, end in pairwise(sorted({0, *begins, len(events)})):
        yield tuple(events[begin:end])


def _name_nodes(parts: Sequence[tuple[str, tuple[Told, ...]]], present: Present) -> list[NodeRun]:
    """By host, or by host and process where one host has several agents; in the order in which they began."""
    known = [(path, events, *_identity(path, events)) for path, events in parts]
    hosts = Counter(host for *_, host, _ in known)
    processes = Counter((host, pid) for *_, host, pid in known)
    agents = []
    for number, (path, events, host, pid) in enumerate(known, 1):
        name = host if hosts[host] == 1 else f"{host}[{pid or '?'}]"
        node = name if processes[host, pid] == 1 else f"{name}#{number}"
        begin_ms = _begin_ms(events)
        has_ended = any(told.name == told_of.ENDED for told in events)
        now_ms = present.now_ms if not has_ended and (host, pid) in present.running else None
        account = settle(events, (now_ms - begin_ms) / 1000 if now_ms is not None else 0.0)
        agents.append(NodeRun(node, host, pid, path, events, begin_ms, follow(events), account, now_ms))
    return sorted(agents, key=lambda run: (run.moments_ms[0], run.node))


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
    generations = {entry.facts.get("generation"): entry for entry in entries if entry.kind == Kind.GENERATION}
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
        if entry.kind == Kind.SILENT:
            entry.at_ms = max(last_ms[node] for node in entry.nodes)


def _key(entry: Entry) -> tuple[object, ...] | None:
    facts = entry.facts
    match entry.kind:
        case Kind.GENERATION:
            return (entry.kind, facts.get("generation"))
        case Kind.STOPPED | Kind.ENDED:
            return (entry.kind, facts.get("generation"), facts.get("succeeded"), facts.get("why"))
        case Kind.FINISHED | Kind.SILENT:
            return (entry.kind, facts.get("generation"), facts.get("why"), entry.at_ms // _BRIEF_MS)
    return None


def _join(known: Entry, more: Entry) -> None:
    """A run ends with its last node, all else begins with the first; how long it took to run is told by the slowest."""
    is_later = (more.facts.get("again", False), more.at_ms) > (known.facts.get("again", False), known.at_ms)
    last_counts = known.kind in (Kind.GENERATION, Kind.ENDED)
    leading, following = (more, known) if is_later == last_counts else (known, more)
    facts = {**following.facts, **leading.facts}
    for name in ("lost_s", "delay_s"):
        if told := [one.facts[name] for one in (known, more) if name in one.facts]:
            facts[name] = max(told)
    known.at_ms = (max if known.kind == Kind.ENDED else min)(known.at_ms, more.at_ms)
    known.nodes, known.facts = (*known.nodes, *more.nodes), facts


def _prune(entries: list[Entry]) -> list[Entry]:
    """Without what goes without saying: the start of those who were there from the beginning, and an end just before the end."""
    first_ms = next((entry.at_ms for entry in entries if entry.kind == Kind.GENERATION), None)
    end_ms = next((entry.at_ms for entry in entries if entry.kind == Kind.ENDED and entry.facts["succeeded"]), None)

    def matters(entry: Entry) -> bool:
        if entry.kind == Kind.STARTED:
            return first_ms is None or entry.at_ms > first_ms
        return entry.kind != Kind.FINISHED or end_ms is None or abs(end_ms - entry.at_ms) > _BRIEF_MS

    return [entry for entry in entries if matters(entry)]


def _join_alike(entries: Sequence[Entry]) -> list[Entry]:
    """Workers of one generation that failed the same way are told once, at the moment of the first; and one that is slow, which
    all nodes tell.
    """
    sizes = {entry.facts["generation"]: entry.facts.get("world_size") for entry in entries if entry.kind == Kind.GENERATION}
    found: dict[object, Entry] = {}
    for number, entry in enumerate(entries):
        key: object = number
        if entry.kind == Kind.FAILED:
            facts = entry.facts
            kind = failure_kind(facts.get("exitcode", 0), facts.get("message", ""), facts.get("place", ""))
            key = (facts.get("generation"), kind)
        if entry.kind == Kind.SLOW:
            key = (entry.kind, entry.facts.get("generation"), entry.facts.get("rank"))
        known = found.setdefault(key, entry)
        if known is entry:
            continue
        known.nodes = tuple(dict.fromkeys((*known.nodes, *entry.nodes)))
        if entry.kind == Kind.FAILED:
            ranks = [*known.facts.get("ranks", [known.facts.get("rank", 0)]), entry.facts.get("rank", 0)]
            size = sizes.get(known.facts.get("generation"))
            known.facts.update({"ranks": sorted(ranks), **({"world_size": size} if size is not None else {})})
    return list(found.values())


def _compare_generations(entries: Sequence[Entry]) -> None:
    """A change of size becomes a fact of the generation that has the new one."""
    sized = [entry for entry in entries if entry.kind == Kind.GENERATION and "group_world_size" in entry.facts]
    for before, after in pairwise(sized):
        after.facts["nodes_before"] = before.facts["group_world_size"]


def _mark_repetitions(entries: Sequence[Entry]) -> None:
    """A stop whose reason is a failure that has an entry of its own need not describe it again."""
    failures = [entry.facts for entry in entries if entry.kind == Kind.FAILED]
    beginnings = [f"rank {facts.get('rank')} (pid {facts.get('pid')})" for facts in failures]
    beginnings += ["ranks "] * any("ranks" in facts for facts in failures)
    for entry in entries:
        if entry.kind == Kind.STOPPED and entry.facts.get("why", "").startswith(tuple(beginnings)):
            entry.facts["failure_is_told"] = True


def _outcome(runs: Sequence[NodeRun]) -> Outcome:
    ends = [(run.moments_ms[-1], run.first(told_of.ENDED)) for run in runs]
    _, told = max(ends, key=lambda end: (end[0], end[1] is not None))
    if any(run.runs_at_ms is not None for run in runs):
        return Outcome(None, "", is_running=True)
    if told is None:
        return Outcome(None, "killed or still running")
    return Outcome(truth(told, "succeeded"), words(told, "why"))


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


# --- sentences -------------------------------------------------------------------------------------------------------------


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
        case Kind.STARTED:
            return _started(facts)
        case Kind.GENERATION:
            return _generation(facts)
        case Kind.FAILED:
            return _failed(facts)
        case Kind.HUNG:
            return _hung(facts)
        case Kind.SLOW:
            where = f" (node {facts['home']})" if "home" in facts else ""
            return f"rank {facts.get('rank', '?')}{where} is slow{_more(facts, 'message')}"
        case Kind.EXPIRED:
            scope = f" {facts['scope']!r}" if "scope" in facts else ""
            return f"a timer{scope} of pid {facts.get('pid', '?')} expired{_more(facts, 'message')}"
        case Kind.STOPPED:
            return _stopped(facts)
        case Kind.FINISHED:
            return facts.get("why") or "all workers of this node succeeded"
        case Kind.ENDED:
            return ("succeeded" if facts["succeeded"] else "did not succeed") + _more(facts, "why") + _lost(facts)
        case Kind.SILENT if facts.get("runs"):
            return f"still running (pid {facts.get('pid')})"
        case Kind.SILENT:
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


def _failed(facts: Mapping[str, Any]) -> str:
    if "ranks" not in facts:
        return f"{_who(facts)} {_end_of_worker(facts)}"
    who = who_of(runs(facts["ranks"]), facts.get("world_size", 0))
    return f"{who}, first rank {facts.get('rank')} (pid {facts.get('pid', '?')}), {_end_of_worker(facts)}"


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
