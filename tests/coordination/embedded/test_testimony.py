"""A warden's testimony, before a real store: what it takes to be believed, and what comes of it."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.conftest import AT_ONCE_S, children

from rallypoint.coordination import engine
from rallypoint.coordination import testimony as testimonies
from rallypoint.coordination.embedded import handshake
from rallypoint.coordination.embedded.client import EmbeddedCoordination
from rallypoint.coordination.model import Event, Put, Transaction
from rallypoint.processes.licence import Licence

SECRETS = [None, b"a secret of the job"]
TTL_S = 60.0  # far more than any test takes: what ends before was ended
with_and_without_secret = pytest.mark.parametrize("secret", SECRETS, ids=["open", "secret"])


class Onlooker:
    """Another node, which watches a key of one that has a lease."""

    def __init__(self, client: EmbeddedCoordination, deadline: float) -> None:
        self._client = client
        client.watch("node", 1, deadline)

    def await_end(self, timeout_s: float = 10.0) -> Event | None:
        """How the key went; None if it is still there after so long."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            for event in self._client.take_events():
                if event.item is None:
                    return event
            select.select([self._client.fileno()], [], [], left_s)
        return None

    def is_there(self) -> bool:
        return bool(self._client.read("node", time.monotonic() + 10.0).items)


@pytest.fixture
def onlooker(connect: Any, soon: Any) -> Callable[..., Onlooker]:
    return lambda server, secret=None: Onlooker(connect(server, secret=secret), soon())


def join(client: EmbeddedCoordination, deadline: float, ttl_s: float = TTL_S) -> int:
    lease = client.grant(ttl_s, deadline)
    client.transact(Transaction((), (Put("node", b"here", lease),)), deadline)
    return lease


def fields(testimony: engine.Testimony | None) -> tuple[Any, ...]:
    assert testimony is not None
    return testimony.fields()


# --- being heard -----------------------------------------------------------------------------------------------------------


@with_and_without_secret
def test_it_ends_the_lease_at_once(
    start_server: Any, connect: Any, onlooker: Any, soon: Any, warnings: list[str], secret: bytes | None
) -> None:
    server = start_server(secret=secret)
    node, other = connect(server, secret=secret), onlooker(server, secret)
    join(node, soon())
    testimonies.testify(*fields(node.testimony()))
    ended = other.await_end()
    assert ended is not None
    assert (ended.key, ended.cause) == ("node", "vouched")
    assert warnings == []


@with_and_without_secret
def test_it_is_good_after_the_session_was_taken_up_on_another_connection(
    start_server: Any, connect: Any, onlooker: Any, soon: Any, secret: bytes | None
) -> None:
    server = start_server(secret=secret)
    node, other = connect(server, secret=secret), onlooker(server, secret)
    join(node, soon())
    given_before = fields(node.testimony())
    node._line.break_off("for the test", time.monotonic())
    node.read("node", soon())
    testimonies.testify(*given_before)
    ended = other.await_end()
    assert ended is not None
    assert ended.cause == "vouched"


def test_there_is_none_without_a_lease(start_server: Any, connect: Any, soon: Any) -> None:
    node = connect(start_server())
    assert node.testimony() is None
    join(node, soon())
    assert node.testimony() is not None
    node.revoke(soon())
    assert node.testimony() is None


def test_about_a_lease_that_has_ended_nobody_complains(
    start_server: Any, connect: Any, onlooker: Any, soon: Any, warnings: list[str]
) -> None:
    """The node has left, and joined anew under another lease: that one lives on."""
    server = start_server()
    node, other = connect(server), onlooker(server)
    join(node, soon())
    old = fields(node.testimony())
    node.revoke(soon())
    assert other.await_end() is not None
    join(node, soon())
    testimonies.testify(*old)
    testimonies.testify(*old)
    assert other.is_there()
    assert warnings == []


# --- not being heard -------------------------------------------------------------------------------------------------------


class Witness:
    """Somebody who speaks to the store as a warden would, one word at a time."""

    def __init__(self, peer: Any) -> None:
        self._peer = peer

    def greet(self, hello: bytes) -> bytes:
        """The store's nonce."""
        self._peer.send_body(hello)
        return bytes.fromhex(json.loads(self._peer.receive())["nonce"])

    def prove(self, proof: bytes) -> dict[str, Any]:
        self._peer.send_body(json.dumps({"proof": proof.hex()}).encode())
        answer: dict[str, Any] = json.loads(self._peer.receive())
        assert self._peer.receive() is None, "it is not cut off"
        return answer


def proof_of(key: bytes, context: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, context + nonce, "sha256")


@pytest.fixture
def witness(peer: Any) -> Callable[..., Witness]:
    return lambda server: Witness(peer(server))


@with_and_without_secret
def test_a_wrong_proof_is_refused(
    start_server: Any, connect: Any, onlooker: Any, witness: Any, soon: Any, warnings: list[str], secret: bytes | None,
    wait_until: Any,
) -> None:  # fmt: skip
    server = start_server(secret=secret)
    node, other = connect(server, secret=secret), onlooker(server, secret)
    lease = join(node, soon())
    _, _, hello, key, context = fields(node.testimony())
    one = witness(server)
    refused = one.prove(proof_of(bytes([key[0] ^ 1]) + key[1:], context, one.greet(hello)))["refused"]
    assert "could not prove to be its warden" in refused
    assert other.is_there()
    wait_until(lambda: any(f"lease {lease}" in line for line in warnings))


def test_who_listened_cannot_testify_where_there_is_a_secret(
    start_server: Any, connect: Any, onlooker: Any, witness: Any, soon: Any
) -> None:
    """The session's token and the job's name go over the wire; the secret does not."""
    server = start_server(secret=SECRETS[1])
    node, other = connect(server, secret=SECRETS[1]), onlooker(server, SECRETS[1])
    lease = join(node, soon())
    for secret in (None, b"", b"another"):
        hello, key, context = handshake.make_testimony((), secret, "job", node._token, lease).details
        one = witness(server)
        assert "refused" in one.prove(proof_of(key, context, one.greet(hello)))
    assert other.is_there()


def test_a_proof_is_good_for_one_challenge_only(start_server: Any, connect: Any, onlooker: Any, witness: Any, soon: Any) -> None:
    """What was overheard, or given to a false store, is worth nothing on another connection."""
    server = start_server(secret=SECRETS[1])
    node, other = connect(server, secret=SECRETS[1]), onlooker(server, SECRETS[1])
    join(node, soon())
    _, _, hello, key, context = fields(node.testimony())
    proof = proof_of(key, context, witness(server).greet(hello))
    again = witness(server)
    again.greet(hello)
    assert "refused" in again.prove(proof)
    assert other.is_there()


def test_it_is_good_for_its_own_lease_only(start_server: Any, connect: Any, onlooker: Any, witness: Any, soon: Any) -> None:
    server = start_server()
    node, stranger, other = connect(server), connect(server), onlooker(server)
    lease = join(node, soon())
    stranger.grant(TTL_S, soon())
    _, _, _, key, _ = fields(stranger.testimony())
    hello, _, context = handshake.make_testimony((), None, "job", "", lease).details
    one = witness(server)
    assert "refused" in one.prove(proof_of(key, context, one.greet(hello)))
    assert other.is_there()


def test_about_a_lease_that_never_was_nothing_is_learned(start_server: Any, witness: Any) -> None:
    server = start_server(secret=SECRETS[1])
    hello, key, context = handshake.make_testimony((), None, "job", "00", 77).details
    one = witness(server)
    assert one.prove(proof_of(key, context, one.greet(hello))) == {"heard": False}


@pytest.mark.parametrize(
    "change",
    [
        {"testimony": True}, {"testimony": 0}, {"testimony": -1}, {"testimony": 2**63}, {"testimony": "1"}, {"testimony": 1.0},
        {"testimony": None}, {"nonce": ""}, {"nonce": "zz"}, {"nonce": 5}, {"version": 1}, {"magic": "other"},
    ],
    ids=str,
)  # fmt: skip
def test_a_greeting_that_breaks_the_rules_is_refused(start_server: Any, peer: Any, change: dict[str, Any]) -> None:
    one = peer(start_server())
    hello = json.loads(handshake.make_testimony((), None, "job", "00", 1).details[0])
    one.send_body(json.dumps({**hello, **change}).encode())
    assert "refused" in json.loads(one.receive())
    assert one.receive() is None


def test_a_testimony_opens_no_door(start_server: Any, peer: Any) -> None:
    """After the challenge nothing but the proof is heard, and after that nothing."""
    server = start_server()
    made = handshake.make_testimony((), None, "job", "00", 1)
    one = peer(server)
    one.send_body(made.details[0])
    one.receive()
    one.send_body(b'[1,"read",""]')
    assert "refused" in json.loads(one.receive())
    assert one.receive() is None


# --- the warden's own side -------------------------------------------------------------------------------------------------


HOSTILE = {
    "silent": None,
    "gone": b"",
    "huge": b"\xff\xff\xff\xff" + b"x" * 5000,
    "garbage": b"\0\0\0\x04abcd",
    "deep": (1024).to_bytes(4, "big") + b"[" * 1024,
    "a list": b"\0\0\0\x02[]",
    "no nonce": b"\0\0\0\x02{}",
    "a number for a nonce": b'\0\0\0\x0b{"nonce":1}',
    "refused": b'\0\0\0\x0f{"refused":"x"}',
    "half": b"\0\0\0\xff{",
}


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_whatever_answers_there_the_warden_ends_in_time(answer: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testimonies, "TRY_FOR_S", 1.0)
    listener = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted.append(listener.accept()[0])
                if answer is not None:
                    accepted[-1].sendall(answer)
                    if answer == b"" or len(accepted) % 2:
                        accepted[-1].close()

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    began_at = time.monotonic()
    testimonies.testify("agent", ((socket.AF_INET, listener.getsockname()),), b"hello", b"key", b"context")
    assert time.monotonic() - began_at < 1.0 + AT_ONCE_S
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    server.join(10.0)
    for one in accepted:
        one.close()


def test_a_store_that_has_ended_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    began_at = time.monotonic()
    testimonies.testify("agent", ((socket.AF_INET, address),), b"hello", b"key", b"context")
    assert time.monotonic() - began_at < AT_ONCE_S


def test_the_second_address_is_tried(start_server: Any, connect: Any, onlooker: Any, soon: Any) -> None:
    server = start_server()
    node, other = connect(server), onlooker(server)
    join(node, soon())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = listener.getsockname()
    kind, addresses, *rest = fields(node.testimony())
    testimonies.testify(kind, ((int(socket.AF_INET), nobody), *addresses), *rest)
    ended = other.await_end()
    assert ended is not None
    assert ended.cause == "vouched"


# --- an agent, its warden, its workers, and a store ------------------------------------------------------------------------

AGENT = """
import os, signal, sys, time
from rallypoint.coordination.model import Put, Transaction
from rallypoint.processes.licence import Licence
from rallypoint.output.log_specs import DefaultLogsSpecs
from rallypoint.processes.subprocesses import start_processes
from rallypoint.coordination.embedded.client import EmbeddedCoordination

port, secret, ttl_s, folder, code, then = sys.argv[1:]
soon = time.monotonic() + 20
engine = EmbeddedCoordination("127.0.0.1", int(port), "job", secret.encode() or None)
engine.connect(soon)
lease = engine.grant(float(ttl_s), soon)
engine.transact(Transaction((), (Put("node", b"here", lease),)), soon)
licence = Licence()
licence.entrust(engine.testimony())
args = {rank: ("-c", code) for rank in range(2)}
context = start_processes("trainer", "/bin/sh", args, {0: {}, 1: {}}, DefaultLogsSpecs(folder), licence_fd=licence.fileno())
print(context._warden.pid, *context.pids().values(), flush=True)
exec(then)
sys.stdin.readline()
"""
WITH_A_DAEMON = "setsid sleep 60 & trap '' TERM; while :; do sleep 1; done"


@pytest.fixture
def start_agent(tmp_path: Any) -> Iterator[Callable[..., tuple[subprocess.Popen[str], int, list[int]]]]:
    """``start_agent(server, secret)``: an agent with two workers, its warden, and all the process ids below that."""
    agents: list[subprocess.Popen[str]] = []

    def run(server: Any, secret: bytes | None = None, ttl_s: float = TTL_S, then: str = "") -> Any:
        words = [str(server.addresses[0][1]), (secret or b"").decode(), str(ttl_s), str(tmp_path / "logs"), WITH_A_DAEMON, then]
        agent = subprocess.Popen([sys.executable, "-c", AGENT, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        agents.append(agent)
        assert agent.stdout is not None
        warden, *workers = map(int, agent.stdout.readline().split())
        return agent, warden, workers

    yield run
    for agent in agents:
        agent.kill()
        agent.communicate()


@with_and_without_secret
def test_v5_kill_9_of_an_agent_is_told_once_nothing_of_it_is_left(
    start_server: Any, onlooker: Any, start_agent: Any, alive: Any, secret: bytes | None
) -> None:
    """V4, V5: the others hear of it at once, and not before every process is gone."""
    server = start_server(secret=secret)
    other = onlooker(server, secret)
    agent, _, workers = start_agent(server, secret)
    agent.kill()
    ended = other.await_end()
    assert ended is not None
    assert ended.cause == "vouched"
    assert not any(map(alive, workers))


def test_v5_kill_9_of_agent_and_warden_leaves_the_lease_to_run_out(
    start_server: Any, onlooker: Any, start_agent: Any, wait_until: Any, alive: Any
) -> None:
    """Nobody is left to know. (The daemons, which nobody is left to kill either, are the test's to end: m7.)"""
    before = children()
    server = start_server()
    other = onlooker(server)
    agent, warden, workers = start_agent(server, ttl_s=2.0)
    os.kill(warden, signal.SIGSTOP)
    agent.kill()
    os.kill(warden, signal.SIGKILL)
    ended = other.await_end()
    assert ended is not None
    assert ended.cause == "expired"
    wait_until(lambda: not any(map(alive, workers)))
    for daemon in children() - before:
        os.kill(daemon, signal.SIGKILL)


@pytest.mark.parametrize(
    "then",
    ["licence.entrust(None)", "context.close(signal.SIGKILL)"],
    ids=["it took its testimony back", "it has ended its workers"],
)
def test_an_agent_that_ended_properly_is_not_testified_for(start_server: Any, onlooker: Any, start_agent: Any, then: str) -> None:
    """What it has to say it says itself; here it says nothing."""
    server = start_server()
    other = onlooker(server)
    agent, _, _ = start_agent(server, ttl_s=2.0, then=then + "\nprint('done', flush=True)")
    assert agent.stdout.readline() == "done\n"
    agent.kill()
    ended = other.await_end()
    assert ended is not None
    assert ended.cause == "expired"


def test_a_licence_is_closed_with_what_it_was_entrusted() -> None:
    licence = Licence()
    licence.close()
    licence.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        licence.extend(1.0)
