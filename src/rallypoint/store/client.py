"""A node's side of the embedded store: calls that wait for their answer, a lease that keeps itself, watches that survive a break.

One thread uses it, and nothing happens unless it is called: whatever is called sends what is due and takes in what has come.
After a break the line is dialled again, the session and its lease are taken up, and the watches go on behind the last change
that was told. A call that was under way is not repeated, since it may have been done: it raises UnreachableError.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Callable
from contextlib import suppress

from rallypoint.core.coordination import Event, Outcome, Snapshot, Transaction
from rallypoint.core.dialling import advice
from rallypoint.core.fence import Connection
from rallypoint.store.client_watches import Watches
from rallypoint.store.conversation import Conversation, checked_answer
from rallypoint.store.coordination import (
    CompactedError,
    Coordination,
    CoordinationError,
    LeaseLostError,
    RefusedError,
    StoreGoneError,
    UnreachableError,
)
from rallypoint.store.frames import FrameError
from rallypoint.store.handshake import ClientHandshake, Testimony, make_testimony
from rallypoint.store.held_lease import HeldLease
from rallypoint.store.line import Line, dial
from rallypoint.store.listening import address_as_such
from rallypoint.store.wire import MOST_WATCHES, decode_event, decode_item, encode_transaction, flag, number, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.store.conversation import Handler
    from rallypoint.store.dialling import Dial

    Clock = Callable[[], float]

__all__ = ["EmbeddedCoordination"]


class EmbeddedCoordination(Coordination):
    """One node's connection with the store at `host` and `port`. `connect` comes first."""

    def __init__(
        self, host: str, port: int, run_id: str, secret: bytes | None, *, clock: Clock = time.monotonic, dial: Dial = dial
    ) -> None:
        self._clock = clock
        self._run_id, self._secret = run_id, secret
        self._where = host, port
        self._line = Line(host, port, lambda: ClientHandshake(run_id, secret), dial, clock())
        self._talk = Conversation(self._line, self)
        self._watches = Watches()
        self._lease: HeldLease | None = None
        self._token = ""  # of the session whose lease that is
        self._end: CoordinationError | None = None
        self._failed_watch: CompactedError | None = None
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._line.poll.register(self._bell, select.EPOLLIN)
        self._is_closed = False

    def connect(self, deadline: float) -> None:
        """Be welcomed by the store; UnreachableError if that does not come about until `deadline`."""
        self._pump()
        while not self._line.is_open:
            if self._clock() >= deadline:
                raise self._unreachable()
            self._wait(deadline)
            self._pump()

    # --- the store ---------------------------------------------------------------------------------------------------------

    def transact(self, transaction: Transaction, deadline: float) -> Outcome:
        succeeded, revision, *items = self._call("outcome", deadline, "transact", *encode_transaction(transaction))
        found = tuple([None if item is None else decode_item(item) for item in items])
        return Outcome(flag(succeeded), number(revision), found)

    def read(self, prefix: str, deadline: float) -> Snapshot:
        revision, *items = self._call("snapshot", deadline, "read", prefix)
        return Snapshot(number(revision), tuple([decode_item(item) for item in items]))

    # --- watches -----------------------------------------------------------------------------------------------------------

    def watch(self, prefix: str, from_revision: int, deadline: float) -> None:
        if prefix not in self._watches and len(self._watches) >= MOST_WATCHES:
            raise ValueError(f"more than {MOST_WATCHES} watches")
        self._connect_for_call(deadline)  # so that a new connection does not ask for it too
        self._watches.begin(prefix, from_revision)
        try:
            self._call("watching", deadline, "watch", prefix, from_revision, on_answer=lambda: self._watches.confirm(prefix))
        except Exception:
            self.unwatch(prefix)
            raise

    def unwatch(self, prefix: str) -> None:
        self._watches.end(prefix)
        if self._line.is_open and self._end is None:
            self._talk.ask(lambda *_: None, "unwatch", prefix)
            self._talk.flush(self._clock())

    def take_events(self) -> list[Event]:
        self._pump()
        if self._is_lease_lost:
            raise LeaseLostError(f"the lease of this node at the store at {self._line.name} has ended")
        if self._failed_watch is not None:
            failed, self._failed_watch = self._failed_watch, None
            raise failed
        with suppress(BlockingIOError):  # it did not ring
            os.eventfd_read(self._bell)
        events = self._watches.take()
        if not events and not self._line.is_open:
            raise self._unreachable()
        return events

    # --- the lease ---------------------------------------------------------------------------------------------------------

    def grant(self, ttl_s: float, deadline: float) -> int:
        self._connect_for_call(deadline)
        asked_at = self._clock()
        (lease,) = self._call("granted", deadline, "grant", ttl_s)
        self._lease = HeldLease(number(lease), ttl_s, asked_at)
        return self._lease.number

    def revoke(self, deadline: float) -> None:
        if self._lease is not None and not self._is_lease_lost:
            self._call("done", deadline, "revoke")
        self._lease = None

    def valid_until(self) -> float:
        return math.inf if self._lease is None else self._lease.valid_until()

    @property
    def _is_lease_lost(self) -> bool:
        return self._lease is not None and self._lease.is_lost

    # --- being a client ----------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._line.poll.fileno()

    def wake_at(self) -> float:
        return 0.0 if self._has_news() else self._next_duty()

    def connection(self) -> Connection:
        return Connection(self.valid_until(), self._line.unreachable_since, self._line.refused_since, self._line.trouble)

    def advice(self) -> str:
        """What a user may look at, while nobody has welcomed us."""
        dialler = self._line.dialler
        return advice(
            *self._where,
            is_name=address_as_such(*self._where) is None,
            is_known=dialler.is_known,
            is_refused=dialler.refused_since is not None,
            is_connected=dialler.is_answered,
        )

    def local_address(self) -> str:
        return self._line.local_address()

    def identity(self) -> str:
        return self._line.incarnation

    def testimony(self) -> Testimony | None:
        home = self._line.home
        if self._lease is None or self._lease.is_lost or home is None:
            return None
        address = (int(home[0]), home[1])
        return make_testimony((address,), self._secret, self._run_id, self._token, self._lease.number)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._line.close()
            os.close(self._bell)

    # --- calls -------------------------------------------------------------------------------------------------------------

    def _call(
        self, expected: str, deadline: float, *request: object, on_answer: Callable[[], None] = lambda: None
    ) -> list[object]:
        """Ask, and wait for the answer, whose fields are given."""
        self._connect_for_call(deadline)
        answers: list[tuple[str, list[object]]] = []

        def handle(what: str, fields: list[object]) -> None:
            answers.append((what, fields))
            if what == expected:
                on_answer()

        try:
            self._wait_for_answer(self._talk.ask(handle, *request), deadline)
        finally:
            self._ring_if_news()
        if not answers:
            raise UnreachableError(f"the connection to the store at {self._line.name} broke during a call: {self._line.trouble}")
        return checked_answer(expected, *answers[0])

    def _wait_for_answer(self, question: int, deadline: float) -> None:
        """Until it is answered, or cannot be any more."""
        self._talk.flush(self._clock())
        while not self._talk.is_over(question):
            if self._clock() >= deadline:
                self._talk.forget(question)
                raise UnreachableError(f"the store at {self._line.name} did not answer in time")
            self._wait(deadline)
            self._pump()

    def _connect_for_call(self, deadline: float) -> None:
        try:
            self.connect(deadline)
        finally:
            self._ring_if_news()

    def _wait(self, deadline: float) -> None:
        self._line.wait(min(deadline, self._next_duty()) - self._clock())

    def _pump(self) -> None:
        """Take in what has come, and send what is due."""
        if self._end is not None:
            raise type(self._end)(str(self._end))
        now = self._clock()
        try:
            self._talk.pump(now)
        except (RefusedError, StoreGoneError) as end:
            self._end = end
            raise
        self._keep_lease(now)

    def _unreachable(self) -> UnreachableError:
        return UnreachableError(f"the store at {self._line.name} cannot be reached: {self._line.trouble}")

    # --- what the line and the store say -----------------------------------------------------------------------------------

    def on_break(self, since: float) -> None:
        if self._lease is not None:
            self._lease.note_break()

    def on_open(self, now: float) -> None:
        """Take up the session, if there is a lease to be saved, and the watches."""
        if self._lease is None or self._lease.is_lost:
            self._token = self._line.token
        else:
            self._talk.ask(self._on_resumed(self._lease, now), "resume", self._token)
        for prefix, revision in self._watches.renew():
            self._talk.ask(self._on_watch_again(prefix), "watch", prefix, revision)
        self._line.flush(now)

    def _on_resumed(self, lease: HeldLease, asked_at: float) -> Handler:
        def handle(_: str, fields: list[object]) -> None:
            lease.note_answer(asked_at, fields == [lease.number])
            if lease.is_lost:
                self._token = self._line.token

        return handle

    def _on_watch_again(self, prefix: str) -> Handler:
        def handle(what: str, _: list[object]) -> None:
            if what == "watching":
                self._watches.confirm(prefix)
            else:
                self._watches.end(prefix)
                self._failed_watch = CompactedError(f"while the store was out of reach, too much has changed under {prefix!r}")

        return handle

    def on_news(self, what: str, fields: list[object]) -> None:
        match what, fields:
            case "events", [through, *events]:
                self._watches.add(map(decode_event, events), number(through))
            case "past", [prefix, through, *events]:
                self._watches.add_past(text(prefix), map(decode_event, events), number(through))
            case "ending", [reason]:
                raise StoreGoneError(f"the store at {self._line.name} has ended: {reason}")
            case "refused", [reason]:
                raise RefusedError(f"the store at {self._line.name} has cut this node off: {reason}")
            case _:
                raise FrameError("news that cannot be understood")

    # --- duties ------------------------------------------------------------------------------------------------------------

    def _keep_lease(self, now: float) -> None:
        lease = self._lease
        if lease is None or lease.is_lost or not self._line.is_open:
            return
        if now >= lease.silent_since() + lease.ttl_s:
            self._talk.break_off(f"no answer for {lease.ttl_s:g} s", now)
        elif now >= lease.keep_at:
            lease.note_sent(now)
            self._talk.ask(self._on_kept(lease, now), "keep", lease.number)
            self._talk.flush(now)

    def _on_kept(self, lease: HeldLease, sent_at: float) -> Handler:
        def handle(_: str, fields: list[object]) -> None:
            if len(fields) != 2:
                raise FrameError("an answer that cannot be understood")
            lease.note_answer(sent_at, flag(fields[0]))
            self._watches.note_told(number(fields[1]))

        return handle

    def _next_duty(self) -> float:
        """When something has to be done, although nothing comes."""
        lease = self._lease
        if lease is None or lease.is_lost or not self._line.is_open:
            return self._line.wake_at()
        return min(self._line.wake_at(), lease.keep_at, lease.silent_since() + lease.ttl_s)

    def _has_news(self) -> bool:
        return self._watches.has_untaken or self._is_lease_lost or self._failed_watch is not None or self._end is not None

    def _ring_if_news(self) -> None:
        if self._has_news():
            os.eventfd_write(self._bell, 1)
