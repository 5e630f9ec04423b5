"""A connection between two agents that measure the way between them: words under a seal, and bulk as it is.

Both prove to each other that they know the key of the one that was called, as agents do for snapshots (`checkpoint.transfer`).
Bulk is the same block again and again, so that whoever gets it sees whether it is what was sent; a seal would be measured too.
It is up to the one that gets it to say when that is enough, by its own clock: what is still in the buffers then, which may take
long over a slow way, is thrown away with the connection.
"""

from __future__ import annotations

import hashlib
import select
import socket
import struct
import time
from contextlib import suppress

from rallypoint.base.records import Value
from rallypoint.checkpoint.transfer import Channel, TransferError
from rallypoint.preflight.links import rate_of

__all__ = ["BULK_BYTES", "BULK_S", "NAME", "Bulk", "Probe"]

NAME = "preflight"  # what the handshake is about
ANSWER_S = 3  # for each word
BULK_BYTES, BULK_S = 16 << 20, 0.5  # whichever comes first
FIRST_S = 2.0  # for the first of it to come
_BLOCK_BYTES = 256 * 1024
_DROP = struct.pack("ii", 1, 0)


class Bulk(Value):
    """What has come: at how many bits per second, how many bytes, and whether they were what was sent."""

    rate: float
    moved: int
    is_right: bool

    @property
    def trouble(self) -> str:
        """Why there is no rate."""
        if not self.is_right:
            return "what arrives is not what was sent"
        return "" if self.moved else "small packets arrive and large ones do not, which may be a matter of the MTU"


class Probe(Channel):
    """For one thread; but any may `abort` it."""

    @classmethod
    def to(cls, host: str, port: int, key: str) -> Probe:
        probe = cls.call(host, port, bytes.fromhex(key), NAME, ANSWER_S)
        probe.wait_up_to(ANSWER_S)
        return probe

    def wait_up_to(self, seconds: int) -> None:
        """For each piece of what is said."""
        self._be_patient(seconds)

    def pour(self) -> None:
        """Send bulk until the other side says that it has enough, or has gone, or there is no more."""
        block, sent, ends_at = memoryview(_block()), 0, time.monotonic() + FIRST_S + BULK_S
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLIN | select.POLLOUT)
        self._sock.setblocking(False)
        try:
            while sent < BULK_BYTES and (left_s := ends_at - time.monotonic()) > 0:
                if any(event & ~select.POLLOUT for _, event in poll.poll(left_s * 1000)):
                    break
                with suppress(BlockingIOError):
                    sent += self._sock.send(block[sent % _BLOCK_BYTES :])
        except OSError as error:
            raise TransferError(f"the connection broke under load: {error.strerror or error}") from None
        finally:
            self._sock.settimeout(None)  # the kernel counts the time again

    def drain(self) -> Bulk:
        """Take bulk until it is enough."""
        expected, moved, got, is_right = _block() * 2, [], 0, True
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLIN)
        ends_at = time.monotonic() + FIRST_S
        while got < BULK_BYTES and is_right and (left_s := ends_at - time.monotonic()) > 0:
            if not poll.poll(left_s * 1000):
                moved.append((time.monotonic(), got))  # the silence counts
                break
            try:
                part = self._sock.recv(_BLOCK_BYTES)
            except OSError as error:
                raise TransferError(f"the connection broke under load: {error.strerror or error}") from None
            if not part:
                break
            now = time.monotonic()
            ends_at = ends_at if got else now + BULK_S
            at = got % _BLOCK_BYTES
            is_right = part == expected[at : at + len(part)]
            got += len(part)
            moved.append((now, got))
        return Bulk(rate_of(moved), got, is_right)

    def discard(self) -> None:
        """Wait until the other side has gone; what it still sends is of no use."""
        ends_at = time.monotonic() + ANSWER_S
        with suppress(OSError):
            while time.monotonic() < ends_at and self._sock.recv(_BLOCK_BYTES):
                pass

    def drop(self) -> None:
        """Close it, with all that is in the buffers."""
        with suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP)
        self.close()


def _block() -> bytes:
    """Bytes that look like any, alike on both sides."""
    return hashlib.shake_128(b"rallypoint").digest(_BLOCK_BYTES)
