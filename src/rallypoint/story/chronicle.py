"""What happened on one node, from its events: the few things that matter, each with its facts.

An agent tells more than a reader wants to know. Here the changes of phase between two generations become one fact of the second
one, how long it took until workers ran; the order to restart joins the stop that it follows; and the start of the run is
the first generation's. The moments are those of the node's own clock, put on the wall by the time at which the run began there,
so within a node nothing is ever out of order.
"""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.base.records import Record, Value, field
from rallypoint.story import event_records as told_of
from rallypoint.story import goodput, phases
from rallypoint.story.event_records import Told, count, integers, seconds, truth, words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "ENDED", "EXPIRED", "FAILED", "FINISHED", "GENERATION", "HUNG", "OTHER", "SILENT", "STARTED", "STOPPED", "Entry", "NodeRun",
    "chronicle", "follow",
]  # fmt: skip

STARTED, GENERATION, FAILED, HUNG, EXPIRED = "started", "generation", "failed", "hung", "expired"
STOPPED, FINISHED, ENDED, SILENT, OTHER = "stopped", "finished", "ended", "silent", "other"

_BRIEF_MS = 1000.0


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
    moments_ms: tuple[float, ...]
    account: goodput.Account

    def first(self, name: str) -> Told | None:
        return next((told for told in self.events if told.name == name), None)


def follow(events: Sequence[Told]) -> tuple[float, ...]:
    """The moment of each event on the wall clock, never going back; the clock on the wall may be set, the node's own is not."""
    begin_ms = next((told.timestamp_ms - 1000 * told.t for told in events if told.t is not None), None)
    moments: list[float] = []
    for told in events:
        at_ms = told.timestamp_ms if told.t is None or begin_ms is None else begin_ms + 1000 * told.t
        moments.append(max(at_ms, moments[-1]) if moments else at_ms)
    return tuple(moments)


def chronicle(run: NodeRun, show_all: bool = False) -> list[Entry]:
    """The entries of one node, in the order in which they were told."""
    reader = _Reader(run.node, run.moments_ms[0])
    for told, at_ms in zip(run.events, run.moments_ms, strict=True):
        reader.read(told, at_ms)
        if show_all and told.name not in told_of.KNOWN:
            reader.add(at_ms, OTHER, {"name": told.name[:200], "metadata": told.metadata})
    if run.first(told_of.ENDED) is None:
        reader.add(run.moments_ms[-1], SILENT, {})
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
                self._add_worker(told, ended_ms, FAILED, exitcode=count(told, "exitcode"), log_file=words(told, "log_file"))
            case told_of.HUNG:
                where: dict[str, Any] = {"phase": words(told, "phase", 200), "step": count(told, "step")}
                self._add_worker(told, at_ms, HUNG, **where, still_s=seconds(told, "still_s"), stacks=words(told, "stacks"))
            case told_of.EXPIRED:
                self._add_worker(told, at_ms, EXPIRED, scope=words(told, "scope", 200))
            case told_of.ENDED:
                self._read_end(told, at_ms)

    def _read_start(self, told: Told, at_ms: float) -> None:
        self.max_restarts = count(told, "max_restarts")
        facts: dict[str, Any] = {key: words(told, key, 500) for key in ("entry_point", "version", "rdzv_backend")}
        self.add(at_ms, STARTED, {**facts, **{key: count(told, key) for key in ("pid", "local_world_size")}})

    def _add_worker(self, told: Told, at_ms: float, kind: str, **facts: object) -> None:
        who = {key: count(told, key) for key in ("rank", "local_rank", "pid", "generation")}
        self.add(at_ms, kind, {**who, "message": words(told, "message", 1000), **facts})

    def _read_generation(self, told: Told, at_ms: float) -> None:
        self.generation = count(told, "generation") or self.generation + 1
        names = ("group_rank", "group_world_size", "world_size", "restarts")
        facts = {**{key: count(told, key) for key in names}, "ranks": integers(told, "ranks"), "pids": integers(told, "pids")}
        entry = self.add(at_ms, GENERATION, {**facts, "max_restarts": self.max_restarts, "folder": words(told, "folder")})
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
        self.add(at_ms, ENDED, facts)

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
            self.add(at_ms, FINISHED, {"why": words(told, "why")})

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
            self.stop = self.add(at_ms, STOPPED, facts)
