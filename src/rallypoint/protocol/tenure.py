"""One session of a node at its coordination store: whether it goes on, until when workers may run by it, and what its end means.

A session begins with a lease and ends when the others may take this node for dead; the next one is under another number. Whoever
drives it (`rendezvous.driver`) asks here, before each turn, and does what the answer says.

    judge          before each turn: go on, or the session is over (Fence), or all hope is (GiveUp)
    licence_until  after each turn: until when the workers may run
    returns_until  when the lease has ended: until when another one may be asked for, to go on as if nothing had been
    end            when it is over: who has to be vouched for by the next session, and whether workers have to go

Invariants: workers are licensed only for a seat of this session, and for no longer than before while it is not known whether the
others have gone on without us; time to return is counted once, from the loss of a lease until the return is confirmed.
"""

from __future__ import annotations

from rallypoint.base.records import Value
from rallypoint.coordination import fence
from rallypoint.protocol.participant import Former, Participant

__all__ = ["NO_LICENCE", "Ending", "Patience", "Tenure"]

NO_LICENCE = 0.0


class Patience(Value):
    """How long a lease is, and how long a store may be silent, or refuse us, until we give up."""

    lease_s: float
    store_timeout_s: float
    refusal_timeout_s: float


class Ending(Value):
    """What follows from the end of a session: what the next has to vouch for, and what becomes of the workers.

    With `had_seat` they may not run any longer; with `was_stopping` our agent is busy with stopping them, or stuck in it.
    """

    former: Former | None
    had_seat: bool
    was_stopping: bool


class Tenure:
    """The session of `participant`."""

    def __init__(self, participant: Participant, patience: Patience) -> None:
        self.participant = participant
        self._patience = patience
        self._returns_until = float("-inf")

    def judge(self, connection: fence.Connection, now: float) -> fence.Hold | fence.Fence | fence.GiveUp:
        """What the others have done counts first, then what their silence may mean."""
        participant, patience = self.participant, self._patience
        if participant.why_fenced:
            return fence.Fence(participant.why_fenced)
        if participant.is_returning and now >= self._returns_until:
            return fence.Fence("the coordination store did not confirm in time that this node is back")
        return fence.judge(connection, patience.store_timeout_s, patience.refusal_timeout_s, now)

    def licence_until(self, valid_until: float) -> float | None:
        """Until when our workers may run, if the store vouches for us until `valid_until`; None: as before."""
        if self.participant.seat is None:
            return NO_LICENCE
        return None if self.participant.is_returning else valid_until

    def returns_until(self, may_return_until: float) -> float:
        """Our lease has ended. Who loses the next one too, before the return was confirmed, has no more time than before."""
        if not self.participant.is_returning:
            self._returns_until = may_return_until
        return self._returns_until

    def end(self) -> Ending:
        participant = self.participant
        return Ending(participant.former, participant.seat is not None, participant.is_stopping)
