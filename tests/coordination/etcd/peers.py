"""Endpoints that answer as a test says, where a real etcd would be too well-behaved; and clients that are closed by the test."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.etcd_cluster import Cluster

from rallypoint.coordination.etcd.engine import EtcdCoordination
from rallypoint.coordination.etcd.gateway import EtcdAccess

TIMEOUT_S = 10.0
PREFIX = "/rallypoint/job/"
HEADER = {"cluster_id": "77", "member_id": "1", "revision": "5", "raft_term": "2"}

Handle = Callable[["Visitor"], None]


class Visitor:
    """A connection that a fake endpoint was asked over."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._received = b""

    def request(self) -> tuple[str, bytes]:
        """Path and body of the next request; ConnectionError when there is none."""
        while b"\r\n\r\n" not in self._received:
            self._receive()
        head, self._received = self._received.split(b"\r\n\r\n", 1)
        lines = head.decode().split("\r\n")
        length = next(int(line.partition(":")[2]) for line in lines if line.lower().startswith("content-length"))
        while len(self._received) < length:
            self._receive()
        body, self._received = self._received[:length], self._received[length:]
        return lines[0].split()[1], body

    def _receive(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError
        self._received += data

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.socket.sendall(piece)

    def answer(self, fields: dict[str, object], status: str = "200 OK") -> None:
        body = json.dumps({"header": HEADER, **fields}).encode()
        self.send(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    def wait_for_end(self) -> None:
        """Until the other side closes the connection."""
        with contextlib.suppress(ConnectionError):
            while True:
                self._receive()


class FakeEndpoint:
    """Listens on loopback, and gives every connection to `handle`, in a thread of its own."""

    def __init__(self, handle: Handle) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._handle = handle
        self._visitors: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()
        return host, port

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                sock, _ = self._listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._visitors.append(sock)
                thread = threading.Thread(target=self._serve, args=[sock])
                self._threads.append(thread)
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):  # the other side has gone
            self._handle(Visitor(sock))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for sock in self._visitors:
            with contextlib.suppress(OSError):  # it has ended
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()


@contextlib.contextmanager
def fake_endpoint(handle: Handle) -> Iterator[FakeEndpoint]:
    endpoint = FakeEndpoint(handle)
    try:
        yield endpoint
    finally:
        endpoint.close()


class Clients(contextlib.ExitStack):
    """Makes clients of a real cluster, and closes them."""

    def __init__(self, cluster: Cluster, prefix: str = PREFIX) -> None:
        super().__init__()
        self.endpoints = tuple(("127.0.0.1", member.client_port) for member in cluster.members)
        self._prefix = prefix

    def make(self, home: int = 0, **access: object) -> EtcdCoordination:
        """One that tries the endpoint `home` first."""
        first = self.endpoints[home:] + self.endpoints[:home]
        client = EtcdCoordination(EtcdAccess(**{"endpoints": first, **access}), self._prefix)  # type: ignore[arg-type]
        client._cluster.home = 0
        self.callback(client.close)
        return client

    def connect(self, home: int = 0, **access: object) -> EtcdCoordination:
        client = self.make(home, **access)
        client.connect(time.monotonic() + TIMEOUT_S)
        return client


def prefix_of(tmp_path: Path) -> str:
    """A part of a cluster that no other test uses."""
    return f"/rallypoint/{tmp_path.name}/"
