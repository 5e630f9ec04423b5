"""Whether a node may still run workers, and whether it may still hope, when its coordination store does not answer.

The others take a node for dead when its lease has run out, which they see on the store's clock. The node cannot ask; but it knows
when it *sent* the last keepalive that was answered, and the lease cannot end before that plus its length (`HeldLease`). From that
time on it is *fenced*: its workers are killed at once, without grace, and it joins anew as soon as it can.

A store that stays silent for too long ends the node. One whose host refuses connections has ended itself, so that takes
much less time; but only for a node that has known it, since a host may be started later than others.
"""

from __future__ import annotations

import math

from rallypoint.base.records import Value

__all__ = ["Connection", "Fence", "GiveUp", "HeldLease", "Hold", "NotReached", "judge", "judge_joining"]

KEEPALIVES_PER_TTL = 3


class HeldLease:
    """A node's own lease, as the node sees it: when to say that it lives, and until when the others must believe it.

    A broken connection changes nothing: it is dialled again, and the lease taken up, for as long as it runs.
    """

    def __init__(self, number: int, ttl_s: float, asked_at: float) -> None:
        self.number = number
        self.ttl_s = ttl_s
        self.is_lost = False
        self.keep_at = asked_at + ttl_s / KEEPALIVES_PER_TTL
        self.silent_since = math.inf  # when the oldest keepalive was sent that has no answer yet
        self._renewed_at = asked_at

    def valid_until(self) -> float:
        return -math.inf if self.is_lost else self.renewed_until()

    def renewed_until(self) -> float:
        """What the last keepalive that was answered was good for, also if the lease is lost since."""
        return self._renewed_at + self.ttl_s

    def note_sent(self, now: float) -> None:
        self.keep_at = now + self.ttl_s / KEEPALIVES_PER_TTL
        self.silent_since = min(self.silent_since, now)

    def note_answer(self, sent_at: float, is_kept: bool) -> None:
        """The keepalive, or the taking up, that was sent then was answered."""
        self.is_lost = self.is_lost or not is_kept
        if not self.is_lost:
            self._renewed_at = max(self._renewed_at, sent_at)
        self.silent_since = math.inf

    def give_back(self) -> None:
        """We do not want it any more, and whatever it was still good for is over."""
        self.is_lost, self._renewed_at = True, -math.inf

    def note_break(self) -> None:
        """What was asked over the connection that broke will not be answered."""
        self.silent_since = math.inf


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
    if connection.unreachable_since is None and connection.refused_since is None:
        return Hold(connection.valid_until)
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
