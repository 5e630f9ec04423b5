"""Whether a node may still run workers, and whether it may still hope, when its coordination store does not answer.

The others take a node for dead when its lease has run out, which they see on the store's clock. The node cannot ask; but it knows
when it *sent* the last keepalive that was answered, and the lease cannot end before that plus its length. From that time on
it is *fenced*: its workers are killed at once, without grace, and it joins anew as soon as it can.

A store that stays silent for too long ends the node. One whose host refuses connections has ended itself, so that takes
much less time.
"""

from __future__ import annotations

from rallypoint.base.records import Value

__all__ = ["Connection", "Fence", "GiveUp", "Hold", "judge"]


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


def judge(connection: Connection, store_timeout_s: float, refusal_timeout_s: float, now: float) -> Hold | Fence | GiveUp:
    """What follows for a node that has, or wants, a lease. A fence comes before the end: workers go first."""
    if now >= connection.valid_until:
        return Fence(f"the coordination store was not heard of in time ({connection.trouble or 'no answer'})")
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
