"""The coordination store in the simulated cluster: the real service, a clock of its own, and a loop that may pause.

What it is asked goes to the service, and what that says goes out, both as they are written down for the real network.

In *embedded* mode it lives in the process of one agent: it stops when that is stopped, and dies with it; wardens testify to it.
In *replicated* mode it is a cluster of its own, that may be unavailable for a while but loses nothing, and that knows no other
sign of death than silence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulation.network import FIN, HELLO, Connection, Link
from tests.simulation.world import NEVER, Clock, Violation, World

from rallypoint.coordination.embedded import wire
from rallypoint.coordination.embedded.handshake import Welcome
from rallypoint.coordination.embedded.service import Session, StoreService
from rallypoint.coordination.keyspace import Keyspace
from rallypoint.coordination.model import Event

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tests.simulation.network import Message
    from tests.simulation.oracle import Oracle

__all__ = ["Engine"]

MOST_REQUESTS = 10_000  # in one job; a few hundred are usual
FORGIVEN_S = 0.5  # an absence that is longer is the store's own fault


class ObservedKeyspace(Keyspace):
    """Shows what has changed to the oracle, before anybody is told."""

    def __init__(self, history_events: int, show: Callable[[list[Event]], None]) -> None:
        super().__init__(history_events=history_events)
        self._show = show

    def take_changes(self) -> list[Event]:
        changes = super().take_changes()
        if changes:
            self._show(changes)
        return changes


class Engine:
    """The store and its loop."""

    def __init__(
        self, world: World, clock: Clock, is_replicated: bool, turn_s: float, oracle: Oracle, incarnation: str = "store 1"
    ) -> None:
        self.incarnation = incarnation
        self.world, self.clock, self.oracle = world, clock, oracle
        self.is_replicated = is_replicated
        self.turn_s = turn_s  # how long a turn of the loop may take, so that messages meet in one
        self.keyspace = ObservedKeyspace(oracle.setup.history, self._show)
        self._service = StoreService(self.keyspace)
        self.is_dead = False
        self.is_silent = False  # dead with its machine, so that nobody refuses connections
        self._away_until = 0.0
        self._inbox: list[tuple[Connection, Message]] = []
        self._turn_is_due = False
        self._tokens = 0
        self._request: Message = FIN  # what is being answered
        self._connections: dict[Connection, None] = {}
        self._tick_at = NEVER
        self._away_since: float | None = None
        self._absences_s = 0.0  # all that were long enough to count
        self._heard: dict[int, float] = {}  # of each lease, when it was heard of, in time that the store was there
        self._lease_of: dict[str, int] = {}

    # Being there.

    def answers_dial(self, link: Link) -> str:
        if link.cut_up or link.cut_down or self.is_silent or (self.is_replicated and self.is_away):
            return "silent"
        return "refused" if self.is_dead else "open"

    def connect(self, connection: Connection) -> None:
        """The kernel takes it in, also while the loop is away."""
        self._connections[connection] = None

    def _welcome(self, connection: Connection) -> None:
        """Whoever is welcome has a session, with a token that only its owner knows."""
        self._tokens += 1
        connection.session = Session(str(self._tokens))
        connection.session.connection = connection
        connection.send_down(Welcome(self.incarnation, connection.session.token))

    @property
    def is_away(self) -> bool:
        return self.world.now < self._away_until

    def pause(self, seconds: float) -> None:
        """Its loop does not come round for so long."""
        self.world.note("store", "is away", round(seconds, 3))
        self._away_since = self.world.now if self._away_since is None else self._away_since
        self._away_until = max(self._away_until, self.world.now + seconds)
        self.world.at(self._away_until, self._turn)

    def back(self) -> None:
        self._away_until = 0.0
        self._turn()

    def die(self, silently: bool) -> None:
        self.world.note("store", "died", "silently" if silently else "")
        self.is_dead, self.is_silent = True, silently
        for connection in self._connections:
            connection.server_open = False
            if not silently:
                connection.send_down(FIN)
        self.oracle.store_died()

    # Its loop.

    def receive(self, connection: Connection, message: Message) -> None:
        if self.is_dead:
            return
        self._inbox.append((connection, message))
        if self.world.now < self._away_until or self._turn_is_due:
            return
        if self.turn_s:
            self._turn_is_due = True
            self.world.after(self.turn_s * self.world.random(), self._turn)
        else:
            self._turn()

    def _turn(self) -> None:
        """Read what has come, end what is over, tell those who watch."""
        self._turn_is_due = False
        if self.is_dead or self.world.now < self._away_until:
            return
        now = self.clock.read(self.world.now)
        if self._away_since is not None:
            absence_s = self.world.now - self._away_since
            self._absences_s += absence_s if absence_s > FORGIVEN_S else 0.0
            self._away_since = None
        inbox, self._inbox = self._inbox, []
        for connection, message in inbox:
            if connection.server_open:
                self._serve(connection, message, now)
        self._service.tick(now)
        self._plan_tick()

    def _plan_tick(self) -> None:
        expiry = self.keyspace.next_expiry()
        if expiry is None:
            return
        at = self.clock.when(expiry)
        if at < self._tick_at:
            self._tick_at = at
            self.world.at(at, self._tick, at)

    def _tick(self, planned: float) -> None:
        if planned == self._tick_at:
            self._tick_at = NEVER
            self._turn()

    def _show(self, changes: list[Event]) -> None:
        expelled = {event.key[14:] for event in changes if event.key.startswith("down/expelled/")}
        for event in changes:
            if event.key.startswith("up/nodes/") and event.key[9:] not in expelled:
                self._check_expiry(event)
        self.oracle.changed(changes, self.keyspace)

    def _check_expiry(self, event: Event) -> None:
        """Nobody is taken for dead before the store has listened in vain for as long as a lease lasts."""
        if event.item is not None:
            self._lease_of[event.key] = event.item.lease
        elif event.cause == "expired":
            listened_s = self.world.now - self._absences_s - self._heard[self._lease_of[event.key]]
            if listened_s < self.oracle.setup.ttl_s * 0.98:
                raise Violation(f"{event.key} expired, but the store has listened for {listened_s:.3f} s only")

    # What it is asked.

    def _serve(self, connection: Connection, message: Message, now: float) -> None:
        if message is FIN:
            connection.server_open = False
            self._on_gone(connection, now)
        elif message is HELLO:
            self._welcome(connection)
        elif isinstance(message, tuple):
            self._hear_warden(*message)
        else:
            self._serve_request(connection, message, now)

    def _hear_warden(self, what: str, about: Any) -> None:
        """A store of ours ends the lease; in a cluster, wardens write what they have to say, and then end it."""
        if what == "vouch":
            of, lease = about  # whoever knows the token of another store's session proves nothing here
            if of == self.incarnation:
                self.keyspace.vouch(lease)
            return
        for operation in about.then:
            self._heard[operation.lease] = -NEVER  # nobody need listen for it any more
        self.keyspace.transact(about)

    def _serve_request(self, connection: Connection, body: bytes, now: float) -> None:
        what = body.split(b'"', 2)[1]
        if what in (b"keep", b"resume"):
            number, _, of_whom = wire.decode(body)
            lease = of_whom if what == b"keep" else self._lease_of_token(of_whom)
            self._note_heard(lease)
            if what == b"keep" and self.is_replicated:  # a cluster does not mind who keeps a lease alive
                connection.send_down(wire.encode([number, "kept", self.keyspace.keep_alive(lease, now), 0]))
                return
        else:
            self._note_request()
        if what == b"transact":
            self.oracle.writes(connection.client._agent, self.incarnation)
        self._request = body
        self._service.serve(connection, body, now)
        self._request = FIN
        for replaced in self._service.take_replaced():
            if not self.is_replicated:
                replaced.server_open = False
                self._on_gone(replaced, now)

    def _note_request(self) -> None:
        self.world.tally["requests"] += 1
        if self.world.tally["requests"] > MOST_REQUESTS:
            raise Violation(f"the store was asked {MOST_REQUESTS} times: somebody asks without end")

    def _lease_of_token(self, token: str) -> int:
        session = self._service.sessions._sessions.get(token)
        return session.lease if session is not None else 0

    def _note_heard(self, lease: int) -> None:
        if self._heard.get(lease) != -NEVER:  # else this was on its way when the warden ended it
            self._heard[lease] = self.world.now - self._absences_s

    def say(self, connection: Connection, body: bytes) -> None:
        """What the service says to a connection: the answer to what it has asked, or the news."""
        if body.startswith(b"[0,"):
            connection.send_down(body)
            return
        if b',"granted",' in body:
            self._note_heard(wire.decode(body)[2])
        self.world.tally["histories too short"] += b',"error","compacted",' in body
        connection.send_down(body, self._request)

    def _on_gone(self, connection: Connection, now: float) -> None:
        """Its connection has ended, which says nothing about its owner."""
        self._connections.pop(connection, None)
        if connection.session is not None:
            self._service.leave(connection, now)
