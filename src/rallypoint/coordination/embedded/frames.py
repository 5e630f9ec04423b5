"""What goes over the wire between a node and its store: frames, each a length and a body, and with a secret a seal.

    u32, big-endian: how many bytes follow | body | 16 bytes of HMAC-SHA256 over the frame's number and its body

Each direction has its own key, made for this one connection, and counts its frames. So a frame that was made up, changed,
repeated, left out, moved, or taken from the other direction or from another connection, does not fit, and ends the connection.
"""

from __future__ import annotations

import hmac

__all__ = ["FrameError", "Inbox", "Seal", "make_frame", "open_seal"]

LENGTH_BYTES = 4
SEAL_BYTES = 16
SMALL_FRAME_BYTES = 1024  # before the welcome, so that a stranger cannot make us hold much
LARGE_FRAME_BYTES = 1024 * 1024


class FrameError(ValueError):
    """What came is not what may come now; the connection cannot be used any more."""


class Seal:
    """Proves that a frame comes from who knows the key, and is the next one."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def of_next(self, body: bytes) -> bytes:
        numbered = self._count.to_bytes(8, "big") + body
        self._count += 1
        return hmac.digest(self._key, numbered, "sha256")[:SEAL_BYTES]


def make_frame(body: bytes, seal: Seal | None) -> bytes:
    if seal is None:
        return len(body).to_bytes(LENGTH_BYTES, "big") + body
    return (len(body) + SEAL_BYTES).to_bytes(LENGTH_BYTES, "big") + body + seal.of_next(body)


def open_seal(frame: bytes, seal: Seal) -> bytes:
    """The body of a sealed frame, if the seal is the one that is due."""
    body = frame[:-SEAL_BYTES]
    if not hmac.compare_digest(frame[len(body) :], seal.of_next(body)):
        raise FrameError("a frame with the wrong seal: forged, changed, repeated or out of order")
    return body


class Inbox:
    """Bytes as they come, to be taken out frame by frame.

    What is allowed may change between two frames: `limit` and `seal` hold for the frames that are taken from then on.
    """

    def __init__(self) -> None:
        self.limit = SMALL_FRAME_BYTES
        self.seal: Seal | None = None
        self._buffer = bytearray()
        self._taken = 0

    def __len__(self) -> int:
        """How many bytes are held."""
        return len(self._buffer) - self._taken

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def take(self) -> bytes | None:
        """The next body, or None while it is not there as a whole."""
        start = self._taken + LENGTH_BYTES
        length = int.from_bytes(self._buffer[self._taken : start], "big")
        if len(self._buffer) >= start and length > self.limit:
            raise FrameError(f"a frame of {length} bytes, where {self.limit} are allowed")
        if len(self._buffer) < start or len(self._buffer) < start + length:
            self._forget_taken()
            return None
        self._taken = start + length
        frame = bytes(self._buffer[start : self._taken])
        return frame if self.seal is None else open_seal(frame, self.seal)

    def _forget_taken(self) -> None:
        if self._taken:
            del self._buffer[: self._taken]
            self._taken = 0
