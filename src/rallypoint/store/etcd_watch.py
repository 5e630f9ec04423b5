"""A watch in etcd: a thread that reads an answer which does not end, and asks for it again, elsewhere, when it breaks.

It goes on with the first revision that it has not told. etcd may have forgotten that one by then; so, when it begins behind the
present, it asks whether the revision before is remembered: what a watch says of that comes too late.
"""

from __future__ import annotations

import math
import random
import threading

from rallypoint.store.bell import Bell
from rallypoint.store.coordination import CompactedError, RefusedError, StoreGoneError, UnreachableError
from rallypoint.store.etcd_causes import events_of
from rallypoint.store.etcd_cluster import EtcdCluster
from rallypoint.store.etcd_errors import EtcdError, Failure, TokenRefused
from rallypoint.store.etcd_gateway import Caller
from rallypoint.store.etcd_reports import Reports
from rallypoint.store.etcd_socket import Interrupted
from rallypoint.store.etcd_talk import Talk
from rallypoint.store.etcd_words import Malformed, Words, flag, number, revision_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.store.etcd_words import Change, Fields

__all__ = ["EtcdWatch"]

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
        self._bell = Bell()  # to stop, or to look where the client's home is
        self._caller = Caller(cluster, self._bell)
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
        self._talk.interrupt_by(self._bell)
        self._thread.start()

    def look_around(self) -> None:
        """The client's home is another one: if it left ours because we are of no use there, we should go too."""
        self._bell.ring()

    def stop(self) -> None:
        self._is_stopped = True
        self._bell.ring()

    def join(self) -> bool:
        """Whether it has ended, in time."""
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)
        if self._thread.is_alive():
            return False
        self._close_talk()
        self._caller.hang_up()
        self._bell.close()
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
            self._bell.silence()
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
                self._caller.pause(RETRY_S * random.uniform(0.5, 1.0))
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
