"""A node's own lease, as the node sees it: when to say that it lives, and until when the others must believe it.

What counts is when the last keepalive that was answered was *sent*, on this node's clock: the store cannot have heard of it
earlier. A broken connection changes nothing: it is dialled again, and the lease taken up, for as long as it runs.
"""

from __future__ import annotations

import math

__all__ = ["HeldLease"]

KEEPALIVES_PER_TTL = 3


class HeldLease:
    """Lease number `number`, granted to this node."""

    def __init__(self, number: int, ttl_s: float, asked_at: float) -> None:
        self.number = number
        self.ttl_s = ttl_s
        self.is_lost = False
        self.keep_at = asked_at + ttl_s / KEEPALIVES_PER_TTL
        self._renewed_at = asked_at
        self._oldest_unanswered = math.inf

    def valid_until(self) -> float:
        if self.is_lost:
            return -math.inf
        return self.renewed_until()

    def renewed_until(self) -> float:
        """What the last keepalive that was answered was good for, also if the lease is lost since."""
        return self._renewed_at + self.ttl_s

    def note_sent(self, now: float) -> None:
        self.keep_at = now + self.ttl_s / KEEPALIVES_PER_TTL
        self._oldest_unanswered = min(self._oldest_unanswered, now)

    def note_answer(self, sent_at: float, is_kept: bool) -> None:
        """The keepalive, or the taking up, that was sent then was answered."""
        self.is_lost = self.is_lost or not is_kept
        if not self.is_lost:
            self._renewed_at = max(self._renewed_at, sent_at)
        self._oldest_unanswered = math.inf

    def give_back(self) -> None:
        """We do not want it any more, and whatever it was still good for is over."""
        self.is_lost, self._renewed_at = True, -math.inf

    def note_break(self) -> None:
        """What was asked over the connection that broke will not be answered."""
        self._oldest_unanswered = math.inf

    def silent_since(self) -> float:
        """When the oldest keepalive was sent that has no answer yet; infinite where there is none."""
        return self._oldest_unanswered
