"""As much of HTTP/1.1 as etcd's gateway needs: one question after the other on one connection, and answers that never end.

The standard library's client would do, but for three things: its time-outs are for each read, not for the answer; nobody can
interrupt it; and it takes longer to import than a whole start of rallypoint. Here every wait ends: by a deadline, or by another
thread that interrupts it.
"""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import time

from rallypoint.base.text import host_port
from rallypoint.net.endpoint import resolve, tune
from rallypoint.net.wake_fd import WakeFd

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping
    from typing import Any

    from rallypoint.net.endpoint import Address

    Clock = Callable[[], float]

__all__ = ["HttpConnection", "Interrupted", "Late", "NotHttp", "is_set"]

CONNECT_S = 1.0  # for each address of a name
READ_BYTES = 256 * 1024
HEAD_BYTES = 64 * 1024
BODY_BYTES = 256 * 1024 * 1024
SIZE_DIGITS = 16
END_OF_HEAD, END_OF_LINE = b"\r\n\r\n", b"\r\n"


class Interrupted(Exception):
    """Another thread wants this one to stop waiting."""


class Late(OSError):
    """A deadline has passed."""


def is_set(wake_fd: WakeFd | None, wait_s: float) -> bool:
    """Whether it is set within this time."""
    poll = select.poll()
    if wake_fd is not None:
        poll.register(wake_fd.fileno(), select.POLLIN)
    return bool(poll.poll(_milliseconds(wait_s)))


def _milliseconds(wait_s: float) -> int | None:
    return None if wait_s == math.inf else max(0, math.ceil(1000 * wait_s))


class NotHttp(Exception):
    """What answers does not speak HTTP, or says more than anybody asked for."""


class HttpConnection:
    """A connection to one endpoint, plain or with TLS, opened when it is made.

    Its calls raise Late at their deadline, Interrupted while `interrupt` is set, and other OSErrors for all else.
    """

    def __init__(
        self,
        endpoint: tuple[str, int],
        tls: ssl.SSLContext | None,
        deadline: float,
        interrupt: WakeFd | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._host, self._port = endpoint
        self._tls, self._interrupt, self._clock = tls, interrupt, clock
        self._socket = socket.socket()
        self._wants: dict[type[OSError], int] = {}  # which of TLS's errors only say what to wait for
        self._received = bytearray()  # and not taken yet
        self._body = bytearray()  # of the answer, as far as it has come
        self._left: int | None = None  # of the body, or of its present chunk; None before the first chunk
        self._is_chunked = False
        self._is_last = False  # whether the other side closes after this answer
        self._ends_by_closing = False  # whether that is the only way to tell where the answer ends
        try:
            self._open(deadline)
        except BaseException:  # whatever it was, nothing half done may stay; it is raised again
            self.close()
            raise

    @property
    def can_ask(self) -> bool:
        """Whether it is open, and between two questions."""
        try:
            return not self._is_last and not self._received and bool(self._take_in())
        except OSError:  # it has ended
            return False

    def interrupt_by(self, wake_fd: WakeFd | None) -> None:
        """From now on this interrupts whoever waits."""
        self._interrupt = wake_fd

    def local_address(self) -> str:
        address: str = self._socket.getsockname()[0]
        return address

    def close(self) -> None:
        self._socket.close()

    def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes, deadline: float) -> None:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host_port(self._host, self._port)}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._send("\r\n".join([*lines, "", ""]).encode("latin-1") + body, deadline)

    def has_answer(self, deadline: float) -> bool:
        """Wait for the first bytes of an answer; whether they came in time."""
        try:
            if not self._received:
                self._receive(deadline)
        except Late:
            return False
        return True

    def read_answer(self, deadline: float) -> tuple[int, bytes]:
        """The status and the whole body."""
        status = self.read_head(deadline)
        while self._read_more(deadline):
            """Until it is complete."""
        body, self._body = bytes(self._body), bytearray()
        return status, body

    def read_head(self, deadline: float) -> int:
        """The status of an answer whose body is then read by lines."""
        while (end := self._received.find(END_OF_HEAD)) < 0:
            self._refuse_if_foreign()
            self._receive(deadline)
        first, *lines = self._take(end + len(END_OF_HEAD))[:end].decode("latin-1").split("\r\n")
        status = self._status(first)
        headers = {name.strip().lower(): value.strip().lower() for name, _, value in (line.partition(":") for line in lines)}
        self._is_last = headers.get("connection") == "close" or first.startswith("HTTP/1.0")
        self._is_chunked = headers.get("transfer-encoding") == "chunked"
        self._ends_by_closing = self._is_last and not self._is_chunked and "content-length" not in headers
        unchunked = BODY_BYTES if self._ends_by_closing else _size(headers.get("content-length", "0"), 10)
        self._left = None if self._is_chunked else unchunked
        return status

    def read_line(self, deadline: float) -> bytes:
        """The next line of the body, or what is left at its end; nothing after that."""
        searched = 0
        while (end := self._body.find(b"\n", searched)) < 0:
            searched = len(self._body)
            if not self._read_more(deadline):
                break
        end = len(self._body) if end < 0 else end + 1
        line = bytes(self._body[:end])
        del self._body[:end]
        return line

    # --- pieces ------------------------------------------------------------------------------------------------------------

    def _refuse_if_foreign(self) -> None:
        """At the first byte that cannot be HTTP, since whoever speaks another language may wait for us to go on."""
        if not bytes(self._received).startswith(b"HTTP/1."[: len(self._received)]):
            raise NotHttp("it does not speak HTTP")
        if len(self._received) > HEAD_BYTES:
            raise NotHttp(f"its answer begins with more than {HEAD_BYTES} bytes of headers")

    def _status(self, line: str) -> int:
        version, _, rest = line.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise NotHttp("it does not speak HTTP")
        return int(rest[:3])

    def _read_more(self, deadline: float) -> bool:
        """A piece of the body; False at its end."""
        if self._is_chunked and not self._left:
            self._left = self._next_chunk(deadline)
        if not self._left or not self._has_more(deadline):
            return False
        piece = self._take(self._left)
        self._body += piece
        self._left -= len(piece)
        if len(self._body) > BODY_BYTES:
            raise NotHttp(f"its answer has more than {BODY_BYTES} bytes")
        return True

    def _has_more(self, deadline: float) -> bool:
        try:
            if not self._received:
                self._receive(deadline)
        except ConnectionResetError:
            if not self._ends_by_closing:
                raise
            return False
        return True

    def _next_chunk(self, deadline: float) -> int:
        """The size of the next chunk; 0 is the end, whose empty line is taken too."""
        is_first = self._left is None
        size = self._next_line(deadline) if is_first else self._next_line(deadline) or self._next_line(deadline)
        count = _size(size.partition(";")[0], 16)
        if count == 0:
            self._is_chunked, self._left = False, 0
            self._next_line(deadline)
        return count

    def _next_line(self, deadline: float) -> str:
        while (end := self._received.find(END_OF_LINE)) < 0:
            if len(self._received) > HEAD_BYTES:
                raise NotHttp("the size of a part of its answer is missing")
            self._receive(deadline)
        return self._take(end + len(END_OF_LINE))[:end].decode("latin-1")

    def _take(self, most: int) -> bytes:
        piece = bytes(self._received[:most])
        del self._received[:most]
        return piece

    # --- bytes -------------------------------------------------------------------------------------------------------------

    def _open(self, deadline: float) -> None:
        """Every address that the name stands for is tried."""
        trouble = OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
        for address in resolve(self._host, self._port):
            try:
                self._connect(address, min(deadline, self._clock() + CONNECT_S))
                break
            except OSError as error:
                trouble = error
        else:
            raise trouble
        if self._tls is not None:
            self._greet(self._tls, deadline)

    def _connect(self, address: Address, deadline: float) -> None:
        family, where = address
        self._socket.close()
        self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        tune(self._socket)
        number = self._socket.connect_ex(where)
        if number == errno.EINPROGRESS:
            self._wait(select.POLLOUT, deadline, "no connection")
            number = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise OSError(number, os.strerror(number))

    def _greet(self, tls: ssl.SSLContext, deadline: float) -> None:
        import ssl

        self._wants = {ssl.SSLWantReadError: select.POLLIN, ssl.SSLWantWriteError: select.POLLOUT}
        self._socket = secured = tls.wrap_socket(self._socket, server_hostname=self._host, do_handshake_on_connect=False)
        while wanted := self._try(secured.do_handshake, 0)[1]:
            self._wait(wanted, deadline, "no TLS handshake")

    def _send(self, data: bytes, deadline: float) -> None:
        left = memoryview(data)
        while left:
            sent, wanted = self._try(lambda: self._socket.send(left), select.POLLOUT)  # noqa: B023  # called at once
            if wanted:
                self._wait(wanted, deadline, "nothing more was taken")
            else:
                left = left[sent:]

    def _receive(self, deadline: float) -> None:
        """Wait until more has come."""
        while wanted := self._take_in():
            self._wait(wanted, deadline, "no answer")

    def _take_in(self) -> int:
        """Read what is there; if there is nothing, what to wait for."""
        data, wanted = self._try(lambda: self._socket.recv(READ_BYTES), select.POLLIN)
        if wanted:
            return wanted
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "it has closed the connection")
        self._received += data
        return 0

    def _try(self, call: Callable[[], Any], wanted: int) -> tuple[Any, int]:
        """What the call gives; or, where it would have to wait, for what."""
        try:
            return call(), 0
        except BlockingIOError:
            return None, wanted
        except OSError as error:
            if type(error) not in self._wants:
                raise
            return None, self._wants[type(error)]

    def _wait(self, wanted: int, deadline: float, what: str) -> None:
        began = self._clock()
        poll = select.poll()
        poll.register(self._socket, wanted)
        if self._interrupt is not None:
            poll.register(self._interrupt.fileno(), select.POLLIN)
        ready = dict(poll.poll(_milliseconds(deadline - began)))
        if self._interrupt is not None and self._interrupt.fileno() in ready:
            raise Interrupted
        if not ready:
            raise Late(errno.ETIMEDOUT, f"{what} within {max(0.0, deadline - began):.1f} s")


def _size(digits: str, base: int) -> int:
    try:
        if len(digits) > SIZE_DIGITS or digits[:1] in "+-":
            raise ValueError
        return int(digits, base)
    except ValueError:
        raise NotHttp("the size of its answer cannot be understood") from None
