"""What others are told of a run: from its events to one document each time, by one node of all.

The events are those of the run's file (`docs/events.md`), as the agent puts them down. A document is told

    failure, hang   when a generation begins that had to: by the node of group rank 0 in it. By then the job has judged what was
                    the cause and what its victims, and it is known that it goes on
    end             when the job is over: by the node that has ended it, which the event says. One that merely leaves tells of
                    that if it has group rank 0; the others need not, because what follows is told by those who stay

So whoever dies, and whenever, the others tell of it, and nobody tells what another one does. What is planned is not told: a node
that was asked to go, one that joins, a restart that somebody asked for.

Nothing that a worker wrote gets into a document but as bounded, printable text, and in `text`, which chats show, it can neither
call anybody nor be a link.
"""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.base import defaults
from rallypoint.base.json_text import clip
from rallypoint.base.records import Value
from rallypoint.base.text import many

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Document = dict[str, Any]

__all__ = ["HEARD", "Teller", "hear"]

STARTED, GENERATION, FAILED, ENDED = (
    f"rallypoint.{name}" for name in ("run.started", "generation", "worker.failed", "run.ended")
)  # fmt: skip
HEARD = frozenset({STARTED, GENERATION, FAILED, ENDED})

_WHY_CHARS_MAX = 1000
_TEXT_CHARS_MAX = 3000
_FAILURES_MAX = 64  # of one generation on this node, of which the first is told
_HEADLINES = {
    "failure": "workers failed; all were restarted",
    "hang": "workers hung; all were restarted",
    "loss": "a node was lost; the workers of the others were restarted",
}
_CAUSE = {
    "rank": "rank", "local_rank": "local_rank", "host": "host", "pid": "pid", "exitcode": "exit_code", "message": "message",
    "place": "place", "log_file": "log_file",
}  # fmt: skip


class Teller(Value):
    """What one node knows of the run, as far as it is told."""

    run_id: str = ""
    role: str = ""
    host: str = ""
    began_ms: int = 0
    max_restarts: int = 0
    generation: int = 0
    group_rank: int | None = None
    nodes: int = 0
    workers: int = 0
    restarts: int = 0
    failures: tuple[Mapping[str, Any], ...] = ()  # of the workers here, in the present generation


def hear(teller: Teller, name: str, timestamp_ms: int, facts: Mapping[str, Any]) -> tuple[Teller, Document | None]:
    """What is known after an event of the run, and the document that it makes, if it makes one."""
    match name:
        case _ if name == STARTED:
            named = {key: facts[key] for key in ("run_id", "role", "max_restarts")}
            return teller.replace(host=facts["hostname"], began_ms=timestamp_ms, **named), None
        case _ if name == FAILED:
            return teller.replace(failures=(*teller.failures, facts)[:_FAILURES_MAX]), None
        case _ if name == GENERATION:
            return _formed(teller, timestamp_ms, facts)
        case _ if name == ENDED:
            return teller, _end(teller, timestamp_ms, facts)
    return teller, None


def _formed(teller: Teller, timestamp_ms: int, facts: Mapping[str, Any]) -> tuple[Teller, Document | None]:
    after, is_ours = facts["after"], not facts["group_rank"]
    now = teller.replace(
        generation=facts["generation"],
        group_rank=facts["group_rank"],
        nodes=facts["group_world_size"],
        workers=facts["world_size"],
        restarts=facts["restarts"],
        failures=(),
    )
    if after not in _HEADLINES or not is_ours:
        return now, None
    why = _clipped(facts["why"])
    size = f"{many(now.nodes, 'node')}, {many(now.workers, 'worker')}"
    event = "hang" if after == "hang" else "failure"
    headline = f"{_HEADLINES[after]}: {why} (generation {now.generation} runs: {size})"
    cause = _own_cause(teller) if now.nodes == 1 and after != "loss" else None
    return now, _document(now, event, timestamp_ms, headline, why=why, cause={"kind": after, **(cause or {})})


def _end(teller: Teller, timestamp_ms: int, facts: Mapping[str, Any]) -> Document | None:
    is_ours = not teller.group_rank if facts.get("tells") is None else facts["tells"]
    if not is_ours:
        return None
    from rallypoint.story.story import duration

    outcome, lasted = facts["outcome"], duration(facts["wall_s"])
    why = _clipped(facts.get("verdict") or facts["why"])
    node = f"node {teller.group_rank} ({teller.host})"
    headline = {
        "succeeded": f"succeeded after {lasted}",
        "failed": f"failed after {lasted}: {why}",
        "stopped": f"was stopped after {lasted}: {why}",
        "left": f"{node} left after {lasted}: {why}; the job goes on where enough other nodes are left",
    }[outcome]
    spent = f" ({teller.restarts} of {many(teller.max_restarts, 'restart')} spent)" if teller.restarts else ""
    cause = None if outcome == "succeeded" else _cause_of_end(teller, facts)
    return _document(teller, "end", timestamp_ms, headline + spent, outcome, facts["wall_s"], why=why, cause=cause)


def _cause_of_end(teller: Teller, facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the job says; where nodes do not act as one, what failed here."""
    told = facts.get("cause")
    if told is not None:
        return {"kind": "hang" if told["hung"] else "failure", **_printable(told)}
    if facts.get("lost"):
        return {"kind": "loss"}
    own = _own_cause(teller)
    if "verdict" in facts or own is None:
        return None
    return {"kind": "hang" if teller.failures[0].get("hung") else "failure", **own}


def _own_cause(teller: Teller) -> dict[str, Any] | None:
    """The failure here that was first."""
    if not teller.failures:
        return None
    first = max(teller.failures, key=lambda one: (one["ago_s"], -one["rank"]))
    return _printable({**first, "host": teller.host})


def _printable(failure: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _clipped(failure[key]) for key, name in _CAUSE.items()}


def _clipped(value: Any) -> Any:
    return clip(value, 2 * _WHY_CHARS_MAX, _WHY_CHARS_MAX) if isinstance(value, str) else value


def _document(
    teller: Teller,
    event: str,
    timestamp_ms: int,
    headline: str,
    outcome: str | None = None,
    lasted_s: float | None = None,
    **more: Any,
) -> Document:
    run = clip(teller.run_id, 400, 200)
    return {
        "schema": defaults.NOTICE_SCHEMA,
        "id": f"{run}/{teller.began_ms}/{teller.generation}/{event}",
        "event": event,
        "outcome": outcome,
        "text": _for_chats(clip(f"{run}: {headline}", 2 * _TEXT_CHARS_MAX, _TEXT_CHARS_MAX)),
        "run_id": run,
        "role": clip(teller.role, 400, 200),
        "timestamp": timestamp_ms,
        "told_by": {"host": teller.host, "group_rank": teller.group_rank},
        "generation": teller.generation,
        "nodes": teller.nodes,
        "workers": teller.workers,
        "restarts": teller.restarts,
        "max_restarts": teller.max_restarts,
        "lasted_s": lasted_s,
        **more,
    }


def _for_chats(text: str) -> str:
    """With what would be a link or a call for everybody as plain characters: the three that Slack and Mattermost want escaped."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
