"""From the events of a run to spans and measurements: what begins, ends, happens and is counted, and when.

    run                       the agent, from its start to its end
    ├─ starting, waiting      phases without workers
    └─ generation             a group of workers, from when all are started until they are gone
       └─ running, stopping   its phases; what failed or hung in it are events of the generation

All times are those of the events, so that spans, `events.jsonl` and ``rallypoint explain`` tell the same, whenever they are sent.
"""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.base.records import Value
from rallypoint.story.event_records import ENDED, EXPIRED, FAILED, GENERATION, HUNG, PHASE, RESTART, STARTED
from rallypoint.story.phases import LOST, RUNNING, STARTING, STOPPING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Attributes = dict[str, Any]

__all__ = ["COUNTERS", "GAUGES", "HEARD", "Begin", "Course", "End", "Happen", "Measure", "Step", "hear", "resource"]

HEARD = frozenset({STARTED, PHASE, GENERATION, FAILED, HUNG, EXPIRED, RESTART, ENDED})
RUN, GROUP, PHASES = "run", "generation", "phase"  # the spans that may be open, each of which is one at a time

COUNTERS = {
    "rallypoint.phase.duration": ("s", "Seconds that the agent spent in each phase; those of lost work are a phase of their own"),
    "rallypoint.worker.failures": ("{worker}", "Workers of this agent that failed"),
    "rallypoint.worker.hangs": ("{worker}", "Workers of this agent that hung"),
    "rallypoint.timer.expirations": ("{timer}", "Timers of workers of this agent that expired"),
    "rallypoint.regroups": ("{regroup}", "Times that the workers were stopped to be started anew, for whatever reason"),
}
GAUGES = {
    "rallypoint.generation": ("{generation}", "Number of the group of workers"),
    "rallypoint.nodes": ("{node}", "Nodes in it"),
    "rallypoint.workers": ("{worker}", "Workers in it, on all nodes"),
    "rallypoint.restarts": ("{restart}", "Restarts that the job has spent"),
}
_EVENTS = {
    FAILED: ("worker.failed", "rallypoint.worker.failures"),
    HUNG: ("worker.hung", "rallypoint.worker.hangs"),
    EXPIRED: ("timer.expired", "rallypoint.timer.expirations"),
    RESTART: ("regroup", "rallypoint.regroups"),
}


class Begin(Value):
    """A span; `parent` is the key of an open one, or empty."""

    key: str
    name: str
    parent: str
    at_ms: float
    attributes: Attributes


class End(Value):
    """With `problem`, it has failed."""

    key: str
    at_ms: float
    attributes: Attributes
    problem: str = ""


class Happen(Value):
    """An event within a span."""

    key: str
    name: str
    at_ms: float
    attributes: Attributes


class Measure(Value):
    """To be added, or set, as the name is that of a counter or a gauge."""

    name: str
    value: float
    attributes: Attributes


Step = Begin | End | Happen | Measure


class Course(Value):
    """Which spans are open, and what is wrong with the generation, if anything."""

    has_run: bool = False
    has_group: bool = False
    problem: str = ""


def hear(course: Course, name: str, at_ms: float, facts: Mapping[str, Any]) -> tuple[Course, tuple[Step, ...]]:
    """What follows from an event of the run."""
    if name == STARTED:
        began_ms = at_ms - 1000 * facts["t"]
        whole = Begin(RUN, "rallypoint.run", "", began_ms, _named(facts, "entry_point", "max_restarts", "rdzv_backend"))
        return Course(has_run=True), (whole, Begin(PHASES, f"rallypoint.{STARTING}", RUN, began_ms, {}))
    if not course.has_run:
        return course, ()
    match name:
        case _ if name == PHASE:
            return _next_phase(course, at_ms, facts)
        case _ if name == GENERATION:
            return _formed(course, at_ms, facts)
        case _ if name == ENDED:
            return _ended(course, at_ms, facts)
    happened, counter = _EVENTS[name]
    key = GROUP if course.has_group else RUN
    at_ms -= 1000 * facts.get("ago_s", 0.0)
    counted = Measure(counter, 1, {})
    return course, (Happen(key, f"rallypoint.{happened}", at_ms, _named(facts, *(one for one in facts if one != "t"))), counted)


def _next_phase(course: Course, at_ms: float, facts: Mapping[str, Any]) -> tuple[Course, tuple[Step, ...]]:
    before, phase, why, lasted_s = facts["previous"], facts["phase"], facts["why"], facts["lasted_s"]
    kept_s = facts.get("kept_s", lasted_s)
    steps: list[Step] = [End(PHASES, at_ms, {"rallypoint.why": why, "rallypoint.kept_s": kept_s} if before == RUNNING else {})]
    steps.append(_spent(before, kept_s))
    if kept_s < lasted_s:
        steps.append(_spent(LOST, lasted_s - kept_s))
    if before == RUNNING and phase == STOPPING:
        course = course.replace(problem=why)
    if before == STOPPING and course.has_group:
        steps.append(End(GROUP, at_ms, {}, course.problem))
        course = course.replace(has_group=False, problem="")
    parent = GROUP if course.has_group else RUN
    return course, (*steps, Begin(PHASES, f"rallypoint.{phase}", parent, at_ms, {}))


def _spent(phase: str, seconds: float) -> Measure:
    return Measure("rallypoint.phase.duration", seconds, {"rallypoint.phase": phase})


def _formed(course: Course, at_ms: float, facts: Mapping[str, Any]) -> tuple[Course, tuple[Step, ...]]:
    over = (End(GROUP, at_ms, {}, course.problem),) if course.has_group else ()
    named = _named(facts, "generation", "group_rank", "group_world_size", "world_size", "restarts", "after", "why", "ranks")
    values = (facts["generation"], facts["group_world_size"], facts["world_size"], facts["restarts"])
    gauges = [Measure(name, value, {}) for name, value in zip(GAUGES, values, strict=True)]
    begun = Begin(GROUP, "rallypoint.generation", RUN, at_ms, named)
    return course.replace(has_group=True, problem=""), (*over, begun, *gauges)


def _ended(course: Course, at_ms: float, facts: Mapping[str, Any]) -> tuple[Course, tuple[Step, ...]]:
    problem = "" if facts["succeeded"] else facts.get("verdict") or facts["why"]
    group = (End(GROUP, at_ms, {}, course.problem or problem),) if course.has_group else ()
    over = End(RUN, at_ms, _named(facts, "outcome", "why", "verdict"), problem)
    return Course(), (End(PHASES, at_ms, {}), *group, over)


def resource(facts: Mapping[str, Any]) -> Attributes:
    """Who the spans are of, by the first event of the run."""
    return {"host.name": facts["hostname"], "process.pid": facts["pid"], **_named(facts, "run_id", "role", "version")}


def _named(facts: Mapping[str, Any], *names: str) -> Attributes:
    """What is there of these, under names of ours."""
    return {f"rallypoint.{name}": facts[name] for name in names if facts.get(name) is not None}
