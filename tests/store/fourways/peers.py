"""The other ends of the script's stores: a client of which every byte is in our hands, and servers that do not last."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outcomes import HOST, TIMEOUT_S, fork

from rallypoint.store import tcp_protocol as wire

TOKEN = 0xA0B1C2D3  # unlike all that is answered otherwise
PING, PONG = wire.request(wire.PING, (), TOKEN), wire.U32.pack(TOKEN)
AT_ONCE = struct.pack("ii", 1, 0)  # linger: what is closed is reset


class Peer:
    """A connection on which nothing is said by itself but the greeting."""

    def __init__(self, port: int, first: bytes = wire.GREETING) -> None:
        self._socket = socket.create_connection((HOST, port), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.say(first)

    def say(self, data: bytes) -> None:
        self._socket.sendall(data)

    def ask(self, operation: int, *strings: bytes, number: int = 0) -> Peer:
        self.say(wire.request(operation, strings, number))
        return self

    def heard(self) -> bytes:
        """All that it has been told, now that the server has taken note of all that it has said."""
        self.say(PING)
        heard = b""
        while not heard.endswith(PONG) and (more := self._socket.recv(65536)):
            heard += more
        return heard.removesuffix(PONG) if heard.endswith(PONG) else heard + b" and then the end"

    def is_cut_off(self, within_s: float = TIMEOUT_S) -> bool:
        """Whether the server closes it, without another word; of no use afterwards."""
        with self._socket as sock:
            try:
                return bool(select.select([sock], [], [], within_s)[0]) and not sock.recv(1)
            except ConnectionError:
                return True

    def leave(self) -> None:
        """With all that is proper; back when the server has seen it."""
        self._socket.shutdown(socket.SHUT_WR)
        while self._socket.recv(65536):
            pass
        self._socket.close()

    def die(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        self._socket.close()


@contextmanager
def server_that(*does: Callable[[socket.socket], object]) -> Iterator[int]:
    """The port of a server in a process of its own that `does` all this with the first who comes, and is gone then."""
    listener = socket.create_server((HOST, 0))
    pid = fork(lambda: _serve_one(listener, does))
    with listener:
        port: int = listener.getsockname()[1]
    yield port
    os.waitpid(pid, 0)


def _serve_one(listener: socket.socket, does: tuple[Callable[[socket.socket], object], ...]) -> None:
    connection, _ = listener.accept()
    for one in does:
        one(connection)


def greets(connection: socket.socket) -> None:
    size = len(wire.GREETING) + len(PING)
    connection.sendall(connection.recv(size, socket.MSG_WAITALL)[-len(PONG) :])


def listens(connection: socket.socket) -> None:
    connection.recv(1)


@contextmanager
def nobody() -> Iterator[int]:
    """A port at which nobody listens, for it is bound to somebody who does not."""
    with socket.socket() as holder:
        holder.bind((HOST, 0))
        yield holder.getsockname()[1]
