"""Answers in pieces, with real sockets: pieces from other threads, readers that are slow, that leave and that are too many."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rallypoint.net import http_stream
from rallypoint.net.http import Request, Response
from rallypoint.net.http_server import HttpLimits, HttpServer
from rallypoint.net.http_stream import Stream

IDLE_S = 2.0  # from when a connection is taken until it is closed if nothing is asked; a busy machine is to ask in time
GET = b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"


class Served:
    """A server that gives a stream to whoever asks for one."""

    def __init__(self, limits: HttpLimits) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self.streams: list[Stream] = []
        self.over = threading.Semaphore(0)
        self.server = HttpServer([listener], self.answer, "test", limits=limits)
        self.server.start()
        self.sockets = contextlib.ExitStack()

    def answer(self, request: Request) -> Response | Stream:
        if request.path != "/stream":
            return Response(200, "at once")
        self.streams.append(Stream(Response(content_type="text/event-stream"), self.over.release))
        return self.streams[-1]

    def connect(self) -> socket.socket:
        return self.sockets.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=10))

    def ask(self) -> http.client.HTTPResponse:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        self.sockets.callback(client.close)
        client.request("GET", "/stream")
        return client.getresponse()

    def get(self, path: str = "/", method: str = "GET") -> tuple[int, bytes]:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(client):
            client.request(method, path)
            response = client.getresponse()
            return response.status, response.read()

    def close(self) -> None:
        self.sockets.close()
        self.server.stop()


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    with contextlib.ExitStack() as servers:

        def start(**limits: Any) -> Served:
            served = Served(HttpLimits(**limits))
            servers.callback(served.close)
            return served

        yield start


def test_pieces_arrive_as_they_are_sent(serve: Callable[..., Served]) -> None:
    served = serve(idle_s=IDLE_S)
    response = served.ask()
    assert response.status == 200
    assert response.headers["Connection"] == "close"
    assert "Content-Length" not in response.headers
    [stream] = served.streams
    for number in range(3):
        assert stream.send(b"piece %d\n" % number)
        assert response.readline() == b"piece %d\n" % number
        if number == 1:
            assert served.connect().recv(1) == b""  # so much later; it is no idle connection, however long nothing comes
    stream.end(b"the last")
    assert response.read() == b"the last"
    assert served.over.acquire(timeout=10)
    assert not stream.send(b"more")


def test_what_was_sent_before_the_server_knew_of_it_arrives(serve: Callable[..., Served]) -> None:
    served = serve()
    made = Stream(Response())
    made.end(b"all of it")
    served.answer = lambda request: made  # type: ignore[method-assign]
    served.server._answer = served.answer
    assert served.get() == (200, b"all of it")


def test_a_large_stream_is_told_whole(serve: Callable[..., Served]) -> None:
    served = serve()
    response = served.ask()
    body = bytes(range(256)) * 40_000
    served.streams[0].end(body)
    assert response.read() == body


def test_a_slow_reader_harms_only_itself(serve: Callable[..., Served], wait_until: Any) -> None:
    """It is told to be behind, others are answered meanwhile, and when it takes nothing for too long, it is left."""
    served = serve(idle_s=IDLE_S)
    slow = served.connect()
    slow.sendall(GET)
    wait_until(lambda: served.streams)
    [stream] = served.streams
    assert stream.send(b"x" * (8 << 20))  # more than the kernel keeps
    wait_until(lambda: not stream.is_behind)
    assert stream.send(b"y")
    assert stream.is_behind
    assert served.get() == (200, b"at once")
    assert served.over.acquire(timeout=10)
    assert not stream.send(b"z")


def test_more_than_can_be_kept_ends_it(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, wait_until: Any) -> None:
    monkeypatch.setattr(http_stream, "WAITING_BYTES", 1000)
    served = serve()
    sock = served.connect()
    sock.sendall(GET)
    wait_until(lambda: served.streams)
    assert not served.streams[0].send(b"x" * 1001)
    assert served.over.acquire(timeout=10)
    with contextlib.suppress(ConnectionError):
        while sock.recv(65536):
            pass
    wait_until(lambda: not served.server._connections)


def test_who_leaves_is_noticed_at_once(serve: Callable[..., Served]) -> None:
    served = serve()
    response = served.ask()
    response.close()
    served.sockets.close()
    assert served.over.acquire(timeout=10)
    assert served.get() == (200, b"at once")


def test_there_are_only_so_many(serve: Callable[..., Served]) -> None:
    served = serve(streams=2)
    first, _ = served.ask(), served.ask()
    refused = served.ask()
    assert refused.status == 503
    assert b"try again" in refused.read()
    assert served.over.acquire(timeout=10)  # the third, which was never begun
    assert served.get() == (200, b"at once")
    served.streams[0].end()
    assert first.read() == b""
    assert served.over.acquire(timeout=10)
    assert served.ask().status == 200


def test_head_gets_the_head(serve: Callable[..., Served]) -> None:
    served = serve()
    assert served.get("/stream", "HEAD") == (200, b"")
    assert served.over.acquire(timeout=10)


def test_what_a_listener_says_is_not_heard(serve: Callable[..., Served]) -> None:
    served = serve()
    sock = served.connect()
    sock.sendall(GET + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100 + b"nonsense")
    head = sock.recv(65536)
    assert head.startswith(b"HTTP/1.1 200")
    served.streams[0].end(b"good bye")
    said = b"".join(iter(lambda: sock.recv(65536), b""))
    assert (head + said).count(b"HTTP/1.1") == 1
    assert said.endswith(b"good bye")


def test_a_server_that_stops_ends_its_streams_while_pieces_come(serve: Callable[..., Served]) -> None:
    """Whoever sends may hold a lock that the end of the stream needs."""
    served = serve()
    response = served.ask()
    [stream] = served.streams
    lock, is_over = threading.Lock(), threading.Event()

    def on_over() -> None:
        with lock:
            is_over.set()

    stream._on_over = on_over

    def send() -> None:
        while not is_over.is_set():
            with lock:
                stream.send(b"x")

    sender = threading.Thread(target=send)
    sender.start()
    assert response.read(1) == b"x"
    served.server.stop()
    sender.join(10)
    assert not sender.is_alive()
    assert is_over.is_set()


def test_nothing_wakes_a_server_while_nothing_is_sent(serve: Callable[..., Served], wait_until: Any) -> None:
    served = serve()
    response = served.ask()
    served.streams[0].send(b"x")
    assert response.read(1) == b"x"
    wait_until(lambda: served.server._patience_s() is None)
    assert len(served.server._connections) == 1
