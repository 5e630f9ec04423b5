"""A connection to a server of torch's TCPStore protocol: one conversation at a time, and never out of step.

An answer bears no mark of what it is the answer to, so a connection whose conversation stops in the middle is of no use any
more: an error ends it, and whoever comes later is told why. Only waiting can be given up: the server is asked to cancel it and
says that it has, perhaps just after it has said that the waiting is over.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from contextlib import suppress

from rallypoint.base.backoff import Backoff
from rallypoint.base.text import host_port
from rallypoint.net.listening import resolve, tune
from rallypoint.store import tcp_protocol as wire
from rallypoint.store.interface import StoreNetworkError
from rallypoint.store.tcp_protocol import I64, U32, U64, ProtocolError, request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    from rallypoint.net.listening import Address

    T = TypeVar("T")

__all__ = ["ANSWER_S", "TcpClient", "connect", "network_error"]

ANSWER_S = 5.0  # a server at work has at least so long to answer, however short the timeout for missing keys
CONNECT_S = 5.0  # for one address, before the next is tried
GREETING_S = 30.0  # a thousand others may be greeted before us
LAST_ATTEMPT_S = 0.1  # what begins just before the deadline still gets its chance
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0
CLOSE_S = 1.0
LONGEST_POLL_S = 1e6  # the kernel counts milliseconds in 32 bits
RECEIVE_BYTES, LARGE_RECEIVE_BYTES = 16 * 1024, 1024 * 1024
MAX_ANSWER_BYTES = 1 << 30  # values can be made longer than what fits into one request
CANCEL = request(wire.CANCEL_WAIT)


class TcpClient:
    """A socket that is connected, and is its own from now on. Everything goes through `talk`; the rest is for conversations."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        sock.setblocking(False)
        self.name = name
        self._socket = sock
        self._incoming = select.poll()
        self._incoming.register(sock, select.POLLIN)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._end = ""  # why it is of no use any more
        self._data = b""  # what has come, read as far as _place
        self._place = 0
        self._answer_s = ANSWER_S
        self._deadline = 0.0  # of the answer that is being waited for
        self._allowed_bytes = 0  # which that answer may still have

    def talk(self, answer_s: float, conversation: Callable[..., T], *arguments: Any) -> T:
        """Do the `conversation` of this client and the `arguments`, each answer of which may take `answer_s`.

        StoreNetworkError: the connection has ended. An error within the conversation ends it.
        """
        with self._lock:
            if self._end:
                raise self._ended()
            self._answer_s = answer_s
            try:
                return conversation(self, *arguments)
            except (OSError, ProtocolError) as error:
                self._give_up(_cause_of(error))
                raise self._ended() from error
            except BaseException:  # whatever it was, nothing half done may stay; it is raised again
                self._give_up("an operation was interrupted before its answer had come")
                raise

    def close(self) -> None:
        """End it, also for a thread that waits; but a forked process only lets go of its copy."""
        if os.getpid() != self._process:
            self._socket.close()
            return
        self._end = self._end or "it was closed on this side"
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        is_unused = self._lock.acquire(timeout=CLOSE_S)  # whoever uses it has noticed by now
        self._socket.close()
        if is_unused:
            self._lock.release()

    def _give_up(self, why: str) -> None:
        self._end = self._end or why
        self._socket.close()
        self._data = b""

    def _ended(self) -> StoreNetworkError:
        return StoreNetworkError(f"the connection to the store at {self.name} has ended: {self._end}")

    # --- conversations -----------------------------------------------------------------------------------------------------

    def greet(self, greeting_s: float) -> None:
        """What comes first, within `greeting_s`."""
        self._answer_s = greeting_s
        token = os.getpid()
        self.send(wire.GREETING + request(wire.PING, (), token))
        if self.take(U32.size) != U32.pack(token):
            raise ProtocolError("what answers there is not a TCPStore")

    def ask(self, data: bytes, read: Callable[[TcpClient], T]) -> T:
        """Send requests, and read the answer."""
        self.send(data)
        return read(self)

    def wait(self, waiting: bytes, timeout_s: float) -> bool:
        """Send a WAIT or a BARRIER; whether that was over within `timeout_s`."""
        self.send(waiting)
        if _is_ready(self._incoming, time.monotonic() + timeout_s):
            if not self.is_ready():
                raise ProtocolError("a wait was cancelled that nobody had cancelled")
            return True
        self.send(CANCEL)
        self._deadline = time.monotonic() + ANSWER_S
        is_over = self.is_ready()  # it may have been just then
        if is_over and self.is_ready():
            raise ProtocolError("a wait was over twice")
        return is_over

    def get(self, asking: bytes, name: list[bytes], timeout_s: float) -> bytes | None:
        """The value of one key, in a single exchange if it is there already. None: it did not come within `timeout_s`."""
        self.send(request(wire.CHECK, name) + asking)
        is_there, value = self.is_ready(), self.text()
        if is_there or value:
            return value
        return self.ask(asking, TcpClient.text) if self.wait(request(wire.WAIT, name), timeout_s) else None

    # --- requests and answers ----------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Begin an exchange. OSError: it has failed, or takes too long."""
        self._deadline = time.monotonic() + self._answer_s
        self._allowed_bytes = MAX_ANSWER_BYTES
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self._send_rest(memoryview(data)[sent:])

    def _send_rest(self, rest: memoryview) -> None:
        outgoing = select.poll()
        outgoing.register(self._socket, select.POLLOUT)
        while rest:
            if not _is_ready(outgoing, self._deadline):
                raise TimeoutError(f"the server did not take a request within {self._answer_s:g} s")
            rest = rest[self._socket.send(rest) :]

    def nothing(self) -> None:
        """What is answered to SET."""

    def is_ready(self) -> bool:
        """The answer to CHECK, WAIT and CANCEL_WAIT."""
        answer = self.take(1)
        if answer > b"\1":
            raise ProtocolError(f"{answer!r} where nothing but 0 or 1 can be")
        return answer == wire.READY

    def number(self) -> int:
        return int(I64.unpack(self.take(I64.size))[0])

    def text(self) -> bytes:
        return self.take(U64.unpack(self.take(U64.size))[0])

    def texts(self) -> list[bytes]:
        """The answer to LIST_KEYS."""
        return [self.text() for _ in range(self.number())]

    def text_if_any(self) -> bytes | None:
        """The answer to QUEUE_POP."""
        return self.text() if self.number() > 0 else None

    def take(self, size: int) -> bytes:
        """The next `size` bytes of the answer. OSError: they do not come, or not in time."""
        if self._place + size > len(self._data):
            self._fill(size)
        place = self._place
        self._place += size
        data = self._data[place : self._place]
        if self._place == len(self._data):
            self._data, self._place = b"", 0
        return data

    def _fill(self, size: int) -> None:
        pieces = [self._data[self._place :]]
        missing = size - len(pieces[0])
        self._allowed_bytes -= missing
        if self._allowed_bytes < 0:
            raise ProtocolError(f"an answer has more than {MAX_ANSWER_BYTES} bytes")
        while missing > 0:
            pieces.append(self._receive(min(max(missing, RECEIVE_BYTES), LARGE_RECEIVE_BYTES)))
            missing -= len(pieces[-1])
        self._data, self._place = b"".join(pieces), 0

    def _receive(self, size: int) -> bytes:
        if not _is_ready(self._incoming, self._deadline):
            raise TimeoutError("no answer came in time")
        data = self._socket.recv(size)
        if not data:
            raise ConnectionError("the server closed it")
        return data


def _is_ready(poll: select.poll, deadline: float) -> bool:
    """Wait until something can be done; False at the deadline."""
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        if poll.poll(min(left_s, LONGEST_POLL_S) * 1000):
            return True
        if left_s <= LONGEST_POLL_S:
            return False


# --- connecting ------------------------------------------------------------------------------------------------------------


def connect(host: str, port: int, timeout_s: float) -> TcpClient:
    """Connect to a server and greet it; tried again until `timeout_s` are over, for the server may start after us."""
    name = host_port(host, port)
    deadline = time.monotonic() + timeout_s
    backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    while True:
        try:
            return _connect_once(host, port, name, deadline)
        except (OSError, ProtocolError) as error:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise network_error(f"no store was reached at {name} within {timeout_s:g} s", error) from error
        time.sleep(min(left_s, backoff.next_s()))


def _connect_once(host: str, port: int, name: str, deadline: float) -> TcpClient:
    """At the first address of the host, which is looked up anew each time, that answers."""
    failure: OSError | ProtocolError = OSError("the name has no address")
    for address in resolve(host, port):
        try:
            return _open(address, name, deadline)
        except (OSError, ProtocolError) as error:
            failure = error
    raise failure


def _open(address: Address, name: str, deadline: float) -> TcpClient:
    family, place = address
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        tune(sock)
        sock.settimeout(_left_s(deadline, CONNECT_S))
        sock.connect(place)
        if sock.getsockname() == sock.getpeername():  # which the kernel does at a free port that it would hand out itself
            raise ConnectionRefusedError("nobody listens there")
        client = TcpClient(sock, name)
        client.greet(_left_s(deadline, GREETING_S))
    except BaseException:  # whatever it was, nothing half done may stay; it is raised again
        sock.close()
        raise
    return client


def _left_s(deadline: float, most_s: float) -> float:
    return min(most_s, max(LAST_ATTEMPT_S, deadline - time.monotonic()))


def network_error(what: str, error: Exception) -> StoreNetworkError:
    """That something has failed, and why, in words."""
    return StoreNetworkError(f"{what}: {_cause_of(error)}")


def _cause_of(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
