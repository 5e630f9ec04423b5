"""The embedded store's server, for the agent that hosts it: a thread that is started, waited for and stopped.

The loop of the store's server: one thread, any number of nodes, and nobody who can make it wait.

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
from collections.abc import Callable, Iterable, Sequence

from rallypoint.base.limits import STRANGERS_IN_RESERVE, is_reserved
from rallypoint.coordination.embedded.connection import Connection, ConnectionEnded
from rallypoint.coordination.embedded.frames import FrameError
from rallypoint.coordination.embedded.handshake import HandshakeRefused, ServerHandshake, Welcome
from rallypoint.coordination.embedded.service import Session, StoreService, new_token
from rallypoint.coordination.embedded.wire import encode
from rallypoint.coordination.keyspace import Keyspace
from rallypoint.net.acceptor import Doorway, Refusals
from rallypoint.net.listening import address_of
from rallypoint.net.service_thread import ServiceThread
from rallypoint.net.wake_fd import WakeFd
from rallypoint.store.tcp_protocol import GREETING

__all__ = ["CoordinationServer", "ServingLoop"]


# --- serving ---------------------------------------------------------------------------------------------------------------


CONNECTIONS = 16_384
STRANGERS = 4_096
HANDSHAKE_S = 5.0
HELD_BYTES = 256 * 1024 * 1024  # for all connections together, of what came in part and what is not sent yet
FAREWELL_S = 0.5


class ServingLoop:
    """Everything that the server's thread does. `wake_fd` ends a turn; `living_count` is for other threads too."""

    def __init__(
        self,
        listeners: Iterable[socket.socket],
        service: StoreService,
        make_handshake: Callable[[Welcome], ServerHandshake],
        incarnation: str,
        clock: Callable[[], float],
        on_fewer: Callable[[], None],
        wake_fd: WakeFd,
        take_in_worker: Callable[[socket.socket, str], None] | None = None,
    ) -> None:
        self._service = service
        self._make_handshake = make_handshake
        self._incarnation = incarnation
        self._clock = clock
        self._on_fewer = on_fewer
        self._take_in_worker = take_in_worker
        self._connections: dict[int, Connection] = {}
        self._strangers: dict[int, Connection] = {}  # in the order in which they came
        self._held_bytes = 0
        self._refusals = Refusals()
        self._poll = select.epoll()
        self._poll.register(wake_fd, select.EPOLLIN)
        self._doorway = Doorway(listeners, self._poll)

    def living_count(self) -> int:
        """How many clients there are, without those that are lost: their lease has ended, and nobody will hear from them."""
        clients = [connection.session for connection in list(self._connections.values()) if connection.is_welcome]
        return sum(not self._service.is_lost(session) for session in clients)

    def turn(self) -> None:
        """Wait until there is something to do, and do it."""
        ready = self._poll.poll(self._patience_s(), CONNECTIONS)
        now = self._clock()
        self._serve_ready(ready, now)
        expiry = self._service.next_expiry()
        if expiry is not None and expiry <= now:  # what came while we were busy is still in time
            self._serve_ready(self._poll.poll(0, CONNECTIONS), now)
        self._service.tick(now)
        self._flush_touched(now)
        self._end_late_strangers(now)
        self._doorway.open_if_due(now)
        self._refusals.tell(now)

    def _patience_s(self) -> float | None:
        """How long there is nothing to do, unless something comes."""
        times = [self._service.next_expiry(), self._doorway.opens_at, self._refusals.due_at]
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
        welcome = Welcome(self._incarnation, new_token())
        connection = Connection(sock, peer, self._make_handshake(welcome), Session(welcome.session), now)
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
            self._on_fewer()

    # --- one connection ----------------------------------------------------------------------------------------------------

    def _read(self, connection: Connection, now: float) -> None:
        if self._take_in_worker is not None and connection.fd in self._strangers and connection.begins_with(GREETING):
            self._hand_over(connection, self._take_in_worker)
            return
        try:
            connection.receive()
        except ConnectionEnded:
            self._end(connection, "", now)
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
            self._service.vouch(lease)
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

    def say_farewell(self, reason: str) -> None:
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

    def close(self) -> None:
        """Close everything; the loop must not run any more."""
        for connection in self._connections.values():
            connection.close()
        self._doorway.close()
        self._poll.close()


# --- server ----------------------------------------------------------------------------------------------------------------


INCARNATION_BYTES = 8
LOOK_AGAIN_S = 0.25


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
    ) -> None:
        """`take_in_worker` gets the connections of those who speak torch's TCPStore protocol; without it they are refused."""
        self.incarnation = os.urandom(INCARNATION_BYTES).hex()
        self.addresses = [address_of(sock) for sock in sockets]
        for sock in sockets:
            sock.setblocking(False)

        service = StoreService(Keyspace())

        def make_handshake(welcome: Welcome) -> ServerHandshake:
            return ServerHandshake(run_id, secret, welcome, service.token_of)

        self._clock = clock
        self._fewer = threading.Condition()
        wake_fd = WakeFd()
        self._loop = ServingLoop(sockets, service, make_handshake, self.incarnation, clock, self._notify, wake_fd, take_in_worker)
        self._thread = ServiceThread("store", wake_fd, self._run, self._loop.close)
        self._farewell: str | None = None

    def start(self) -> None:
        self._thread.start()

    def wait_until_alone(self, deadline: float, except_for: int = 1) -> bool:
        """Wait, until `deadline` at the latest, until at most `except_for` clients are left; whether that is so.

        A node whose lease has ended is lost, even if its connection does not show it yet.
        """
        with self._fewer:
            while self._loop.living_count() > except_for:
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

    def _run(self) -> None:
        while self._farewell is None:
            self._loop.turn()
        self._loop.say_farewell(self._farewell)

    def _notify(self) -> None:
        with self._fewer:
            self._fewer.notify_all()
