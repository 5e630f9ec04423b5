"""A job's coordination store on an etcd v3 cluster, through the JSON gateway that each of its members has.

Calls are made in the owner's thread. A thread keeps the lease and looks after the way to the cluster, another one reads each
watch (`threads`); what they find is taken with `take_events`. All of them use one endpoint, and go to another one together.
`EtcdCell` is the same cluster for those who want no more than one key of it.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import contextmanager
from zlib import crc32

from rallypoint.coordination.engine import (
    Coordination,
    CoordinationError,
    LeaseLostError,
    RefusedError,
    StoreGoneError,
    Testimony,
    UnreachableError,
    uses_foreign_lease,
)
from rallypoint.coordination.etcd.codec import Malformed, Words, encode, number, revision_of
from rallypoint.coordination.etcd.errors import EtcdError
from rallypoint.coordination.etcd.gateway import AUTHENTICATE, GRANT, RANGE, TXN, Answer, Caller, EtcdAccess, EtcdCluster
from rallypoint.coordination.etcd.threads import EtcdWatch, Keeper, Reports
from rallypoint.coordination.fence import Connection, HeldLease
from rallypoint.coordination.model import Compare, Delete, EndLease, Event, Get, Item, Outcome, Put, Snapshot, Transaction
from rallypoint.coordination.testimony import ETCD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rallypoint.coordination.etcd.codec import Fields

    Clock = Callable[[], float]

__all__ = ["EtcdCell", "EtcdCoordination"]

PUT, REVOKE = "/v3/kv/put", "/v3/lease/revoke"
FAREWELL_S = 60  # how long it is remembered that a lease was given back
MOST_WATCHES = 16
LONGEST_TESTIMONY = 3500  # bytes, of the page that an agent and its warden share


class EtcdCoordination(Coordination):
    """One node's part in what stands under `prefix`; keys are given and shown without it. `connect` comes first.

    With `fence_s` the others have agreed to wait so long, counted from the last that they can have heard of a node, until they
    act as if it were dead, also when its lease is over earlier.
    """

    def __init__(self, access: EtcdAccess, prefix: str, *, fence_s: float = 0.0, clock: Clock = time.monotonic) -> None:
        self._fence_s = fence_s
        self._prefix = prefix
        self._words = Words(prefix)
        self._cluster = EtcdCluster(access, clock)
        self._cluster.on_move = self._move_watches
        self._caller = Caller(self._cluster)
        self._reports = Reports()
        self._began = clock()
        self._reports.trouble(self, self._began, "no answer yet")
        self._keeper = Keeper(self._cluster, self._words, self._reports)
        self._watches: dict[str, EtcdWatch] = {}
        self._retired: list[EtcdWatch] = []  # which nobody wants any more, but whose threads may not have ended
        self._revision = 0
        self._is_connected = self._is_closed = False

    def connect(self, deadline: float) -> None:
        """Find a member that serves us, of a cluster that has a leader."""
        try:
            with self._serving():
                self._note_revision(self._caller.call(RANGE, self._words.presence(), deadline))
        except UnreachableError as error:
            if not self._is_connected:
                self._reports.trouble(self, self._began, str(error))
            raise
        self._is_connected = True
        self._reports.fine(self)
        self._keeper.start()

    # --- the store ---------------------------------------------------------------------------------------------------------

    def transact(self, transaction: Transaction, deadline: float) -> Outcome:
        lease = self._keeper.lease
        if uses_foreign_lease(transaction, lease.number if lease is not None and not lease.is_lost else 0):
            raise LeaseLostError("a put names a lease that is not this node's, or that has ended")
        operations = (*transaction.then, *transaction.otherwise)
        changes_nothing = not any(isinstance(operation, Put | Delete) for operation in operations)
        question = self._words.transaction(transaction)
        with self._serving():
            outcome = self._words.outcome(self._ask(TXN, question, deadline, is_repeatable=changes_nothing))
            for operation in transaction.then if outcome.succeeded else transaction.otherwise:
                if isinstance(operation, EndLease):  # whoever finds a lease that should have ended, ends it again
                    self._end_lease(operation.lease, deadline)
        return outcome

    def read(self, prefix: str, deadline: float) -> Snapshot:
        with self._serving():
            return self._words.snapshot(self._ask(RANGE, self._words.reading(prefix), deadline))

    # --- watches -----------------------------------------------------------------------------------------------------------

    def watch(self, prefix: str, from_revision: int, deadline: float) -> None:
        if prefix not in self._watches and len(self._watches) >= MOST_WATCHES:
            raise ValueError(f"more than {MOST_WATCHES} watches")
        self.unwatch(prefix)
        watch = EtcdWatch(prefix, from_revision, self._cluster, self._words, self._reports)
        try:
            with self._serving():
                self._connect_if_need_be(deadline)
                watch.open(self._caller, deadline)
        except BaseException:  # whatever it was, nothing half done may stay; it is raised again
            watch.join()
            raise
        self._watches[prefix] = watch
        self._reports.expect(watch)
        watch.start()
        watch.look_around()  # the home may have changed while nobody knew of this watch
        self._keeper.vouch(True)

    def unwatch(self, prefix: str) -> None:
        watch = self._watches.pop(prefix, None)
        if watch is not None:
            self._reports.drop(watch)
            watch.stop()
            self._retired.append(watch)
        self._retired = [one for one in self._retired if not (one.has_ended and one.join())]
        self._keeper.vouch(bool(self._watches))

    def _move_watches(self) -> None:
        for watch in list(self._watches.values()):
            watch.look_around()

    def take_events(self) -> list[Event]:
        self._keeper.attend()
        if self._keeper.is_lease_lost:
            raise LeaseLostError(f"the lease of this node in etcd at {self._where()} has ended")
        return self._reports.take()

    # --- the lease ---------------------------------------------------------------------------------------------------------

    def grant(self, ttl_s: float, deadline: float) -> int:
        """The lease that we had, and until when it was good, is forgotten only when the new one is there."""
        with self._serving():
            self._connect_if_need_be(deadline)
            lease = self._new_lease(math.ceil(ttl_s), deadline)
            self._bind(lease.number, lease.number, deadline)
            self._keeper.hold(lease)
        return lease.number

    def revoke(self, deadline: float) -> None:
        """Whatever comes of it, the lease is not ours any more: once the others may think that we left, we must have."""
        lease = self._keeper.lease
        if lease is not None and not lease.is_lost:
            self._keeper.give_back()
            with self._serving():
                farewell = self._new_lease(FAREWELL_S, deadline)
                self._bind(lease.number, farewell.number, deadline)
                self._end_lease(lease.number, deadline)
        self._keeper.hold(None)

    def valid_until(self) -> float:
        """Also of a lease that has ended: the others wait for as long as the fence is."""
        lease = self._keeper.lease
        return math.inf if lease is None else lease.renewed_until() + max(0.0, self._fence_s - lease.ttl_s)

    def may_return_until(self) -> float:
        return -math.inf if self._keeper.lease is None else self.valid_until()

    def _new_lease(self, ttl_s: int, deadline: float) -> HeldLease:
        answer = self._caller.call(GRANT, {"TTL": str(ttl_s)}, deadline)
        return HeldLease(number(answer.fields, "ID"), number(answer.fields, "TTL"), answer.sent_at)

    def _bind(self, lease: int, to_lease: int, deadline: float) -> None:
        """Bind the key by which others tell why the keys of `lease` have gone."""
        self._caller.call(PUT, {"key": self._words.lease_key(lease), "lease": str(to_lease)}, deadline)

    def _end_lease(self, lease: int, deadline: float) -> None:
        try:
            self._caller.call(REVOKE, {"ID": str(lease)}, deadline)
        except EtcdError as error:
            if not error.is_lease_gone:
                raise

    def testimony(self, will: Transaction | None = None) -> Testimony | None:
        """That the lease is over stands for itself; the will, which comes first, says that nobody need wait for the fence."""
        lease, access = self._keeper.lease, self._cluster.access
        if lease is None or lease.is_lost:
            return None
        requests = [] if will is None else [(TXN, encode(self._words.transaction(will)))]
        requests.append((REVOKE, encode({"ID": str(lease.number)})))
        tls = (access.ca_cert, access.cert, access.key) if access.protocol == "https" else None
        login = None
        if access.user is not None:
            login = AUTHENTICATE, encode({"name": access.user, "password": access.password or ""})
        endpoints = tuple(access.endpoints[index] for index in self._cluster.order())
        details = tls, login, tuple(requests)
        return Testimony(ETCD, endpoints, details) if len(repr((endpoints, details))) <= LONGEST_TESTIMONY else None

    # --- being a client ----------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._reports.wake_fd.fileno()

    def wake_at(self) -> float:
        return 0.0 if self._reports.has_news or self._keeper.is_lease_lost else self._keeper.keep_at()

    def connection(self) -> Connection:
        """A cluster whose members all refuse connections may be starting again: that counts as silence, not as its end."""
        since, trouble = self._reports.oldest_trouble()
        return Connection(self.valid_until(), since, None, trouble)

    def local_address(self) -> str:
        return self._cluster.local_address

    def identity(self) -> str:
        """Of the cluster, and of the part of it that is ours."""
        return f"{self._cluster.id:016x}{crc32(self._prefix.encode()):08x}" if self._cluster.id else ""

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        watches = [*self._watches.values(), *self._retired]
        for watch in watches:
            watch.stop()
        self._keeper.stop()
        for watch in watches:
            watch.join()
        self._caller.hang_up()
        self._reports.wake_fd.close()

    # --- calls -------------------------------------------------------------------------------------------------------------

    def _ask(self, path: str, question: Fields, deadline: float, *, is_repeatable: bool = True) -> Fields:
        self._connect_if_need_be(deadline)
        return self._note_revision(self._caller.call(path, question, deadline, is_repeatable=is_repeatable))

    def _connect_if_need_be(self, deadline: float) -> None:
        if not self._is_connected:
            self.connect(deadline)

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """The owner's calls: its lease is kept meanwhile, and errors become those that it knows."""
        try:
            with self._keeper.attended():
                yield
        except EtcdError as error:
            raise self._error(error) from None
        except Malformed as error:
            raise RefusedError(f"etcd at {self._where()} gives {error}") from None
        except UnreachableError:
            self._keeper.check_soon()
            raise

    def _error(self, error: EtcdError) -> Exception:
        if error.is_lease_gone:
            self._keeper.lose()
            return LeaseLostError(f"etcd at {self._where()} does not know the lease of this node: it has ended")
        if error.is_bad_request:
            return ValueError(f"etcd does not take the request: {error}")
        return RefusedError(f"etcd at {self._where()} refuses the request: {error}")

    def _note_revision(self, answer: Answer) -> Fields:
        """Revisions only grow; unless the cluster was started anew, without what it knew, or from a copy."""
        revision = revision_of(answer.fields)
        if revision < self._revision:
            raise StoreGoneError(
                f"etcd at {self._where()} has gone back from revision {self._revision} to {revision}:"
                " it was started anew without its data, or from a copy of it; the job ends here"
            )
        self._revision = revision
        return answer.fields

    def _where(self) -> str:
        return self._cluster.names[self._cluster.home]


class EtcdCell:
    """The key `name` under `prefix`: a cell of bytes with a version, without a thread of its own.

    It is gone when nobody has written it for `ttl_s`, or for half of that.
    """

    def __init__(self, access: EtcdAccess, prefix: str, name: str, ttl_s: float) -> None:
        self._words = Words(f"{prefix}/")
        self._cluster = EtcdCluster(access)
        self._caller = Caller(self._cluster)
        self._key, self._ttl_s = name, ttl_s
        self._timeout_s = access.read_timeout_s
        self._lease, self._lease_from = 0, 0.0
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self.close()

    def close(self) -> None:
        """End the connection; the next call opens another."""
        self._caller.hang_up()

    def get(self) -> Item | None:
        return self._ask(Transaction((), (Get(self._key),))).items[0]

    def put(self, value: bytes, mod_revision: int) -> tuple[bool, Item | None]:
        """Write it if it was last changed at that revision, 0 if there is none; whether that was so, and what is there now."""
        with self._lock:
            lease = self._current_lease()
        unchanged = Compare(self._key, "mod", mod_revision)
        outcome = self._ask(Transaction((unchanged,), (Put(self._key, value, lease), Get(self._key)), (Get(self._key),)))
        return outcome.succeeded, outcome.items[0]

    def _current_lease(self) -> int:
        """One for all that is written within half of its time."""
        now = time.monotonic()
        if not self._lease or now >= self._lease_from + self._ttl_s / 2:
            answer = self._call(GRANT, {"TTL": str(math.ceil(self._ttl_s))}, is_repeatable=True)
            self._lease, self._lease_from = number(answer, "ID"), now
        return self._lease

    def _ask(self, transaction: Transaction) -> Outcome:
        changes_nothing = all(isinstance(operation, Get) for operation in transaction.then)
        with self._lock:
            answer = self._call(TXN, self._words.transaction(transaction), is_repeatable=changes_nothing)
        return self._words.outcome(answer)

    def _call(self, path: str, question: dict[str, object], *, is_repeatable: bool) -> dict[str, object]:
        """A lease that etcd has forgotten is asked for anew the next time."""
        try:
            return self._caller.call(path, question, time.monotonic() + self._timeout_s, is_repeatable=is_repeatable).fields
        except EtcdError as error:
            self._lease = 0 if error.is_lease_gone else self._lease
            raise RefusedError(f"etcd refuses the request: {error}") from error
        except Malformed as error:
            raise CoordinationError(f"etcd gives {error}") from error
