"""A job's coordination store in one cell of bytes with a version: any back end that torch's rendezvous could use.

A back end is any object with ``get_state() -> (state, token) | None`` and ``set_state(state, token) -> (state, token, has_set) |
None``, which writes only if the token is that of what is there.

The cell can wake nobody, so it is looked at again and again: quickly after a change, and then less and less often. Each look also
says that this node lives, when that is due, and ends the leases of those who have gone silent. What a third party's back end does
with a call is its own affair: it may wait for minutes, and nobody can interrupt it. So a thread makes the calls, one after the
other; who asked gives up when its time is over, and the call goes on without it.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from rallypoint.base.records import Value
from rallypoint.coordination.cell.document import CellDocument, DocumentTooLarge, NotOurDocument, Sightings, decode, encode
from rallypoint.coordination.engine import (
    CompactedError,
    Coordination,
    LeaseLostError,
    RefusedError,
    StoreGoneError,
    UnreachableError,
    uses_foreign_lease,
)
from rallypoint.coordination.fence import Connection, HeldLease
from rallypoint.coordination.keyspace import Compacted, UnknownLease
from rallypoint.coordination.model import Event, Outcome, Snapshot, Transaction
from rallypoint.errors import RendezvousStateError
from rallypoint.net.wake_fd import WakeFd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    class Backend(Protocol):
        def get_state(self) -> tuple[bytes, Any] | None: ...
        def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None: ...

    Alter = Callable[[CellDocument], bool]

__all__ = ["Cell", "CellCall", "CellCaller", "CellCoordination", "Change"]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.2
CONNECTION_ERROR = "RendezvousConnectionError"  # ours or torch's
STOP_S = 1.0  # how long a call under way is waited for at the end
QUICK_S, SLOW_S, SLOWING = 0.02, 1.0, 1.5
LOOK_S = 10.0  # how long one look may take, with all that comes between
SILENCE_S = 2.0  # after which a call that is not answered counts as trouble


class Change(Value):
    """The document after it, and when it was sent to be written; None if there was nothing to write."""

    document: CellDocument
    written_at: float | None


class Cell:
    """A job's document in `backend`. Used by one thread at a time.

    After a write that lost to another it pauses, for a random time of at most `backoff_max_s`; 0: as long as we think fit.
    """

    def __init__(self, backend: Backend, backoff_max_s: float = 0.0) -> None:
        self._backend = backend
        self._backoff_max_s = backoff_max_s
        self._identity = ""
        self._name = os.urandom(6).hex()
        self._writes = 0

    def change(self, alter: Callable[[CellDocument], bool], until: float) -> Change:
        """Let `alter` change the document, anew if others have written meanwhile, until what it made is written.

        It says whether there is anything to write. UnreachableError: not done until then, or it is not known.
        """
        found, pause_s = self._get(), FIRST_PAUSE_S
        while True:
            document = self._document(found)
            if not alter(document):
                return Change(document, None)
            sent_at = time.monotonic()
            if sent_at >= until:  # who asked for it has given up, and may have acted on that
                raise UnreachableError("the back end was too slow, or others too quick, for a change to be made in time")
            found = self._set(document, None if found is None else found[1])
            if found is None:
                return Change(document, sent_at)
            drawn_s = random.uniform(0, self._backoff_max_s or pause_s)  # so that those who collide do not do so again
            time.sleep(min(drawn_s, max(0.0, until - time.monotonic())))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _document(self, found: tuple[bytes, Any] | None) -> CellDocument:
        if found is None:
            if self._identity:
                raise StoreGoneError("the back end has lost the state of this job; the job ends here")
            return CellDocument(os.urandom(8).hex())
        document = self._decoded(found[0])
        if self._identity and document.identity != self._identity:
            raise StoreGoneError("the back end holds the state of another run of this job; the job ends here")
        self._identity = document.identity
        return document

    def _decoded(self, state: bytes) -> CellDocument:
        try:
            return decode(bytes(state))
        except (NotOurDocument, TypeError) as error:
            raise RendezvousStateError(
                f"the rendezvous state in the back end is not rallypoint's: {error}; nodes of another launcher, or of another"
                " version, use the same run id, or something else has written there"
            ) from error

    # --- the back end ------------------------------------------------------------------------------------------------------

    def _get(self) -> tuple[bytes, Any] | None:
        found = self._call(self._backend.get_state)
        return None if found is None else (found[0], found[1])

    def _set(self, document: CellDocument, token: Any) -> tuple[bytes, Any] | None:
        """Write it; if others have written first, what is there now."""
        self._writes += 1
        try:
            state = encode(document, f"{self._name}.{self._writes}")
        except DocumentTooLarge as error:
            raise RefusedError(str(error)) from error
        answer = self._call(lambda: self._backend.set_state(state, token))
        if answer is not None and answer[2]:
            self._identity = document.identity
            return None
        there = self._get() if answer is None else (answer[0], answer[1])
        # A back end may have asked twice by itself, and tell of the second time only.
        return None if there is not None and bytes(there[0]) == state else there

    def _call(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except OSError as error:
            raise UnreachableError(f"the back end cannot be reached: {error}") from error
        except Exception as error:  # a back end may raise what it likes; only this one is known to pass by itself
            if any(base.__name__ == CONNECTION_ERROR for base in type(error).__mro__):
                raise UnreachableError(str(error)) from error
            raise


class CellCall:
    """One call: under way, or done with a result or an error."""

    def __init__(self, function: Callable[[], Change], began_at: float) -> None:
        self.began_at = began_at
        self._function = function
        self._done = threading.Event()
        self._result: Change | None = None
        self._error: BaseException | None = None

    def make(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # it is raised again where the result is asked for
            self._error = error
        self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def result(self, deadline: float) -> Change:
        """What came of it; UnreachableError if nothing has until `deadline`."""
        if not self._done.wait(max(0.0, deadline - time.monotonic())):
            raise UnreachableError(f"the back end has not answered for {time.monotonic() - self.began_at:.1f} s")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class CellCaller:
    """The thread; it begins with the first call. `on_done` is called in it after each."""

    def __init__(self, on_done: Callable[[], None]) -> None:
        self._on_done = on_done
        self._calls: SimpleQueue[CellCall | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def begin(self, function: Callable[[], Change]) -> CellCall:
        """Let `function` be called when those before it are done."""
        call = CellCall(function, time.monotonic())
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rallypoint-cell", daemon=True)
            self._thread.start()
        self._calls.put(call)
        return call

    def close(self) -> None:
        """No further call, also of those that were asked for; a thread that is stuck in one ends with the process."""
        self._is_closed = True
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None and not self._is_closed:
            call.make()
            self._on_done()


class CellCoordination(Coordination):
    """One node's part in the document in `backend`; `address` is where its peers reach it."""

    def __init__(self, backend: Backend, address: str = "127.0.0.1", backoff_max_s: float = 0.0) -> None:
        self._cell = Cell(backend, backoff_max_s)
        self._address = address
        self._wake_fd = WakeFd()
        self._caller = CellCaller(self._wake_fd.set)
        self._sightings = Sightings()  # for the caller's thread alone
        self._look: CellCall | None = None
        self._look_at = 0.0
        self._pause_s = QUICK_S
        self._document: CellDocument | None = None
        self._watches: dict[str, int] = {}  # the first revision that was not told
        self._lease: HeldLease | None = None
        self._unreachable_since: float | None = None
        self._trouble = ""
        self._is_closed = False

    def connect(self, deadline: float) -> None:
        """Let there be a document in the cell."""
        self._do(lambda document: not document.writer, deadline)

    # --- the store ---------------------------------------------------------------------------------------------------------

    def transact(self, transaction: Transaction, deadline: float) -> Outcome:
        if uses_foreign_lease(transaction, 0 if self._lease is None or self._lease.is_lost else self._lease.number):
            raise LeaseLostError("a put names a lease that is not this node's, or that has ended")
        outcomes: list[Outcome] = []

        def alter(document: CellDocument) -> bool:
            before = document.revision, len(document.pulses)
            outcomes.append(document.transact(transaction))
            return (document.revision, len(document.pulses)) != before

        try:
            self._do(alter, deadline)
        except UnknownLease as error:
            if self._lease is not None:
                self._lease.is_lost = True
            raise LeaseLostError(f"the lease of this node has ended: {error}") from error
        return outcomes[-1]

    def read(self, prefix: str, deadline: float) -> Snapshot:
        return self._do(lambda _: False, deadline).read(prefix)

    # --- watches -----------------------------------------------------------------------------------------------------------

    def watch(self, prefix: str, from_revision: int, deadline: float) -> None:
        document = self._document if self._document is not None else self._do(lambda _: False, deadline)
        if from_revision < document.oldest_change:
            raise CompactedError(str(Compacted(document.oldest_change)))
        self._watches[prefix] = from_revision

    def unwatch(self, prefix: str) -> None:
        self._watches.pop(prefix, None)

    def take_events(self) -> list[Event]:
        self._wake_fd.clear()
        self._take_look()
        if self._lease is not None and self._lease.is_lost:
            raise LeaseLostError(f"lease {self._lease.number} of this node has ended")
        self._look_if_due()
        trouble = self.connection()
        if trouble.unreachable_since is not None:
            raise UnreachableError(trouble.trouble)
        return self._new_events()

    def _new_events(self) -> list[Event]:
        document = self._document
        if document is None or not self._has_news():
            return []
        taken = [event for prefix in list(self._watches) for event in self._changes(document, prefix)]
        return sorted(taken, key=lambda event: event.revision)

    def _changes(self, document: CellDocument, prefix: str) -> list[Event]:
        """A watch that has missed something is over: who watches has to begin anew."""
        revision = self._watches[prefix]
        self._watches[prefix] = max(revision, document.revision + 1)
        try:
            return document.changes(prefix, revision)
        except Compacted as error:
            del self._watches[prefix]
            raise CompactedError(str(error)) from error

    def _has_news(self) -> bool:
        document = self._document
        return document is not None and any(revision <= document.revision for revision in self._watches.values())

    # --- the lease ---------------------------------------------------------------------------------------------------------

    def grant(self, ttl_s: float, deadline: float) -> int:
        numbers: list[int] = []

        def alter(document: CellDocument) -> bool:
            numbers.append(document.grant(ttl_s))
            return True

        self._lease = None
        change = self._call(alter, deadline)
        self._lease = HeldLease(numbers[-1], ttl_s, change.written_at or 0.0)
        self._see(change)
        return numbers[-1]

    def revoke(self, deadline: float) -> None:
        """Whatever comes of it, the lease is not ours any more: once the others may think that we left, we must have."""
        lease, self._lease = self._lease, None
        if lease is not None and not lease.is_lost:
            self._do(lambda document: self._ended(document, lease.number), deadline)

    def _ended(self, document: CellDocument, lease: int) -> bool:
        is_there = document.has_lease(lease)
        document.revoke(lease)
        return is_there

    def valid_until(self) -> float:
        return math.inf if self._lease is None else self._lease.valid_until()

    # --- looking -----------------------------------------------------------------------------------------------------------

    def _look_if_due(self) -> None:
        now, lease = time.monotonic(), self._lease
        if self._look is not None or self._is_closed or now < self._due_at():
            return
        own = lease.number if lease is not None else 0
        keeps = lease is not None and now >= lease.keep_at
        self._look = self._caller.begin(lambda: self._cell.change(lambda one: self._live(one, own, keeps), now + LOOK_S))

    def _due_at(self) -> float:
        """Who has no lease and watches nothing need not look."""
        if self._lease is not None:
            return min(self._lease.keep_at, self._look_at)
        return self._look_at if self._watches else math.inf

    def _live(self, document: CellDocument, own: int, keeps: bool) -> bool:
        """In the caller's thread: say that we live, if that is due, and end what does not."""
        others = {number: pulse for number, pulse in document.pulses.items() if number != own}
        silent = self._sightings.look(others, time.monotonic())
        for lease, count in silent:
            document.expire(lease, count)
        return (keeps and document.beat(own)) or bool(silent)

    def _take_look(self) -> None:
        look = self._look
        if look is None or not look.is_done:
            return
        self._look = None
        try:
            change = look.result(0.0)
        except UnreachableError as error:
            self._note_trouble(look.began_at, error)
        else:
            self._see(change)

    # --- calls -------------------------------------------------------------------------------------------------------------

    def _do(self, alter: Alter, deadline: float) -> CellDocument:
        """Change the document, or only read it; what is written says that we live, too."""
        own = self._lease.number if self._lease is not None else 0
        change = self._call(lambda document: alter(document) and (document.beat(own) or True), deadline)
        self._see(change)
        return change.document

    def _call(self, alter: Alter, deadline: float) -> Change:
        call = self._caller.begin(lambda: self._cell.change(alter, deadline))
        try:
            return call.result(deadline)
        except UnreachableError as error:
            self._note_trouble(call.began_at, error)
            raise

    def _see(self, change: Change) -> None:
        """What an older call shows, whose answer came late, is left alone."""
        now, document, lease = time.monotonic(), change.document, self._lease
        self._unreachable_since = None
        before = self._document.revision if self._document is not None else 0
        if lease is not None and document.granted >= lease.number:
            self._note_lease(lease, document.has_lease(lease.number), change.written_at)
        if document.revision >= before:
            self._document = document
        self._pause_s = QUICK_S if document.revision != before else min(SLOWING * self._pause_s, SLOW_S)
        silence_at = self._sightings.look_at()
        self._look_at = min(now + self._pause_s, math.inf if silence_at is None else max(silence_at, now + QUICK_S))

    def _note_lease(self, lease: HeldLease, is_there: bool, written_at: float | None) -> None:
        if written_at is not None:
            lease.note_sent(written_at)
            lease.note_answer(written_at, is_there)
        lease.is_lost = lease.is_lost or not is_there

    def _note_trouble(self, began_at: float, error: Exception) -> None:
        self._unreachable_since = began_at if self._unreachable_since is None else self._unreachable_since
        self._trouble = str(error)
        self._pause_s = min(SLOWING * self._pause_s, SLOW_S)
        self._look_at = time.monotonic() + self._pause_s

    # --- being a client ----------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._wake_fd.fileno()

    def wake_at(self) -> float:
        """While a look is under way, the descriptor is set when it is done."""
        if self._has_news():
            return 0.0
        if self._look is not None:
            return max(self._look.began_at + SILENCE_S, time.monotonic() + QUICK_S)
        return self._due_at()

    def connection(self) -> Connection:
        since, trouble = self._unreachable_since, self._trouble
        if since is None and self._look is not None and time.monotonic() - self._look.began_at >= SILENCE_S:
            since, trouble = self._look.began_at, f"the back end has not answered for {SILENCE_S:g} s"
        return Connection(self.valid_until(), since, None, trouble if since is not None else "")

    def local_address(self) -> str:
        return self._address

    def identity(self) -> str:
        return self._document.identity if self._document is not None else ""

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._caller.close()
            self._wake_fd.close()
