"""Whose store it is: who is told the name of a job, and who is not."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable

import pytest
from tests.conftest import PATIENCE_S

from rallypoint.coordination.embedded.handshake import HandshakeRefused, NameQuestion, ServerHandshake, Welcome
from rallypoint.coordination.embedded.inquiring import job_at
from rallypoint.coordination.embedded.server import CoordinationServer
from rallypoint.coordination.embedded.wire import FrameError, make_frame
from rallypoint.coordination.engine import RefusedError, UnreachableError

Start = Callable[..., CoordinationServer]


def ask(server: CoordinationServer, secret: bytes | None) -> str:
    host, port = server.addresses[0][:2]
    return job_at(host, port, secret, time.monotonic() + PATIENCE_S)


@pytest.mark.parametrize("secret", [None, b"secret"])
@pytest.mark.parametrize("name", ["a-job", "jöb \U0001f600", "x" * 2000])
def test_who_may_know_is_told_and_not_let_in(start_server: Start, secret: bytes | None, name: str) -> None:
    server = start_server(name, secret)
    for _ in range(2):
        assert ask(server, secret) == name
    assert server.wait_until_alone(time.monotonic() + PATIENCE_S, except_for=0)


@pytest.mark.parametrize(
    ("secret", "given", "why"),
    [
        (b"secret", None, "this store asks for a secret, and the node has none"),
        (None, b"secret", "the node has a secret, and this store has none"),
        (b"secret", b"another", "the secret is not the same here as at the store"),
    ],
)
def test_p36_who_may_not_learns_nothing(start_server: Start, secret: bytes | None, given: bytes | None, why: str) -> None:
    """P36: also not the name of the job."""
    server = start_server("the-run-id", secret)
    with pytest.raises(RefusedError, match=f"refused: {why}$"):
        ask(server, given)


def test_a_question_that_was_overheard_is_good_for_nothing() -> None:
    question = NameQuestion(b"secret")
    store, other = (ServerHandshake("job", b"secret", Welcome("i", "s")) for _ in range(2))
    proof = question.answer(store.answer(question.hello()))
    assert proof is not None
    other.answer(question.hello())
    with pytest.raises(HandshakeRefused):
        other.answer(proof)
    assert not other.has_told_name
    assert not other.is_over


@pytest.mark.parametrize("proof", [None, "00" * 32])
def test_p36_a_name_without_a_proof_counts_for_nothing(proof: str | None) -> None:
    """P36: whoever does not know the secret cannot send us elsewhere."""
    question = NameQuestion(b"secret")
    question.answer(json.dumps({"version": 2, "nonce": "00" * 16}).encode())
    with pytest.raises((HandshakeRefused, FrameError)):
        question.answer(json.dumps({"job": "mine", **({"proof": proof} if proof else {})}).encode())
    assert question.job is None


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no store of this version of rallypoint's"),
        (make_frame(b'{"job": 7}', None), "is no store of this version of rallypoint's"),
        (make_frame(b'{"refused": "go away"}', None), "refused: go away"),
    ],
)
def test_whatever_else_answers_there_is_named(answer: bytes, error: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as visitor:
                visitor.recv(1024)
                visitor.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(RefusedError, match=error):
            job_at("127.0.0.1", listener.getsockname()[1], None, time.monotonic() + PATIENCE_S)
        thread.join()


def test_nobody_is_there() -> None:
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        port = gone.getsockname()[1]
        with pytest.raises(UnreachableError, match=f"no store answers at 127.0.0.1:{port}: Connection refused"):
            job_at("127.0.0.1", port, None, time.monotonic() + PATIENCE_S)
