"""A watch in etcd: a thread that reads an answer which does not end, and asks for it again, elsewhere, when it breaks.

It goes on with the first revision that it has not told. etcd may have forgotten that one by then; so, when it begins behind the
present, it asks whether the revision before is remembered: what a watch says of that comes too late.

What the threads of an etcd client have to say to its owner: changes, and how the way to the cluster is.

Why a key has gone. etcd does not say whether a transaction deleted it, or the end of the lease that it was bound to.

But a lease ends with all its keys at one revision. So the engine binds a key of its own to each lease, which no transaction
deletes: if that is still there at the revision at which another key of the lease went, a transaction has deleted that one; if it
is gone too, the lease has run out. An owner who gives its lease back binds that key to something else first, so
that what goes then counts as deleted. Where nobody can tell any more, because etcd has forgotten that revision, the lease
counts as run out, which makes the others wait and does no harm.
"""

from __future__ import annotations

import math
import threading
from operator import attrgetter

from rallypoint.base.backoff import jittered
from rallypoint.coordination.engine import CompactedError, CoordinationError, RefusedError, StoreGoneError, UnreachableError
from rallypoint.coordination.etcd.codec import OPERATIONS, Change, Malformed, Words, counts, flag, number, revision_of
from rallypoint.coordination.etcd.errors import EtcdError, Failure, TokenRefused
from rallypoint.coordination.etcd.gateway import Caller
from rallypoint.coordination.etcd.http import Interrupted
from rallypoint.coordination.etcd.talk import EtcdCluster, Talk
from rallypoint.coordination.model import Event
from rallypoint.net.wake_fd import WakeFd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from rallypoint.coordination.model import Cause

    Loss = tuple[int, int]  # of a lease, at a revision
    from rallypoint.coordination.etcd.codec import Change, Fields

__all__ = ["EtcdWatch", "Reports", "events_of"]


# --- etcd reports ----------------------------------------------------------------------------------------------------------


_revision_of = attrgetter("revision")


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


# --- etcd causes -----------------------------------------------------------------------------------------------------------


TXN = "/v3/kv/txn"
ASK_S = 5.0


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
    if change.lease is None:
        return "expired"
    return "deleted" if not change.lease or (change.lease, change.revision) in were_deleted else "expired"


def _deleted(losses: Iterable[Loss], words: Words, caller: Caller, deadline: float) -> set[Loss]:
    """Those at whose revision the lease still had its own key."""
    asked = list(losses)
    try:
        answer = caller.call(TXN, words.were_bound(asked), deadline)
    except (EtcdError, UnreachableError):
        return set()
    return {loss for loss, count in zip(asked, counts(answer.fields), strict=False) if count}


# --- etcd watch ------------------------------------------------------------------------------------------------------------


WATCH, RANGE = "/v3/watch", "/v3/kv/range"
TRY_S = 3.0
RETRY_S = 0.2
JOIN_S = 5.0


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
        stream = caller.open_stream(WATCH, self._words.watching(self._prefix, self._next_revision), deadline)
        try:
            if revision_of(stream.first) >= self._next_revision:
                self._check_memory(caller, deadline)
        except BaseException:  # whatever it was, nothing half done may stay; it is raised again
            stream.talk.close()
            raise
        return stream.talk

    def _check_memory(self, caller: Caller, deadline: float) -> None:
        try:
            caller.call(RANGE, self._words.past(max(1, self._next_revision - 1)), deadline)
        except EtcdError as error:
            if not error.is_compacted:
                raise
            raise self._compacted() from None

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
