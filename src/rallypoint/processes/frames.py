"""Messages between the agent and its warden: a length, then a tuple written by ``marshal``.

Both ends are the same interpreter, joined by a private socket pair, so nothing of this comes from the network. But either end may
be stopped at any moment, also in the middle of a message, and the other must not stop with it: the sockets never block, a message
is read as far as it has come, the warden's reports wait in a queue, and who sends to the warden gives up in time.
"""

from __future__ import annotations

import _socket  # all that is needed of socket, which takes 4 ms to import
import array
import marshal
import os
import select
import time

TYPE_CHECKING = False  # the warden is to start without the cost of importing typing
if TYPE_CHECKING:
    from typing import Any

__all__ = ["MAX_FDS", "FrameQueue", "FrameReader", "send_frame"]

MAX_FDS = 250  # the kernel passes at most 253 file descriptors with one message
_HEAD_BYTES = 4
_READ_BYTES = 1 << 20
_FDS_SPACE = _socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)


def _make_frame(message: tuple[Any, ...]) -> bytes:
    body = marshal.dumps(message)
    return len(body).to_bytes(_HEAD_BYTES, "little") + body


def send_frame(sock: _socket.socket, message: tuple[Any, ...], fds: list[int], give_up_at: float) -> None:
    """Send one message, and file descriptors with its first bytes. After a TimeoutError the line is of no use any more."""
    rest = memoryview(_make_frame(message))
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    while rest:
        try:
            if rights:
                sent, rights = sock.sendmsg([rest[:_HEAD_BYTES]], rights), []
            else:
                sent = sock.send(rest)
        except BlockingIOError:
            _await_room(sock, give_up_at)
        else:
            rest = rest[sent:]


def _await_room(sock: _socket.socket, give_up_at: float) -> None:
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLOUT)
    if not poll.poll(max(0.0, give_up_at - time.monotonic()) * 1000):
        raise TimeoutError("nobody reads at the other end")


class FrameReader:
    """Takes messages out of a socket that does not block."""

    def __init__(self, sock: _socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._fds = array.array("i")

    def read(self) -> tuple[tuple[Any, ...], list[int]] | None:
        """The next message and its file descriptors, or None while it is not there as a whole; EOFError at the end."""
        try:
            while missing := self._missing():
                self._receive(missing)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            raise EOFError from None
        message, fds = marshal.loads(self._buffer[_HEAD_BYTES:]), list(self._fds)
        self._buffer.clear()
        del self._fds[:]
        return message, fds

    def _missing(self) -> int:
        """How much of the message has not come yet. No more is read: descriptors belong to the message that they come with."""
        wanted = _HEAD_BYTES
        if len(self._buffer) >= _HEAD_BYTES:
            wanted += int.from_bytes(self._buffer[:_HEAD_BYTES], "little")
        return wanted - len(self._buffer)

    def _receive(self, most: int) -> None:
        data, ancillary, _, _ = self._sock.recvmsg(min(most, _READ_BYTES), _FDS_SPACE, _socket.MSG_CMSG_CLOEXEC)
        for _, _, rights in ancillary:
            self._fds.frombytes(rights[: len(rights) - len(rights) % self._fds.itemsize])
        if not data:
            raise EOFError
        self._buffer += data


class FrameQueue:
    """Messages on their way out of a socket that does not block, with file descriptors, which are closed once they are sent."""

    def __init__(self, sock: _socket.socket) -> None:
        self._sock = sock
        self._waiting: list[tuple[bytearray, list[int]]] = []

    def __bool__(self) -> bool:
        """Whether some of it has to wait until there is room."""
        return bool(self._waiting)

    def put(self, message: tuple[Any, ...], fds: list[int] | None = None) -> None:
        self._waiting.append((bytearray(_make_frame(message)), fds or []))
        self.flush()

    def flush(self) -> None:
        try:
            while self._waiting:
                self._send_first()
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):  # whoever reads next sees that the other end is gone
            self.clear()

    def _send_first(self) -> None:
        rest, fds = self._waiting[0]
        if fds:  # with the head alone: the reader takes no more than that at once
            sent = self._sock.sendmsg([rest[:_HEAD_BYTES]], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", fds))])
            _close_all(fds)
        else:
            sent = self._sock.send(rest)
        del rest[:sent]
        if not rest:
            del self._waiting[0]

    def clear(self) -> None:
        for _, fds in self._waiting:
            _close_all(fds)
        self._waiting.clear()


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
