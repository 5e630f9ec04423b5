"""A connection between two agents, over which snapshots go.

Both prove to each other that they know the key of the one that was called, which it has told in the job's store; and whatever is
said from then on, and what is pickled in a snapshot, comes in sealed frames (`coordination.embedded.wire`). The buffers of a
snapshot, the numbers that a training job sends over the network all day, come behind that as they are: the kernel moves them.

Whatever goes wrong is a TransferError, and the connection is of no use any more.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from collections.abc import Callable

from rallypoint.base.json_text import from_json
from rallypoint.checkpoint.layout import BODY_AT, MARK_BYTES, Mark, read_mark, write_mark
from rallypoint.checkpoint.rooms import make_room
from rallypoint.coordination.embedded.handshake import ClientHandshake, HandshakeRefused, ServerHandshake, Welcome
from rallypoint.coordination.embedded.wire import (
    LENGTH_BYTES,
    SEAL_BYTES,
    SMALL_FRAME_BYTES,
    FrameError,
    Seal,
    make_frame,
    open_seal,
)
from rallypoint.net.endpoint import tune

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    C = TypeVar("C", bound="Channel")

__all__ = ["Channel", "TransferError", "mark_in", "mark_text"]

SILENCE_S = 30.0  # after which a peer that takes or gives nothing is given up
GREETING_S = 5.0
CONNECT_S = 10.0
NAME = "snapshots"  # what the handshake is about; the key is made for one agent
FRAME_BYTES = 1 << 20
CHUNK_BYTES = 4 << 20
_TIMEOUT = struct.Struct("@ll")


class TransferError(Exception):
    """It did not work, for the reason that is told."""


class Channel:
    """For one thread; but any may `abort` it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._incoming: Seal | None = None
        self._outgoing: Seal | None = None
        sock.settimeout(None)  # the kernel counts the time, so that sendfile can be used
        self._be_patient(GREETING_S)

    @classmethod
    def call(cls: type[C], host: str, port: int, key: bytes, name: str = NAME, connect_s: float = CONNECT_S) -> C:
        try:
            sock = socket.create_connection((host, port), connect_s)
            tune(sock)
        except OSError as error:
            raise TransferError(f"{host} port {port}: {error.strerror or error}") from None
        channel = cls(sock)
        shake = ClientHandshake(name, key)
        try:
            channel._send_frame(shake.hello())
            proof = shake.answer(channel._read_frame(SMALL_FRAME_BYTES))
            channel._send_frame(proof or b"")
            shake.answer(channel._read_frame(SMALL_FRAME_BYTES))
        except (FrameError, HandshakeRefused) as error:
            channel.close()
            raise TransferError(f"{host} port {port}: {error}") from None
        except TransferError:
            channel.close()
            raise
        channel._incoming, channel._outgoing = shake.incoming, shake.outgoing
        channel._be_patient(SILENCE_S)
        return channel

    def welcome(self, key: bytes, name: str = NAME) -> None:
        """The other side has called: it is to prove that it knows the key."""
        shake = ServerHandshake(name, key, Welcome("", ""))
        try:
            while not shake.is_over:
                answer = shake.answer(self._read_frame(SMALL_FRAME_BYTES))
                self._outgoing = shake.outgoing
                self._send_frame(answer)
        except (FrameError, HandshakeRefused) as error:
            self._send_frame(ServerHandshake.refusal(str(error)))
            raise TransferError(str(error)) from None
        self._incoming = shake.incoming
        self._be_patient(SILENCE_S)

    def _be_patient(self, silence_s: float) -> None:
        self._patience_s = silence_s
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEOUT.pack(int(silence_s), 0))

    # --- words -------------------------------------------------------------------------------------------------------------

    def say(self, *message: object) -> None:
        self._send_frame(json.dumps(message).encode())

    def await_words(self) -> None:
        """Until there is something to hear, however long that takes."""
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLIN)
        poll.poll()

    def hear(self) -> list[Any]:
        """A word, and what belongs to it."""
        try:
            message = from_json(self._open(self._read_frame(FRAME_BYTES + SEAL_BYTES)))
        except ValueError as error:  # also what has the wrong seal
            raise TransferError(f"it says what cannot be understood: {error}") from None
        if not isinstance(message, list) or not message or not isinstance(message[0], str):
            raise TransferError("it says what cannot be understood")
        return message

    def send(self, block: bytes) -> None:
        """Bytes, of which there are few enough for a frame."""
        self._send_frame(block)

    def receive(self) -> bytes:
        try:
            return self._open(self._read_frame(FRAME_BYTES + SEAL_BYTES))
        except ValueError as error:
            raise TransferError(f"it sends what it did not seal: {error}") from None

    # --- snapshots ---------------------------------------------------------------------------------------------------------

    def send_snapshot(self, fd: int, mark: Mark, may_send: Callable[[int], None] = lambda _: None) -> None:
        """All but the mark. Whether it was still the same at the end is for the caller to see, when the other has it.

        `may_send` is asked before each chunk, and waits where there is a limit.
        """
        end = BODY_AT + mark.body_bytes
        at = BODY_AT
        while at < BODY_AT + mark.head_bytes:
            piece = os.pread(fd, min(FRAME_BYTES - SEAL_BYTES, BODY_AT + mark.head_bytes - at), at)
            if not piece:
                raise TransferError("the snapshot is not there any more")
            may_send(len(piece))
            self._send_frame(piece)
            at += len(piece)
        while at < end:
            count = min(CHUNK_BYTES, end - at)
            may_send(count)
            at += self._send_file(fd, at, count)

    def receive_snapshot(self, fd: int, mark: Mark) -> None:
        """Into a file that has no mark until the caller writes it."""
        size = BODY_AT + mark.body_bytes
        try:
            make_room(fd, size)
        except OSError as error:
            raise TransferError(f"there is no memory for {size:,} bytes: {error.strerror}") from None
        at, head_end = BODY_AT, BODY_AT + mark.head_bytes
        while at < head_end:
            piece = self._open(self._read_frame(FRAME_BYTES + SEAL_BYTES))
            if not 0 < len(piece) <= head_end - at:
                raise TransferError("it sends more than it said")
            os.pwrite(fd, piece, at)
            at += len(piece)
        buffer = memoryview(bytearray(min(CHUNK_BYTES, size - at)))
        while at < size:
            count = self._receive_into(buffer[: size - at])
            os.pwrite(fd, buffer[:count], at)
            at += count

    # --- pieces ------------------------------------------------------------------------------------------------------------

    def _send_frame(self, body: bytes) -> None:
        try:
            self._sock.sendall(make_frame(body, self._outgoing))
        except OSError as error:
            raise self._trouble(error) from None

    def _send_file(self, fd: int, at: int, count: int) -> int:
        try:
            sent = os.sendfile(self._sock.fileno(), fd, at, count)
        except OSError as error:
            raise self._trouble(error) from None
        if not sent:
            raise TransferError("the snapshot is not there any more")
        return sent

    def _read_frame(self, most_bytes: int) -> bytes:
        length = int.from_bytes(self._read_exactly(LENGTH_BYTES), "big")
        if length > most_bytes:
            raise TransferError(f"a frame of {length} bytes, where {most_bytes} are allowed")
        return bytes(self._read_exactly(length))

    def _open(self, frame: bytes) -> bytes:
        return frame if self._incoming is None else open_seal(frame, self._incoming)

    def _read_exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            view = view[self._receive_into(view) :]
        return data

    def _receive_into(self, view: memoryview) -> int:
        try:
            count = self._sock.recv_into(view)
        except OSError as error:
            raise self._trouble(error) from None
        if not count:
            raise TransferError("it has closed the connection")
        return count

    def _trouble(self, error: OSError) -> TransferError:
        if isinstance(error, BlockingIOError):
            return TransferError(f"it did nothing for {self._patience_s:g} s")
        return TransferError((error.strerror or str(error)).lower())

    def abort(self) -> None:
        """Whatever it is doing ends at once."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended already
            return

    def close(self) -> None:
        self._sock.close()


def mark_in(text: object) -> Mark:
    """A mark, as it was told; TransferError: it is none, or one of what cannot be."""
    try:
        mark = read_mark(bytes.fromhex(text)) if isinstance(text, str) and len(text) == 2 * MARK_BYTES else None
    except ValueError:
        mark = None
    if mark is None or not mark.head_bytes <= mark.body_bytes < 2**62:
        raise TransferError("it tells of a snapshot without a mark")
    return mark


def mark_text(mark: Mark) -> str:
    return write_mark(mark).hex()
