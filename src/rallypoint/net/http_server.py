"""A small HTTP/1.1 server: one thread, sockets that do not block, and a limit on everything.

It is for short answers that are made at once, such as how the agent is: `answer` is called on the server's thread, and whoever
else asks waits meanwhile. What takes longer is a `Stream`, which another thread gives. Listeners may be of TCP or Unix sockets.
``Request`` and ``Response`` are in ``net.http``.

Whoever is slow harms only itself: a request has to arrive within a few seconds, an answer that nobody takes is given up, and when
there is no room for a newcomer, the one that has been silent for the longest gives way.
"""

from __future__ import annotations

import math
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from rallypoint.base import report
from rallypoint.base.limits import STRANGERS_IN_RESERVE, is_reserved
from rallypoint.base.records import Value
from rallypoint.net.acceptor import Doorway
from rallypoint.net.http import METHODS, Refusal, Request, RequestReader, Response, render, render_head
from rallypoint.net.http_stream import Stream
from rallypoint.net.service_thread import ServiceThread
from rallypoint.net.wake_fd import WakeFd

__all__ = ["Admits", "Answer", "HttpLimits", "HttpServer"]

EVENTS_PER_TURN = 64
REQUESTS_PER_TURN = 16  # of one connection, before the others have their turn
CHUNK_BYTES = 16 * 1024
QUIET_S = 60.0  # between two lines about what went wrong: whoever can connect can cause them
IN, OUT = select.EPOLLIN, select.EPOLLOUT
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

Answer = Callable[[Request], Response | Stream]
Admits = Callable[[socket.socket], bool]
TOO_MANY_STREAMS = "as many are being told something as can be; try again later\n"
STOPPING_S = 5.0  # an answer is a matter of milliseconds


class HttpLimits(Value):
    connections: int = 128
    request_s: float = 5.0  # for a request to arrive
    idle_s: float = 30.0  # between two requests, and for an answer to be taken
    linger_s: float = 1.0  # for the peer to take the last answer, and to notice that it is the last
    first_word_s: float = 0.1  # that everybody has before giving way to a newcomer
    streams: int = 16


class Connection:
    """One peer: what has come, and what is still to go out."""

    __slots__ = (
        "deadline", "events", "fd", "has_left", "has_more", "is_last", "lingers", "outbox", "reader", "since", "sock", "stream",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, now: float, idle_s: float) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.reader = RequestReader()
        self.outbox = memoryview(b"")
        self.events = IN  # those that are polled for
        self.since = now  # when it was last heard or told something whole
        self.deadline = now + idle_s
        self.has_more = False  # requests that have come and wait for the next turn
        self.is_last = False  # what is in the outbox
        self.has_left = False  # it will say nothing any more, but may listen
        self.lingers = False  # it was told everything, and what it says is not heard any more
        self.stream: Stream | None = None  # the last answer, of which more may come

    @property
    def is_idle(self) -> bool:
        return self.lingers or not (self.outbox or self.reader.has_begun)

    def send(self) -> None:
        """As much as the peer takes now; OSError: it has gone."""
        try:
            while self.outbox:
                self.outbox = self.outbox[self.sock.send(self.outbox) :]
        except BlockingIOError:
            return

    def receive(self) -> bytes | None:
        """What has come, nothing at the end, None if it was a false alarm; OSError: it has gone."""
        try:
            return self.sock.recv(CHUNK_BYTES)
        except BlockingIOError:
            return None


class HttpServer:
    """Serves on sockets that listen already, which it owns from now on, until it is stopped.

    `answer` makes the answers, and `admits` says who is heard at all, by the accepted socket. Its thread is named after `name`.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        answer: Answer,
        name: str,
        *,
        admits: Admits = lambda _: True,
        limits: HttpLimits = HttpLimits(),  # noqa: B008  # a value
    ) -> None:
        self._answer = answer
        self._admits = admits
        self._limits = limits
        self._connections: dict[int, Connection] = {}
        self._rung: deque[Connection] = deque()  # those whose streams have news
        self._quiet_until = 0.0
        self._wake_fd = WakeFd()
        self._poll = select.epoll()
        self._poll.register(self._wake_fd.fileno(), IN)
        for listener in listeners:
            listener.setblocking(False)
        self._doorway = Doorway(listeners, self._poll)
        self._thread = ServiceThread(name, self._wake_fd, self._run, self._close)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = STOPPING_S) -> None:
        """End all connections, and listen no more. An answer that is being made is waited for so long; after that the thread,
        which keeps nobody from ending, does all this when the answer is made. Twice is once.
        """
        self._thread.stop(timeout_s)

    # --- the thread --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._thread.is_ending:
                self._turn()
        finally:  # while whoever gives a stream can still be told, and may be about to ring
            self._attend_streams(time.monotonic())  # with their last words
            for one in list(self._connections.values()):
                self._end(one)

    def _turn(self) -> None:
        """Wait until there is something to do, and do it."""
        ready = self._poll.poll(self._patience_s(), EVENTS_PER_TURN)
        now = time.monotonic()
        for fd, _ in ready:
            if one := self._connections.get(fd):
                self._attend(one, now)
            elif fd == self._wake_fd.fileno():
                self._wake_fd.clear()
        self._attend_streams(now)
        for fd, _ in ready:  # after those who are here, who might have to give way with a request in hand
            if fd in self._doorway:
                self._welcome(fd, now)
        for one in [one for one in self._connections.values() if now >= one.deadline]:
            self._give_up(one, now)
        self._doorway.open_if_due(now)

    def _attend_streams(self, now: float) -> None:
        while self._rung:
            self._attend(self._rung.popleft(), now, is_news=True)

    def _close(self) -> None:
        for one in self._connections.values():
            one.sock.close()
        self._connections.clear()
        self._doorway.close()
        self._poll.close()

    # --- one connection ----------------------------------------------------------------------------------------------------

    def _attend(self, one: Connection, now: float, is_news: bool = False) -> None:
        """It can be told something, or has said something; or its stream has news."""
        if self._connections.get(one.fd) is not one:
            return  # it has ended since
        try:
            if is_news or one.events != IN:
                one.send()
            else:
                self._hear(one, now)
            if one.stream is not None:
                self._pass_on(one, one.stream, now)
            elif not one.outbox and not one.lingers:
                self._serve(one, now)
            self._watch(one)
        except OSError:
            self._end(one)
        except Exception as mistake:  # ours, which the words of one peer bring out: it must not end the server for all
            self._complain(f"a connection was ended, for an internal mistake: {mistake!r}", now)
            self._end(one)

    def _hear(self, one: Connection, now: float) -> None:
        data = one.receive()
        if data and not one.lingers and one.stream is None:
            if not one.reader.has_begun:
                one.since, one.deadline = now, now + self._limits.request_s
            one.reader.feed(data)
        elif data == b"":
            one.has_left = True

    def _serve(self, one: Connection, now: float) -> None:
        """Answer what was asked, as far as it has come and earlier answers are taken."""
        one.has_more = False
        for count in range(REQUESTS_PER_TURN + 1):
            if one.is_last or one.outbox:
                break
            if count == REQUESTS_PER_TURN:
                one.has_more = True
                break
            asked = one.reader.take()
            if asked is None:
                break
            self._tell(one, asked, now)
        if one.is_last and not one.outbox and one.stream is None:
            self._say_goodbye(one, now)

    def _pass_on(self, one: Connection, stream: Stream, now: float) -> None:
        """What a stream has to tell, as far as it is taken; a piece has the time of any answer. OSError: it is over."""
        if stream.is_over:
            raise ConnectionAbortedError
        while not one.outbox and (piece := stream.take()):
            one.since, one.deadline = now, now + self._limits.idle_s
            one.outbox = memoryview(piece)
            one.send()
        if one.outbox or one.lingers:
            return
        one.deadline = math.inf
        if stream.is_told:
            self._say_goodbye(one, now)

    def _tell(self, one: Connection, asked: Request | Refusal, now: float) -> None:
        if isinstance(asked, Refusal):
            one.is_last = True
            data = render(_refused(asked), _date())
        else:
            one.is_last = not asked.keeps_open
            data = self._make_answer(one, asked, now)
        one.since, one.deadline = now, now + self._limits.idle_s
        one.outbox = memoryview(data)
        one.send()
        if one.stream is not None:
            self._pass_on(one, one.stream, now)
        elif one.reader.has_begun and not one.outbox:
            one.deadline = now + self._limits.request_s

    def _make_answer(self, one: Connection, asked: Request, now: float) -> bytes:
        try:
            answer = self._answer(asked)
            if isinstance(answer, Stream):
                return self._begin_stream(one, answer, asked)
            return render(answer, _date(), asked.method, asked.keeps_open)
        except Exception as mistake:  # of whoever makes the answers: it must not end the server for all
            self._complain(f"{asked.method} {asked.path!r} could not be answered: {mistake!r}", now)
            return render(Response(500, "this could not be answered\n"), _date(), asked.method, asked.keeps_open)

    def _begin_stream(self, one: Connection, stream: Stream, asked: Request) -> bytes:
        """Its head; the rest follows, until it ends with the connection."""
        if sum(other.stream is not None for other in self._connections.values()) >= self._limits.streams:
            stream.give_up()
            return render(Response(503, TOO_MANY_STREAMS), _date(), asked.method, asked.keeps_open)
        head = render_head(stream.head, _date())
        one.is_last = True
        if asked.method == "HEAD":
            stream.give_up()
        else:
            one.stream = stream
            stream.attach(lambda: self._ring(one))
        return head

    def _ring(self, one: Connection) -> None:
        self._thread.hand_over(lambda: self._rung.append(one))

    def _complain(self, text: str, now: float) -> None:
        if now >= self._quiet_until:
            self._quiet_until = now + QUIET_S
            report.warn(text)

    def _say_goodbye(self, one: Connection, now: float) -> None:
        """To close at once could destroy the last answer on its way, if the peer has sent something that we have not read."""
        one.lingers = True
        one.since, one.deadline = now, now + self._limits.linger_s
        one.sock.shutdown(socket.SHUT_WR)

    def _watch(self, one: Connection) -> None:
        """Poll for what is needed of it next; one that has had its turn comes again at once, since it can be told something.

        Who has left while a stream has nothing to tell is taken for gone: nothing else would ever tell.
        """
        if one.has_left and not (one.outbox or one.has_more):
            self._end(one)
            return
        events = OUT if one.outbox or one.has_more else IN
        if events != one.events:
            self._poll.modify(one.fd, events)
            one.events = events

    def _end(self, one: Connection) -> None:
        if self._connections.pop(one.fd, None) is not None:
            one.sock.close()
            if one.stream is not None:
                one.stream.give_up()

    # --- coming and going --------------------------------------------------------------------------------------------------

    def _welcome(self, fd: int, now: float) -> None:
        if not self._has_room(now):
            return
        for sock, _ in self._doorway.accept(fd, now):
            self._admit(sock, now)
            if len(self._connections) >= self._limits.connections:
                return

    def _admit(self, sock: socket.socket, now: float) -> None:
        try:
            is_welcome = self._admits(sock)
        except Exception as mistake:  # of whoever decides: it must not end the server for all
            self._complain(f"nobody could say whether a connection is welcome: {mistake!r}", now)
            is_welcome = False
        if not is_welcome:
            sock.close()
            return
        while len(self._connections) >= STRANGERS_IN_RESERVE and is_reserved(sock.fileno()):
            self._end(min(self._connections.values(), key=_dispensable))
        one = self._connections[sock.fileno()] = Connection(sock, now, self._limits.idle_s)
        self._poll.register(one.fd, IN)
        self._attend(one, now)  # most have said what they want by now

    def _has_room(self, now: float) -> bool:
        """Whether the one at the door can come in, if need be in place of another; else it is shut for a moment."""
        if len(self._connections) < self._limits.connections:
            return True
        oldest = min(self._connections.values(), key=_dispensable)
        if now >= oldest.since + self._limits.first_word_s:
            self._end(oldest)
            return True
        self._doorway.shut()
        self._doorway.opens_at = oldest.since + self._limits.first_word_s
        return False

    def _give_up(self, one: Connection, now: float) -> None:
        if one.is_idle or one.outbox:
            self._end(one)
            return
        try:
            self._tell(one, Refusal(408, f"a request has to arrive within {self._limits.request_s:g} s"), now)
            self._serve(one, now)
            self._watch(one)
        except OSError:
            self._end(one)

    def _patience_s(self) -> float | None:
        """How long there is nothing to do, unless something comes."""
        times = [one.deadline for one in self._connections.values()]
        if self._doorway.opens_at is not None:
            times.append(self._doorway.opens_at)
        ends_at = min(times, default=math.inf)
        return None if ends_at == math.inf else max(0.0, ends_at - time.monotonic())


def _dispensable(one: Connection) -> tuple[bool, float]:
    """Who has been silent for longest comes first."""
    return not one.is_idle, one.since


def _refused(refusal: Refusal) -> Response:
    headers = (("Allow", ", ".join(METHODS)),) if refusal.status == 405 else ()
    return Response(refusal.status, refusal.why + "\n", headers=headers)


def _date() -> str:
    at = time.gmtime()
    day = f"{DAYS[at.tm_wday]}, {at.tm_mday:02} {MONTHS[at.tm_mon - 1]} {at.tm_year}"
    return f"{day} {at.tm_hour:02}:{at.tm_min:02}:{at.tm_sec:02} GMT"
