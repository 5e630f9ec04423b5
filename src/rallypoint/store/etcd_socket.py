"""A connection of bytes, plain or with TLS, every wait of which ends: by a deadline, or by another thread that interrupts it."""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import time

from rallypoint.store.bell import Bell
from rallypoint.store.listening import resolve, tune

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable
    from typing import Any

    from rallypoint.store.listening import Address

    Clock = Callable[[], float]

__all__ = ["Interrupted", "Late", "Wire", "is_rung"]

CONNECT_S = 1.0  # for each address of a name
READ_BYTES = 256 * 1024


class Interrupted(Exception):
    """Another thread wants this one to stop waiting."""


class Late(OSError):
    """A deadline has passed."""


def is_rung(bell: Bell | None, wait_s: float) -> bool:
    """Whether the bell rings within this time."""
    poll = select.poll()
    if bell is not None:
        poll.register(bell.fileno(), select.POLLIN)
    return bool(poll.poll(_milliseconds(wait_s)))


def _milliseconds(wait_s: float) -> int | None:
    return None if wait_s == math.inf else max(0, math.ceil(1000 * wait_s))


class Wire:
    """One connection. What has come, and was not taken yet, is in `received`.

    Its calls raise Late at their deadline, Interrupted while `interrupt` rings, and other OSErrors for all else.
    """

    def __init__(
        self, host: str, port: int, tls: ssl.SSLContext | None, interrupt: Bell | None, clock: Clock = time.monotonic
    ) -> None:
        self.interrupt = interrupt
        self.received = bytearray()
        self._host, self._port, self._tls = host, port, tls
        self._clock = clock
        self._socket = socket.socket()
        self._wants: dict[type[OSError], int] = {}  # which of TLS's errors only say what to wait for

    def open(self, deadline: float) -> None:
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

    def send(self, data: bytes, deadline: float) -> None:
        left = memoryview(data)
        while left:
            sent, wanted = self._try(lambda: self._socket.send(left), select.POLLOUT)  # noqa: B023  # called at once
            if wanted:
                self._wait(wanted, deadline, "nothing more was taken")
            else:
                left = left[sent:]

    def receive(self, deadline: float) -> None:
        """Wait until more has come."""
        while wanted := self._take_in():
            self._wait(wanted, deadline, "no answer")

    def is_quiet(self) -> bool:
        """Whether nothing has come, not even the other side's end: so it can be used for another question."""
        try:
            return not self.received and bool(self._take_in())
        except OSError:
            return False

    def local_address(self) -> str:
        address: str = self._socket.getsockname()[0]
        return address

    def close(self) -> None:
        self._socket.close()

    def _take_in(self) -> int:
        """Read what is there; if there is nothing, what to wait for."""
        data, wanted = self._try(lambda: self._socket.recv(READ_BYTES), select.POLLIN)
        if wanted:
            return wanted
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "it has closed the connection")
        self.received += data
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
        if self.interrupt is not None:
            poll.register(self.interrupt.fileno(), select.POLLIN)
        ready = dict(poll.poll(_milliseconds(deadline - began)))
        if self.interrupt is not None and self.interrupt.fileno() in ready:
            raise Interrupted
        if not ready:
            raise Late(errno.ETIMEDOUT, f"{what} within {max(0.0, deadline - began):.1f} s")
