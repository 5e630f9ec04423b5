"""When processes are started to wait for the places of workers, and when it is said that none will be. Pure.

They are started once every worker has called `rallypoint.worker.ready` and some time has passed, to be in nobody's way.
Workers that were on standby themselves have called it. Who ends without having called it never will, and the program may be one
that does not. After the second loss there is no other attempt.
"""

from __future__ import annotations

from collections.abc import Iterable

from rallypoint.base import defaults
from rallypoint.base.records import Value

__all__ = ["Known", "Start", "TellNobodyCalls", "Wait", "begin", "decide", "heard", "lost", "started", "taken", "will_retry"]

NOT_CALLED_S = 60.0  # after which it is said that there is no standby because nobody has called `ready`
MOST_LOSSES = 2  # of processes on standby that ended by themselves


class Known(Value):
    """Of the workers of now, and of the processes on standby of this run."""

    started_at: float = 0.0
    silent: frozenset[int] = frozenset()  # local ranks that have not called it, and may yet
    not_ready: frozenset[int] = frozenset()  # also those that will not
    ready_at: float | None = None  # since when all are, or since when there is nobody on standby for them
    has_standby: bool = False
    losses: int = 0
    has_told: bool = False


class Start(Value):
    """Start processes on standby."""


class TellNobodyCalls(Value):
    """Say that there are none, and why."""


class Wait(Value):
    """Look again when something is heard, or at that time, if there is one."""

    until: float | None = None


def begin(known: Known, local_ranks: Iterable[int]) -> Known:
    """These workers are about to start."""
    ranks = frozenset(local_ranks)
    return known.replace(silent=ranks, not_ready=ranks, ready_at=None)


def started(known: Known, now: float) -> Known:
    """They run; those of whom nothing is to be heard have been on standby."""
    return known.replace(started_at=now, ready_at=None if known.not_ready else now)


def heard(known: Known, local_rank: int, is_ready: bool, now: float) -> Known:
    """One has called it, or has ended or closed its line without."""
    not_ready = known.not_ready - {local_rank} if is_ready else known.not_ready
    return known.replace(silent=known.silent - {local_rank}, not_ready=not_ready, ready_at=None if not_ready else now)


def taken(known: Known) -> Known:
    """Those on standby are the next workers."""
    return known.replace(has_standby=False)


def lost(known: Known, now: float, is_for_good: bool = False) -> Known:
    """They have ended by themselves, or could not be started; or they never can."""
    return known.replace(has_standby=False, ready_at=now, losses=MOST_LOSSES if is_for_good else known.losses + 1)


def will_retry(known: Known) -> bool:
    return known.losses < MOST_LOSSES


def decide(known: Known, now: float) -> Start | TellNobodyCalls | Wait:
    """What is due."""
    if known.ready_at is not None:
        if known.has_standby or not will_retry(known):
            return Wait()
        start_at = known.ready_at + defaults.STANDBY_AFTER_S
        return Start() if now >= start_at else Wait(start_at)
    if known.has_told or not known.silent:
        return Wait()
    tell_at = known.started_at + NOT_CALLED_S
    return TellNobodyCalls() if now >= tell_at else Wait(tell_at)
