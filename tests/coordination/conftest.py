"""A store that is served on loopback, clients of it, and peers that speak to it byte by byte."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rallypoint.coordination.embedded.client import EmbeddedCoordination
from rallypoint.coordination.embedded.handshake import ClientHandshake
from rallypoint.coordination.embedded.server import CoordinationServer
from rallypoint.coordination.embedded.wire import LARGE_FRAME_BYTES, Inbox, decode, encode, make_frame
from rallypoint.net.endpoint import open_listeners

TIMEOUT_S = 10.0


@pytest.fixture
def start_server() -> Iterator[Callable[..., CoordinationServer]]:
    """``start_server(run_id, secret, port=0)`` serves a store on loopback until the test ends."""
    with contextlib.ExitStack() as servers:

        def start(run_id: str = "job", secret: bytes | None = None, port: int = 0) -> CoordinationServer:
            sockets = open_listeners("127.0.0.1", port, is_host=True, wildcard_allowed=False)
            assert sockets is not None
            server = CoordinationServer(sockets, run_id, secret)
            servers.callback(server.stop)
            server.start()
            return server

        yield start


@pytest.fixture
def connect(soon: Callable[[], float]) -> Iterator[Callable[..., EmbeddedCoordination]]:
    """``connect(server, run_id, secret)`` is a new client; `port` is for a server that is not there any more."""
    with contextlib.ExitStack() as clients:

        def connect(server: CoordinationServer | int, run_id: str = "job", secret: bytes | None = None) -> EmbeddedCoordination:
            port = server if isinstance(server, int) else server.addresses[0][1]
            client = EmbeddedCoordination("127.0.0.1", port, run_id, secret)
            clients.callback(client.close)
            client.connect(soon())
            return client

        yield connect


class Peer:
    """A socket, and what a client does with it, step by step."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = b""
        self._inbox = Inbox()
        self._inbox.limit = LARGE_FRAME_BYTES
        self._handshake = ClientHandshake("", None)
        self._asked = 0

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send_body(self, body: bytes) -> None:
        self.send(make_frame(body, self._handshake.outgoing))

    def receive(self) -> bytes | None:
        """The next frame's body, or None at the end."""
        while (body := self._inbox.take()) is None:
            try:
                data = self.socket.recv(65536)
            except ConnectionError:
                return None
            if not data:
                return None
            self.received += data
            self._inbox.feed(data)
        return body

    def read_to_end(self) -> bytes:
        """All that it was ever told, once it is cut off."""
        while self.receive() is not None:
            pass
        return self.received

    def greet(self, run_id: str = "job", secret: bytes | None = None) -> Peer:
        """Be welcomed."""
        self._handshake = ClientHandshake(run_id, secret)
        self.send(make_frame(self._handshake.hello(), None))
        while self._handshake.welcome is None:
            frame = self.receive()
            assert frame is not None, "cut off during the greeting"
            if (answer := self._handshake.answer(frame)) is not None:
                self.send(make_frame(answer, None))
        self._inbox.seal = self._handshake.incoming
        return self

    def ask(self, *request: object) -> list[Any]:
        self._asked += 1
        self.send_body(encode([self._asked, *request]))
        body = self.receive()
        assert body is not None, "cut off"
        return decode(body)


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    """``peer(server)`` is connected, and has said nothing yet."""
    with contextlib.ExitStack() as sockets:

        def connect(server: CoordinationServer) -> Peer:
            one = Peer(server.addresses[0][1])
            sockets.enter_context(one.socket)
            return one

        yield connect
