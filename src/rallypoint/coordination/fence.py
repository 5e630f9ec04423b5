"""Whether a node may still run workers, and whether it may still hope, when its coordination store does not answer.

The others take a node for dead when its lease has run out, which they see on the store's clock. The node cannot ask; but it knows
when it *sent* the last keepalive that was answered, and the lease cannot end before that plus its length. From that time on
it is *fenced*: its workers are killed at once, without grace, and it joins anew as soon as it can.

A store that stays silent for too long ends the node. One whose host refuses connections has ended itself, so that takes
much less time; but only for a node that has known it, since a host may be started later than others.
"""

from __future__ import annotations

from rallypoint.base.records import Value

__all__ = ["Connection", "Fence", "GiveUp", "Hold", "NotReached", "judge", "judge_joining"]


class Connection(Value):
    """What is known of the way to the store: since when it is broken, and since when the host refuses us, None if not."""

    valid_until: float
    unreachable_since: float | None = None
    refused_since: float | None = None
    trouble: str = ""


class Hold(Value):
    """All is well, or may be again; look again at `wake_at`."""

    wake_at: float


class Fence(Value):
    why: str


class GiveUp(Value):
    why: str


class NotReached(Value):
    """There was no store in all the time that there is for joining."""

    why: str


def judge(connection: Connection, store_timeout_s: float, refusal_timeout_s: float, now: float) -> Hold | Fence | GiveUp:
    """What follows for a node that has, or wants, a lease. A fence comes before the end: workers go first."""
    if now >= connection.valid_until:
        return Fence(f"lost the coordination store: {connection.trouble or 'no answer'}")
    ends = [
        (since + limit_s, f"the coordination store {how} for {limit_s:g} s ({connection.trouble or 'no answer'})")
        for since, limit_s, how in (
            (connection.refused_since, refusal_timeout_s, "has refused connections"),
            (connection.unreachable_since, store_timeout_s, "has not answered"),
        )
        if since is not None
    ]
    for at, why in sorted(ends):
        if now >= at:
            return GiveUp(why)
    return Hold(min([connection.valid_until, *(at for at, _ in ends)]))


def judge_joining(
    where: str, connection: Connection, is_known: bool, timeout_s: float, refusal_timeout_s: float, now: float
) -> Hold | NotReached | GiveUp:
    """What follows for a node that has tried to join, or to join anew, since the store was out of reach."""
    since, refused_since = connection.unreachable_since, connection.refused_since if is_known else None
    if since is not None and now >= since + timeout_s:
        return NotReached(f"the coordination store at {where} was not reached within {timeout_s:g} s: {connection.trouble}")
    if refused_since is not None and now >= refused_since + refusal_timeout_s:
        return GiveUp(
            f"the coordination store at {where} is gone: its host has refused connections for {refusal_timeout_s:g} s; the agent"
            " there has ended or was killed, and the job ends with it"
        )
    ends = [at + limit_s for at, limit_s in ((since, timeout_s), (refused_since, refusal_timeout_s)) if at is not None]
    return Hold(min(ends, default=connection.valid_until))
