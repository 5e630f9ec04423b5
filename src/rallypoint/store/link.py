"""One attempt of a node to be connected with its store: connecting, being greeted, and then frames, without ever waiting."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct

from rallypoint.store.frames import LARGE_FRAME_BYTES, FrameError, Inbox, make_frame
from rallypoint.store.handshake import ClientHandshake, Welcome
from rallypoint.store.listening import tune

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.store.listening import Address

__all__ = ["Link", "LinkBroken", "dial"]

READ_BYTES = 256 * 1024


class LinkBroken(Exception):
    """The connection did not come about, or has ended; the text says how. `number` is the kernel's, 0 where it has none."""

    def __init__(self, reason: str, number: int = 0) -> None:
        super().__init__(reason)
        self.number = number


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
    """Bytes are sent and read when `pump` is called; `wanted_events` says what to wait for until then."""

    def __init__(self, sock: socket.socket, handshake: ClientHandshake, begun_at: float) -> None:
        self._socket = sock
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
    def wanted_events(self) -> int:
        if not self.is_connected:
            return select.EPOLLOUT
        return select.EPOLLIN | (select.EPOLLOUT if self._output else 0)

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
        self._output += make_frame(self._handshake.hello(), None)
        return True

    def flush(self) -> None:
        while self._output:
            try:
                sent = self._socket.send(self._output)
            except BlockingIOError:
                return
            except OSError as error:
                raise LinkBroken((error.strerror or str(error)).lower(), error.errno or 0) from None
            del self._output[:sent]

    def _receive(self) -> bool:
        """Read all that is there; whether that was the end."""
        while True:
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                return False
            except OSError as error:
                raise LinkBroken((error.strerror or str(error)).lower(), error.errno or 0) from None
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
