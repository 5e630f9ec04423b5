"""One agent's thread to the coordination store: what is asked, told and kept alive over its connection.

What `rendezvous.driver` and `coordination.embedded.client` do in calls that wait is done here one request at a time: what was
under way when a connection broke may have been done, and is asked again. What comes while a request is under way waits until it
is answered, as it does there, or, for the sake of variety, is passed on at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tests.simulation.line import NEVER, Line
from tests.simulation.network import Connection
from tests.simulation.world import Violation

from rallypoint.coordination.fence import HeldLease
from rallypoint.coordination.model import Transaction, Watch
from rallypoint.protocol.participant import Participant
from rallypoint.protocol.session import NO_LICENCE, Seated, Staying, Tenure

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
        self._is_pumping = False
        self._is_regranting = False
        self._sayings: deque[Callable[[Participant], None]] = deque()
        self.ready_port: int | None = None  # no worker runs here: it holds for later sessions too, until a seat is found

    # What comes.

    def receive(self, connection: Connection, message: tuple[object, ...]) -> None:
        if connection is not self.connection or not self.agent.driver_can(self.receive, connection, message):
            return
        kind = message[0]
        if kind == "kept":
            self._kept(*message[1:])
        elif kind == "events":
            self._watches.add(message[2], message[1])
            self._pump_if_news()
        elif kind == "past":
            self._watches.add_past(message[1], message[3], message[2])
            self._pump_if_news()
        elif kind == "reply":
            self._replied(message[1], message[2])
        elif kind == "resumed":
            if not message[1]:
                self._token = connection.session.token
            self._kept(*message[1:])
            if self.held is not None and not self.held.is_lost:
                self._is_up = True
                self._keep_lease(self.agent.time())
                self.pump()
        elif kind == "granted":
            self._granted(message[1], message[2])
        elif kind == "lost" and message[1] == self._number:
            self._lost_lease()
        elif kind == "compacted" and message[2] in self._watches:
            self._compacted(message[1], message[2])

    def _kept(self, is_kept: bool, sent_at: float, lease: int) -> None:
        if self.held is None or self.held.number != lease:  # it is about the lease before
            return
        self.held.note_answer(sent_at, is_kept)
        if self.held.is_lost:
            self._lost_lease()
        else:
            self._renew_licence()

    def _lost_lease(self) -> None:
        """Where the fence is longer than a lease, there is time to come back."""
        if self._is_regranting:
            return
        self.world.tally["leases lost"] += 1
        returns_until = self.tenure.returns_until(self.may_return_until()) if self.tenure is not None else -NEVER
        if self.agent.time() >= returns_until or self.connection is None:
            self.end_session("the lease has ended")
            return
        self._is_up, self._is_regranting = False, True
        self._forget_request()
        self._arm_fence(self.clock.when(returns_until))
        self.connection.send_up(("grant", self.setup.ttl_s, self.agent.time()))

    def _granted(self, lease: int, asked_at: float) -> None:
        self.held, self._is_up, self._is_regranting = HeldLease(lease, self.setup.ttl_s, asked_at), True, False
        is_back = self.participant is not None
        if self.participant is not None:
            self.world.tally["nodes back within their fence"] += self.participant.seat is not None
            self.participant.come_back(lease)
        else:
            self.tenure = Tenure(self.agent.new_participant(lease), self.patience)
        self.check_fence()
        if self.held is not None:
            if not is_back:
                self._plan_keep(self.held)
            if self.ready_port is not None and not is_back:
                self.participant.ready(self.agent.time(), self.ready_port)
            self.pump()

    def _plan_keep(self, held: HeldLease) -> None:
        at = min(held.keep_at, held.silent_since + held.ttl_s)
        if not self._is_up or at <= self.agent.time():
            at = self.agent.time() + held.ttl_s / 3
        self.world.at(self.clock.when(at), self._keep, self._session)

    def _keep(self, session: int) -> None:
        if session != self._session or not self.agent.driver_can(self._keep, session):
            return
        now = self.agent.time()
        self._keep_lease(now)
        if self.request is not None and self._is_up and now >= self._asked_at + REQUEST_TIMEOUT_S:
            self._forget_request()
            self.pump()
        if self.held is not None and session == self._session:
            self._plan_keep(self.held)

    def _keep_lease(self, now: float) -> None:
        """Say that we live, when it is due; hang up if the last time was not answered for as long as the lease lasts."""
        held = self.held
        if held is None or held.is_lost or not self._is_up:
            return
        if now >= held.silent_since + held.ttl_s:
            self.world.tally["connections given up"] += 1
            self.connection.close()
            self.on_break(self.connection, "no answer")
        elif now >= held.keep_at:
            held.note_sent(now)
            self.connection.send_up(("keep", self.lease, now))

    def _forget_grant(self) -> None:
        self._is_regranting = False

    def _forget_request(self) -> None:
        """It was not answered in time; it is asked again, under another number."""
        if isinstance(self.request, Watch):
            self._watches.end(self.request.prefix)
            self._asked_watches.pop(self._number, None)
        self.request = None

    # Watches.

    def _send_watch(self, prefix: str, revision: int) -> None:
        self._number += 1
        self._asked_watches[self._number] = prefix
        self.connection.send_up(("ask", self._number, Watch(prefix, revision)))

    def told_through(self) -> int:
        """Up to which revision this node has been told all that nodes say; what a leader may be expected to know."""
        watch = self._watches._watches.get("up/")
        return watch.next_revision - 1 if watch is not None else -1

    def _pump_if_news(self) -> None:
        if self._watches.has_untaken:
            self.pump()

    def _compacted(self, number: int, prefix: str) -> None:
        """While we were away too much has changed: everything is read again."""
        self.world.tally["histories too short"] += 1
        self._watches.end(prefix)
        self._asked_watches.pop(number, None)
        if number == self._number:
            self.request = None
        if self.participant is not None:
            self.participant.look_again()
            self.pump()

    # The participant.

    def tell(self, saying: Callable[[Participant], None]) -> None:
        """What the agent says; where there is no session, the next one's participant is told."""
        self._sayings.append(saying)
        self.pump()

    def _replied(self, number: int, answer: object) -> None:
        prefix = self._asked_watches.pop(number, None)
        if prefix is not None:
            self._watches.confirm(prefix)
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
        if self.request is None or self.setup.is_eager:
            while self._sayings:
                self._sayings.popleft()(participant)
            for event in self._watches.take():
                participant.see(event, now)
        self._renew_licence()
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

    def _renew_licence(self) -> None:
        """As `rendezvous.driver` does, with each word of the store."""
        until = self.tenure.licence_until(self.valid_until()) if self.tenure is not None else NO_LICENCE
        if until is not None:
            self.agent.licence = until

    def _ask(self, request: object, now: float) -> None:
        self.request, self._asked_at = request, now
        self.world.tally["requests"] += 1
        if isinstance(request, Watch):
            self._watches.begin(request.prefix, request.from_revision)
            self._send_watch(request.prefix, request.from_revision)
            return
        if isinstance(request, Transaction):
            self.agent.note_transaction(request)
        self._number += 1
        self.connection.send_up(("ask", self._number, request))

    def _arm_wake(self, participant: Participant) -> None:
        wake_at = participant.wake_at()
        if wake_at is None or (self.agent.is_leaving and not isinstance(self.agent.session, Staying)):
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
