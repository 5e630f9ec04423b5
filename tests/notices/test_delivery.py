"""Telling somebody, for real: servers that answer this or that or nothing, and commands."""

from __future__ import annotations

import base64
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests import ports

from rallypoint.notices.delivery import attempt
from rallypoint.notices.rules import Attempt, Command, Target, read_target

BODY = '{"text": "caf\\u00e9"}'
IN_TIME_S = 30.0


class Server(ThreadingHTTPServer):
    """Answers as the path says, and keeps what it got."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.got: list[tuple[str, str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.is_over = threading.Event()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.headers.append(dict(self.headers))
        self.server.got.append((self.command, self.path, body))
        what = self.path[1:]
        if what == "never":
            self.server.is_over.wait()
        elif what == "gone":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif what == "noise":
            self.wfile.write(b"what?\r\n\r\n")
        else:
            self.send_response(int(what))
            self.send_header("Location", "/200")
            self.end_headers()

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as one:
        thread = threading.Thread(target=one.serve_forever, args=(0.01,))
        thread.start()
        yield one
        one.is_over.set()
        one.shutdown()
        thread.join()


def tell(target: Target | str, timeout_s: float = IN_TIME_S) -> Attempt:
    return attempt(read_target(target) if isinstance(target, str) else target, BODY, timeout_s, bool)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("200", Attempt()),
        ("204", Attempt()),
        ("307", Attempt("it answered 307 Temporary Redirect")),
        ("302", Attempt("it answered 302 Found")),
        ("404", Attempt("it answered 404 Not Found")),
        ("503", Attempt("it answered 503 Service Unavailable", may_retry=True)),
        ("gone", Attempt("it gave no proper answer: RemoteDisconnected", may_retry=True)),
        ("noise", Attempt("it gave no proper answer: BadStatusLine")),
    ],
)
def test_what_a_server_answers(server: Server, path: str, expected: Attempt) -> None:
    assert tell(server.url(path)) == expected
    assert server.got == [("POST", f"/{path}", BODY)]
    assert server.headers[0]["Content-Type"].startswith("application/json")


def test_a_server_that_took_it_and_does_not_answer_is_not_told_again(server: Server, wait_until: Callable[..., object]) -> None:
    assert tell(server.url("never"), 0.2) == Attempt("it took it, but gave no answer within 0.2 s")
    wait_until(lambda: len(server.got) == 1)  # it may read it later than we have given up


def test_nobody_there() -> None:
    failed = tell(f"http://127.0.0.1:{ports.free_port()}/s3cr3t")
    assert failed.may_retry
    assert failed.why == "it cannot be reached: [Errno 111] Connection refused"


def test_a_login_is_sent_and_not_shown(server: Server) -> None:
    target = read_target(server.url("404").replace("//", "//me:pa%40ss@"))
    assert target.name == f"http://127.0.0.1:{server.server_port}"
    assert "me" not in tell(target).why
    assert server.headers[0]["Authorization"] == f"Basic {base64.b64encode(b'me:pa@ss').decode()}"


def test_a_command_gets_the_document_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NOTIFY", "https://h/s3cr3t")
    monkeypatch.setenv("KEPT", "yes")
    assert tell(Command(("sh", "-c", f"cat > {tmp_path}/got; env > {tmp_path}/env"))) == Attempt()
    assert (tmp_path / "got").read_text() == BODY
    assert "KEPT=yes" in (tmp_path / "env").read_text()
    assert "s3cr3t" not in (tmp_path / "env").read_text()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("sh", "-c", "echo first >&2; echo 'no \033[1mroute' >&2; exit 3"), "it exited with code 3: no [1mroute"),
        (("sh", "-c", "kill -9 $$"), "it was ended by signal 9"),
        (("/nowhere/tell",), "it exited with code 1: /nowhere/tell: No such file or directory"),
    ],
)
def test_a_command_that_fails(argv: tuple[str, ...], expected: str) -> None:
    assert tell(Command(argv)) == Attempt(expected, may_retry=True)


def test_a_command_that_does_not_end_is_killed_with_its_children(
    tmp_path: Path, alive: Callable[[int], bool], wait_until: Callable[..., object]
) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/child.new; mv {tmp_path}/child.new {tmp_path}/child; wait"
    began = time.monotonic()
    failed: list[Attempt] = []
    teller = threading.Thread(target=lambda: failed.append(tell(Command(("sh", "-c", script)), 3.0)))
    teller.start()
    wait_until(lambda: failed or (tmp_path / "child").exists())
    teller.join()
    assert failed == [Attempt("it ran for over 3 s and was killed")]
    assert time.monotonic() - began >= 3.0
    if (tmp_path / "child").exists():
        child = int((tmp_path / "child").read_text())
        wait_until(lambda: not alive(child))


def test_what_a_command_leaves_in_the_background_goes_with_it(
    tmp_path: Path, alive: Callable[[int], bool], wait_until: Callable[..., object]
) -> None:
    assert tell(Command(("sh", "-c", f"sleep 600 & echo $! > {tmp_path}/child"))) == Attempt()
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not alive(child))
    assert os.getpid() != child
