"""The coordination store of a job, as an interface: what an engine must offer so that a job can be run on it.

An engine is used by one thread at a time. Its calls wait, at most until their deadline, a time of ``time.monotonic()``. Watched
changes come through `take_events`; `fileno` says when to look. An engine keeps the lease that it granted alive by itself
whenever it is called, so whoever holds a lease calls `take_events` when `wake_at` says.

`rallypoint.testing.coordination_contract` has the tests that every engine has to pass.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from rallypoint.base.records import Value
from rallypoint.coordination.fence import Connection
from rallypoint.coordination.model import Event, Outcome, Put, Snapshot, Transaction
from rallypoint.errors import RallypointError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "CompactedError", "Coordination", "CoordinationError", "LeaseLostError", "RefusedError", "StoreGoneError",
    "StoreReplacedError", "Testimony", "UnreachableError", "uses_foreign_lease",
]  # fmt: skip


class CoordinationError(RallypointError):
    """The base of what can go wrong between a node and its coordination store."""


class UnreachableError(CoordinationError):
    """The store did not answer in time. Whether it has done what it was asked for is unknown; it may be asked again."""


class RefusedError(CoordinationError):
    """The store will not serve us: another job's, another version, no secret or the wrong one. Asking again does not help."""


class StoreGoneError(CoordinationError):
    """The store that we knew has ended: another one answers at its address, or its host said that it ends."""


class StoreReplacedError(StoreGoneError):
    """The store that we knew has ended, and was started anew: another of the same job answers at its address."""


class LeaseLostError(CoordinationError):
    """Our lease has ended, and with it all that was bound to it: the others take us for dead."""


class CompactedError(CoordinationError):
    """Changes that were asked for are no longer remembered: read, and watch from there."""


class Testimony(Value):
    """What a warden needs to tell the store that nothing is left of its node; see `coordination.testimony`."""

    kind: str
    addresses: tuple[Any, ...]  # to be tried, one after the other
    details: tuple[Any, ...]

    def fields(self) -> tuple[Any, ...]:
        """As they are written down for the warden."""
        return self.kind, self.addresses, *self.details


class Coordination(ABC):
    """One node's way to the coordination store."""

    @abstractmethod
    def transact(self, transaction: Transaction, deadline: float) -> Outcome:
        """Do `transaction`, as one change. `Put.lease` must be 0 or the lease of this node, else LeaseLostError."""

    @abstractmethod
    def read(self, prefix: str, deadline: float) -> Snapshot:
        """All items under `prefix`."""

    @abstractmethod
    def watch(self, prefix: str, from_revision: int, deadline: float) -> None:
        """From now on `take_events` gives the changes under `prefix` from `from_revision` on; CompactedError if they are gone.

        A prefix is watched once; watching it again begins anew at the revision given.
        """

    @abstractmethod
    def unwatch(self, prefix: str) -> None:
        """Nothing more of `prefix`."""

    @abstractmethod
    def grant(self, ttl_s: float, deadline: float) -> int:
        """A new lease for this node, kept alive from now on; its number. There is one at a time."""

    @abstractmethod
    def revoke(self, deadline: float) -> None:
        """End the lease; what is bound to it is deleted, as by a transaction ("deleted")."""

    @abstractmethod
    def take_events(self) -> list[Event]:
        """What has come since the last call, in order, without waiting; sends what is due to keep the lease.

        Raises LeaseLostError once the lease is known to have ended, UnreachableError while there is no connection (it goes on
        trying, and calling it again is how to go on), StoreGoneError or RefusedError when trying is over.
        """

    @abstractmethod
    def fileno(self) -> int:
        """Readable when `take_events` may have something; may change after every call."""

    @abstractmethod
    def wake_at(self) -> float:
        """When `take_events` is to be called at the latest, on time.monotonic()."""

    @abstractmethod
    def valid_until(self) -> float:
        """Until when, on time.monotonic(), nobody can have taken this node for dead: from then on its workers must not run.

        Counted from when the last keepalive that was answered was *sent*. Infinite while there is no lease.
        """

    def may_return_until(self) -> float:
        """Until when a node whose lease has ended cannot have been replaced, so that it may go on with a new one.

        That is so only where nodes have agreed to wait for longer than a lease.
        """
        return -math.inf

    def connection(self) -> Connection:
        """How things stand, for the fence; an engine that knows since when its connection is broken, and why, says so."""
        return Connection(self.valid_until())

    @abstractmethod
    def local_address(self) -> str:
        """The address of this node from which it reaches the store, so that peers can reach it there."""

    @abstractmethod
    def identity(self) -> str:
        """What distinguishes this store from any other that ever served this job: its incarnation or cluster id."""

    def testimony(self, will: Transaction | None = None) -> Testimony | None:
        """What the warden of this node needs to tell the store that all of its processes are gone, for the lease that it has now.

        `will` is what is to be written then, in a store that cannot itself tell others why a lease has ended. None where there is
        no lease, or where the store does not listen to wardens.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """End the connection. Whoever holds a lease revokes it first, or is taken for dead a little later."""


def uses_foreign_lease(transaction: Transaction, own: int) -> bool:
    """Whether a put of it names another lease than `own`."""
    operations = (*transaction.then, *transaction.otherwise)
    return any(isinstance(operation, Put) and operation.lease not in (0, own) for operation in operations)
