"""One agent's connection to the store and its lease: dialling, breaks, the fence, and when to give up.

It does what `Line` in `coordination.embedded.client` does; the lease, the watches that survive a break and what decides about the
session (`protocol.session`) are the real ones. What is said is in `driver`.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.network import Connection

from rallypoint.coordination import fence
from rallypoint.coordination.embedded.client import Watches
from rallypoint.coordination.fence import HeldLease
from rallypoint.protocol.participant import Former, Participant
from rallypoint.protocol.session import Patience, Tenure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tests.simulation.agent import Agent

__all__ = ["NEVER", "Line"]

STORE_TIMEOUT_S = 30.0
REFUSAL_TIMEOUT_S = 3.0
CONNECT_TIMEOUT_S = 1.0
HANDSHAKE_S = 5.0
NEVER = float("inf")


class Line:
    """The connection of one agent, and what it knows of its lease."""

    pump: Callable[[], None]
    _forget_request: Callable[[], None]
    _forget_grant: Callable[[], None]
    _send_watch: Callable[[str, int], None]

    def __init__(self, agent: Agent) -> None:
        self.agent, self.world, self.clock = agent, agent.world, agent.clock
        self.engine, self.link, self.setup = agent.engine, agent.link, agent.setup
        self.tenure: Tenure | None = None
        self.patience = Patience(self.setup.ttl_s, STORE_TIMEOUT_S, REFUSAL_TIMEOUT_S)
        self.is_over = False  # there is no store any more
        self.connection: Connection | None = None
        self.held: HeldLease | None = None
        self._token = ""  # of the session whose lease that is
        self._is_up = False  # the lease was granted, or taken up, on this connection
        self._watches = Watches()
        self._asked_watches: dict[int, str] = {}
        self._unreachable_since: float | None = None
        self._refused_since: float | None = None
        self._trouble = ""
        self._dials = self._failures = self._session = 0
        self._fence_at = self._wake_at = NEVER
        self.former: Former | None = None

    @property
    def participant(self) -> Participant | None:
        return self.tenure.participant if self.tenure is not None else None

    # The lease, as this node sees it.

    @property
    def lease(self) -> int:
        return self.held.number if self.held is not None else 0

    def valid_until(self) -> float:
        """As the engines have it: where the fence is longer than a lease, what that was good for counts after its end too."""
        if self.held is None:
            return NEVER
        return self.may_return_until() if self.setup.is_replicated else self.held.valid_until()

    def may_return_until(self) -> float:
        if self.held is None or not self.setup.is_replicated:
            return -NEVER
        return self.held.renewed_until() + self.setup.fence_s - self.held.ttl_s

    def check_fence(self) -> bool:
        """Whether all is well; if not, what follows from that has been done."""
        match self._judge(self.agent.time()):
            case fence.Fence(why):
                self.world.tally["fences"] += 1
                self.end_session(why)
                return False
            case fence.GiveUp(why):
                self.world.tally["stores given up"] += 1
                self._give_up(why)
                return False
            case fence.Hold(wake_at):
                self._arm_fence(self.clock.when(wake_at))
        return True

    def _judge(self, now: float) -> fence.Hold | fence.Fence | fence.GiveUp:
        connection = fence.Connection(self.valid_until(), self._unreachable_since, self._refused_since, self._trouble)
        if self.tenure is not None:
            return self.tenure.judge(connection, now)
        return fence.judge(connection, self.patience.store_timeout_s, self.patience.refusal_timeout_s, now)

    def _give_up(self, why: str) -> None:
        """The thread ends, and nobody dials any more."""
        self.is_over = True
        self._session += 1
        self.close()
        self.tenure, self.held = None, None
        self.agent.give_up(why)

    def _arm_fence(self, at: float) -> None:
        if at < self._fence_at:
            self._fence_at = at
            self.world.at(at, self._on_fence, at)

    def _on_fence(self, planned: float) -> None:
        if planned == self._fence_at and self.agent.driver_can(self._on_fence, planned):
            self._fence_at = NEVER
            valid_until = self.valid_until()
            is_returning = self.participant is not None and self.participant.is_returning
            is_well = self._unreachable_since is None and not is_returning
            if is_well and self.agent.time() < valid_until:  # as `judge` would say, only quicker
                self._arm_fence(self.clock.when(valid_until))
            else:
                self.check_fence()

    def end_session(self, why: str) -> None:
        """The others may take us for dead: no worker may run any longer, and the next session is under another number."""
        self.world.note(self.agent.name, "session over", why)
        self.close()
        self._session += 1
        tenure, self.tenure, self.held = self.tenure, None, None
        self._watches = Watches()
        self._wake_at = NEVER
        if self._unreachable_since is None:
            self._unreachable_since = self.agent.time()
        if tenure is not None:
            self._part_with(tenure, why)
        if self.agent.is_alive:
            self.dial()

    def _part_with(self, tenure: Tenure, why: str) -> None:
        """Workers go first; what was learned before is passed on before that is."""
        ending = tenure.end()
        self.former = ending.former
        if ending.had_seat:
            self.agent.end_licence()
        self.agent.hear(list(tenure.participant.take_news()))
        if ending.had_seat:
            self.agent.fenced(why)

    def close(self) -> None:
        connection, self.connection = self.connection, None
        self._is_up = False
        self._forget_request()
        self._forget_grant()
        if connection is not None:
            connection.close()

    # Connecting.

    def dial(self) -> None:
        if self.is_over:
            return
        self._dials += 1
        answer = self.engine.answers_dial(self.link)
        delay_s = CONNECT_TIMEOUT_S if answer == "silent" else 2 * self.link.latency_s(self.world)
        self.world.after(delay_s, self._dialled, self._dials, answer)

    def _dialled(self, dial: int, answer: str) -> None:
        if dial != self._dials or not self.agent.driver_can(self._dialled, dial, answer):
            return
        now = self.agent.time()
        if answer == "open" and self.engine.answers_dial(self.link) == "open":
            self._connected(now)
            return
        self._refused_since = (self._refused_since or now) if answer == "refused" else None
        self._unreachable_since = self._unreachable_since or now
        self._trouble = answer
        if self.check_fence() and dial == self._dials:
            self._failures += 1
            self.world.after(min(1.0, 0.05 * 2.0**self._failures) * self.world.between(0.5, 1.0), self._redial, dial)

    def _redial(self, dial: int) -> None:
        if dial == self._dials and self.agent.driver_can(self._redial, dial):
            self.dial()

    def _connected(self, now: float) -> None:
        self._failures = 0
        self._unreachable_since = self._refused_since = None
        self.connection = Connection(self.world, self.link, self, self.engine)
        self.engine.accept(self.connection)
        self._asked_watches.clear()
        if self.held is not None:
            self.connection.send_up(("resume", self._token, now, self.lease))
            for prefix, revision in self._watches.renew():
                self._send_watch(prefix, revision)
        else:
            self._token = self.connection.session.token
            self.connection.send_up(("grant", self.setup.ttl_s, now))
            self.world.after(HANDSHAKE_S, self._not_granted, self.connection)

    def _not_granted(self, connection: Connection) -> None:
        if connection is self.connection and not self._is_up and self.agent.driver_can(self._not_granted, connection):
            connection.close()
            self.on_break(connection, "no answer")

    def on_break(self, connection: Connection, why: str) -> None:
        """The connection is gone; what was asked over it may have been done or not."""
        if connection is not self.connection or not self.agent.driver_can(self.on_break, connection, why):
            return
        self.world.note(self.agent.name, "connection broke", why)
        self.world.tally["breaks"] += 1
        now = self.agent.time()
        if self.held is not None:
            self.held.note_break()
        self._unreachable_since, self._trouble = now, why
        self.close()
        if self.check_fence():
            self.dial()
            self.pump()
