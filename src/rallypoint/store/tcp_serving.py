"""Serving a store by torch's TCPStore protocol: one thread, any number of workers.

Everybody who has something to say is heard in turn, a piece at a time, so that a large value holds nobody up. Sockets do not
block. Whoever breaks the format or passes a limit is cut off, and one line says why; what it had stored stays. The way of a
small request through here is kept short on purpose: it is what bounds the rate.

What an operation means, and who waits for it, is the affair of `store.values`; here both get their wire format.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from rallypoint.base.limits import STRANGERS_IN_RESERVE, is_reserved
from rallypoint.net.acceptor import Doorway, Refusals
from rallypoint.net.wake_fd import WakeFd
from rallypoint.store import tcp_protocol as wire
from rallypoint.store.tcp_protocol import RequestReader
from rallypoint.store.values import NotANumber, StoreFull, Values, Waiters

TYPE_CHECKING = False
if TYPE_CHECKING:
    Reply = bytes | list[bytes]  # in pieces where joining them would copy much
    Operation = Callable[[int, list[bytes], int], Reply]

__all__ = ["PeerGone", "TcpConnection", "TcpService", "TcpServingLoop"]

NOTHING = b""
WAIT_BYTES = 400  # what it takes that one waits for one key, roughly
COPIED_BYTES = 64 * 1024  # what is copied without a thought
_pack_i64, _pack_u64 = wire.I64.pack, wire.U64.pack
CHUNK_BYTES = 64 * 1024  # what is read of one connection before the next one has its turn
LARGE_CHUNK_BYTES = 1024 * 1024  # the same within a large value
JOINED_BYTES = 256 * 1024  # small pieces go out together, up to so much
GREETING_S = 30.0  # a worker greets at once, but its machine may be busy
EVENTS_PER_TURN = 256
TURN_S = 0.005  # for the requests of one connection, before the others have their turn
LOOKS = 30  # some 40 µs, once after each answer and never while nothing happens
IN, OUT = select.EPOLLIN, select.EPOLLOUT


class TcpService:
    """One store for any number of connections, each known by its number: what each request does to it, and what is replied.

    `tell` says something to a connection that is not the one being served.

    NotANumber, StoreFull and ProtocolError end the connection whose request caused them.
    """

    def __init__(self, values: Values, tell: Callable[[int, bytes], None]) -> None:
        self._values = values
        self._waiters = Waiters()
        self._awaited = self._waiters.by_key  # most of what changes is awaited by nobody
        self._tell = tell
        # From the operation to what does it. Each takes the connection, the byte strings and the number of the request.
        self.operations: dict[int, Operation] = {
            wire.VALIDATE: self._refuse_greeting,
            wire.SET: self._set,
            wire.COMPARE_SET: self._compare_set,
            wire.GET: self._get,
            wire.ADD: self._add,
            wire.CHECK: self._check,
            wire.WAIT: self._wait,
            wire.GETNUMKEYS: self._count_keys,
            wire.DELETE_KEY: self._delete,
            wire.APPEND: self._append,
            wire.MULTI_GET: self._get_many,
            wire.MULTI_SET: self._set_many,
            wire.CANCEL_WAIT: self._cancel_wait,
            wire.PING: self._ping,
            wire.QUEUE_PUSH: self._push,
            wire.QUEUE_POP: self._pop,
            wire.QUEUE_LEN: self._queue_length,
            wire.LIST_KEYS: self._list_keys,
            wire.BARRIER: self._barrier,
        }

    def leave(self, who: int) -> None:
        """That connection has ended, and waits for nothing any more."""
        self._waiters.forget(who)

    def _release(self, waiters: Iterable[int]) -> None:
        for who in waiters:
            self._tell(who, wire.STOP_WAITING)

    # --- values ------------------------------------------------------------------------------------------------------------

    def _set(self, who: int, strings: list[bytes], _: int) -> Reply:
        key, value = strings
        self._values.set(key, value)
        if key in self._awaited:
            self._release(self._waiters.changed(key))
        return NOTHING

    def _set_many(self, who: int, strings: list[bytes], _: int) -> Reply:
        for place in range(0, len(strings), 2):
            self._set(who, strings[place : place + 2], _)
        return NOTHING

    def _append(self, who: int, strings: list[bytes], _: int) -> Reply:
        key, more = strings
        self._values.append(key, more)
        self._release(self._waiters.changed(key))
        return NOTHING

    def _compare_set(self, who: int, strings: list[bytes], _: int) -> Reply:
        key, expected, desired = strings
        value, is_written = self._values.compare_set(key, expected, desired)
        if is_written:
            self._release(self._waiters.changed(key))
        return wire.packed(value)

    def _add(self, who: int, strings: list[bytes], amount: int) -> Reply:
        (key,) = strings
        count = self._values.add(key, amount)
        if key in self._awaited:
            self._release(self._waiters.changed(key))
        return _pack_i64(count)

    def _get(self, who: int, strings: list[bytes], _: int) -> Reply:
        """Clients wait for a key before they ask for it; one that has gone since is empty."""
        return wire.packed(self._values.values.get(strings[0], b""))

    def _get_many(self, who: int, strings: list[bytes], _: int) -> Reply:
        values = self._values.values
        return _all_packed([values.get(key, b"") for key in strings])

    def _delete(self, who: int, strings: list[bytes], _: int) -> Reply:
        return _pack_i64(self._values.delete(strings[0]))

    def _count_keys(self, who: int, strings: list[bytes], _: int) -> Reply:
        return _pack_i64(len(self._values.values))

    def _list_keys(self, who: int, strings: list[bytes], _: int) -> Reply:
        keys = list(self._values.values)
        packed = _all_packed(keys)
        return [_pack_i64(len(keys)), *packed] if isinstance(packed, list) else _pack_i64(len(keys)) + packed

    # --- waiting -----------------------------------------------------------------------------------------------------------

    def _check(self, who: int, strings: list[bytes], _: int) -> Reply:
        return wire.NOT_READY if self._values.missing(strings) else wire.READY

    def _wait(self, who: int, strings: list[bytes], _: int) -> Reply:
        missing = self._values.missing(strings)
        if not missing:
            return wire.STOP_WAITING
        self._let_wait(who, missing)
        return NOTHING

    def _let_wait(self, who: int, keys: list[bytes]) -> None:
        limit_bytes = self._values.limit_bytes
        if self._values.held_bytes + (self._waiters.pairs + len(keys)) * WAIT_BYTES > limit_bytes:
            raise StoreFull(limit_bytes)
        self._waiters.add(who, keys)

    def _cancel_wait(self, who: int, strings: list[bytes], _: int) -> Reply:
        self._waiters.forget(who)
        return wire.WAIT_CANCELED

    def _barrier(self, who: int, strings: list[bytes], world_size: int) -> Reply:
        """The key counts who has come; only the last one's coming is told."""
        (key,) = strings
        if self._values.add(key, 1) < world_size:
            self._let_wait(who, strings)
            return NOTHING
        self._release(self._waiters.changed(key))
        return wire.STOP_WAITING

    def _refuse_greeting(self, who: int, strings: list[bytes], _: int) -> Reply:
        raise wire.ProtocolError("it greeted twice")

    def _ping(self, who: int, strings: list[bytes], number: int) -> Reply:
        return wire.U32.pack(number)

    # --- queues ------------------------------------------------------------------------------------------------------------

    def _push(self, who: int, strings: list[bytes], _: int) -> Reply:
        key, value = strings
        self._values.push(key, value)
        self._release(self._waiters.pushed(key))
        return NOTHING

    def _pop(self, who: int, strings: list[bytes], _: int) -> Reply:
        length = self._values.queue_length(strings[0])
        first = self._values.pop(strings[0])
        return _pack_i64(length) if first is None else _pack_i64(length) + wire.packed(first)

    def _queue_length(self, who: int, strings: list[bytes], _: int) -> Reply:
        return _pack_i64(self._values.queue_length(strings[0]))


def _all_packed(strings: list[bytes]) -> Reply:
    """Byte strings, each behind its length; in pieces if they are large: the same one may be asked for many times at once."""
    if sum(map(len, strings)) <= COPIED_BYTES:
        return b"".join([_pack_u64(len(one)) + one for one in strings])
    return [piece for one in strings for piece in (_pack_u64(len(one)), one)]


class PeerGone(Exception):
    """The other end has closed the connection, or cannot be reached any more."""


class TcpConnection:
    """A socket that does not block: what has come, and what is still to go out.

    Whoever uses it reads no more while there is something in the `outbox`, which the peer has not taken yet: so a peer that does
    not read has at most one large answer that waits for it.
    """

    __slots__ = ("_recv", "_send", "accepted_at", "events", "fd", "is_greeted", "kept_bytes", "outbox", "peer", "reader", "sock")

    def __init__(self, sock: socket.socket, peer: str, now: float, events: int) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.peer = peer
        self.accepted_at = now
        self.events = events  # those that are polled for
        self.is_greeted = False  # whether it has said that it speaks the protocol
        self.kept_bytes = 0  # of a request that is not complete, when we last looked
        self.reader = RequestReader()
        self.outbox: deque[bytes | memoryview] = deque()
        self._recv = sock.recv
        self._send = sock.send

    def receive(self) -> bool:
        """Read what has come; whether there was anything."""
        wanted_bytes = self.reader.wanted_bytes
        try:
            data = self._recv(CHUNK_BYTES if wanted_bytes <= CHUNK_BYTES else min(wanted_bytes, LARGE_CHUNK_BYTES))
        except BlockingIOError:
            return False
        except OSError:
            raise PeerGone from None
        if not data:
            raise PeerGone
        self.reader.feed(data)
        return True

    def say(self, reply: bytes | list[bytes]) -> None:
        """Send it now as far as the peer takes it, the rest when `flush` is called."""
        if isinstance(reply, list) or self.outbox:
            self.outbox.extend([reply] if isinstance(reply, bytes) else reply)
            self.flush()
            return
        sent = self._try_to_send(reply)
        if sent < len(reply):
            self.outbox.append(memoryview(reply)[sent:])

    def flush(self) -> None:
        """Send what is still to go out, as far as the peer takes it."""
        while self.outbox:
            data = self._next_data()
            sent = self._try_to_send(data)
            if sent < len(data):
                self.outbox.appendleft(memoryview(data)[sent:])
                return

    def _next_data(self) -> bytes | memoryview:
        first = self.outbox.popleft()
        pieces, size = [first], len(first)
        while self.outbox and size + len(self.outbox[0]) <= JOINED_BYTES:
            pieces.append(self.outbox.popleft())
            size += len(pieces[-1])
        return b"".join(pieces) if len(pieces) > 1 else first

    def _try_to_send(self, data: bytes | memoryview) -> int:
        try:
            return self._send(data)
        except BlockingIOError:
            return 0
        except OSError:
            raise PeerGone from None


class TcpServingLoop:
    """Everything that the server's thread does. The `wake_fd` ends a turn; `newcomers` were accepted elsewhere."""

    def __init__(
        self,
        listeners: Iterable[socket.socket],
        wake_fd: WakeFd,
        newcomers: deque[tuple[socket.socket, str]],
        limit_bytes: int,
        most_connections: int,
        objection: Callable[[socket.socket], str] | None = None,
    ) -> None:
        """`objection` says why somebody is not let in."""
        self._object = objection
        self._limit_bytes = limit_bytes
        self._most_connections = most_connections
        self._values = Values(limit_bytes)
        self._service = TcpService(self._values, self._tell)
        self._connections: dict[int, TcpConnection] = {}
        self._strangers: dict[int, TcpConnection] = {}  # who has not greeted yet, in the order in which they came
        self._kept_bytes = 0  # of requests that are not complete, of all connections
        self._refusals = Refusals()
        self._has_chores = False  # whether there may be something to do that nothing wakes us for
        self._wake_fd = wake_fd
        self._newcomers = newcomers
        self._poll = select.epoll()
        self._poll.register(wake_fd.fileno(), IN)
        self._doorway = Doorway(listeners, self._poll)

    def turn(self) -> None:
        """Wait until there is something to do, and do it."""
        ready = self._look_around() or self._poll.poll(self._patience_s() if self._has_chores else None, EVENTS_PER_TURN)
        now = time.monotonic()
        for fd, _ in ready:
            one = self._connections.get(fd)
            if one is None:
                self._welcome(fd, now)
            elif one.events == OUT:  # perhaps only since this turn began
                self._go_on(one)
            else:
                self._hear(one)
        if self._has_chores:
            self._look_after(now)

    def _look_around(self) -> list[tuple[int, int]]:
        """What comes in the next moment. To be woken takes longer than to ask, so who is answered soon asks again sooner."""
        for _ in range(LOOKS):
            if ready := self._poll.poll(0, EVENTS_PER_TURN):
                return ready
            os.sched_yield()
        return []

    def close(self) -> list[socket.socket]:
        """End all connections, and give the listeners back; the loop must not run any more."""
        for one in self._connections.values():
            one.sock.close()
        self._poll.close()
        return self._doorway.listeners

    # --- one connection ----------------------------------------------------------------------------------------------------

    def _hear(self, one: TcpConnection) -> None:
        try:
            if one.receive():
                self._serve(one)
        except PeerGone:
            self._end(one)

    def _serve(self, one: TcpConnection) -> None:
        """Do what is asked, as far as it has come and earlier answers are taken; the rest next time, if it takes long."""
        fd, operations, until = one.fd, self._service.operations, time.monotonic() + TURN_S
        try:
            requests = one.reader.requests()
            if not one.is_greeted:
                self._hear_greeting(one, requests)
            for operation, strings, number in requests:
                reply = operations[operation](fd, strings, number)
                if reply:
                    one.say(reply)
                elif operation != wire.APPEND:  # which copies the whole value; all else that is not answered takes no time
                    continue
                if one.outbox or (time.monotonic() > until and one.reader.has_more):
                    self._watch(one)
                    break
        except (wire.ProtocolError, NotANumber, StoreFull) as broken:
            self._end(one, str(broken))
            return
        except PeerGone:
            raise
        except Exception as mistake:  # ours, which the words of one peer bring out: it must not end the store for all
            self._end(one, f"of an internal mistake, {mistake!r}")
            return
        if one.reader.wanted_bytes or one.kept_bytes:
            self._account(one)

    def _hear_greeting(self, one: TcpConnection, requests: Iterator[tuple[int, list[bytes], int]]) -> None:
        for operation, _, number in requests:
            if operation != wire.VALIDATE or number != wire.MAGIC:
                raise wire.ProtocolError("it does not speak the protocol of torch's TCPStore")
            one.is_greeted = True
            del self._strangers[one.fd]
            return

    def _go_on(self, one: TcpConnection) -> None:
        """It has taken something of what it was told; when that is all, what it has asked meanwhile has its turn."""
        try:
            one.flush()
            if not one.outbox:
                self._serve(one)
        except PeerGone:
            self._end(one)
            return
        if one.fd in self._connections:
            self._watch(one)

    def _tell(self, who: int, data: bytes) -> None:
        """To one that waits, on behalf of another."""
        one = self._connections[who]
        try:
            one.say(data)
        except PeerGone:
            return  # the poll will say so too; here it may be the very one that is being served
        if one.outbox:
            self._watch(one)

    def _watch(self, one: TcpConnection) -> None:
        """Poll for what is needed of it next; one that has had its turn comes again at once, if it could be told something."""
        events = OUT if one.outbox or one.reader.has_more else IN
        if events != one.events:
            self._poll.modify(one.fd, events)
            one.events = events

    def _account(self, one: TcpConnection) -> None:
        kept = one.reader.held_bytes
        self._kept_bytes += kept - one.kept_bytes
        one.kept_bytes = kept
        if self._kept_bytes + self._values.held_bytes > self._limit_bytes:
            self._end(one, f"the store may hold {self._limit_bytes} bytes, and with this request it would be more")

    # --- coming and going --------------------------------------------------------------------------------------------------

    def _welcome(self, fd: int, now: float) -> None:
        self._has_chores = True
        if fd in self._doorway:
            for sock, peer in self._doorway.accept(fd, now):
                self._admit(sock, peer, now)
        elif fd == self._wake_fd.fileno():
            self._wake_fd.clear()
            while self._newcomers:
                self._admit(*self._newcomers.popleft(), now)

    def _admit(self, sock: socket.socket, peer: str, now: float) -> None:
        if objection := self._objection(sock):
            self._refusals.add(peer, objection)
            sock.close()
            return
        if len(self._connections) >= self._most_connections:
            self._refusals.add(peer, f"there are {self._most_connections} connections already, near the limit of open files")
            sock.close()
            return
        one = TcpConnection(sock, peer, now, IN)
        self._connections[one.fd] = self._strangers[one.fd] = one
        self._poll.register(one.fd, IN)
        while len(self._strangers) > STRANGERS_IN_RESERVE and is_reserved(one.fd):
            self._end(next(iter(self._strangers.values())), "too many others came before it had said a word of the protocol")

    def _objection(self, sock: socket.socket) -> str:
        try:
            return "" if self._object is None else self._object(sock)
        except OSError:
            return "it has gone already"

    def _end(self, one: TcpConnection, reason: str = "") -> None:
        """Close it; without a `reason` where that is nothing to report."""
        if self._connections.pop(one.fd, None) is None:
            return
        self._strangers.pop(one.fd, None)
        self._kept_bytes -= one.kept_bytes
        self._service.leave(one.fd)
        one.sock.close()
        if reason:
            self._refusals.add(one.peer, reason)
            self._has_chores = True

    def _look_after(self, now: float) -> None:
        while self._strangers:
            oldest = next(iter(self._strangers.values()))
            if now < oldest.accepted_at + GREETING_S:
                break
            self._end(oldest, f"it did not say a word of the protocol within {GREETING_S:g} s")
        self._doorway.open_if_due(now)
        self._refusals.tell(now)
        self._has_chores = self._patience_s() is not None

    def _patience_s(self) -> float | None:
        """How long there is nothing to do, unless something comes."""
        times = [at for at in (self._doorway.opens_at, self._refusals.due_at) if at is not None]
        if self._strangers:
            times.append(next(iter(self._strangers.values())).accepted_at + GREETING_S)
        return max(0.0, min(times) - time.monotonic()) if times else None
