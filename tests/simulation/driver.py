"""One agent's thread to the coordination store: connections, keepalives, the fence, and a participant that is driven over them.

It does what `rendezvous.driver` and `store.client` do, one request at a time: what was under way when a connection broke may have
been done, and is asked again. What comes while a request is under way waits until it is answered, as it does there, or,
for the sake of variety, is passed on at once.
"""

from __future__ import annotations

from rallypoint.core import fence
from rallypoint.core.coordination import Event, Transaction, Watch
from rallypoint.core.participant import Participant
from tests.simulation.network import Connection
from tests.simulation.world import Violation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tests.simulation.agent import Agent

__all__ = ["BROKEN_GRACE_S", "Driver"]

BROKEN_GRACE_S = 0.25
REQUEST_TIMEOUT_S = 10.0
STORE_TIMEOUT_S = 30.0
REFUSAL_TIMEOUT_S = 3.0
CONNECT_TIMEOUT_S = 1.0
HANDSHAKE_S = 5.0
NEVER = float("inf")


class Driver:
    """The connection of one agent, and what it knows of its lease."""

    def __init__(self, agent: Agent) -> None:
        self.agent, self.world, self.clock = agent, agent.world, agent.clock
        self.engine, self.link, self.setup = agent.engine, agent.link, agent.setup
        self.participant: Participant | None = None
        self.connection: Connection | None = None
        self.lease = 0
        self.renewed_at = 0.0  # when the last keepalive was sent that was answered
        self.request: object = None
        self._is_up = False  # the lease was granted, or taken up, on this connection
        self._asked_at = 0.0
        self._number = 0
        self._untaken: list[Event] = []
        self._watches: dict[str, int] = {}  # what is watched, and the next revision to be told
        self._confirmed: set[str] = set()
        self._asked_watches: dict[int, str] = {}
        self._broken_at = NEVER
        self._silent_since = NEVER
        self._unreachable_since: float | None = None
        self._refused_since: float | None = None
        self._trouble = ""
        self._dials = self._failures = 0
        self._session = 0
        self._fence_at = self._wake_at = NEVER
        self._is_pumping = False

    # The lease, as this node sees it.

    def valid_until(self) -> float:
        if not self.lease:
            return NEVER
        own_end = self.renewed_at + self.setup.fence_s
        return own_end if self.setup.is_replicated else min(own_end, self._broken_at + BROKEN_GRACE_S)

    def check_fence(self) -> bool:
        """Whether all is well; if not, what follows from that has been done."""
        connection = fence.Connection(self.valid_until(), self._unreachable_since, self._refused_since, self._trouble)
        match fence.judge(connection, STORE_TIMEOUT_S, REFUSAL_TIMEOUT_S, self.agent.time()):
            case fence.Fence(why):
                self.world.tally["fences"] += 1
                self.end_session(why)
                return False
            case fence.GiveUp(why):
                self.world.tally["stores given up"] += 1
                self.agent.give_up(why)
                return False
            case fence.Hold(wake_at):
                self._arm_fence(self.clock.when(wake_at))
        return True

    def _arm_fence(self, at: float) -> None:
        if at < self._fence_at:
            self._fence_at = at
            self.world.at(at, self._on_fence, at)

    def _on_fence(self, planned: float) -> None:
        if planned == self._fence_at and self.agent.is_awake(self._on_fence, planned):
            self._fence_at = NEVER
            valid_until = self.valid_until()
            if self._unreachable_since is None and self.agent.time() < valid_until:  # as `judge` would say, only quicker
                self._arm_fence(self.clock.when(valid_until))
            else:
                self.check_fence()

    def end_session(self, why: str) -> None:
        """The others may take us for dead: no worker may run any longer, and the next session is under another number."""
        self.world.note(self.agent.name, "session over", why)
        self.close()
        self._session += 1
        self.participant, self.lease = None, 0
        self._watches, self._untaken = {}, []
        self._broken_at = self._silent_since = self._wake_at = NEVER
        if self._unreachable_since is None:
            self._unreachable_since = self.agent.time()
        self.agent.fenced(why)
        if self.agent.is_alive:
            self.dial()

    def close(self) -> None:
        connection, self.connection = self.connection, None
        self._is_up = False
        self._forget_request()
        if connection is not None:
            connection.close()

    # Connecting.

    def dial(self) -> None:
        self._dials += 1
        answer = self.engine.answers_dial(self.link)
        delay_s = CONNECT_TIMEOUT_S if answer == "silent" else 2 * self.link.latency_s(self.world)
        self.world.after(delay_s, self._dialled, self._dials, answer)

    def _dialled(self, dial: int, answer: str) -> None:
        if dial != self._dials or not self.agent.is_awake(self._dialled, dial, answer):
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
        if dial == self._dials and self.agent.is_awake(self._redial, dial):
            self.dial()

    def _connected(self, now: float) -> None:
        self._failures = 0
        self._unreachable_since = self._refused_since = None
        self.connection = Connection(self.world, self.link, self, self.engine)
        self.engine.accept(self.connection)
        self._confirmed.clear()
        self._asked_watches.clear()
        if self.lease:
            self.connection.send_up(("resume", self.lease, now))
            for prefix, revision in self._watches.items():
                self._send_watch(prefix, revision)
        else:
            self.connection.send_up(("grant", self.setup.ttl_s, now))
            self.world.after(HANDSHAKE_S, self._not_granted, self.connection)

    def _not_granted(self, connection: Connection) -> None:
        if connection is self.connection and not self._is_up and self.agent.is_awake(self._not_granted, connection):
            connection.close()
            self.on_break(connection, "no answer")

    def on_break(self, connection: Connection, why: str) -> None:
        """The connection is gone; what was asked over it may have been done or not."""
        if connection is not self.connection or not self.agent.is_awake(self.on_break, connection, why):
            return
        self.world.note(self.agent.name, "connection broke", why)
        self.world.tally["breaks"] += 1
        now = self.agent.time()
        self._broken_at = min(self._broken_at, now)
        self._silent_since = NEVER
        self._unreachable_since, self._trouble = now, why
        self.close()
        if self.check_fence():
            self.dial()
            self.pump()

    # What comes.

    def receive(self, connection: Connection, message: tuple[object, ...]) -> None:
        if connection is not self.connection or not self.agent.is_awake(self.receive, connection, message):
            return
        kind = message[0]
        if kind == "kept":
            self._kept(message[1], message[2])
        elif kind == "events":
            self._add(message[2], message[1], self._confirmed)
        elif kind == "past":
            self._add(message[3], message[2], {message[1]} & self._confirmed)
        elif kind == "reply":
            self._replied(message[1], message[2])
        elif kind == "resumed":
            self._kept(message[1], message[2])
            if self.lease:
                self._broken_at, self._is_up = NEVER, True
                self.pump()
        elif kind == "granted":
            self._granted(message[1], message[2])
        elif kind == "lost" and message[1] == self._number:
            self._lost_lease()
        elif kind == "compacted" and message[2] in self._watches:
            self._compacted(message[1], message[2])

    def _kept(self, is_kept: bool, sent_at: float) -> None:
        if is_kept:
            self.renewed_at = max(self.renewed_at, sent_at)
            self._silent_since = NEVER
        else:
            self._lost_lease()

    def _lost_lease(self) -> None:
        self.world.tally["leases lost"] += 1
        self.end_session("the lease has ended")

    def _granted(self, lease: int, asked_at: float) -> None:
        self.lease, self.renewed_at, self._is_up = lease, asked_at, True
        self.participant = self.agent.new_participant(lease)
        self.check_fence()
        if self.lease:
            self.world.after(self.setup.ttl_s / 3 / self.clock.rate, self._keep, self._session)
            self.agent.may_be_ready()
            self.pump()

    def _keep(self, session: int) -> None:
        """Say that we live; hang up if the last time was not answered for as long as the lease lasts."""
        if session != self._session or not self.agent.is_awake(self._keep, session):
            return
        now = self.agent.time()
        if self._is_up and now >= self._silent_since + self.setup.ttl_s:
            self.world.tally["connections given up"] += 1
            self.connection.close()
            self.on_break(self.connection, "no answer")
            if session != self._session:
                return
        if self._is_up:
            self._silent_since = min(self._silent_since, now)
            self.connection.send_up(("keep", self.lease, now))
            if self.request is not None and now >= self._asked_at + REQUEST_TIMEOUT_S:
                self._forget_request()
                self.pump()
        self.world.after(self.setup.ttl_s / 3 / self.clock.rate, self._keep, session)

    def _forget_request(self) -> None:
        """It was not answered in time; it is asked again, under another number."""
        if isinstance(self.request, Watch):
            self._watches.pop(self.request.prefix, None)
        self.request = None

    # Watches.

    def _send_watch(self, prefix: str, revision: int) -> None:
        self._number += 1
        self._asked_watches[self._number] = prefix
        self._confirmed.discard(prefix)
        self.connection.send_up(("ask", self._number, Watch(prefix, revision)))

    def _add(self, events: list[Event], through: int, prefixes: set[str]) -> None:
        for event in events:
            prefix = event.key[: event.key.index("/") + 1]
            if prefix in prefixes and event.revision >= self._watches[prefix]:
                self._untaken.append(event)
        for prefix in prefixes:
            if self._watches[prefix] <= through:
                self._watches[prefix] = through + 1
        if self._untaken:
            self.pump()

    def _compacted(self, number: int, prefix: str) -> None:
        """While we were away too much has changed: everything is read again."""
        self.world.tally["histories too short"] += 1
        del self._watches[prefix]
        self._asked_watches.pop(number, None)
        if number == self._number:
            self.request = None
        if self.participant is not None:
            self.participant.look_again()
            self.pump()

    # The participant.

    def _replied(self, number: int, answer: object) -> None:
        prefix = self._asked_watches.pop(number, None)
        if prefix is not None:
            self._confirmed.add(prefix)
        if number == self._number and self.request is not None:
            request, self.request = self.request, None
            self.agent.note_answer(answer)
            self.participant.replied(request, answer, self.agent.time())
            self.pump()

    def pump(self) -> None:
        """Hand over what came, pass on what follows, and ask what is next; until there is nothing left to do."""
        if self._is_pumping or self.participant is None or not self.agent.is_alive:
            return
        self._is_pumping = True
        while self._pump_once():
            pass
        self._is_pumping = False
        if self.participant is not None and self.request is None and self._is_up:
            self._arm_wake(self.participant)

    def _pump_once(self) -> bool:
        participant = self.participant
        if participant is None:
            return False
        now = self.agent.time()
        if self._untaken and (self.request is None or self.setup.is_eager):
            events, self._untaken = self._untaken, []
            for event in events:
                self.agent.note_event(event)
                participant.see(event, now)
        news = participant.take_news()
        if news:
            self.agent.hear(news)
            return True
        if self.request is not None or not self._is_up:
            return False
        request = participant.next_request(now)
        if request is None:
            return bool(participant._news)
        self._ask(request, now)
        return False

    def _ask(self, request: object, now: float) -> None:
        self.request, self._asked_at = request, now
        self.world.tally["requests"] += 1
        if isinstance(request, Watch):
            self._watches[request.prefix] = request.from_revision
            self._untaken = [event for event in self._untaken if not event.key.startswith(request.prefix)]
            self._send_watch(request.prefix, request.from_revision)
            return
        if isinstance(request, Transaction):
            self.agent.note_transaction(request)
        self._number += 1
        self.connection.send_up(("ask", self._number, request))

    def _arm_wake(self, participant: Participant) -> None:
        wake_at = participant.wake_at()
        if wake_at is None or self.agent.is_leaving:
            return
        if wake_at <= self.agent.time():
            raise Violation(f"{self.agent.name} would spin: there is nothing to ask, but it wants to be woken at once")
        at = self.clock.when(wake_at)
        if at < self._wake_at:
            self._wake_at = at
            self.world.at(at, self._on_wake, at)

    def _on_wake(self, planned: float) -> None:
        if planned == self._wake_at and self.agent.is_awake(self._on_wake, planned):
            self._wake_at = NEVER
            self.pump()
