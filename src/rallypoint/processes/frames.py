"""Messages between the agent and its warden: a length, then a tuple written by ``marshal``.

Both ends are the same interpreter, joined by a private socket pair, so nothing of this comes from the network.
"""

from __future__ import annotations

import _socket  # all that is needed of socket, which takes 4 ms to import
import array
import marshal

TYPE_CHECKING = False  # the warden is to start without the cost of importing typing
if TYPE_CHECKING:
    from typing import Any

__all__ = ["MAX_FDS", "receive_frame", "send_frame"]

MAX_FDS = 250  # the kernel passes at most 253 file descriptors with one message


def send_frame(sock: _socket.socket, message: tuple[Any, ...], fds: list[int] | None = None) -> None:
    """Send one message, and file descriptors with its first bytes."""
    body = marshal.dumps(message)
    head = len(body).to_bytes(4, "little")
    if fds:
        sock.sendmsg([head], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", fds))])
    else:
        body = head + body
    sock.sendall(body)


def receive_frame(sock: _socket.socket) -> tuple[tuple[Any, ...], list[int]] | None:
    """Receive one message and its file descriptors; None when the other end is gone."""
    fds = array.array("i")
    head, ancillary, _, _ = sock.recvmsg(4, _socket.CMSG_SPACE(MAX_FDS * fds.itemsize), _socket.MSG_CMSG_CLOEXEC)
    for _, _, data in ancillary:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    body = _receive_exactly(sock, int.from_bytes(head, "little")) if len(head) == 4 else b""
    return (marshal.loads(body), list(fds)) if body else None


def _receive_exactly(sock: _socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        part = sock.recv(count - len(received))
        if not part:
            return b""
        received += part
    return bytes(received)
