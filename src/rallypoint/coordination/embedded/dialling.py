"""Dialling a store until it welcomes us: the addresses of its name race each other.

A name may stand for several addresses, of two families, and one that drops every packet looks for long like one that is merely
far away. So the next address is dialled a moment after the last, or at once when one fails, and whoever welcomes us first is
taken. What has not connected goes on beside the others for as long as a slow network needs; since the kernel repeats an
unanswered SYN ever more rarely, a new one is sent every second, so that a network that mends is noticed soon.

Until somebody has welcomed us every address is tried, and the name is looked up anew for each round. From then on there is one
store at one address, its *home*, which alone is dialled.
"""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence

from rallypoint.base.backoff import Backoff
from rallypoint.coordination.embedded.handshake import ClientHandshake, HandshakeRefused, Welcome
from rallypoint.coordination.embedded.wire import LARGE_FRAME_BYTES, FrameError, Inbox, TlsError, make_frame
from rallypoint.net.endpoint import address_as_such, look_up, tune
from rallypoint.net.wake_fd import WakeFd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    from rallypoint.net.endpoint import Address

    Place = TypeVar("Place")
    Dial = Callable[[Address], socket.socket]
    Call = Callable[[Address, float], "Link"]  # begins to connect, at this time

__all__ = ["Dialler", "Link", "LinkBroken", "Lookup", "advice", "dial", "interleave", "next_dial_at"]

STAGGER_S = 0.25  # between two addresses
REPEAT_S = 1.0  # between two rounds over all of them, while none has connected
MOST_UNDER_WAY = 16
GIVE_UP_S = 20.0  # longer than the system's own resolver asks two name servers twice
READ_BYTES = 256 * 1024
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
CONNECT_S = 10.0  # for round trips of seconds, and a SYN that is lost twice
HANDSHAKE_S = 15.0  # the same, and twice more there and back; from the dialling on
REFUSAL_STANDS_S = 2.0  # who refuses us may be a stranger at one of several addresses: the others have so long to welcome us
STALE_NAME_S = 1.0  # after which the addresses that a name had the last time are tried again, if it is not answered


def interleave(addresses: Sequence[tuple[int, Place]]) -> list[tuple[int, Place]]:
    """The same, families in turn; the family that comes first stays first, and so does each address in its family."""
    families: dict[int, list[tuple[int, Place]]] = {}
    for address in addresses:
        families.setdefault(address[0], []).append(address)
    longest = max(map(len, families.values()), default=0)
    return [members[turn] for turn in range(longest) for members in families.values() if turn < len(members)]


def next_dial_at(
    *, untried: int, under_way: int, is_connected: bool, last_began_at: float, last_failed_at: float, pause_s: float
) -> float:
    """When the next address is dialled; infinite: not before something has become of those that are under way.

    `untried` are left in this round; `is_connected` says whether somebody has taken a call, if not welcomed us; `pause_s` is kept
    after a round in which all have failed.
    """
    if not under_way and not untried:
        return last_failed_at + pause_s
    if under_way >= MOST_UNDER_WAY:
        return math.inf
    if untried:
        return -math.inf if not under_way or last_failed_at >= last_began_at else last_began_at + STAGGER_S
    return math.inf if is_connected else last_began_at + REPEAT_S


def advice(host: str, port: int, *, is_name: bool, is_known: bool, is_refused: bool, is_connected: bool) -> str:
    """What a user may look at, whose node has not found its store for a moment."""
    if not is_known:
        return f"check the spelling of {host}, and on this machine DNS and /etc/hosts"
    if is_connected:
        return f"something takes connections there without greeting us: another program may have port {port}"
    if not is_refused:
        return f"{host} may be down, or a firewall may drop what is sent to port {port}"
    if not is_name:
        return f"nobody listens there yet: is the agent on {host} started?"
    return (
        f"nobody listens there yet: is the agent on {host} started? If it is, its own /etc/hosts may say that {host} is"
        " 127.0.1.1; then use its address as the endpoint"
    )


class Lookup:
    """The addresses of `host`: `ask`, and `take` what was answered; `fileno` is readable when there is an answer.

    An address as such is known at once. A name is asked for in a thread of its own, whose answer wakes ours: name servers may
    take for ever, and cannot be interrupted. A question that is not answered is given up after a while and asked anew; its thread
    ends when the system lets it.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._lock = threading.Lock()
        self._wake_fd = WakeFd()
        self.asked_at: float | None = None  # since when an answer is waited for
        self._question = 0
        self._answer: list[Address] | OSError | None = None

    def fileno(self) -> int:
        return self._wake_fd.fileno()

    def ask(self, now: float) -> None:
        """Ask, unless that is under way."""
        if self.asked_at is not None and now < self.asked_at + GIVE_UP_S:
            return
        self.asked_at = now
        with self._lock:
            self._question += 1
            question = self._question
        if (address := address_as_such(self._host, self._port)) is not None:
            self._tell(question, [address])
        else:
            threading.Thread(target=self._look_up, args=(question,), name="rallypoint-lookup", daemon=True).start()

    def take(self) -> list[Address] | OSError | None:
        """The answer, once; None while there is none."""
        with self._lock:
            answer, self._answer = self._answer, None
            if answer is not None:
                self.asked_at = None
                self._wake_fd.clear()
        return answer

    def close(self) -> None:
        """Whatever is still answered is not wanted any more."""
        with self._lock:
            self._question += 1
            self._wake_fd.close()

    def _look_up(self, question: int) -> None:
        try:
            self._tell(question, look_up(self._host, self._port))
        except OSError as error:
            self._tell(question, error)
        except ValueError as error:  # a name that cannot be written down for a name server
            self._tell(question, OSError(0, str(error)))

    def _tell(self, question: int, answer: list[Address] | OSError) -> None:
        with self._lock:
            if question == self._question:
                self._answer = answer
                self._wake_fd.set()


class LinkBroken(Exception):
    """The connection did not come about, or has ended; the text says how. `number` is the kernel's, 0 where it has none."""

    def __init__(self, reason: str, number: int = 0) -> None:
        super().__init__(reason)
        self.number = number

    @classmethod
    def by(cls, error: OSError) -> LinkBroken:
        return cls((error.strerror or str(error)).lower(), error.errno or 0)


def dial(address: Address) -> socket.socket:
    """A socket that has begun to connect."""
    family, where = address
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        tune(sock)
        number = sock.connect_ex(where)
        if number not in (0, errno.EINPROGRESS):
            raise OSError(number, os.strerror(number))
    except OSError:
        sock.close()
        raise
    return sock


class Link:
    """One attempt to be connected with a store: connecting, being greeted, and then frames, without ever waiting.

    Bytes are sent and read when `pump` is called; `wanted_events` says what to wait for until then.
    """

    def __init__(
        self,
        sock: socket.socket,
        handshake: ClientHandshake,
        begun_at: float,
        secure: Callable[[socket.socket], socket.socket] | None = None,
    ) -> None:
        """`secure` gives what to speak by once it is connected."""
        self._socket = sock
        self._secure = secure
        self._handshake = handshake
        self._inbox = Inbox()
        self._output = bytearray()
        self.fd = sock.fileno()
        self.begun_at = begun_at
        self.is_connected = False
        self._polled_events = 0

    @property
    def welcome(self) -> Welcome | None:
        """What the store said; None until then."""
        return self._handshake.welcome

    @property
    def secret(self) -> bytes | None:
        """Which one both sides have proven to know; None if none."""
        return self._handshake.secret

    @property
    def wanted_events(self) -> int:
        if not self.is_connected:
            return select.EPOLLOUT
        is_held = getattr(self._socket, "is_held", False)
        return select.EPOLLIN | (select.EPOLLOUT if self._output and not is_held else 0)

    def watch(self, poll: select.epoll) -> None:
        """Have `poll` tell of what is waited for now."""
        if self.wanted_events != self._polled_events:
            (poll.modify if self._polled_events else poll.register)(self.fd, self.wanted_events)
            self._polled_events = self.wanted_events

    def local_address(self) -> str:
        address: str = self._socket.getsockname()[0]
        return address

    def send(self, body: bytes) -> None:
        """After the welcome."""
        self._output += make_frame(body, self._handshake.outgoing)

    def pump(self) -> list[bytes]:
        """Send and read what is possible now: the bodies that have come. LinkBroken, FrameError and HandshakeRefused end it."""
        if not self.is_connected and not self._connect():
            return []
        self.flush()
        at_end = self._receive()
        bodies = self._take_bodies()
        if at_end and not bodies:
            raise LinkBroken("the store has closed the connection")
        return bodies

    def _connect(self) -> bool:
        if number := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise LinkBroken(os.strerror(number).lower(), number)
        try:
            self._socket.getpeername()
        except OSError:
            return False  # not yet
        self.is_connected = True
        if self._secure is not None:
            try:
                self._socket = self._secure(self._socket)
            except OSError as error:
                raise LinkBroken.by(error) from None
        self._output += make_frame(self._handshake.hello(), None)
        return True

    def flush(self) -> None:
        while self._output:
            try:
                sent = self._socket.send(self._output)
            except BlockingIOError:
                return
            except OSError as error:
                raise self._what_follows(error) from None
            del self._output[:sent]

    def _what_follows(self, error: OSError) -> Exception:
        """A connection may be tried again; to try TLS again before anybody has welcomed us would change nothing."""
        if isinstance(error, TlsError) and self.welcome is None:
            return HandshakeRefused(str(error.strerror))
        return LinkBroken.by(error)

    def _receive(self) -> bool:
        """Read all that is there; whether that was the end."""
        while True:
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._what_follows(error) from None
            self._inbox.feed(data)
            if len(data) < READ_BYTES:
                return not data

    def _take_bodies(self) -> list[bytes]:
        bodies = []
        while (body := self._inbox.take()) is not None:
            if self.welcome is not None:
                bodies.append(body)
            else:
                self._greet(body)
        return bodies

    def _greet(self, frame: bytes) -> None:
        answer = self._handshake.answer(frame)
        if answer is not None:
            self._output += make_frame(answer, None)
            self.flush()
        else:
            self._inbox.limit = LARGE_FRAME_BYTES
            self._inbox.seal = self._handshake.incoming
            if self._handshake.welcome is None:
                raise FrameError("no welcome")

    def close(self, poll: select.epoll) -> None:
        """At once: a FIN would wait behind what a broken network does not let out, and the store would not hear of it."""
        if self._polled_events:
            poll.unregister(self.fd)  # closing alone would not do that while a fork of ours has a copy
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


class Dialler:
    """Calls that are under way, in `poll`. `pump` gives the one that was answered; then `hang_up_all` begins anew."""

    def __init__(self, host: str, port: int, call: Call, poll: select.epoll) -> None:
        self.refused_since: float | None = None
        self._host = host
        self._call = call
        self._poll = poll
        self._calls: dict[Link, Address] = {}
        self._untried: list[Address] = []  # in this round
        self.home: Address | None = None  # where the store was found
        self._lookup: Lookup | None = Lookup(host, port)  # until there is a home
        self._poll.register(self._lookup.fileno(), select.EPOLLIN)
        self._known: list[Address] = []
        self._answer: list[Address] | OSError | None = None  # of the look-up, for the next round
        self._trouble = ""  # of the latest call that failed
        self._refusal: FrameError | HandshakeRefused | None = None
        self._refused_at = math.inf
        self._last_began_at = self._last_failed_at = -math.inf
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._pause_s = 0.0

    # --- how it stands -----------------------------------------------------------------------------------------------------

    @property
    def is_answered(self) -> bool:
        """Whether somebody has taken a call, without having welcomed us yet."""
        return any(link.is_connected for link in self._calls)

    @property
    def is_known(self) -> bool:
        """Whether the name was ever answered with an address."""
        return self.home is not None or bool(self._known)

    @property
    def trouble(self) -> str:
        """Why nobody has welcomed us so far."""
        if self._trouble:
            return self._trouble
        if not self.is_known:
            return f"no name server has answered where {self._host} is"
        return "no answer yet, although it takes connections" if self.is_answered else "no connection yet"

    def wake_at(self) -> float:
        """When to `pump` although nothing comes."""
        dial_at = self._next_dial_at()
        if not self._untried and self._lookup is not None and self._lookup.asked_at is not None:  # its answer will wake us
            dial_at = max(dial_at, self._lookup.asked_at + (STALE_NAME_S if self._known else GIVE_UP_S))
        return min([dial_at, self._refused_at + REFUSAL_STANDS_S, *map(_patient_until, self._calls)])

    def _next_dial_at(self) -> float:
        return next_dial_at(
            untried=len(self._untried),
            under_way=len(self._calls),
            is_connected=self._refusal is not None or self.is_answered,
            last_began_at=self._last_began_at,
            last_failed_at=self._last_failed_at,
            pause_s=self._pause_s,
        )

    # --- at work -----------------------------------------------------------------------------------------------------------

    def pump(self, now: float) -> tuple[Link, list[bytes]] | None:
        """Do what can be done now; the link that has brought a welcome, and what came behind it. It is the caller's from now on.

        FrameError and HandshakeRefused: who answers will not have us, and there is nobody else to ask.
        """
        self._hear_lookup()
        self._dial_those_due(now)
        for link in list(self._calls):
            if link in self._calls and (bodies := self._listen(link, now)) is not None:
                self.home = self._calls.pop(link)
                self._end_race()
                return link, bodies
        self._raise_final_refusal(now)
        self._dial_those_due(now)
        return None

    def hang_up_all(self) -> None:
        for link in self._calls:
            link.close(self._poll)
        self._calls.clear()

    def start_anew(self, broken: LinkBroken, failures: int, now: float) -> None:
        """The link that was given out has broken, and so many did before it, each soon."""
        self._backoff.failures = failures
        self._note_failure(broken, now)

    def close(self) -> None:
        self.hang_up_all()
        lookup, self._lookup = self._lookup, None
        if lookup is not None:
            self._poll.unregister(lookup.fileno())
            lookup.close()

    def _end_race(self) -> None:
        self.close()
        self._untried.clear()
        self._trouble, self._refusal, self._refused_at, self.refused_since = "", None, math.inf, None
        self._last_began_at = self._last_failed_at = -math.inf

    def _listen(self, link: Link, now: float) -> list[bytes] | None:
        """What has come behind its welcome; None while there is no welcome."""
        try:
            bodies = link.pump()
            if link.welcome is None and now >= _patient_until(link):
                stage = "answer" if link.is_connected else "connection"
                raise LinkBroken(f"no {stage} within {_patient_until(link) - link.begun_at:g} s")
        except LinkBroken as broken:
            self._drop(link, broken, now)
        except (FrameError, HandshakeRefused) as refusal:
            if self._refusal is None:
                self._refusal, self._refused_at = refusal, now
            self._drop(link, LinkBroken(str(refusal)), now)
        else:
            link.watch(self._poll)
            if link.is_connected:
                self._note_answered(link)
            return bodies if link.welcome is not None else None
        return None

    def _note_answered(self, link: Link) -> None:
        """Whoever has been called twice needs one answer."""
        if self.refused_since is not None:
            self.refused_since, self._trouble = None, ""
        for other, address in list(self._calls.items()):
            if address == self._calls[link] and not other.is_connected:
                del self._calls[other]
                other.close(self._poll)

    def _drop(self, link: Link, broken: LinkBroken, now: float) -> None:
        del self._calls[link]
        link.close(self._poll)
        self._note_failure(broken, now, link.begun_at)

    def _note_failure(self, broken: LinkBroken, now: float, begun_at: float = math.inf) -> None:
        """A call that is older than the refusals, and was never answered, says nothing of what is there now."""
        is_refused = broken.number == errno.ECONNREFUSED
        if is_refused or self.refused_since is None or begun_at >= self.refused_since:
            self._trouble = str(broken)
            self.refused_since = (self.refused_since or now) if is_refused else None
        self._last_failed_at = now
        if not self._calls and not self._untried:
            pause_s = self._backoff.next_s()
            self._pause_s = 0.0 if self._backoff.failures == 1 and self.home is not None else pause_s

    def _raise_final_refusal(self, now: float) -> None:
        refusal = self._refusal
        if refusal is not None and (now >= self._refused_at + REFUSAL_STANDS_S or not (self._calls or self._untried)):
            self._refusal, self._refused_at = None, math.inf
            raise refusal

    # --- dialling ----------------------------------------------------------------------------------------------------------

    def _dial_those_due(self, now: float) -> None:
        while now >= self._next_dial_at() and (self._untried or self._begin_round(now)):
            address = self._untried.pop(0)
            try:
                link = self._call(address, now)
            except OSError as error:  # the network is not there, and may come
                self._note_failure(LinkBroken.by(error), now)
            else:
                self._last_began_at = now
                self._calls[link] = address
                link.watch(self._poll)

    def _begin_round(self, now: float) -> bool:
        """Whether there is anybody to dial: a name may not be answered yet, or be unknown still."""
        if self.home is not None:
            self._untried = [self.home]
            return True
        assert self._lookup is not None
        if self._answer is None:
            self._lookup.ask(now)
            self._hear_lookup()
        answer, self._answer = self._answer, None
        if isinstance(answer, OSError):
            self._note_failure(LinkBroken((answer.strerror or str(answer)).lower()), now)
            return False
        if answer is not None:
            self._trouble = self._trouble if self._known else ""
            self._known = answer
        elif now < (self._lookup.asked_at or now) + STALE_NAME_S:
            return False
        self._untried = interleave(self._known)
        return bool(self._untried)

    def _hear_lookup(self) -> None:
        if self._lookup is not None:
            self._answer = self._lookup.take() or self._answer


def _patient_until(link: Link) -> float:
    return link.begun_at + (HANDSHAKE_S if link.is_connected else CONNECT_S)
