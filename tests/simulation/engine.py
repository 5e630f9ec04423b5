"""The coordination store in the simulated cluster: a real keyspace, real sessions, a clock of its own, and a loop that may pause.

In *embedded* mode it lives in the process of one agent: it stops when that is stopped, and dies with it; wardens testify to it.
In *replicated* mode it is a cluster of its own, that may be unavailable for a while but loses nothing, and that knows no other
sign of death than silence.
"""

from __future__ import annotations

from tests.simulation.network import FIN, Connection, Link
from tests.simulation.world import Clock, Violation, World

from rallypoint.coordination.embedded.service import Session, Sessions
from rallypoint.coordination.keyspace import Compacted, Keyspace, UnknownLease
from rallypoint.coordination.model import Event, Read, Transaction, Watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tests.simulation.oracle import Oracle

__all__ = ["Engine"]

FORGIVEN_S = 0.5  # an absence that is longer is the store's own fault


class Engine:
    """The store and its loop."""

    def __init__(self, world: World, clock: Clock, is_replicated: bool, turn_s: float, oracle: Oracle) -> None:
        self.world, self.clock, self.oracle = world, clock, oracle
        self.is_replicated = is_replicated
        self.turn_s = turn_s  # how long a turn of the loop may take, so that messages meet in one
        self.keyspace = Keyspace(history_events=oracle.setup.history)
        self.is_dead = False
        self.is_silent = False  # dead with its machine, so that nobody refuses connections
        self._away_until = 0.0
        self._inbox: list[tuple[Connection, tuple[object, ...]]] = []
        self._turn_is_due = False
        self._watchers: dict[str, dict[Connection, None]] = {"down/": {}, "up/": {}}
        self._sessions = Sessions(self.keyspace)
        self._tokens = 0
        self._connections: dict[Connection, None] = {}
        self._tick_at = float("inf")
        self._away_since: float | None = None
        self._absences_s = 0.0  # all that were long enough to count
        self._heard: dict[int, float] = {}  # of each lease, when it was heard of, in time that the store was there
        self._lease_of: dict[str, int] = {}

    # Being there.

    def answers_dial(self, link: Link) -> str:
        if link.cut_up or link.cut_down or self.is_silent or (self.is_replicated and self.is_away):
            return "silent"
        return "refused" if self.is_dead else "open"

    def accept(self, connection: Connection) -> None:
        """Whoever is welcome has a session, with a token that only its owner knows."""
        self._connections[connection] = None
        self._tokens += 1
        connection.session = Session(str(self._tokens))
        connection.session.connection = connection

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

    def receive(self, connection: Connection, message: tuple[object, ...]) -> None:
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
        self.keyspace.tick(now)
        self._tell()
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
            self._tick_at = float("inf")
            self._turn()

    def _tell(self) -> None:
        changes = self.keyspace.take_changes()
        if not changes:
            return
        expelled = {event.key[14:] for event in changes if event.key.startswith("down/expelled/")}
        for event in changes:
            if event.key.startswith("up/nodes/") and event.key[9:] not in expelled:
                self._check_expiry(event)
        self.oracle.changed(changes, self.keyspace)
        through = self.keyspace.revision
        down = [event for event in changes if event.key.startswith("down/")]
        up = [event for event in changes if event.key.startswith("up/")]
        both = [event for event in changes if event.key.startswith(("down/", "up/"))]
        leads = self._watchers["up/"]
        if down:
            for connection in self._watchers["down/"]:
                connection.send_down(("events", through, both if connection in leads else down), is_event=True)
        if up:
            for connection in leads:
                if not down or connection not in self._watchers["down/"]:
                    connection.send_down(("events", through, up), is_event=True)

    def _check_expiry(self, event: Event) -> None:
        """Nobody is taken for dead before the store has listened in vain for as long as a lease lasts."""
        if event.item is not None:
            self._lease_of[event.key] = event.item.lease
        elif event.cause == "expired":
            listened_s = self.world.now - self._absences_s - self._heard[self._lease_of[event.key]]
            if listened_s < self.oracle.setup.ttl_s * 0.98:
                raise Violation(f"{event.key} expired, but the store has listened for {listened_s:.3f} s only")

    # What it is asked.

    def _serve(self, connection: Connection, message: tuple[object, ...], now: float) -> None:
        kind = message[0]
        if kind == "keep":
            lease = message[1]
            self._heard[lease] = self.world.now - self._absences_s
            is_kept = self._keep(connection.session, lease, now)
            connection.send_down(("kept", is_kept, message[2], lease))
        elif kind == "ask":
            self._answer(connection, message[1], message[2])
        elif kind == "grant":
            lease = self._sessions.grant(connection.session, message[1], now)
            self._heard[lease] = self.world.now - self._absences_s
            connection.send_down(("granted", lease, message[2]))
        elif kind == "resume":
            self._resume(connection, *message[1:], now)
        elif kind == "vouch":
            self.keyspace.vouch(message[1])
        elif kind == "fin":
            connection.server_open = False
            self._on_gone(connection, now)

    def _keep(self, session: Session, lease: int, now: float) -> bool:
        """A cluster does not mind who keeps a lease alive."""
        if self.is_replicated:
            return self.keyspace.keep_alive(lease, now)
        return session.lease == lease and self._sessions.keep(session, now)

    def _answer(self, connection: Connection, number: int, request: object) -> None:
        if isinstance(request, Transaction):
            try:
                answer = self.keyspace.transact(request)
            except UnknownLease:
                connection.send_down(("lost", number))
                return
            connection.send_down(("reply", number, answer, request))
        elif isinstance(request, Read):
            connection.send_down(("reply", number, self.keyspace.read(request.prefix), request))
        else:
            self._watch(connection, number, request)

    def _watch(self, connection: Connection, number: int, request: Watch) -> None:
        """What has happened goes out first; what happens from now on comes with what everybody is told."""
        self._tell()
        prefix = request.prefix
        try:
            past = self.keyspace.changes(prefix, request.from_revision)
        except Compacted:
            connection.send_down(("compacted", number, prefix), is_event=True)
            return
        self._watchers[prefix][connection] = None
        connection.prefixes.add(prefix)
        connection.send_down(("reply", number, None, request), is_event=True)
        connection.send_down(("past", prefix, self.keyspace.revision, past), is_event=True)

    def _resume(self, connection: Connection, token: str, sent_at: float, lease: int, now: float) -> None:
        self._heard[lease] = self.world.now - self._absences_s
        known = self._sessions.resume(token, now)
        if known is not None:
            old = known.connection
            if old is not None and old is not connection and not self.is_replicated:
                old.server_open = False  # it is replaced
                self._forget(old)
            known.connection, connection.session = connection, known
        connection.send_down(("resumed", known is not None, sent_at, lease))

    def _on_gone(self, connection: Connection, now: float) -> None:
        """Its connection has ended, which says nothing about its owner."""
        self._forget(connection)
        session = connection.session
        if session is not None and session.connection is connection:
            self._sessions.leave(session, now)

    def _forget(self, connection: Connection) -> None:
        self._connections.pop(connection, None)
        for prefix in connection.prefixes:
            self._watchers[prefix].pop(connection, None)
