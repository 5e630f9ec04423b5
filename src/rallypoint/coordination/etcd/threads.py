"""The threads of an etcd client: one that keeps its lease, and one that reads each watch; what they find is taken from `Reports`.

A watch is an answer which does not end, and is asked for again, elsewhere, when it breaks. It goes on with the first revision
that it has not told. etcd may have forgotten that one by then; so, when it begins behind the present, it asks whether the
revision before is remembered: what a watch says of that comes too late.

Why a key has gone: etcd does not say whether a transaction deleted it, or the end of the lease that it was bound to. But a lease
ends with all its keys at one revision. So the engine binds a key of its own to each lease, which no transaction deletes: if that
is still there at the revision at which another key of the lease went, a transaction has deleted that one; if it is gone too, the
lease has run out. An owner who gives its lease back binds that key to something else first, so that what goes then counts as
deleted. Where nobody can tell any more, because etcd has forgotten that revision, the lease counts as run out, which makes the
others wait and does no harm.

The keeper says that the node lives, whatever the node's other connections are stuck in, when that is due and the node shows that
it does: by calling its engine, or by being inside such a call. A node that hangs is taken for dead. What counts is when the
keepalive that was answered was *sent*. It also looks after the way to the cluster. Watches say nothing for hours, and one at a
paused or isolated member would go on saying nothing; but all connections of a client lead to one endpoint, so its answers to
keepalives vouch for its watches. Where there are no keepalives, or few, it is asked how it is.
"""

from __future__ import annotations

import math
import threading
from contextlib import contextmanager
from operator import attrgetter

from rallypoint.base.backoff import jittered
from rallypoint.coordination.engine import CompactedError, CoordinationError, RefusedError, StoreGoneError, UnreachableError
from rallypoint.coordination.etcd.codec import OPERATIONS, Change, Malformed, Words, counts, flag, leases, number, revision_of
from rallypoint.coordination.etcd.errors import EtcdError, Failure, TokenRefused
from rallypoint.coordination.etcd.gateway import PATIENCE_S, RANGE, STATUS, TXN, Caller, EtcdCluster, Talk
from rallypoint.coordination.etcd.http import Interrupted, is_set
from rallypoint.coordination.fence import HeldLease
from rallypoint.coordination.model import Event
from rallypoint.net.wake_fd import WakeFd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from rallypoint.coordination.etcd.codec import Fields
    from rallypoint.coordination.model import Cause

    Loss = tuple[int, int]  # of a lease, at a revision

__all__ = ["EtcdWatch", "Keeper", "Reports", "events_of"]

_revision_of = attrgetter("revision")
WATCH, KEEP_ALIVE = "/v3/watch", "/v3/lease/keepalive"
ASK_S = 5.0
TRY_S = 3.0  # after which a question that nobody has answered is trouble
RETRY_S = 0.2
JOIN_S = 5.0
PATIENCES_PER_TTL = 12  # so that two endpoints can be given up before the lease is over
CHECK_EVERY_S = 5.0  # while something is watched


class Reports:
    """Filled by any thread, emptied by the owner's; `wake_fd` is set when there is something to take."""

    def __init__(self) -> None:
        self.wake_fd = WakeFd()
        self._lock = threading.Lock()
        self._events: dict[object, list[Event]] = {}  # by the watch that they are from
        self._troubles: dict[object, tuple[float, str]] = {}  # by whom they have befallen: since when, and what
        self._failure: CoordinationError | None = None  # of a watch
        self._end: CoordinationError | None = None

    # --- for the threads ---------------------------------------------------------------------------------------------------

    def tell(self, watch: object, events: list[Event]) -> None:
        """What is told by a watch that nobody wants any more is not passed on."""
        with self._lock:
            if events and watch in self._events:
                self._events[watch] += events
                self.wake_fd.set()

    def fail(self, watch: object, failure: CoordinationError) -> None:
        """The watch cannot go on."""
        with self._lock:
            if self._events.pop(watch, None) is not None:
                self._troubles.pop(watch, None)
                self._failure = failure
                self.wake_fd.set()

    def end(self, end: CoordinationError) -> None:
        """Nothing can go on."""
        with self._lock:
            self._end = self._end or end
            self.wake_fd.set()

    def trouble(self, who: object, since: float, what: str) -> None:
        with self._lock:
            if who not in self._troubles:
                self.wake_fd.set()
            self._troubles[who] = since, what

    def fine(self, who: object) -> None:
        with self._lock:
            if self._troubles.pop(who, None) is not None:
                self.wake_fd.set()

    # --- for the owner -----------------------------------------------------------------------------------------------------

    def expect(self, watch: object) -> None:
        with self._lock:
            self._events[watch] = []

    def drop(self, watch: object) -> None:
        """Nothing more of it, also not what has come already."""
        with self._lock:
            self._events.pop(watch, None)
            self._troubles.pop(watch, None)

    @property
    def has_news(self) -> bool:
        with self._lock:
            return self._end is not None or self._failure is not None or any(self._events.values())

    def oldest_trouble(self) -> tuple[float | None, str]:
        """Since when the cluster cannot be reached, and why."""
        with self._lock:
            return min(self._troubles.values()) if self._troubles else (None, "")

    def take(self) -> list[Event]:
        """What has come, ordered; raises what has happened instead."""
        with self._lock:
            self.wake_fd.clear()
            if self._end is not None:
                raise type(self._end)(str(self._end))
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            events = sorted((event for told in self._events.values() for event in told), key=_revision_of)
            for told in self._events.values():
                told.clear()
            if not events and self._troubles:
                raise UnreachableError(min(self._troubles.values())[1])
        return events


def events_of(changes: list[Change], words: Words, caller: Caller, now: float) -> list[Event]:
    """The changes, with their causes; asks the cluster where it has to."""
    losses = sorted({(change.lease, change.revision) for change in changes if change.item is None and change.lease})
    were_deleted: set[Loss] = set()
    for first in range(0, len(losses), OPERATIONS):
        were_deleted |= _deleted(losses[first : first + OPERATIONS], words, caller, now + ASK_S)
    return [Event(change.revision, change.key, change.item, _cause(change, were_deleted)) for change in changes]


def _cause(change: Change, were_deleted: set[Loss]) -> Cause:
    if change.item is not None:
        return "put"
    return "deleted" if change.lease == 0 or (change.lease, change.revision) in were_deleted else "expired"


def _deleted(asked: list[Loss], words: Words, caller: Caller, deadline: float) -> set[Loss]:
    """Those at whose revision the lease still had its own key."""
    try:
        answer = caller.call(TXN, words.were_bound(asked), deadline)
    except (EtcdError, UnreachableError):
        return set()
    return {loss for loss, count in zip(asked, counts(answer.fields), strict=False) if count}


class EtcdWatch:
    """`open` comes first; then `start`, `stop` and `join`."""

    def __init__(self, prefix: str, from_revision: int, cluster: EtcdCluster, words: Words, reports: Reports) -> None:
        self._prefix = prefix
        self._next_revision = max(1, from_revision)
        self._cluster = cluster
        self._clock = cluster.clock
        self._words = words
        self._reports = reports
        self._wake_fd = WakeFd()  # to stop, or to look where the client's home is
        self._caller = Caller(cluster, self._wake_fd)
        self._talk: Talk | None = None
        self._begun_at = self._clock()
        self._broken_at: float | None = None
        self._untold: list[Change] = []  # what has come, while it is found out why
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name=f"rallypoint-etcd-watch-{prefix}", daemon=True)

    # --- for the owner -----------------------------------------------------------------------------------------------------

    def open(self, caller: Caller, deadline: float) -> None:
        """Begin, as one who waits for it: CompactedError if what is asked for is forgotten."""
        self._talk = self._begin(caller, deadline)

    def start(self) -> None:
        assert self._talk is not None
        self._talk.interrupt_by(self._wake_fd)
        self._thread.start()

    def look_around(self) -> None:
        """The client's home is another one: if it left ours because we are of no use there, we should go too."""
        self._wake_fd.set()

    def stop(self) -> None:
        self._is_stopped = True
        self._wake_fd.set()

    def join(self) -> bool:
        """Whether it has ended, in time."""
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)
        if self._thread.is_alive():
            return False
        self._close_talk()
        self._caller.hang_up()
        self._wake_fd.close()
        return True

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    # --- the thread --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                self._go_on()
        except CompactedError as forgotten:
            self._reports.fail(self, forgotten)
        except (RefusedError, StoreGoneError) as end:
            self._reports.end(end)
        except Exception as bug:  # a node that hears nothing must not believe that there is nothing to hear
            self._reports.end(StoreGoneError(f"{self._prefix!r} in etcd is not watched any more: {bug!r}"))

    def _go_on(self) -> None:
        try:
            if self._talk is None:
                self._talk = self._begin_again()
            if not self._untold:
                self._take(self._talk.go_on(math.inf))
            self._tell()
        except Interrupted:
            self._wake_fd.clear()
            self._begun_at = -math.inf  # it did not break
            if self._talk is not None and self._talk.index != self._cluster.home:
                self._close_talk()
        except (Failure, EtcdError, TokenRefused, Malformed):
            self._close_talk()

    def _begin_again(self) -> Talk:
        self._caller.pause(max(0.0, self._begun_at + RETRY_S - self._clock()))  # should it break again and again
        while True:
            try:
                self._begun_at = self._clock()
                talk = self._begin(self._caller, self._begun_at + TRY_S)
            except UnreachableError as trouble:
                self._reports.trouble(self, self._broken_at or self._begun_at, str(trouble))
                self._caller.pause(jittered(RETRY_S))
            else:
                self._broken_at = None
                self._reports.fine(self)
                return talk

    def _begin(self, caller: Caller, deadline: float) -> Talk:
        first, talk = caller.open_stream(WATCH, self._words.watching(self._prefix, self._next_revision), deadline)
        try:
            if revision_of(first) >= self._next_revision:
                caller.call(RANGE, self._words.past(max(1, self._next_revision - 1)), deadline)
        except BaseException as error:  # whatever it was, nothing half done may stay
            talk.close()
            if isinstance(error, EtcdError) and error.is_compacted:
                raise self._compacted() from None
            raise
        return talk

    def _compacted(self) -> CompactedError:
        return CompactedError(f"etcd has forgotten what changed under {self._prefix!r} at revision {self._next_revision}")

    def _take(self, told: Fields) -> None:
        if flag(told, "canceled"):
            raise self._compacted() if number(told, "compact_revision") else Failure(str(told.get("cancel_reason", "")))
        self._untold = self._words.changes(told)
        if not self._untold and not flag(told, "created"):  # nothing has changed up to here
            self._next_revision = max(self._next_revision, revision_of(told) + 1)

    def _tell(self) -> None:
        if self._untold:
            self._reports.tell(self, events_of(self._untold, self._words, self._caller, self._clock()))
            self._next_revision = self._untold[-1].revision + 1
            self._untold = []

    def _close_talk(self) -> None:
        """What was not told comes again."""
        if self._talk is not None:
            self._talk.close()
            self._talk, self._untold, self._broken_at = None, [], self._clock()


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
