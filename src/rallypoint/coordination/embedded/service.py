"""What the store does for its clients: their requests, put to the keyspace, and the changes that they watch.

It knows connections, but no sockets and no clock. A request that breaks the rules raises RequestError, which ends the
connection; one that cannot be done is answered with ``[number, "error", kind, text]``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

from rallypoint.coordination.embedded import wire
from rallypoint.coordination.embedded.handshake import Owner
from rallypoint.coordination.embedded.wire import RequestError, encode, encode_in_parts, number, text
from rallypoint.coordination.keyspace import Compacted, Keyspace, UnknownLease
from rallypoint.coordination.model import Event, Put, Transaction

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.coordination.embedded.server import Connection

    Prefixes = frozenset[str]
    Handler = Callable[[Connection, "Session", int, list[object]], None]

__all__ = ["Session", "Sessions", "StoreService", "Watchers"]

TOKEN_BYTES = 16
FORGET_AFTER_S = 60.0  # who has not come back by then has long lost its lease
MOST_AWAY = 16_384
KEYSPACE_BYTES = 64 * 1024 * 1024
FEW_ITEMS = 16  # an answer of so few is written down at once
TOKEN_CHARACTERS = 64


class Watchers:
    """The prefixes that each connection watches, and the connections of each set of prefixes.

    Connections that watch the same prefixes are one *group*: what they are told is the same, so it is written down once for all
    of them. A change finds its groups by the beginnings of its key, so that it costs the same however many groups there are.
    """

    def __init__(self) -> None:
        self._prefixes: dict[Connection, Prefixes] = {}
        self._members: dict[Prefixes, dict[Connection, None]] = {}  # a dict, for its order: all is told in the same one again
        self._groups: dict[str, dict[Prefixes, None]] = {}  # by each of their prefixes
        self._lengths: dict[int, int] = {}  # of those prefixes, and how many have it

    def __len__(self) -> int:
        return len(self._prefixes)

    def of(self, connection: Connection) -> Prefixes:
        return self._prefixes.get(connection, frozenset())

    def assign(self, connection: Connection, prefixes: Prefixes) -> None:
        """From now on `connection` watches exactly these."""
        if old := self._prefixes.pop(connection, None):
            self._members[old].pop(connection, None)
            if not self._members[old]:
                self._remove_group(old)
        if prefixes:
            self._prefixes[connection] = prefixes
            if prefixes not in self._members:
                self._add_group(prefixes)
            self._members[prefixes][connection] = None

    def route(self, events: Iterable[Event]) -> Iterator[tuple[list[Event], Iterable[Connection]]]:
        """For each group that is concerned, what it is to be told, in order, and who belongs to it."""
        told: dict[Prefixes, list[Event]] = {}
        for event in events:
            for group in self._concerned(event.key):
                told.setdefault(group, []).append(event)
        for group, its_events in told.items():
            yield its_events, self._members[group]

    def _concerned(self, key: str) -> dict[Prefixes, None]:
        found: dict[Prefixes, None] = {}
        for length in self._lengths:
            if length <= len(key):
                found |= self._groups.get(key[:length], {})
        return found

    def _add_group(self, prefixes: Prefixes) -> None:
        self._members[prefixes] = {}
        for prefix in prefixes:
            if prefix not in self._groups:
                self._groups[prefix] = {}
                self._lengths[len(prefix)] = self._lengths.get(len(prefix), 0) + 1
            self._groups[prefix][prefixes] = None

    def _remove_group(self, prefixes: Prefixes) -> None:
        del self._members[prefixes]
        for prefix in prefixes:
            self._groups[prefix].pop(prefixes, None)
            if not self._groups[prefix]:
                del self._groups[prefix]
                self._lengths[len(prefix)] -= 1
                if not self._lengths[len(prefix)]:
                    del self._lengths[len(prefix)]


def new_token() -> str:
    return os.urandom(TOKEN_BYTES).hex()


class Session:
    """Begins with a welcome and outlives its connection while it has a lease, which is 0 while it has none.

    Whoever knows its token, a random number that only its owner was told, may take it up on a new connection. As tokens can be
    overheard, who has not proven to know the secret takes up none that was begun by somebody who had.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self.is_proven = False
        self.connection: Connection | None = None
        self.lease = 0
        self.left_at = 0.0


class Sessions:
    """The sessions that have a lease, by their tokens."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._sessions: dict[str, Session] = {}
        self._by_lease: dict[int, Session] = {}  # the same
        self._away: dict[str, Session] = {}  # the same that have no connection, in the order in which they lost it

    def __len__(self) -> int:
        return len(self._sessions)

    def grant(self, session: Session, ttl_s: float, now: float) -> int:
        """A new lease, in place of the one that it had."""
        self.revoke(session)
        session.lease = self._keyspace.grant(ttl_s, now)
        self._sessions[session.token] = self._by_lease[session.lease] = session
        return session.lease

    def revoke(self, session: Session) -> None:
        if session.lease:
            self._keyspace.revoke(session.lease)
            self._forget(session)

    def keep(self, session: Session, now: float) -> bool:
        """Whether it has a lease still, which then lives on."""
        return bool(session.lease) and self._keyspace.keep_alive(session.lease, now)

    def owner_of(self, lease: int) -> Owner | None:
        """Of the session that has this lease; None if it has ended."""
        session = self._by_lease.get(lease)
        return Owner(session.token, session.is_proven) if session is not None and self._keyspace.has_lease(lease) else None

    def leave(self, session: Session, now: float) -> None:
        """Its connection has ended, which says nothing about its owner; with a lease it may come back."""
        session.connection = None
        if session.lease:
            session.left_at = now
            self._away[session.token] = session
        self._forget_those_away(now)

    def resume(self, token: str, is_proven: bool, now: float) -> Session | None:
        """The session of that token, if its lease lives."""
        session = self._sessions.get(token)
        if session is None or session.is_proven > is_proven or not self._keyspace.keep_alive(session.lease, now):
            return None
        self._away.pop(token, None)
        return session

    def _forget(self, session: Session) -> None:
        self._sessions.pop(session.token, None)
        self._away.pop(session.token, None)
        self._by_lease.pop(session.lease, None)
        session.lease = 0

    def _forget_those_away(self, now: float) -> None:
        while self._away:
            oldest = next(iter(self._away.values()))
            if now - oldest.left_at < FORGET_AFTER_S and len(self._away) <= MOST_AWAY:
                return
            self._forget(oldest)


class StoreService:
    """The store without its network. `touched` are the connections that something was said to."""

    def __init__(self, keyspace: Keyspace, keyspace_bytes: int = KEYSPACE_BYTES) -> None:
        self.keyspace = keyspace
        self.sessions = Sessions(keyspace)
        self._keyspace_bytes = keyspace_bytes
        self._watchers = Watchers()
        self._told_revision = keyspace.revision
        self._now = 0.0
        self.touched: set[Connection] = set()
        self._replaced: list[Connection] = []
        self._handlers: dict[str, tuple[int, Handler]] = {
            "transact": (3, self._transact),
            "read": (1, self._read),
            "watch": (2, self._watch),
            "unwatch": (1, self._unwatch),
            "grant": (1, self._grant),
            "keep": (1, self._keep),
            "revoke": (0, self._revoke),
            "resume": (1, self._resume),
        }

    # --- what the server calls ---------------------------------------------------------------------------------------------

    def serve(self, connection: Connection, body: bytes, now: float) -> None:
        """Do one request, and answer it."""
        self._now = now
        request_id, what, *arguments = wire.decode(body)
        count, handler = self._handlers.get(what, (-1, self._transact))
        if count != len(arguments):
            raise RequestError("unknown request")
        handler(connection, connection.session, request_id, arguments)

    def leave(self, connection: Connection, now: float) -> None:
        """The connection has ended."""
        self._watchers.assign(connection, frozenset())
        if connection.session.connection is connection:
            self.sessions.leave(connection.session, now)

    def take_replaced(self) -> list[Connection]:
        """The connections that gave way to a new one of the same session, to be closed."""
        replaced, self._replaced = self._replaced, []
        return replaced

    def is_lost(self, session: Session) -> bool:
        return bool(session.lease) and not self.keyspace.has_lease(session.lease)

    def tick(self, now: float) -> None:
        """End what is over, and tell everybody what has changed."""
        self.keyspace.tick(now)
        self.tell()

    def tell(self) -> None:
        """All that has changed since the last time, to those that watch it: written down once for each group of them."""
        events = self.keyspace.take_changes()
        self._told_revision = self.keyspace.revision
        if not events:
            return
        for its_events, members in self._watchers.route(events):
            bodies = list(encode_in_parts((0, "events", self._told_revision), its_events))
            for connection in members:
                self.touched.add(connection)
                for body in bodies:
                    connection.send(body)

    # --- requests ----------------------------------------------------------------------------------------------------------

    def _transact(self, connection: Connection, session: Session, request_id: int, arguments: list[object]) -> None:
        transaction = wire.decode_transaction(*arguments)
        if (error := self._objection(transaction, session)) is not None:
            connection.send(encode([request_id, "error", *error]))
            return
        try:
            outcome = self.keyspace.transact(transaction)
        except UnknownLease as unknown:
            connection.send(encode([request_id, "error", "lease", str(unknown)]))
        except ValueError as invalid:
            connection.send(encode([request_id, "error", "invalid", str(invalid)]))
        else:
            answer = (request_id, "outcome", outcome.succeeded, outcome.revision)
            if len(outcome.items) <= FEW_ITEMS and sum(len(item.value) for item in outcome.items if item) < 4096:
                connection.send(encode([*answer, [wire.encode_item(item) for item in outcome.items]]))
            else:
                connection.send_each(encode_in_parts(answer, outcome.items))

    def _objection(self, transaction: Transaction, session: Session) -> tuple[str, str] | None:
        """The kind of error and the text, if this session may not do this, or there is no room for it."""
        room = self._keyspace_bytes - self.keyspace.size_bytes
        for operation in (*transaction.then, *transaction.otherwise):
            if isinstance(operation, Put):
                if operation.lease and operation.lease != session.lease:
                    return "lease", f"lease {operation.lease} is not this node's"
                room -= len(operation.value) + len(operation.key)
                if room < 0:
                    return "full", f"the store is full: it holds at most {self._keyspace_bytes} bytes"
        return None

    def _read(self, connection: Connection, session: Session, request_id: int, arguments: list[object]) -> None:
        snapshot = self.keyspace.read(text(arguments[0]))
        connection.send_each(encode_in_parts((request_id, "snapshot", snapshot.revision), snapshot.items))

    def _watch(self, connection: Connection, session: Session, request_id: int, arguments: list[object]) -> None:
        """What has happened goes out first, on its own; what happens from now on comes with what its group is told."""
        prefix, from_revision = text(arguments[0]), number(arguments[1])
        self.tell()
        prefixes = self._watchers.of(connection) | {prefix}
        if len(prefixes) > wire.MOST_WATCHES:
            raise RequestError(f"more than {wire.MOST_WATCHES} watches")
        try:
            events = self.keyspace.changes(prefix, from_revision)
        except Compacted as compacted:
            connection.send(encode([request_id, "error", "compacted", str(compacted)]))
            return
        self._watchers.assign(connection, prefixes)
        connection.send(encode([request_id, "watching"]))
        connection.send_each(encode_in_parts((0, "past", prefix, self._told_revision), events))

    def _unwatch(self, connection: Connection, session: Session, request_id: int, arguments: list[object]) -> None:
        self._watchers.assign(connection, self._watchers.of(connection) - {text(arguments[0])})
        connection.send(encode([request_id, "done"]))

    def _grant(self, connection: Connection, session: Session, request_id: int, arguments: list[object]) -> None:
        lease = self.sessions.grant(session, wire.seconds(arguments[0]), self._now)
        connection.send(encode([request_id, "granted", lease]))

    def _keep(self, connection: Connection, session: Session, request_id: int, arguments: list[object]) -> None:
        """The answer says too up to which revision the client has been told everything, which helps it after a break."""
        is_kept = session.lease == number(arguments[0]) and self.sessions.keep(session, self._now)
        connection.send(encode([request_id, "kept", is_kept, self._told_revision]))

    def _revoke(self, connection: Connection, session: Session, request_id: int, arguments: list[object]) -> None:
        self.sessions.revoke(session)
        connection.send(encode([request_id, "done"]))

    def _resume(self, connection: Connection, session: Session, request_id: int, arguments: list[object]) -> None:
        """A client is back on a new connection. The old one may still look alive from here: it is replaced."""
        token = arguments[0]
        if type(token) is not str or len(token) > TOKEN_CHARACTERS or session.lease:
            raise RequestError("nothing to take up")
        known = self.sessions.resume(token, session.is_proven, self._now)
        connection.send(encode([request_id, "resumed", 0 if known is None else known.lease]))
        if known is not None:
            if known.connection is not None:
                self._replaced.append(known.connection)
            known.connection, connection.session = connection, known
