"""One connection of the store's server: a socket that never makes the server wait.

What is to be sent is collected and goes out once a turn. A long answer is written down bit by bit, as the other side reads it;
until it is out, no more requests of that connection are read. A peer that lets too much pile up is cut off.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Iterator

from rallypoint.coordination.embedded.frames import LARGE_FRAME_BYTES, Inbox, Seal, make_frame
from rallypoint.coordination.embedded.handshake import ServerHandshake

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.coordination.embedded.service import Session

__all__ = ["Connection", "ConnectionEnded"]

READ_BYTES = 256 * 1024
SEND_BYTES = 256 * 1024
OUTPUT_BYTES = 8 * 1024 * 1024


class ConnectionEnded(Exception):
    """The connection is over; the text says why, and is empty where the peer has closed it."""


class Connection:
    """A peer: a stranger until it is welcome."""

    def __init__(self, sock: socket.socket, peer: str, handshake: ServerHandshake, session: Session, accepted_at: float) -> None:
        self.fd = sock.fileno()
        self.peer = peer
        self.handshake = handshake
        self.session = session
        self.accepted_at = accepted_at
        self.is_welcome = False
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

    def release(self) -> socket.socket:
        """The socket, for somebody else to read."""
        self.is_closed = True
        return self._socket

    def welcome(self) -> None:
        """The handshake is over: larger frames, with the seals."""
        self.is_welcome = True
        self.session.connection = self
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
