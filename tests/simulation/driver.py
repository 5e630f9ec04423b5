"""One agent's thread to the coordination store: what is asked, told and kept alive over its connection.

It does what `rendezvous.driver` and `coordination.embedded.client` do, one request at a time: what was under way when a
connection broke may have been done, and is asked again. What comes while a request is under way waits until it is answered, as it
does there, or, for the sake of variety, is passed on at once.
"""

from __future__ import annotations

from tests.simulation.line import NEVER, Line
from tests.simulation.network import Connection
from tests.simulation.world import Violation

from rallypoint.coordination.model import Event, Transaction, Watch
from rallypoint.protocol.participant import Participant, Seated

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tests.simulation.agent import Agent

__all__ = ["Driver"]

REQUEST_TIMEOUT_S = 10.0


class Driver(Line):
    """One request at a time, events as they come, keepalives when they are due."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.request: object = None
        self._asked_at = 0.0
        self._number = 0
        self._untaken: list[Event] = []
        self._is_pumping = False
        self._is_regranting = False
        self.ready_port: int | None = None  # no worker runs here: it holds for later sessions too, until a seat is found

    # What comes.

    def receive(self, connection: Connection, message: tuple[object, ...]) -> None:
        if connection is not self.connection or not self.agent.driver_can(self.receive, connection, message):
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
                self._is_up = True
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
            if self.participant is not None:
                self._renew_licence(self.participant)
        elif sent_at >= self.renewed_at:  # else it is about the lease before
            self._lost_lease()

    def _lost_lease(self) -> None:
        """Where the fence is longer than a lease, there is time to come back."""
        if self._is_regranting:
            return
        self.world.tally["leases lost"] += 1
        returns_until = self.renewed_at + self.setup.fence_s
        participant = self.participant
        if participant is not None and participant.is_returning:
            returns_until = self.returns_until
        if participant is None or not self.setup.is_replicated or self.agent.time() >= returns_until or self.connection is None:
            self.end_session("the lease has ended")
            return
        self.returns_until, self._is_up, self._is_regranting = returns_until, False, True
        self._forget_request()
        self._arm_fence(self.clock.when(returns_until))
        self.connection.send_up(("grant", self.setup.ttl_s, self.agent.time()))

    def _granted(self, lease: int, asked_at: float) -> None:
        self.lease, self.renewed_at, self._is_up, self._is_regranting = lease, asked_at, True, False
        is_back = self.participant is not None
        if self.participant is not None:
            self.world.tally["nodes back within their fence"] += self.participant.seat is not None
            self.participant.come_back(lease)
        else:
            self.participant = self.agent.new_participant(lease)
        self.check_fence()
        if self.lease:
            if not is_back:
                self.world.after(self.setup.ttl_s / 3 / self.clock.rate, self._keep, self._session)
            if self.ready_port is not None and not is_back:
                self.participant.ready(self.agent.time(), self.ready_port)
            self.pump()

    def _keep(self, session: int) -> None:
        """Say that we live; hang up if the last time was not answered for as long as the lease lasts."""
        if session != self._session or not self.agent.driver_can(self._keep, session):
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

    def _forget_grant(self) -> None:
        self._is_regranting = False

    def _forget_request(self) -> None:
        """It was not answered in time; it is asked again, under another number."""
        if isinstance(self.request, Watch):
            self._watches.pop(self.request.prefix, None)
            self._asked_watches.pop(self._number, None)
            self._confirmed.discard(self.request.prefix)
        self.request = None

    def _forget_events(self) -> None:
        self._untaken = []

    # Watches.

    def _send_watch(self, prefix: str, revision: int) -> None:
        self._number += 1
        self._asked_watches[self._number] = prefix
        self._confirmed.discard(prefix)
        self.connection.send_up(("ask", self._number, Watch(prefix, revision)))

    def told_through(self) -> int:
        """Up to which revision this node has been told all that nodes say; what a leader may be expected to know."""
        return self._watches.get("up/", 0) - 1

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
        self._confirmed.discard(prefix)
        if number == self._number:
            self.request = None
        if self.participant is not None:
            self.participant.look_again()
            self.pump()

    # The participant.

    def _replied(self, number: int, answer: object) -> None:
        prefix = self._asked_watches.pop(number, None)
        if prefix in self._watches:  # it may have been forgotten meanwhile
            self._confirmed.add(prefix)
        if number == self._number and self.request is not None:
            request, self.request = self.request, None
            self.participant.replied(request, answer, self.agent.time())
            self.pump()

    def pump(self) -> None:
        """Hand over what came, pass on what follows, and ask what is next; until there is nothing left to do."""
        if self._is_pumping or self.participant is None or not self.agent.driver_can(self.pump):
            return
        self._is_pumping = True
        while self._pump_once():
            pass
        self._is_pumping = False
        if self.participant is not None and self.participant.why_fenced:
            self.check_fence()
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
                participant.see(event, now)
        self._renew_licence(participant)
        news = participant.take_news()
        if news:
            if any(isinstance(one, Seated) for one in news):
                self.ready_port = None
            self.agent.hear(news)
            return True
        if self.request is not None or not self._is_up:
            return False
        request = participant.next_request(now)
        if request is None:
            return bool(participant._news)
        self._ask(request, now)
        return False

    def _renew_licence(self, participant: Participant) -> None:
        """As `rendezvous.driver` does, with each word of the store."""
        if participant.seat is None:
            self.agent.licence = 0.0
        elif not participant.is_returning:
            self.agent.licence = self.valid_until()

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
        if planned == self._wake_at and self.agent.driver_can(self._on_wake, planned):
            self._wake_at = NEVER
            self.pump()
