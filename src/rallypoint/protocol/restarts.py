"""Which event spends which budget, and whether the job goes on: one restart budget for the whole job.

A generation ends because a worker failed, a node was lost, a node departed, or somebody joined; often several of these at once,
because each causes others. It is judged once, when the next generation is formed and it is known who is gone: a lost
node, then a departed one, explains the failures around it, so only failures with no such explanation are paid as failures.
One generation pays at most once, from one purse, however many nodes or workers were part of it.

What was spent is a `Purse`. It travels in the generation record, so it is one for all nodes and outlives any leader. It holds
ages instead of times, because no two hosts share a clock: whoever judges next adds how long the purse has lain there, on its
own clock. A leader that saw it late adds too little, which forgives later, never sooner.

Invariants: within any window, or ever when there is none, at most `max_restarts` failures are paid; nothing that was spent is
given back except by the window; every answer says why.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from rallypoint.base import defaults
from rallypoint.base.records import Value
from rallypoint.base.text import listed, plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    Membership = Literal["loss", "departure", "join"]
    Kind = Literal["failure", "none"] | Membership

__all__ = ["AGES_MAX", "Again", "Ended", "GiveUp", "Purse", "RestartPolicy", "ended_text", "judge"]

AGES_MAX = 64  # the purse is part of a small record; so a window holds at most so many restarts, even where more were asked for
_DOUBLINGS_MAX = 62  # any back-off has reached its cap long before
_NAMES_MAX = 4
_NAME_CHARS_MAX = 64
_FAILURE_CHARS_MAX = 500


class RestartPolicy(Value):
    max_restarts: int
    no_retry_exit_codes: tuple[int, ...] = ()  # they can never succeed; -N: ended by signal N
    backoff_s: float = defaults.RESTART_BACKOFF_S  # before the second restart for a failure, then doubled each time; 0: none
    max_backoff_s: float = defaults.RESTART_BACKOFF_MAX_S
    window_s: float = defaults.RESTART_WINDOW_S  # failures older than this are forgiven; 0: never
    max_membership_changes: int | None = None  # joins, losses and departures together; None: no limit


class Purse(Value):
    """What has been spent so far."""

    failures: int = 0  # all that were ever paid, forgiven ones too
    losses: int = 0
    departures: int = 0
    joins: int = 0
    recent_ages_s: tuple[float, ...] = ()  # of the failures inside the window, oldest first, when this purse was written


class Ended(Value):
    """How a generation ended."""

    failed_exit_codes: tuple[int, ...] = ()  # of the workers that failed by themselves, the cause first
    failure: str = ""  # the cause, in a sentence
    lost: tuple[str, ...] = ()
    departed: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    ran_s: float = 0.0  # how long ago the purse was written


class Again(Value):
    """The next generation may begin after `delay_s`, with this purse in its record."""

    purse: Purse
    delay_s: float
    kind: Kind
    why: str


class GiveUp(Value):
    why: str


def judge(policy: RestartPolicy, purse: Purse, ended: Ended) -> Again | GiveUp:
    """Whether there is another generation, and who pays for it.

    It changes nothing, so a leader can ask beforehand: joiners that no budget would pay for are better kept waiting than let in.
    """
    hopeless = [code for code in ended.failed_exit_codes if code in policy.no_retry_exit_codes]
    if hopeless:
        why = f"a worker {ended_text(hopeless[0])}, which no restart can help (no-retry exit codes)"
        return GiveUp(_with_failure(ended, why))
    purse = purse.replace(recent_ages_s=_grown_older(policy, purse, ended.ran_s))
    if ended.lost:
        return _change_members(policy, purse, "loss", f"lost {_nodes(ended.lost)}")
    if ended.departed:
        return _change_members(policy, purse, "departure", f"{_nodes(ended.departed)} left")
    if ended.failed_exit_codes:
        return _pay_for_failure(policy, purse, ended)
    if ended.joined:
        return _change_members(policy, purse, "join", f"{_nodes(ended.joined)} joined")
    return Again(purse, 0.0, "none", ended.failure or "nobody failed, left or joined")


def _grown_older(policy: RestartPolicy, purse: Purse, ran_s: float) -> tuple[float, ...]:
    """The failures that are still inside the window, as old as they are now; none are kept where there is no window."""
    ages_s = [age_s + max(ran_s, 0.0) for age_s in purse.recent_ages_s[-AGES_MAX:]]
    return tuple(age_s for age_s in ages_s if policy.window_s > 0 and age_s <= policy.window_s)


def _pay_for_failure(policy: RestartPolicy, purse: Purse, ended: Ended) -> Again | GiveUp:
    limit = min(policy.max_restarts, AGES_MAX) if policy.window_s > 0 else policy.max_restarts
    number = 1 + (len(purse.recent_ages_s) if policy.window_s > 0 else purse.failures)
    within = f" within {policy.window_s:g} s" if policy.window_s > 0 else ""
    if limit <= 0:
        return GiveUp(_with_failure(ended, "no restarts were asked for (--max-restarts)"))
    if number > limit:
        return GiveUp(_with_failure(ended, _used_up(limit, "restart", within)))
    delay_s = _backoff_s(policy, number)
    after = f", after {delay_s:g} s" if delay_s else ""
    ages_s = (*purse.recent_ages_s, 0.0) if policy.window_s > 0 else ()
    paid = purse.replace(failures=purse.failures + 1, recent_ages_s=ages_s)
    return Again(paid, delay_s, "failure", _with_failure(ended, f"restart {number} of {limit}{within}{after}"))


def _used_up(count: int, what: str, within: str = "") -> str:
    return f"the one {what}{within} is used up" if count == 1 else f"all {count} {what}s{within} are used up"


def _backoff_s(policy: RestartPolicy, number: int) -> float:
    """None before the first restart: most failures happen once, and then waiting only costs."""
    if number < 2 or policy.backoff_s <= 0:
        return 0.0
    return max(min(policy.backoff_s * 2.0 ** min(number - 2, _DOUBLINGS_MAX), policy.max_backoff_s), 0.0)


def _change_members(policy: RestartPolicy, purse: Purse, kind: Membership, what: str) -> Again | GiveUp:
    """A change of members is not the program's fault: it costs no restart and no waiting, only its own budget if there is one."""
    number = 1 + purse.losses + purse.departures + purse.joins
    most = policy.max_membership_changes
    if most is not None and number > most:
        none_left = _used_up(most, "membership change") if most else "no membership changes are allowed"
        return GiveUp(f"{what}; {none_left}")
    limit = "" if most is None else f" of {most}"
    return Again(_paid_by(purse, kind), 0.0, kind, f"{what}; membership change {number}{limit}")


def _paid_by(purse: Purse, kind: Membership) -> Purse:
    match kind:
        case "loss":
            return purse.replace(losses=purse.losses + 1)
        case "departure":
            return purse.replace(departures=purse.departures + 1)
        case "join":
            return purse.replace(joins=purse.joins + 1)


def _with_failure(ended: Ended, outcome: str) -> str:
    return f"{ended.failure[:_FAILURE_CHARS_MAX]}; {outcome}" if ended.failure else outcome


def ended_text(exit_code: int) -> str:
    """How a process ended, for a sentence about it."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was ended by signal {-exit_code}"


def _nodes(names: Sequence[str]) -> str:
    """A rack that goes at once is not listed in full."""
    return f"{plural(len(names), 'node')} {listed([name[:_NAME_CHARS_MAX] for name in names], _NAMES_MAX)}"
