"""The embedded store's server, for the agent that hosts it: one thread, any number of nodes, and nobody who can make it wait.

In each turn all that has come is read before any lease may end, so that a keepalive which was here in time counts; then what is
over ends, then everybody is told what has changed, then all that is to be said goes out. Sockets do not block, and whoever is
too slow, says too much or breaks the rules is cut off. A *stranger*, who has not yet proven that it belongs to the job, may
hold one small frame, for a few seconds, and learns nothing.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from rallypoint.base.limits import STRANGERS_IN_RESERVE, is_reserved
from rallypoint.coordination.embedded.handshake import Boxes, HandshakeRefused, ServerHandshake, Welcome
from rallypoint.coordination.embedded.service import Session, StoreService, new_token
from rallypoint.coordination.embedded.wire import LARGE_FRAME_BYTES, FrameError, Inbox, Seal, TlsError, encode, make_frame
from rallypoint.coordination.keyspace import Keyspace
from rallypoint.net.acceptor import Doorway, Refusals
from rallypoint.net.endpoint import address_of
from rallypoint.net.service_thread import ServiceThread
from rallypoint.net.visitors import Visitors
from rallypoint.net.wake_fd import WakeFd
from rallypoint.store.tcp_protocol import GREETING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.coordination.embedded.tls import Tls

__all__ = ["Connection", "ConnectionEnded", "CoordinationServer"]

READ_BYTES = 256 * 1024
SEND_BYTES = 256 * 1024
OUTPUT_BYTES = 8 * 1024 * 1024
CONNECTIONS = 16_384
STRANGERS = 4_096
HANDSHAKE_S = 5.0
HELD_BYTES = 256 * 1024 * 1024  # for all connections together, of what came in part and what is not sent yet
FAREWELL_S = 0.5
INCARNATION_BYTES = 8
TLS_HELLO = b"\x16"  # no frame of ours begins with it, while one has to be small
NO_TLS = "this store speaks TLS, and the node does not: --tls-cert, --tls-key and --tls-ca are needed on all nodes"
LOOK_AGAIN_S = 0.25


class ConnectionEnded(Exception):
    """The connection is over; the text says why, and is empty where the peer has closed it."""


class Connection:
    """A peer: a stranger until it is welcome.

    What is to be sent is collected and goes out once a turn. A long answer is written down bit by bit, as the other side reads
    it; until it is out, no more requests of that connection are read. A peer that lets too much pile up is cut off.
    """

    def __init__(self, sock: socket.socket, peer: str, handshake: ServerHandshake, session: Session, accepted_at: float) -> None:
        self.fd = sock.fileno()
        self.peer = peer
        self.handshake = handshake
        self.session = session
        self.accepted_at = accepted_at
        self.is_welcome = False
        self.is_tls_due = False  # before anything else
        self.is_node = False  # it has, or had, a lease
        self.is_closed = False
        self.inbox = Inbox()
        self.polled_events = select.EPOLLIN  # what the server has asked the kernel to tell it
        self.accounted_bytes = 0  # how much of `held_bytes` the server has counted
        self._socket = sock
        self._seal: Seal | None = None
        self._output: deque[bytes] = deque()
        self._output_bytes = 0
        self._sending = memoryview(b"")
        self._bodies: deque[bytes | Iterator[bytes]] = deque()  # a long answer, and what must not overtake it
        self._bodies_bytes = 0

    # --- coming in ---------------------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Read what is there."""
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except TlsError:
            raise
        except OSError as error:
            raise ConnectionEnded(error.strerror or str(error)) from None
        if not data:
            raise ConnectionEnded("")
        self.inbox.feed(data)

    def wake_for(self, size: int) -> None:
        """Let the kernel tell of what has come when it is `size` bytes, or the end."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)

    def begins_with(self, greeting: bytes) -> bool:
        """Whether what has come, of which nothing is read yet, is this; from now on the kernel tells of each byte."""
        self.wake_for(1)
        try:
            return not self.inbox and self._socket.recv(len(greeting), socket.MSG_PEEK) == greeting
        except OSError:  # whatever it is, whoever reads it next finds out
            return False

    def begin_tls(self, tls: Tls) -> None:
        """Whoever begins otherwise may be a warden, and is not heard else."""
        self.is_tls_due = False
        try:
            begins_so = self._socket.recv(len(TLS_HELLO), socket.MSG_PEEK) == TLS_HELLO
            if begins_so:
                self._socket = tls.at_store(self._socket)
        except OSError as error:
            raise ConnectionEnded(error.strerror or str(error)) from None
        if not begins_so:
            self.handshake.objection = NO_TLS

    def release(self) -> socket.socket:
        """The socket, for somebody else to read."""
        self.is_closed = True
        return self._socket

    def note_node(self, visitors: Visitors) -> None:
        if self.session.lease and not self.is_node:
            self.is_node = True
            visitors.add(self._socket)

    def welcome(self) -> None:
        """The handshake is over: larger frames, with the seals."""
        self.is_welcome = True
        self.session.connection = self
        self.session.is_proven = self.handshake.incoming is not None
        self.inbox.limit = LARGE_FRAME_BYTES
        self.inbox.seal = self.handshake.incoming
        self._seal = self.handshake.outgoing

    @property
    def is_busy(self) -> bool:
        """Whether it has to read an answer before it may ask for more."""
        return bool(self._bodies)

    # --- going out ---------------------------------------------------------------------------------------------------------

    @property
    def has_output(self) -> bool:
        return bool(self._sending or self._output or self._bodies)

    @property
    def output_bytes(self) -> int:
        return self._output_bytes + self._bodies_bytes + len(self._sending)

    @property
    def held_bytes(self) -> int:
        """How much memory its peer makes us hold."""
        return len(self.inbox) + self.output_bytes

    def send(self, body: bytes) -> None:
        if self._bodies:
            self._bodies.append(body)
            self._bodies_bytes += len(body)
        else:
            self._append(body)

    def send_each(self, bodies: Iterator[bytes]) -> None:
        """Send what is written down only when there is room for it."""
        self._bodies.append(bodies)

    def _append(self, body: bytes) -> None:
        frame = make_frame(body, self._seal)
        self._output.append(frame)
        self._output_bytes += len(frame)

    def flush(self) -> None:
        """Send what the kernel takes now."""
        while self._fill():
            try:
                sent = self._socket.send(self._sending)
            except BlockingIOError:
                if self.output_bytes > OUTPUT_BYTES:
                    raise ConnectionEnded(f"it does not read what it is told, {self.output_bytes} bytes by now") from None
                return
            except OSError as error:
                raise ConnectionEnded(error.strerror or str(error)) from None
            self._sending = self._sending[sent:]

    def _fill(self) -> bool:
        """Put together what goes out next; False if there is nothing."""
        if self._sending:
            return True
        while self._bodies and self._output_bytes < SEND_BYTES:
            self._write_down_next()
        frames: list[bytes] = []
        size = 0
        while self._output and size < SEND_BYTES:
            frames.append(self._output.popleft())
            size += len(frames[-1])
        self._output_bytes -= size
        self._sending = memoryview(frames[0] if len(frames) == 1 else b"".join(frames))
        return size > 0

    def _write_down_next(self) -> None:
        first = self._bodies[0]
        if isinstance(first, bytes):
            self._bodies.popleft()
            self._bodies_bytes -= len(first)
            self._append(first)
        elif (body := next(first, None)) is not None:
            self._append(body)
        else:
            self._bodies.popleft()

    def close(self) -> None:
        self.is_closed = True
        self._socket.close()


class CoordinationServer:
    """Serves the store of one job on sockets that listen already, which it owns from now on."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        run_id: str,
        secret: bytes | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        take_in_worker: Callable[[socket.socket, str], None] | None = None,
        boxes: Mapping[str, str] | None = None,
        judge: Callable[[socket.socket], str] | None = None,
        tls: Tls | None = None,
    ) -> None:
        """`take_in_worker` gets the connections of those who speak torch's TCPStore protocol; without it they are refused.

        `boxes` hold the secret, for those who were given none; `judge` says why who can open none is not heard, and nothing if it
        is.
        """
        self.incarnation = os.urandom(INCARNATION_BYTES).hex()
        self.addresses = [address_of(sock) for sock in sockets]
        self._run_id, self._secret = run_id, secret
        self._clock = clock
        self._take_in_worker = take_in_worker
        self._boxes, self._judge = boxes, judge
        self._tls = tls
        self.visitors = Visitors()
        self._service = StoreService(Keyspace())
        self._connections: dict[int, Connection] = {}
        self._strangers: dict[int, Connection] = {}  # in the order in which they came
        self._held_bytes = 0
        self._refusals = Refusals()
        self._fewer = threading.Condition()
        self._farewell: str | None = None
        wake_fd = WakeFd()
        self._poll = select.epoll()
        self._poll.register(wake_fd, select.EPOLLIN)
        for sock in sockets:
            sock.setblocking(False)
        self._doorway = Doorway(sockets, self._poll)
        self._thread = ServiceThread("store", wake_fd, self._run, self._close)

    def start(self) -> None:
        self._thread.start()

    def wait_until_alone(self, deadline: float, except_for: int = 1) -> bool:
        """Wait, until `deadline` at the latest, until at most `except_for` clients are left; whether that is so.

        A node whose lease has ended is lost, even if its connection does not show it yet.
        """
        with self._fewer:
            while self._living_count() > except_for:
                left_s = deadline - self._clock()
                if left_s <= 0:
                    return False
                self._fewer.wait(min(left_s, LOOK_AGAIN_S))  # nobody notifies of a lease that runs out
        return True

    def stop(self, linger_s: float = 0.0, reason: str = "its host has ended") -> None:
        """End the server once everybody has gone, or `linger_s` from now; who is left then is told the `reason`."""
        if self._farewell is not None:
            return
        self.wait_until_alone(self._clock() + linger_s, except_for=0)
        self._farewell = reason
        self._thread.stop()

    def _living_count(self) -> int:
        """How many clients there are, without those that are lost: their lease has ended, and nobody will hear from them."""
        clients = [connection.session for connection in list(self._connections.values()) if connection.is_welcome]
        return sum(not self._service.is_lost(session) for session in clients)

    # --- the thread --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._farewell is None:
            self._turn()
        self._say_farewell(self._farewell)

    def _turn(self) -> None:
        """Wait until there is something to do, and do it."""
        ready = self._poll.poll(self._patience_s(), CONNECTIONS)
        now = self._clock()
        self._serve_ready(ready, now)
        expiry = self._service.keyspace.next_expiry()
        if expiry is not None and expiry <= now:  # what came while we were busy is still in time
            self._serve_ready(self._poll.poll(0, CONNECTIONS), now)
        self._service.tick(now)
        self._flush_touched(now)
        self._end_late_strangers(now)
        self._doorway.open_if_due(now)
        self._refusals.tell(now)

    def _patience_s(self) -> float | None:
        """How long there is nothing to do, unless something comes."""
        times = [self._service.keyspace.next_expiry(), self._doorway.opens_at, self._refusals.due_at]
        if self._strangers:
            times.append(next(iter(self._strangers.values())).accepted_at + HANDSHAKE_S)
        known = [time for time in times if time is not None]
        return max(0.0, min(known) - self._clock()) if known else None

    def _serve_ready(self, ready: list[tuple[int, int]], now: float) -> None:
        for fd, events in ready:
            connection = self._connections.get(fd)
            if connection is not None:
                if events & select.EPOLLOUT:
                    self._service.touched.add(connection)
                if events & ~select.EPOLLOUT:
                    self._read(connection, now)
            elif fd in self._doorway:
                for sock, peer in self._doorway.accept(fd, now):
                    self._admit(sock, peer, now)

    # --- coming and going --------------------------------------------------------------------------------------------------

    def _admit(self, sock: socket.socket, peer: str, now: float) -> None:
        if len(self._connections) >= CONNECTIONS:
            self._refusals.add(peer, f"there are {CONNECTIONS} connections already")
            sock.close()
            return
        welcome = Welcome(self.incarnation, new_token())
        boxes = None if self._boxes is None else Boxes(self._boxes, self._judge and partial(self._judge, sock))
        handshake = ServerHandshake(self._run_id, self._secret, welcome, self._service.sessions.owner_of, boxes)
        connection = Connection(sock, peer, handshake, Session(welcome.session), now)
        connection.is_tls_due = self._tls is not None
        self._connections[connection.fd] = self._strangers[connection.fd] = connection
        self._poll.register(connection.fd, select.EPOLLIN)
        if self._take_in_worker is not None:
            connection.wake_for(len(GREETING))  # by which a worker is known
        most = STRANGERS_IN_RESERVE if is_reserved(connection.fd) else STRANGERS
        while len(self._strangers) > most:
            self._end(next(iter(self._strangers.values())), "too many others came before it had proven anything", now)

    def _end_late_strangers(self, now: float) -> None:
        while self._strangers:
            oldest = next(iter(self._strangers.values()))
            if now < oldest.accepted_at + HANDSHAKE_S:
                return
            self._end(oldest, f"it did not introduce itself within {HANDSHAKE_S:g} s", now)

    def _refuse(self, connection: Connection, reason: str, now: float) -> None:
        """Tell the peer why, if it takes one more frame, and end it."""
        connection.send(encode([0, "refused", reason]) if connection.is_welcome else ServerHandshake.refusal(reason))
        self._see_off(connection, reason, now)

    def _see_off(self, connection: Connection, reason: str, now: float) -> None:
        """End it behind the last word."""
        try:
            connection.flush()
        except ConnectionEnded:
            pass  # then it does not hear it
        self._end(connection, reason, now)

    def _end(self, connection: Connection, reason: str, now: float) -> None:
        """Close it; without a `reason` where that is nothing to report."""
        if connection.is_closed:  # and its number may be that of another by now
            return
        del self._connections[connection.fd]
        self._strangers.pop(connection.fd, None)
        self._held_bytes -= connection.accounted_bytes
        self._service.leave(connection, now)
        connection.close()
        if reason:
            self._refusals.add(connection.peer, reason)
        if connection.is_welcome:
            with self._fewer:
                self._fewer.notify_all()

    # --- one connection ----------------------------------------------------------------------------------------------------

    def _read(self, connection: Connection, now: float) -> None:
        if self._take_in_worker is not None and connection.fd in self._strangers and connection.begins_with(GREETING):
            self._hand_over(connection, self._take_in_worker)
            return
        try:
            if self._tls is not None and connection.is_tls_due:
                connection.begin_tls(self._tls)
            connection.receive()
        except ConnectionEnded:
            self._end(connection, "", now)
        except TlsError as error:
            self._end(connection, str(error.strerror), now)
        else:
            self._serve(connection, now)

    def _hand_over(self, worker: Connection, take_in: Callable[[socket.socket, str], None]) -> None:
        del self._connections[worker.fd], self._strangers[worker.fd]
        self._poll.unregister(worker.fd)
        take_in(worker.release(), worker.peer)

    def _serve(self, connection: Connection, now: float) -> None:
        """Do what is asked, as far as it has come and earlier answers are read."""
        try:
            while not connection.is_closed and not connection.is_busy and (body := connection.inbox.take()) is not None:
                self._service.touched.add(connection)
                if connection.is_welcome:
                    self._service.serve(connection, body, now)
                    connection.note_node(self.visitors)
                else:
                    self._greet(connection, body, now)
        except (FrameError, HandshakeRefused) as refused:
            self._refuse(connection, str(refused), now)
        except Exception as mistake:  # ours, which the words of one peer bring out: it must not end the store for all
            self._refuse(connection, f"of an internal mistake, {mistake!r}", now)
        for replaced in self._service.take_replaced():
            self._end(replaced, "", now)
        self._account(connection, now)

    def _greet(self, connection: Connection, body: bytes, now: float) -> None:
        answer = connection.handshake.answer(body)
        if connection.handshake.is_over:
            connection.welcome()
            self._strangers.pop(connection.fd, None)
        connection.send(answer)
        if (lease := connection.handshake.vouched_lease) is not None:
            self._service.keyspace.vouch(lease)
        if lease is not None or connection.handshake.has_told_name:
            self._see_off(connection, "", now)

    def _account(self, connection: Connection, now: float) -> None:
        if connection.is_closed:
            return
        held = connection.held_bytes
        self._held_bytes += held - connection.accounted_bytes
        connection.accounted_bytes = held
        if held and self._held_bytes > HELD_BYTES:
            self._end(connection, f"the store holds more than {HELD_BYTES} bytes for its clients, and this is one of them", now)

    def _flush_touched(self, now: float) -> None:
        touched = self._service.touched
        while touched:
            connection = touched.pop()
            if not connection.is_closed:
                self._flush(connection, now)
            if not touched:
                self._service.tell()  # a request that had to wait for its turn may have changed something just now

    def _flush(self, connection: Connection, now: float) -> None:
        try:
            connection.flush()
        except ConnectionEnded as ended:
            self._end(connection, str(ended), now)
            return
        if connection.inbox and not connection.is_busy:
            self._serve(connection, now)  # it had to wait for the answer that is out now
        if connection.is_closed:
            return
        wanted = (0 if connection.is_busy else select.EPOLLIN) | (select.EPOLLOUT if connection.has_output else 0)
        if wanted != connection.polled_events:
            self._poll.modify(connection.fd, wanted)
            connection.polled_events = wanted
        self._account(connection, now)

    # --- the end -----------------------------------------------------------------------------------------------------------

    def _say_farewell(self, reason: str) -> None:
        """Tell everybody that the store ends, and let what is still to be said go out, but not for long."""
        for connection in self._connections.values():
            if connection.is_welcome:
                connection.send(encode([0, "ending", reason]))
                self._service.touched.add(connection)
        self._doorway.shut()
        deadline = self._clock() + FAREWELL_S
        self._flush_touched(self._clock())
        while (now := self._clock()) < deadline and any(one.has_output for one in self._connections.values() if one.is_welcome):
            self._serve_ready(self._poll.poll(deadline - now, CONNECTIONS), now)
            self._flush_touched(now)

    def _close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._doorway.close()
        self._poll.close()
