"""A node's side of the embedded store: calls that wait for their answer, a lease that keeps itself, watches that survive a break.

One thread uses it, and nothing happens unless it is called: whatever is called sends what is due and takes in what has come.
After a break the line is dialled again, the session and its lease are taken up, and the watches go on behind the last change
that was told. A call that was under way is not repeated, since it may have been done: it raises UnreachableError.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable, Iterable
from functools import partial

from rallypoint.base.text import host_port
from rallypoint.coordination.embedded import wire
from rallypoint.coordination.embedded.dialling import Dialler, Link, LinkBroken, advice, dial
from rallypoint.coordination.embedded.handshake import ClientHandshake, HandshakeRefused, make_testimony
from rallypoint.coordination.embedded.wire import LARGE_FRAME_BYTES, MOST_WATCHES, SEAL_BYTES, FrameError, flag, number
from rallypoint.coordination.engine import (
    CompactedError,
    Coordination,
    CoordinationError,
    LeaseLostError,
    RefusedError,
    StoreGoneError,
    StoreReplacedError,
    Testimony,
    UnreachableError,
)
from rallypoint.coordination.fence import Connection, HeldLease
from rallypoint.coordination.model import Event, Outcome, Snapshot, Transaction
from rallypoint.net.endpoint import address_as_such
from rallypoint.net.wake_fd import WakeFd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from rallypoint.coordination.embedded.dialling import Call, Dial
    from rallypoint.coordination.embedded.handshake import Secret
    from rallypoint.coordination.embedded.tls import Tls
    from rallypoint.net.endpoint import Address

    Clock = Callable[[], float]
    Handler = Callable[[str, list[object]], None]  # what the answer is, and its fields

    class Listener(Protocol):
        def on_open(self, now: float) -> None: ...
        def on_break(self) -> None: ...
        def on_news(self, what: str, fields: list[object]) -> None: ...


__all__ = ["EmbeddedCoordination", "Line", "Watches", "checked_answer"]

SETTLED_S = 1.0  # a connection that held so long is dialled again at once
SHORT_LIVES = 3  # and one that did not, so many times in a row
ANSWER_BYTES = 256 * 1024 * 1024  # of an answer in many parts
IN_PARTS = ("part", "outcome", "snapshot", "events", "past")
ERRORS: dict[object, type[Exception]] = {
    "lease": LeaseLostError,
    "compacted": CompactedError,
    "full": CoordinationError,
    "invalid": ValueError,
}


class Line:
    """Questions and answers over a connection that mends itself: it notices a break, and dials again. `poll` is for waiting.

    An answer has the number of its question. A long one comes in parts, which are put together here. What was asked on a
    connection that broke is never answered: whoever asked notices by `is_over`. The listener is told when it opens and breaks,
    and what the store tells unasked. Once a store has welcomed us it is the only one: whoever else answers there is not it, and
    that is the end.
    """

    def __init__(self, host: str, port: int, call: Call, poll: select.epoll, listener: Listener, now: float) -> None:
        self.name = host_port(host, port)
        self.poll = poll
        self.incarnation = ""
        self.token = ""  # of the session that the latest welcome began
        self.secret: bytes | None = None  # by which that one was welcomed
        self.local_address = ""  # as of the latest welcome
        self.unreachable_since: float | None = now
        self.dialler = Dialler(host, port, call, poll)
        self._listener = listener
        self._link: Link | None = None  # while it is open
        self._opened_at = 0.0
        self._short_lives = 0
        self._asked = 0
        self._handlers: dict[int, Handler] = {}
        self._parts: list[object] = []
        self._parts_bytes = 0

    @property
    def is_open(self) -> bool:
        return self.unreachable_since is None

    @property
    def trouble(self) -> str:
        return "" if self.is_open else self.dialler.trouble

    def wake_at(self) -> float:
        """When to `pump` although nothing comes."""
        return math.inf if self.is_open else self.dialler.wake_at()

    def ask(self, handler: Handler, *request: object) -> int:
        """Send a question, while the line is open; its number. It goes out with the next `flush` or `pump`."""
        body = wire.encode([self._asked + 1, *request])
        if len(body) + SEAL_BYTES > LARGE_FRAME_BYTES:
            raise ValueError(f"a request of {len(body)} bytes, which is more than a store takes")
        assert self._link is not None
        self._asked += 1
        self._handlers[self._asked] = handler
        self._link.send(body)
        return self._asked

    def is_over(self, question: int) -> bool:
        """Whether it will not be answered any more, or has been."""
        return question not in self._handlers

    def forget(self, question: int) -> None:
        """Nobody waits for the answer any more."""
        self._handlers.pop(question, None)

    def flush(self, now: float) -> None:
        try:
            if self._link is not None:
                self._link.flush()
                self._link.watch(self.poll)
        except LinkBroken as broken:
            self._break(broken, now)

    def pump(self, now: float) -> None:
        """Send and take in what can be now. RefusedError and StoreGoneError: there is no store for us any more."""
        try:
            for body in self._dialled(now) if self._link is None else self._received(self._link, now):
                self._take(body)
        except FrameError as error:
            self._end_if_hopeless(f"what answers there is not a rallypoint store that this node can talk to ({error})")
            self.break_off(str(error), now)
        except HandshakeRefused as refused:
            self._end_if_hopeless(str(refused))
            self._hang_up()
            raise StoreGoneError(f"the store at {self.name} has ended, and another answers there: {refused}") from None

    def break_off(self, reason: str, now: float) -> None:
        """It is of no use any more; dial again."""
        self._break(LinkBroken(reason), now)

    def close(self) -> None:
        self._hang_up()
        self.dialler.close()
        self.poll.close()

    # --- what comes --------------------------------------------------------------------------------------------------------

    def _received(self, link: Link, now: float) -> list[bytes]:
        try:
            bodies = link.pump()
            link.watch(self.poll)
        except LinkBroken as broken:
            self._break(broken, now)
            return self._dialled(now)
        return bodies

    def _dialled(self, now: float) -> list[bytes]:
        found = self.dialler.pump(now)
        if found is None:
            return []
        self._link, bodies = found
        welcome = self._link.welcome
        assert welcome is not None
        if self.incarnation not in ("", welcome.incarnation):
            self._hang_up()
            raise StoreReplacedError(f"the store at {self.name} has ended, and was started anew")
        self.incarnation, self.token, self.secret = welcome.incarnation, welcome.session, self._link.secret
        self.local_address = self._link.local_address()
        self.unreachable_since, self._opened_at = None, now
        self._listener.on_open(now)
        return bodies

    def _take(self, body: bytes) -> None:
        number, what, *fields = wire.decode(body)
        if what in IN_PARTS:
            fields = self._put_together(what, fields, len(body))
        if what == "part":
            return
        if not number:
            self._listener.on_news(what, fields)
        elif (handler := self._handlers.pop(number, None)) is not None:  # else nobody waits for it any more
            handler(what, fields)

    def _put_together(self, what: str, fields: list[object], size: int) -> list[object]:
        """The fields, and the things in the list that is the last of them, with those of the parts before."""
        last = fields.pop() if fields else None
        if type(last) is not list:
            raise FrameError("an answer without its list")
        self._parts += last
        self._parts_bytes += size
        if self._parts_bytes > ANSWER_BYTES:
            raise FrameError("an answer without end")
        if what == "part":
            return []
        whole, self._parts, self._parts_bytes = [*fields, *self._parts], [], 0
        return whole

    # --- breaks ------------------------------------------------------------------------------------------------------------

    def _break(self, broken: LinkBroken, now: float) -> None:
        self._hang_up()
        if self.is_open:
            self.unreachable_since = now
            self._short_lives = 0 if now - self._opened_at >= SETTLED_S else self._short_lives + 1
            self.dialler.start_anew(broken, max(0, self._short_lives - SHORT_LIVES), now)
            self._handlers.clear()
            self._parts, self._parts_bytes = [], 0
            self._listener.on_break()

    def _end_if_hopeless(self, reason: str) -> None:
        """Until somebody has welcomed us a refusal is final: it is the answer to who we are."""
        if not self.incarnation:
            self._hang_up()
            raise RefusedError(f"the store at {self.name} refuses this node: {reason}") from None

    def _hang_up(self) -> None:
        self.dialler.hang_up_all()
        if self._link is not None:
            self._link.close(self.poll)
            self._link = None


def checked_answer(expected: str, what: str, fields: list[object]) -> list[object]:
    """The fields of the answer that was expected; an error is raised."""
    if what == "error" and len(fields) == 2:
        raise ERRORS.get(fields[0], CoordinationError)(str(fields[1]))
    if what != expected:
        raise CoordinationError(f"the store answered {what!r} where {expected!r} was due")
    return fields


class _Watch:
    def __init__(self, next_revision: int) -> None:
        self.next_revision = next_revision
        self.is_confirmed = False


class Watches:
    """What a node watches, how far it has been told, and what it has not taken yet.

    The store tells changes in whole batches, each with the revision up to which it is complete, so that after a break each watch
    goes on with the first change that it was not told. Between asking for a watch and the store's confirmation what comes for it
    belongs to an earlier watch of the same prefix, and is not passed on.
    """

    def __init__(self) -> None:
        self._watches: dict[str, _Watch] = {}
        self._untaken: list[Event] = []

    def __contains__(self, prefix: str) -> bool:
        return prefix in self._watches

    def __len__(self) -> int:
        return len(self._watches)

    @property
    def has_untaken(self) -> bool:
        return bool(self._untaken)

    def begin(self, prefix: str, from_revision: int) -> None:
        """Ask for it, anew if it is watched already."""
        self.end(prefix)
        self._watches[prefix] = _Watch(from_revision)

    def end(self, prefix: str) -> None:
        """Nothing more of it, also not what has come already, unless another watch has it too."""
        if self._watches.pop(prefix, None) is not None:
            others = tuple(self._watches)
            self._untaken = [one for one in self._untaken if not one.key.startswith(prefix) or one.key.startswith(others)]

    def confirm(self, prefix: str) -> None:
        if (watch := self._watches.get(prefix)) is not None:
            watch.is_confirmed = True

    def renew(self) -> list[tuple[str, int]]:
        """The connection is a new one: what to ask for again."""
        for watch in self._watches.values():
            watch.is_confirmed = False
        return [(prefix, watch.next_revision) for prefix, watch in self._watches.items()]

    def add_past(self, prefix: str, events: Iterable[Event], through: int) -> None:
        """What had happened under one prefix when its watch began."""
        watch = self._watches.get(prefix)
        if watch is not None and watch.is_confirmed:
            self._untaken += [event for event in events if event.revision >= watch.next_revision]
            watch.next_revision = max(watch.next_revision, through + 1)

    def add(self, events: Iterable[Event], through: int) -> None:
        """What has happened since, under any of the prefixes."""
        self._untaken += filter(self._is_wanted, events)
        self.note_told(through)

    def note_told(self, through: int) -> None:
        """All changes up to this revision have been told, if there were any."""
        for watch in self._watches.values():
            if watch.is_confirmed:
                watch.next_revision = max(watch.next_revision, through + 1)

    def take(self) -> list[Event]:
        taken, self._untaken = self._untaken, []
        return taken

    def _is_wanted(self, event: Event) -> bool:
        return any(
            watch.is_confirmed and event.revision >= watch.next_revision and event.key.startswith(prefix)
            for prefix, watch in self._watches.items()
        )


class EmbeddedCoordination(Coordination):
    """One node's connection with the store at `host` and `port`. `connect` comes first. It sleeps nowhere but in `poll`."""

    def __init__(
        self,
        host: str,
        port: int,
        run_id: str,
        secret: Secret,
        *,
        clock: Clock = time.monotonic,
        dial: Dial = dial,
        poll: Callable[[], select.epoll] = select.epoll,
        tls: Tls | None = None,
        tls_name: str = "",
    ) -> None:
        """With `tls` the store has to show that it is `tls_name`, or `host`."""
        self._secure = None if tls is None else partial(tls.at_node, host=tls_name or host)
        self._clock = clock
        self._dial = dial
        self._run_id, self._given_secret = run_id, secret
        self._where = host, port
        self._line = Line(host, port, self._begin_link, poll(), self, clock())
        self._watches = Watches()
        self._lease: HeldLease | None = None
        self._token = ""  # of the session whose lease that is
        self._secret: bytes | None = None  # by which that session was begun
        self._end: CoordinationError | None = None
        self._failed_watch: CompactedError | None = None
        self._wake_fd = WakeFd()
        self._line.poll.register(self._wake_fd, select.EPOLLIN)
        self._is_closed = False

    def _begin_link(self, address: Address, now: float) -> Link:
        return Link(self._dial(address), ClientHandshake(self._run_id, self._given_secret), now, self._secure)

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
        succeeded, revision, *items = self._call("outcome", deadline, "transact", *wire.encode_transaction(transaction))
        found = tuple([None if item is None else wire.decode_item(item) for item in items])
        return Outcome(flag(succeeded), number(revision), found)

    def read(self, prefix: str, deadline: float) -> Snapshot:
        revision, *items = self._call("snapshot", deadline, "read", prefix)
        return Snapshot(number(revision), tuple([wire.decode_item(item) for item in items]))

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
            self._line.ask(lambda *_: None, "unwatch", prefix)
            self._line.flush(self._clock())

    def take_events(self) -> list[Event]:
        self._pump()
        if self._is_lease_lost:
            raise LeaseLostError(f"the lease of this node at the store at {self._line.name} has ended")
        if self._failed_watch is not None:
            failed, self._failed_watch = self._failed_watch, None
            raise failed
        self._wake_fd.clear()
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
        return Connection(self.valid_until(), self._line.unreachable_since, self._line.dialler.refused_since, self._line.trouble)

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
        return self._line.local_address

    def identity(self) -> str:
        return self._line.incarnation

    def testimony(self, will: Transaction | None = None) -> Testimony | None:
        home = self._line.dialler.home
        if self._lease is None or self._lease.is_lost or home is None:
            return None
        address = (int(home[0]), home[1])
        return make_testimony((address,), self._secret, self._run_id, self._token, self._lease.number)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._line.close()
            self._wake_fd.close()

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
            self._wait_for_answer(self._line.ask(handle, *request), deadline)
        finally:
            self._ring_if_news()
        if not answers:
            raise UnreachableError(f"the connection to the store at {self._line.name} broke during a call: {self._line.trouble}")
        return checked_answer(expected, *answers[0])

    def _wait_for_answer(self, question: int, deadline: float) -> None:
        """Until it is answered, or cannot be any more."""
        self._line.flush(self._clock())
        while not self._line.is_over(question):
            if self._clock() >= deadline:
                self._line.forget(question)
                raise UnreachableError(f"the store at {self._line.name} did not answer in time")
            self._wait(deadline)
            self._pump()

    def _connect_for_call(self, deadline: float) -> None:
        try:
            self.connect(deadline)
        finally:
            self._ring_if_news()

    def _wait(self, deadline: float) -> None:
        """Within a call: the bell is for who waits outside of one, and rings again at its end if there is news."""
        self._wake_fd.clear()
        self._line.poll.poll(max(0.0, min(deadline, self._next_duty()) - self._clock()))

    def _pump(self) -> None:
        """Take in what has come, and send what is due."""
        if self._end is not None:
            raise type(self._end)(str(self._end))
        now = self._clock()
        try:
            self._line.pump(now)
        except (RefusedError, StoreGoneError) as end:
            self._end = end
            raise
        self._keep_lease(now)

    def _unreachable(self) -> UnreachableError:
        return UnreachableError(f"the store at {self._line.name} cannot be reached: {self._line.trouble}")

    # --- what the line and the store say -----------------------------------------------------------------------------------

    def on_break(self) -> None:
        if self._lease is not None:
            self._lease.note_break()

    def on_open(self, now: float) -> None:
        """Take up the session, if there is a lease to be saved, and the watches."""
        if self._lease is None or self._lease.is_lost:
            self._begin_session()
        else:
            self._line.ask(self._on_resumed(self._lease, now), "resume", self._token)
        for prefix, revision in self._watches.renew():
            self._line.ask(self._on_watch_again(prefix), "watch", prefix, revision)
        self._line.flush(now)

    def _begin_session(self) -> None:
        self._token, self._secret = self._line.token, self._line.secret

    def _on_resumed(self, lease: HeldLease, asked_at: float) -> Handler:
        def handle(what: str, fields: list[object]) -> None:
            lease.note_answer(asked_at, fields == [lease.number])
            is_taken_up = what == "resumed" and fields != [0]  # maybe with another lease, if we never heard that it was granted
            if not is_taken_up:
                self._begin_session()

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
                self._watches.add(map(wire.decode_event, events), number(through))
            case "past", [prefix, through, *events]:
                self._watches.add_past(wire.text(prefix), map(wire.decode_event, events), number(through))
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
        if now >= lease.silent_since + lease.ttl_s:
            self._line.break_off(f"no answer for {lease.ttl_s:g} s", now)
        elif now >= lease.keep_at:
            lease.note_sent(now)
            self._line.ask(self._on_kept(lease, now), "keep", lease.number)
            self._line.flush(now)

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
        return min(self._line.wake_at(), lease.keep_at, lease.silent_since + lease.ttl_s)

    def _has_news(self) -> bool:
        return self._watches.has_untaken or self._is_lease_lost or self._failed_watch is not None or self._end is not None

    def _ring_if_news(self) -> None:
        if self._has_news():
            self._wake_fd.set()
