"""A coordination store inside one process: the real rules, without a server, for quick tests and as an example of an engine.

Time is real. There is no thread that could be late: whoever calls a client first brings the store up to date, ending each lease
at the moment at which a punctual server would have. A client can be cut off, so that a program can be shown how that is:

    store = MemoryEngine()
    one, other = store.connect(), store.connect()
    one.disconnect()           # nothing of it arrives any more: the others learn it when its lease has run out
    store.vouch(one)           # whoever must know says that it is gone: they learn it at once
    one.reconnect()            # in time, or it has lost its lease
    store.close()
"""

from __future__ import annotations

import math
import os
import threading
import time
from contextlib import contextmanager

from rallypoint.coordination.engine import CompactedError, Coordination, LeaseLostError, UnreachableError, uses_foreign_lease
from rallypoint.coordination.fence import Connection
from rallypoint.coordination.keyspace import Compacted, Keyspace, UnknownLease
from rallypoint.coordination.model import Event, Outcome, Snapshot, Transaction
from rallypoint.net.wake_fd import WakeFd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MemoryCoordination", "MemoryEngine"]

KEEPALIVES_PER_TTL = 3
DISCONNECTED = "this client was disconnected from the store in memory"


class MemoryEngine:
    """The store, with all its clients; these may be used by several threads, one thread each."""

    def __init__(self) -> None:
        self.identity = os.urandom(8).hex()
        self.keyspace = Keyspace()
        self.clients: list[MemoryCoordination] = []
        self._lock = threading.Lock()

    def connect(self) -> MemoryCoordination:
        """A new client."""
        client = MemoryCoordination(self)
        with self._lock:
            self.clients.append(client)
        return client

    def vouch(self, client: MemoryCoordination) -> None:
        """Testify that all processes of this client are gone."""
        with self.at_work():
            self.keyspace.vouch(client.lease)

    def close(self) -> None:
        """Close all clients."""
        for client in list(self.clients):
            client.close()

    @contextmanager
    def at_work(self) -> Iterator[float]:
        """The store for one caller alone, up to date; the time. Afterwards whoever watches what was changed is woken."""
        with self._lock:
            now = time.monotonic()
            self._catch_up(now)
            try:
                yield now
            finally:
                self._wake(self.keyspace.take_changes())

    def _catch_up(self, now: float) -> None:
        while (due := self.keyspace.next_expiry()) is not None and due <= now:
            self.keyspace.tick(due)
        self.keyspace.tick(now)

    def _wake(self, events: list[Event]) -> None:
        for client in self.clients if events else ():
            client.wake(events)


class MemoryCoordination(Coordination):
    """One client of a `MemoryEngine`."""

    def __init__(self, engine: MemoryEngine) -> None:
        self._engine = engine
        self._keyspace = engine.keyspace
        self._wake_fd = WakeFd()
        self._next_revisions: dict[str, int] = {}  # by watched prefix, the first that was not told
        self._unreachable_since: float | None = None
        self._is_closed = False
        self._lease, self._ttl_s, self._renewed_at, self._is_lost = 0, math.inf, 0.0, False

    # --- the store ---------------------------------------------------------------------------------------------------------

    def transact(self, transaction: Transaction, deadline: float) -> Outcome:
        with self._served():
            if uses_foreign_lease(transaction, self._lease):
                raise LeaseLostError("a put names a lease that is not this node's")
            try:
                return self._keyspace.transact(transaction)
            except UnknownLease as error:
                raise LeaseLostError(str(error)) from error

    def read(self, prefix: str, deadline: float) -> Snapshot:
        with self._served():
            return self._keyspace.read(prefix)

    # --- watches -----------------------------------------------------------------------------------------------------------

    def watch(self, prefix: str, from_revision: int, deadline: float) -> None:
        with self._served():
            if self._changes(prefix, from_revision):
                self._wake_fd.set()
            self._next_revisions[prefix] = from_revision

    def unwatch(self, prefix: str) -> None:
        self._next_revisions.pop(prefix, None)

    def take_events(self) -> list[Event]:
        with self._served():
            self._wake_fd.clear()
            if self._is_lost:
                raise LeaseLostError(f"lease {self._lease} has ended")
            taken = [event for watched in self._next_revisions.items() for event in self._changes(*watched)]
            for prefix, revision in self._next_revisions.items():
                self._next_revisions[prefix] = max(revision, self._keyspace.revision + 1)
        return sorted(taken, key=lambda event: event.revision)

    def wake(self, events: list[Event]) -> None:
        """The store has changed."""
        prefixes = tuple(self._next_revisions)
        if self._unreachable_since is None and any(event.key.startswith(prefixes) for event in events):
            self._wake_fd.set()

    # --- the lease ---------------------------------------------------------------------------------------------------------

    @property
    def lease(self) -> int:
        return self._lease

    def grant(self, ttl_s: float, deadline: float) -> int:
        with self._served() as now:
            self._lease = self._keyspace.grant(ttl_s, now)
            self._ttl_s, self._renewed_at, self._is_lost = ttl_s, now, False
            return self._lease

    def revoke(self, deadline: float) -> None:
        with self._served():
            self._keyspace.revoke(self._lease)
            self._lease, self._ttl_s, self._is_lost = 0, math.inf, False

    def valid_until(self) -> float:
        return self._renewed_at + self._ttl_s

    def connection(self) -> Connection:
        is_broken = self._unreachable_since is not None
        return Connection(self.valid_until(), self._unreachable_since, trouble=DISCONNECTED if is_broken else "")

    # --- being a client ----------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._wake_fd.fileno()

    def wake_at(self) -> float:
        """There is no server to notice in time that a lease of somebody else is over, so all clients look."""
        with self._engine.at_work():
            expiry = self._keyspace.next_expiry()
        keeps = self._unreachable_since is None and not self._is_lost
        keepalive = self._renewed_at + self._ttl_s / KEEPALIVES_PER_TTL if keeps else math.inf
        return min(keepalive, math.inf if expiry is None else expiry)

    def local_address(self) -> str:
        return "127.0.0.1"

    def identity(self) -> str:
        return self._engine.identity

    def close(self) -> None:
        if not self._is_closed:
            self.disconnect()
            with self._engine.at_work():
                self._engine.clients.remove(self)
                self._is_closed = True
                self._wake_fd.close()

    def disconnect(self) -> None:
        """From now on every call raises UnreachableError; the store notices only that nothing comes."""
        with self._engine.at_work() as now:
            self._unreachable_since = now

    def reconnect(self) -> None:
        """Go on; what was missed of the watches comes with the next events."""
        with self._engine.at_work() as now:
            self._unreachable_since = None
            self._renew(now)
            self._wake_fd.set()

    # --- one call ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _served(self) -> Iterator[float]:
        """One call on the store; like all that a node does, it keeps its lease."""
        with self._engine.at_work() as now:
            if self._unreachable_since is not None:
                raise UnreachableError(DISCONNECTED)
            self._renew(now)
            yield now

    def _renew(self, now: float) -> None:
        if self._lease and not self._is_lost:
            self._is_lost = not self._keyspace.keep_alive(self._lease, now)
            self._renewed_at = self._renewed_at if self._is_lost else now

    def _changes(self, prefix: str, from_revision: int) -> list[Event]:
        try:
            return self._keyspace.changes(prefix, from_revision)
        except Compacted as error:
            raise CompactedError(str(error)) from error
