"""What came of a fault: from how the job stood before it, and how it stands since.

- *recovered*: another generation runs on all nodes that can be seen here, and has done so for a moment. How long that took
  counts from the fault to the moment at which the last of these nodes ran.
- *unharmed*: the job runs on as it was, some time after the fault was over.
- *lost*: it did not run again within the patience of whoever started the drill.
- *ended*: the job is over.

A fault that lasts is judged when it has been undone, and not at once where a node is missing: one that was stopped, or cut off,
comes back, and that is another generation.
"""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.base.records import Value
from rallypoint.base.text import many
from rallypoint.chaos.faults import KINDS, Fault
from rallypoint.inspection.view import NodeView
from rallypoint.story.phases import RUNNING
from rallypoint.story.story import duration

__all__ = [
    "ENDED",
    "LOST",
    "RECOVERED",
    "UNHARMED",
    "End",
    "Outcome",
    "Standing",
    "Trial",
    "judge",
    "outcome_text",
    "stands",
    "table",
]

RECOVERED, UNHARMED, LOST, ENDED = ("recovered", "unharmed", "lost", "ended")
STEADY_S = 1.0  # that it has to run before it counts as recovered: a generation may fail at its start
QUIET_S = 4.0  # after a fault, with nothing come of it: a lease of three seconds has ended by then
BACK_S = 20.0  # for a node that was held to join again: a connection that was silent is tried ever more rarely


class End(Value):
    """How the job ended, as far as it can be known here."""

    text: str
    is_good: bool = False
    exit_code: int | None = None


class Standing(Value):
    """How the job stands, by its nodes on this machine; seconds count from the start of the drill."""

    at_s: float
    phase: str = ""  # empty where nobody answers
    generation: int = 0
    restarts: int = 0
    max_restarts: int = 0
    nodes: int = 0
    running_since_s: float = 0.0
    end: End | None = None

    @property
    def is_running(self) -> bool:
        return self.phase == RUNNING and self.end is None


class Trial(Value):
    """A fault that was given, and has not been judged."""

    number: int
    fault: Fault
    given_s: float
    before: Standing
    held_until_s: float = 0.0  # 0: nothing was held
    expects_change: bool = False

    @property
    def over_s(self) -> float:
        return max(self.given_s, self.held_until_s)


class Outcome(Value):
    """What came of it, and after how long."""

    kind: str
    fault: Fault
    after_s: float
    standing: Standing
    restarts: int = 0  # that were spent for it
    undone_s: float = 0.0  # of that, since it was undone

    @property
    def is_good(self) -> bool:
        return self.kind in (RECOVERED, UNHARMED) or (self.standing.end is not None and self.standing.end.is_good)


def stands(nodes: Sequence[NodeView], at_s: float, end: End | None = None) -> Standing:
    """By those that have answered just now; a spare, which has no seat, says nothing of the others."""
    latest = max((node.generation for node in nodes), default=0)
    seated = [node for node in nodes if node.generation == latest and node.node_rank is not None] or list(nodes)
    if not seated:
        return Standing(at_s, end=end)
    others = [node.phase for node in seated if node.phase != RUNNING]
    return Standing(
        at_s,
        others[0] if others else RUNNING,
        latest,
        max(node.restarts for node in nodes),
        max(node.max_restarts for node in nodes),
        seated[0].nodes or len(seated),
        max(at_s - node.phase_s for node in seated),
        end,
    )


def judge(trial: Trial, now: Standing, patience_s: float) -> Outcome | None:
    """None: it cannot be said yet."""
    spent = now.restarts - trial.before.restarts if now.phase else 0
    if now.end is not None:
        return Outcome(ENDED, trial.fault, now.at_s - trial.given_s, now, spent)
    if now.at_s < trial.over_s:
        return None
    if now.is_running and now.generation > trial.before.generation:
        steady_from_s = max(now.running_since_s, trial.held_until_s)
        is_whole = now.nodes >= trial.before.nodes or not trial.held_until_s
        if now.at_s >= steady_from_s + STEADY_S and (is_whole or now.at_s >= trial.over_s + BACK_S):
            after_s = max(now.running_since_s - trial.given_s, 0.0)
            undone_s = now.running_since_s - trial.held_until_s if trial.held_until_s else 0.0
            return Outcome(RECOVERED, trial.fault, after_s, now, spent, max(undone_s, 0.0))
        return None
    quiet_s = patience_s if trial.expects_change else QUIET_S
    if now.is_running and now.at_s >= trial.over_s + quiet_s:
        return Outcome(UNHARMED, trial.fault, now.at_s - trial.given_s, now, spent)
    if now.at_s >= trial.over_s + patience_s:
        return Outcome(LOST, trial.fault, now.at_s - trial.given_s, now, spent)
    return None


# --- in words --------------------------------------------------------------------------------------------------------------


def outcome_text(outcome: Outcome) -> str:
    """In one line, without the fault."""
    now = outcome.standing
    match outcome.kind:
        case "recovered":
            spent = f", restart {now.restarts} of {now.max_restarts}" if outcome.restarts else ""
            into = f"generation {now.generation} of {many(now.nodes, 'node')}"
            undone = f", {duration(outcome.undone_s)} after it was undone" if outcome.undone_s else ""
            return f"recovered after {duration(outcome.after_s)}{undone}, into {into}{spent}"
        case "unharmed":
            return f"unharmed: generation {now.generation} runs on"
        case "lost":
            how = f"it is {now.phase}" if now.phase else "nobody answers"
            return f"not recovered within {duration(outcome.after_s)}: {how}"
    return f"{now.end.text if now.end is not None else 'the job has ended'}, {duration(outcome.after_s)} after the fault"


def table(outcomes: Sequence[Outcome]) -> str:
    """How many of each kind of fault there were, what came of them, and how long it took to recover."""
    titles = ("FAULT", "GIVEN", "RECOVERED", "UNHARMED", "NOT", "MEDIAN", "MAX", "RESTARTS")
    kinds = [kind for kind in KINDS if any(one.fault.kind == kind for one in outcomes)]
    rows = [titles, *(_row(kind, [one for one in outcomes if one.fault.kind == kind]) for kind in kinds)]
    if len(kinds) > 1:
        rows.append(_row("all", outcomes))
    widths = [max(len(row[column]) for row in rows) for column in range(len(titles))]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def _row(name: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    columns = [one.kind if one.kind == RECOVERED else UNHARMED if one.is_good else LOST for one in outcomes]
    took = sorted(one.after_s for one in outcomes if one.kind == RECOVERED)
    times = (duration(median(took)), duration(took[-1])) if took else ("-", "-")
    spent = str(sum(one.restarts for one in outcomes) or "-")
    counts = [str(columns.count(kind) or "-") for kind in (RECOVERED, UNHARMED, LOST)]
    return (name, str(len(outcomes)), *counts, *times, spent)


def median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
