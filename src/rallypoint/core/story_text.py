"""The sentences of a story: each entry of the timeline in one line of plain words."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from rallypoint.core import chronicle as chapter
from rallypoint.core import phases
from rallypoint.core.bounded_json import clip
from rallypoint.core.chronicle import Entry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["duration", "many", "sentence"]

_OTHER_MAX = 300
_WORTH_TELLING_S = 0.5  # of the parts of a way that is long


def duration(lasted_s: float) -> str:
    """As exact as a reader cares for."""
    if lasted_s < 60:
        return f"{lasted_s:.2f} s" if lasted_s < 10 else f"{lasted_s:.1f} s"
    minutes, rest_s = divmod(round(lasted_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min {rest_s} s" if hours else f"{minutes} min {rest_s} s"


def many(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


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
            return "nothing more is told: the agent was killed, or still runs"
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
