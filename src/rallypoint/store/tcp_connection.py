"""One connection to a store that is reached by torch's protocol: what has come, and what is still to go out."""

from __future__ import annotations

import socket
from collections import deque

from rallypoint.store.tcp_protocol import RequestReader

__all__ = ["PeerGone", "TcpConnection"]

CHUNK_BYTES = 64 * 1024  # what is read of one connection before the next one has its turn
LARGE_CHUNK_BYTES = 1024 * 1024  # the same within a large value
JOINED_BYTES = 256 * 1024  # small pieces go out together, up to so much


class PeerGone(Exception):
    """The other end has closed the connection, or cannot be reached any more."""


class TcpConnection:
    """A socket that does not block. Whoever uses it reads no more while there is something in the `outbox`, which the peer has
    not taken yet: so a peer that does not read has at most one large answer that waits for it.
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
