"""What the agent spends its time on: the phases of a run, and a ledger of the seconds in each.

Every moment of a run belongs to exactly one phase, so the seconds of all of them add up to the time that the run took:

- *waiting* for other nodes: to meet, to become free after a failure, to finish;
- *starting* the launcher, and workers;
- *running*: all workers run;
- *stopping* workers;
- *lost*: workers ran, but what they did has to be done again: from the last checkpoint that they told of, or from their
  start if they told of none, to the end of a generation that did not succeed.
"""

from __future__ import annotations

from rallypoint.base.records import Value
from rallypoint.protocol import agent_machine

__all__ = [
    "DONE", "LOST", "PHASES", "RUNNING", "STARTING", "STOPPING", "WAITING", "Ledger", "enter", "keeps_work", "open_ledger",
    "phase_of", "totals",
]  # fmt: skip

STARTING, WAITING, RUNNING, STOPPING, LOST = PHASES = ("starting", "waiting", "running", "stopping", "lost")
DONE = "done"


class Ledger(Value):
    """The phase since `since`, and the seconds of those before it."""

    phase: str
    since: float
    seconds: dict[str, float]


def open_ledger(now: float) -> Ledger:
    return Ledger(STARTING, now, dict.fromkeys(PHASES, 0.0))


def phase_of(state: agent_machine.State) -> str:
    """An agent that has decided to end still stops its workers, and is done only when it has returned."""
    match state:
        case agent_machine.Gathering() | agent_machine.Draining():
            return WAITING
        case agent_machine.Starting():
            return STARTING
        case agent_machine.Running():
            return RUNNING
    return STOPPING


def keeps_work(state: agent_machine.State) -> bool:
    """Whether running that leads to this state was for something: the workers of this node have all succeeded."""
    return isinstance(state, agent_machine.Draining)


def enter(ledger: Ledger, phase: str, now: float, kept_until: float | None = None) -> Ledger:
    """The ledger after a change of phase; what was run after `kept_until` is lost, None keeps it all."""
    seconds = dict(ledger.seconds)
    if ledger.phase in seconds:
        kept = now if kept_until is None or ledger.phase != RUNNING else min(max(kept_until, ledger.since), now)
        seconds[ledger.phase] += kept - ledger.since
        seconds[LOST] += now - kept
    return Ledger(phase, now, seconds)


def totals(ledger: Ledger, now: float) -> dict[str, float]:
    """The seconds in each phase up to now, the present one included."""
    return enter(ledger, ledger.phase, now).seconds
