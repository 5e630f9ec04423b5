"""The HTTP server with real clients: polite ones, many at once, and those that mean no good."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.pace import is_under

from rallypoint.base import outbox, report
from rallypoint.net.http import Request, Response
from rallypoint.net.http_server import HttpLimits, HttpServer

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LAST_GET = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
PEER_CREDENTIALS = "3i"


def echo(request: Request) -> Response:
    return Response(200, f"{request.method} {request.path} {len(request.body)}")


class Served:
    """A server on a port of its own, and ways to talk to it."""

    def __init__(self, answer: Callable[[Request], Response], limits: HttpLimits) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.port: int = listener.getsockname()[1]
        self.server = HttpServer([listener], answer, "test", limits=limits)
        self.server.start()
        self.sockets = contextlib.ExitStack()

    def client(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        self.sockets.callback(connection.close)
        return connection

    def connect(self) -> socket.socket:
        return self.sockets.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=10))

    def ask(self, data: bytes) -> bytes:
        """All that comes back, until the server closes."""
        with self.connect() as sock:
            sock.sendall(data)
            return read_all(sock)

    def close(self) -> None:
        self.sockets.close()
        self.server.stop()


def read_all(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(65536), b""))


def answers(data: bytes) -> list[int]:
    return [int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]]


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """``serve(answer, **limits)`` starts a server, which is stopped after the test."""
    with contextlib.ExitStack() as servers:

        def start(answer: Callable[[Request], Response] = echo, **limits: Any) -> Served:
            served = Served(answer, HttpLimits(**limits))
            servers.callback(served.close)
            return served

        yield start


def get(client: http.client.HTTPConnection, path: str = "/", method: str = "GET", **kwargs: Any) -> tuple[int, bytes]:
    client.request(method, path, **kwargs)
    response = client.getresponse()
    return response.status, response.read()


# --- those who know how to behave ------------------------------------------------------------------------------------------


def test_one_connection_serves_many_requests(serve: Callable[..., Served]) -> None:
    client = serve().client()
    assert get(client) == (200, b"GET / 0")
    sock = client.sock
    assert get(client, "/a", "HEAD") == (200, b"")
    assert get(client, "/b", "POST", body=b"x" * 65536) == (200, b"POST /b 65536")
    assert client.sock is sock


def test_close_is_honoured(serve: Callable[..., Served]) -> None:
    served = serve()
    assert answers(served.ask(LAST_GET)) == [200]
    assert answers(served.ask(b"GET / HTTP/1.0\r\n\r\n")) == [200]


def test_pipelined_requests_are_answered_in_order(serve: Callable[..., Served]) -> None:
    numbered = b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number for number in range(1000))
    answer = serve().ask(numbered + LAST_GET)
    assert [int(part.partition(b"GET /")[2].partition(b" ")[0]) for part in answer.split(b"HTTP/1.1 ")[1:-1]] == [*range(1000)]


def test_a_half_closed_connection_gets_all_its_answers(serve: Callable[..., Served]) -> None:
    sock = serve().connect()
    sock.sendall(GET * 40)
    sock.shutdown(socket.SHUT_WR)
    assert answers(read_all(sock)) == [200] * 40


def test_a_large_answer_goes_out_as_fast_as_it_is_taken(serve: Callable[..., Served]) -> None:
    body = os.urandom(1 << 20) * 32
    served = serve(lambda request: Response(200, body))
    slow, quick = served.client(), served.client()
    slow.request("GET", "/")
    assert get(quick) == (200, body)
    assert slow.getresponse().read() == body


def test_an_answer_that_nobody_takes_is_given_up(serve: Callable[..., Served], wait_until: Any) -> None:
    served = serve(lambda request: Response(200, b"x" * (1 << 25)), idle_s=0.2)
    sock = served.connect()
    sock.sendall(GET * 3)
    assert sock.recv(1, socket.MSG_PEEK)
    wait_until(lambda: not served.server._connections)
    assert len(last_words(sock)) < 1 << 25


def test_unix_sockets_and_who_may_come_in(tmp_path: Path) -> None:
    def is_us(sock: socket.socket) -> bool:
        data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(PEER_CREDENTIALS))
        seen.append(struct.unpack(PEER_CREDENTIALS, data)[0])
        return len(seen) == 1

    seen: list[int] = []
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    listener.listen()
    server = HttpServer([listener], echo, "test", admits=is_us)
    server.start()
    received = []
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(ConnectionError):
            sock.settimeout(10)
            sock.connect(str(tmp_path / "socket"))
            sock.sendall(LAST_GET)
            received.append(answers(read_all(sock)))
    server.stop()
    assert received[0] == [200]
    assert received[1:] in ([], [[]])
    assert seen == [os.getpid()] * 2


def test_who_decides_on_admission_may_fail(serve: Callable[..., Served]) -> None:
    """Then nobody comes in, and the server goes on."""
    asked: list[int] = []

    def fail_once(sock: socket.socket) -> bool:
        asked.append(1)
        return bool(1 // (len(asked) - 1))

    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer([listener], echo, "test", admits=fail_once)
    server.start()
    outcomes = []
    for _ in range(2):
        with socket.create_connection(listener.getsockname(), timeout=10) as sock, contextlib.suppress(BrokenPipeError):
            sock.sendall(LAST_GET)
            outcomes.append(answers(last_words(sock)))
    server.stop()
    assert outcomes[-1] == [200]


# --- those who do not ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET / HTTP/1.1\r\nHost x\r\n\r\n", 400),
        (b"DELETE / HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 65537\r\n\r\n" + b"x" * 65537, 413),
        (b"GET / HTTP/1.1\r\nHost: x\r\na: " + b"b" * 100_000 + b"\r\n\r\n", 431),
        (GET + b"nonsense", 400),
    ],
)
def test_bad_requests_are_told_so_and_closed(serve: Callable[..., Served], data: bytes, status: int) -> None:
    """The answer arrives although the rest of what was sent is never read."""
    assert answers(serve().ask(data))[-1:] == [status]


def test_a_method_that_is_not_allowed_is_told_which_are(serve: Callable[..., Served]) -> None:
    client = serve().client()
    client.request("DELETE", "/")
    assert client.getresponse().headers["Allow"] == "GET, HEAD, POST"


def test_an_answer_that_cannot_be_made_harms_nobody(serve: Callable[..., Served]) -> None:
    def answer(request: Request) -> Response:
        if request.path == "/header":
            return Response(200, headers=(("a", "b\r\nc: d"),))
        return {"/": Response(200, "fine")}[request.path]

    lines: list[str] = []
    report.set_sink(lambda level, text: lines.append(text))
    try:
        client = serve(answer).client()
        assert [get(client, path)[0] for path in ("/x", "/header", "/x", "/")] == [500, 500, 500, 200]
        assert outbox.flush(10.0)
    finally:
        report.set_sink(None)
    assert lines == ["GET '/x' could not be answered: KeyError('/x')"]


def test_slow_requests_harm_only_themselves(serve: Callable[..., Served]) -> None:
    """All places are taken by peers that send a byte now and then; who asks properly is answered at once all the same."""
    served = serve(connections=16, request_s=1.0)
    slow = {served.connect() for _ in range(16)}
    unsent = iter(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 1000)
    waits_s = []
    ended: list[bytes] = []
    deadline = time.monotonic() + 10
    while slow and time.monotonic() < deadline:
        byte = bytes([next(unsent)])
        for sock in slow:
            with contextlib.suppress(ConnectionError):  # it was told to go, which is read below
                sock.sendall(byte)
        asked = time.monotonic()
        client = served.client()
        assert get(client) == (200, b"GET / 0")
        client.close()
        waits_s.append(time.monotonic() - asked)
        readable, _, _ = select.select(slow, [], [], 0.05)
        slow.difference_update(readable)
        ended += [last_words(sock) for sock in readable]
    assert not slow
    assert is_under(max(waits_s), 1.0)
    assert set(map(len, map(answers, ended))) <= {0, 1}  # to give way to another has no words
    assert {status for words in ended for status in answers(words)} <= {408}


def last_words(sock: socket.socket) -> bytes:
    try:
        return read_all(sock)
    except ConnectionError:
        return b""


def test_a_request_that_does_not_arrive_is_told_so(serve: Callable[..., Served]) -> None:
    served = serve(request_s=0.2)
    assert answers(served.ask(b"GET / HTTP/1.1\r\nHost:")) == [408]
    assert answers(served.ask(GET + b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\na")) == [200, 408]


def test_idle_connections_are_closed(serve: Callable[..., Served]) -> None:
    served = serve(idle_s=0.2)
    assert served.ask(b"") == b""
    assert answers(served.ask(GET)) == [200]


def test_the_oldest_idle_connection_gives_way(serve: Callable[..., Served], wait_until: Any) -> None:
    served = serve(connections=3)
    clients = [served.client() for _ in range(3)]
    for client in clients:
        assert get(client)[0] == 200
    assert get(served.client())[0] == 200
    first = clients[0].sock
    assert first.recv(1) == b""
    assert get(clients[2])[0] == 200
    assert len(served.server._connections) == 3


def test_a_thousand_connections_at_once(serve: Callable[..., Served]) -> None:
    """Far more than there is room for: nobody is sent away with an open question."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        served = serve()
        socks = []
        for _ in range(1000):
            socks.append(served.connect())
            socks[-1].sendall(LAST_GET)
        assert [answers(read_all(sock)) for sock in socks] == [[200]] * 1000
        served.sockets.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- load ------------------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_under_load_all_are_answered_and_memory_stays_flat(serve: Callable[..., Served]) -> None:
    served = serve(lambda request: Response(200, "x" * 2000))
    wrong: list[object] = []

    def ask(count: int) -> None:
        client = served.client()
        for index in range(count):
            if get(client) != (200, b"x" * 2000):
                wrong.append(index)
            if index % 50 == 49:
                client.close()  # the next request opens it again

    def round_of(threads: int, count: int) -> None:
        clients = [threading.Thread(target=ask, args=(count,)) for _ in range(threads)]
        for one in clients:
            one.start()
        for one in clients:
            one.join()

    round_of(16, 50)
    before = resident_bytes()
    round_of(16, 300)
    assert wrong == []
    assert resident_bytes() - before < 4 << 20


def test_stopping_while_busy_is_prompt(serve: Callable[..., Served]) -> None:
    served = serve()
    stopping = threading.Event()

    def ask() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            client = served.client()
            while not stopping.is_set():
                get(client)

    clients = [threading.Thread(target=ask) for _ in range(8)]
    for one in clients:
        one.start()
    assert get(served.client())[0] == 200
    begun = time.monotonic()
    served.server.stop()
    took_s = time.monotonic() - begun
    stopping.set()
    for one in clients:
        one.join()
    assert is_under(took_s, 1.0)
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", served.port), timeout=10)
    served.server.stop()


def test_a_server_that_never_starts_can_be_stopped() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    HttpServer([listener], echo, "test").stop()
    assert listener.fileno() == -1


def test_a_server_can_be_stopped_by_its_own_answer(wait_until: Any) -> None:
    def answer(request: Request) -> Response:
        server.stop()
        return Response(200)

    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer([listener], answer, "test")
    server.start()
    with socket.create_connection(listener.getsockname(), timeout=10) as sock:
        sock.sendall(LAST_GET)
        assert answers(read_all(sock)) == [200]
    wait_until(lambda: listener.fileno() == -1)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # about fork, which is the point
def test_a_fork_does_not_keep_the_port(serve: Callable[..., Served]) -> None:
    served = serve()
    sock = served.connect()
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        os.write(ready[1], b"x")
        os.close(done[1])
        os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    sock.sendall(LAST_GET)
    assert answers(read_all(sock)) == [200]
    served.server.stop()
    with socket.create_server(("127.0.0.1", served.port)), pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.2", served.port), timeout=10)
    for fd in (*done, *ready):
        os.close(fd)
    os.waitpid(pid, 0)
