"""The thread that keeps a node's lease in etcd, whatever the node's other connections are stuck in.

It says that the node lives when that is due and the node shows that it does: by calling its engine, or by being inside such a
call. A node that hangs is taken for dead. What counts is when the keepalive that was answered was *sent*.

It also looks after the way to the cluster. Watches say nothing for hours, and one at a paused or isolated member would go on
saying nothing; but all connections of a client lead to one endpoint, so its answers to keepalives vouch for its watches. Where
there are no keepalives, or few, it is asked how it is.
"""

from __future__ import annotations

import math
import threading
from contextlib import contextmanager

from rallypoint.base.backoff import jittered
from rallypoint.coordination.engine import RefusedError, StoreGoneError, UnreachableError
from rallypoint.coordination.etcd.codec import Malformed, Words, leases, number
from rallypoint.coordination.etcd.errors import EtcdError
from rallypoint.coordination.etcd.gateway import Caller
from rallypoint.coordination.etcd.http import Interrupted, is_set
from rallypoint.coordination.etcd.talk import PATIENCE_S, STATUS, EtcdCluster
from rallypoint.coordination.etcd.watch import Reports
from rallypoint.coordination.held_lease import HeldLease
from rallypoint.net.wake_fd import WakeFd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Keeper"]

KEEP_ALIVE, RANGE = "/v3/lease/keepalive", "/v3/kv/range"
TRY_S = 3.0  # after which a question that nobody has answered is trouble
RETRY_S = 0.2
PATIENCES_PER_TTL = 12  # so that two endpoints can be given up before the lease is over
CHECK_EVERY_S = 5.0  # while something is watched
JOIN_S = 5.0


class Keeper:
    """It begins with `start`. The lease is handed over by `hold`, and is None or lost when there is none to keep."""

    def __init__(self, cluster: EtcdCluster, words: Words, reports: Reports) -> None:
        self.lease: HeldLease | None = None
        self._words = words
        self._reports = reports
        self._clock = cluster.clock
        self._lock = threading.Lock()
        self._wake_fd, self._stop = WakeFd(), WakeFd()
        self._caller = Caller(cluster, self._stop)
        self._calls = 0  # of the owner, that are under way, one inside the other
        self._is_beat_due = self._is_check_due = self._is_vouching = self._is_stopped = False
        self._heard_at = self._clock()
        self._troubled_since: float | None = None
        self._retry_at = 0.0
        self._thread = threading.Thread(target=self._run, name="rallypoint-etcd-keeper", daemon=True)

    # --- for the owner -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        self._is_stopped = True
        self._stop.set()
        self._wake_fd.set()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            self._caller.hang_up()
            self._wake_fd.close()
            self._stop.close()

    def hold(self, lease: HeldLease | None) -> None:
        with self._lock:
            self.lease, self._is_beat_due = lease, False
        self._wake_fd.set()

    def lose(self) -> None:
        """The lease is over, as we have learnt elsewhere."""
        with self._lock:
            self._is_beat_due = False
            if self.lease is not None:
                self.lease.is_lost = True

    def give_back(self) -> None:
        with self._lock:
            self._is_beat_due = False
            if self.lease is not None:
                self.lease.give_back()

    @property
    def is_lease_lost(self) -> bool:
        return self.lease is not None and self.lease.is_lost

    def keep_at(self) -> float:
        """When the owner has to show itself."""
        lease = self.lease
        return math.inf if lease is None or lease.is_lost else lease.keep_at

    def attend(self) -> None:
        """The owner shows that it lives."""
        now = self._clock()
        with self._lock:
            is_due = now >= self.keep_at()
            if is_due:
                self._note_due(now)
        if is_due:
            self._wake_fd.set()

    @contextmanager
    def attended(self) -> Iterator[None]:
        """The owner is busy here, and lives."""
        self.attend()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    def check_soon(self) -> None:
        """Somebody could not reach the cluster."""
        self._is_check_due = True
        self._wake_fd.set()

    def vouch(self, is_wanted: bool) -> None:
        """Whether there are watches, which say nothing if nothing changes."""
        self._is_vouching = is_wanted
        self._wake_fd.set()

    # --- the thread --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                is_set(self._wake_fd, self._wait_s())
                self._wake_fd.clear()
                self._do_what_is_due()
        except Interrupted:
            return
        except (RefusedError, StoreGoneError) as end:
            self._reports.end(end)
        except Exception as bug:  # a node whose lease is not kept must not believe that it is
            self._reports.end(StoreGoneError(f"the lease of this node in etcd is not kept any more: {bug!r}"))

    def _wait_s(self) -> float:
        now = self._clock()
        if self._is_beat_due or self._is_check_due or self._troubled_since is not None:
            return max(0.0, self._retry_at - now)
        keep_at = self.keep_at()
        times = [keep_at if keep_at > now or self._calls else math.inf]
        if self._is_vouching:
            times.append(self._heard_at + CHECK_EVERY_S)
        return max(0.0, min(times) - now)

    def _do_what_is_due(self) -> None:
        now = self._clock()
        with self._lock:
            if self._calls and now >= self.keep_at():
                self._note_due(now)
            lease = self.lease if self._is_beat_due else None
        if now < self._retry_at or self._is_stopped:
            return
        if lease is not None and not lease.is_lost:
            self._try(now, lease)
        elif self._is_check_due or self._troubled_since is not None or self._is_silence_long(now):
            self._try(now, None)

    def _is_silence_long(self, now: float) -> bool:
        return self._is_vouching and now >= self._heard_at + CHECK_EVERY_S

    def _note_due(self, now: float) -> None:
        """The next time is counted from here, so that an owner whose keepalive is not answered is not woken at once again."""
        assert self.lease is not None
        self.lease.note_sent(now)
        self._is_beat_due = True

    def _try(self, now: float, lease: HeldLease | None) -> None:
        try:
            if lease is None:
                self._caller.call(STATUS, {}, now + TRY_S)
            else:
                self._keep(lease, now + TRY_S)
        except (UnreachableError, EtcdError, Malformed) as trouble:
            self._troubled_since = now if self._troubled_since is None else self._troubled_since
            self._retry_at = self._clock() + jittered(RETRY_S)
            self._reports.trouble(self, self._troubled_since, str(trouble))
        else:
            self._troubled_since, self._retry_at, self._heard_at = None, 0.0, self._clock()
            self._is_check_due = False
            self._reports.fine(self)

    def _keep(self, lease: HeldLease, deadline: float) -> None:
        patience_s = min(PATIENCE_S, lease.ttl_s / PATIENCES_PER_TTL)
        answer = self._caller.call(KEEP_ALIVE, {"ID": str(lease.number)}, deadline, patience_s=patience_s)
        ttl_s = number(answer.fields, "TTL")
        is_kept = ttl_s > 0
        if not is_kept and self._is_bound(lease, deadline):
            raise UnreachableError("etcd does not know the lease of this node, but has not ended it either")
        with self._lock:
            lease.ttl_s = ttl_s or lease.ttl_s
            lease.note_answer(answer.sent_at, is_kept)
            self._is_beat_due = self._is_beat_due and self.lease is not lease
        if not is_kept:
            self._reports.wake_fd.set()

    def _is_bound(self, lease: HeldLease, deadline: float) -> bool:
        """Whether the key that goes with the lease is there. A new leader may not know of a lease yet, but it does of keys."""
        answer = self._caller.call(RANGE, {"key": self._words.lease_key(lease.number)}, deadline)
        return lease.number in leases(answer.fields)
