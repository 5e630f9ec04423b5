"""Who a connection belongs to, and which lease is whose.

A session begins with a welcome and outlives its connection while it has a lease: whoever knows its token, a random number that
only its owner was told, may take it up on a new connection. A lease is used by its session only.
"""

from __future__ import annotations

import os

from rallypoint.core.keyspace import Keyspace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.store.connection import Connection

__all__ = ["Session", "Sessions"]

TOKEN_BYTES = 16
FORGET_AFTER_S = 60.0  # who has not come back by then has long lost its lease
MOST_AWAY = 16_384


def new_token() -> str:
    return os.urandom(TOKEN_BYTES).hex()


class Session:
    """`lease` is 0 while it has none; `connection` is None while it has none."""

    def __init__(self, token: str) -> None:
        self.token = token
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

    def token_of(self, lease: int) -> str | None:
        """The token of the session that has this lease; None if it has ended."""
        session = self._by_lease.get(lease)
        return session.token if session is not None and self._keyspace.has_lease(lease) else None

    def leave(self, session: Session, now: float) -> None:
        """Its connection has ended, which says nothing about its owner; with a lease it may come back."""
        session.connection = None
        if session.lease:
            session.left_at = now
            self._away[session.token] = session
        self._forget_those_away(now)

    def resume(self, token: str, now: float) -> Session | None:
        """The session of that token, if its lease lives."""
        session = self._sessions.get(token)
        if session is None or not self._keyspace.resume(session.lease, now):
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
