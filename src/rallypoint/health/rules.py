"""Whether an agent is alive, and whether its workers run: what a scheduler asks before it sends traffic, or kills.

To be killed for being patient is worse than to be found a little late. So only that counts as dead which cannot be explained:

- *running*: workers that have given signs of progress in this generation, and none for longer than the timeout; those that
  have given none are not judged, since nobody knows how long their first step takes;
- *starting* and *stopping*: longer than these can take, and the timeout on top;
- *waiting*: never; there are no workers here, and how long to wait for others is bounded by the rendezvous;
- *done*: never.

Ready is an agent whose workers run.
"""

from __future__ import annotations

from rallypoint.base import defaults
from rallypoint.base.records import Value
from rallypoint.story.phases import RUNNING, STARTING, STOPPING, Ledger

__all__ = ["Health", "Limits", "judge", "judge_progress"]

STARTING_S = 60.0
STOPPING_S = defaults.SHUTDOWN_TIMEOUT_S + defaults.UNINTERRUPTIBLE_TIMEOUT_S


class Limits(Value):
    """After how much longer than it should be it is too long, and how long it takes at most to start and to stop workers."""

    timeout_s: float
    starting_s: float = STARTING_S
    stopping_s: float = STOPPING_S


class Health(Value):
    alive: bool
    ready: bool
    why: str


def judge(ledger: Ledger, phase_why: str, progress_at: float | None, limits: Limits, now: float) -> Health:
    """How the agent is; `progress_at` is the time of its workers' last sign of progress, and None if they never gave one."""
    phase, age_s = ledger.phase, now - ledger.since
    said = f"{phase} for {max(0.0, age_s):.0f} s" + (f": {phase_why}" if phase_why else "")
    bound_s = {STARTING: limits.starting_s, STOPPING: limits.stopping_s}.get(phase)
    if bound_s is not None and age_s > bound_s + limits.timeout_s:
        return Health(False, False, f"{said}; this should take {bound_s:g} s at most")
    if phase == RUNNING and progress_at is not None and progress_at >= ledger.since:
        progress = judge_progress(now - progress_at, limits.timeout_s)
        return progress.replace(why=f"{said}; {progress.why}")
    return Health(True, phase == RUNNING, said)


def judge_progress(age_s: float, timeout_s: float) -> Health:
    """By the age of the last sign of progress alone."""
    if age_s > timeout_s:
        return Health(False, False, f"the last sign of progress is {age_s:.0f} s old, and {timeout_s:g} s are allowed")
    return Health(True, True, f"the last sign of progress is {max(0.0, age_s):.0f} s old")
