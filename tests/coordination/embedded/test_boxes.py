"""A secret that nobody gave: nodes that find it in what the store offers, those that do not, and those that only claim so."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from rallypoint.coordination.embedded import handshake
from rallypoint.coordination.embedded.client import EmbeddedCoordination
from rallypoint.coordination.embedded.handshake import (
    Boxes,
    ClientHandshake,
    HandshakeRefused,
    NameQuestion,
    ServerHandshake,
    Welcome,
)
from rallypoint.coordination.embedded.inquiring import job_at
from rallypoint.coordination.embedded.server import CoordinationServer
from rallypoint.coordination.embedded.wire import FrameError, encode, make_frame
from rallypoint.coordination.engine import RefusedError
from rallypoint.coordination.model import Get, Put, Transaction
from rallypoint.coordination.testimony import testify as say_that_nothing_is_left
from rallypoint.net.endpoint import open_listeners

SECRET = b"a secret that was drawn at random"
BOX = {"chest": SECRET.hex()}
OTHER_USER = "this store is for one user"


class Opener:
    """Opens a chest, if it has the key."""

    def __init__(self, has_key: bool = True) -> None:
        self.has_key, self.has_opened = has_key, False

    def open(self, boxes: Mapping[str, str]) -> bytes | None:
        if not self.has_key or "chest" not in boxes:
            return None
        self.has_opened = True
        return bytes.fromhex(boxes["chest"])


def store(judge: Callable[[], str] | None = None, run_id: str = "job") -> ServerHandshake:
    return ServerHandshake(run_id, SECRET, Welcome("i", "s"), boxes=Boxes(BOX, judge))


def meet(client: ClientHandshake, server: ServerHandshake) -> None:
    answer: bytes | None = client.hello()
    while answer is not None:
        answer = client.answer(make_frame(server.answer(answer), server.outgoing)[4:])


def test_who_opens_a_box_proves_it_and_all_that_follows_is_sealed() -> None:
    client, server = ClientHandshake("job", Opener()), store()
    meet(client, server)
    assert client.welcome == Welcome("i", "s")
    assert client.secret == SECRET
    assert server.incoming is not None
    assert client.outgoing is not None


def test_p13_another_job_of_the_same_user_is_refused_by_name() -> None:
    """P13: but only when it has proven itself; to another's node the name is not told."""
    with pytest.raises(HandshakeRefused, match="the store of job 'job', and the node belongs to job 'mine'"):
        meet(ClientHandshake("mine", Opener()), store())
    with pytest.raises(HandshakeRefused) as refused:
        meet(ClientHandshake("mine", Opener(has_key=False)), store())
    assert "'job'" not in str(refused.value)


@pytest.mark.parametrize("secret", [None, Opener(has_key=False)], ids=["has none", "opens nothing"])
def test_p36_who_can_open_nothing_is_refused_where_everybody_must(secret: Opener | None) -> None:
    with pytest.raises(HandshakeRefused, match=r"could not open what it is in \(chest\); give the same --secret FILE"):
        meet(ClientHandshake("job", secret), store())


@pytest.mark.parametrize("secret", [None, Opener(has_key=False)], ids=["has none", "opens nothing"])
def test_else_it_is_judged(secret: Opener | None) -> None:
    client, server = ClientHandshake("job", secret), store(lambda: "")
    meet(client, server)
    assert client.welcome is not None
    assert server.is_over
    assert server.incoming is None
    assert client.secret is None
    with pytest.raises(HandshakeRefused, match=OTHER_USER):
        meet(ClientHandshake("job", secret), store(lambda: OTHER_USER))
    with pytest.raises(HandshakeRefused, match="the store of job 'job', and the node belongs to job 'mine'"):
        meet(ClientHandshake("mine", secret), store(lambda: ""))


def test_where_there_is_no_secret_none_is_needed() -> None:
    client = ClientHandshake("job", Opener())
    meet(client, ServerHandshake("job", None, Welcome("i", "s")))
    assert client.welcome is not None
    assert client.secret is None


def test_p36_who_has_been_in_is_not_talked_out_of_it() -> None:
    """P36: a store that offers nothing any more, or only what cannot be opened, is not the one that it was."""
    opener = Opener()
    meet(ClientHandshake("job", opener), store())
    with pytest.raises(HandshakeRefused, match="cannot show that it knows the job's secret, as the one before could"):
        meet(ClientHandshake("job", opener), ServerHandshake("job", None, Welcome("i", "s")))
    opener.has_key = False
    with pytest.raises(HandshakeRefused, match="as the one before could"):
        meet(ClientHandshake("job", opener), store(lambda: ""))


def test_p36_a_box_of_our_own_does_not_make_a_store_ours() -> None:
    """P36: it was copied from the store, and whoever offers it does not know what is in it."""
    client = ClientHandshake("job", Opener())
    client.hello()
    proof = client.answer(json.dumps({"version": handshake.PROTOCOL_VERSION, "nonce": "00" * 16, "boxes": BOX}).encode())
    assert proof is not None
    assert b"proof" in proof
    with pytest.raises((HandshakeRefused, FrameError)):
        client.answer(json.dumps({"incarnation": "x", "session": "y"}).encode())
    assert client.welcome is None


@pytest.mark.parametrize("boxes", [7, ["chest"], {"chest": 7}])
def test_what_is_no_box_is_no_greeting(boxes: object) -> None:
    client = ClientHandshake("job", Opener())
    client.hello()
    with pytest.raises(FrameError, match="no proper 'boxes'"):
        client.answer(json.dumps({"version": handshake.PROTOCOL_VERSION, "nonce": "00" * 16, "boxes": boxes}).encode())


def test_whoever_asks_for_the_name_of_the_job_is_treated_like_a_node() -> None:
    def ask(secret: Opener | None, server: ServerHandshake) -> str | None:
        question = NameQuestion(secret)
        said: bytes | None = question.hello()
        while said is not None:
            said = question.answer(server.answer(said))
        return question.job

    assert ask(Opener(), store()) == "job"
    assert ask(Opener(has_key=False), store(lambda: "")) == "job"
    for judge in (None, lambda: OTHER_USER):
        for secret in (None, Opener(has_key=False)):
            with pytest.raises(HandshakeRefused):
                ask(secret, store(judge))


# --- before a real store -----------------------------------------------------------------------------------------------------


@pytest.fixture
def serve() -> Iterator[Callable[..., CoordinationServer]]:
    """``serve(objection)``: a store that offers its secret, and hears nobody without it if there is an objection."""
    servers = []

    def start(objection: str = "") -> CoordinationServer:
        sockets = open_listeners("127.0.0.1", 0, is_host=True, wildcard_allowed=False)
        assert sockets is not None
        servers.append(CoordinationServer(sockets, "job", SECRET, boxes=BOX, judge=lambda _: objection))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def put(key: str) -> bytes:
    return encode([1, "transact", [], [["put", key, "", 0]], []])


@pytest.mark.parametrize("is_proven", [True, False])
def test_a_warden_testifies_for_either_kind(serve: Any, connect: Any, soon: Any, wait_until: Any, is_proven: bool) -> None:
    server = serve()
    onlooker = connect(server, secret=Opener())
    owner = EmbeddedCoordination("127.0.0.1", server.addresses[0][1], "job", Opener(has_key=is_proven))
    owner.connect(soon())
    owner.transact(Transaction((), (Put("node", b"", owner.grant(60.0, soon())),)), soon())
    testimony = owner.testimony()
    assert testimony is not None
    owner.close()
    say_that_nothing_is_left(*testimony.fields())
    wait_until(lambda: onlooker.transact(Transaction((), (Get("node"),)), soon()).items == (None,))


def test_p36_who_has_proven_nothing_takes_up_no_session_that_was_proven(serve: Any, connect: Any, peer: Any, soon: Any) -> None:
    """P36: its token can be overheard. The other way round nothing is won by it."""
    server = serve()
    owner = connect(server, secret=Opener())
    lease = owner.grant(60.0, soon())
    assert peer(server).greet().ask("resume", owner._token)[1:] == ["resumed", 0]
    assert peer(server).greet(secret=SECRET).ask("resume", owner._token)[1:] == ["resumed", lease]


def test_the_store_is_not_told_to_who_is_judged_to_be_another(serve: Any, connect: Any, soon: Any) -> None:
    server = serve(OTHER_USER)
    for secret in (None, Opener(has_key=False)):
        with pytest.raises(RefusedError, match=OTHER_USER):
            connect(server, secret=secret)
        with pytest.raises(RefusedError, match=OTHER_USER):
            job_at(*server.addresses[0], secret, soon())
    assert connect(server, secret=Opener()).read("", soon()).items == ()


# --- sessions that were overheard --------------------------------------------------------------------------------------------


class Overheard(socket.socket):
    """Keeps what goes over it."""

    said = b""
    heard = b""

    def send(self, data: Any, flags: int = 0) -> int:
        count = super().send(data, flags)
        self.said += bytes(data[:count])
        return count

    def recv(self, size: int, flags: int = 0) -> bytes:
        data = super().recv(size, flags)
        self.heard += data
        return data


@pytest.fixture
def overheard(serve: Any, soon: Any) -> tuple[CoordinationServer, list[bytes], list[bytes]]:
    """A store, and all that a node and it have said to each other while the node wrote a key, frame by frame."""
    server = serve(OTHER_USER)
    lines: list[Overheard] = []

    def dial(address: Any) -> socket.socket:
        lines.append(Overheard(address[0], socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
        assert lines[-1].connect_ex(address[1]) in (0, errno.EINPROGRESS)
        return lines[-1]

    client = EmbeddedCoordination("127.0.0.1", server.addresses[0][1], "job", Opener(), dial=dial)
    try:
        client.connect(soon())
        client.transact(Transaction((), (Put("k", b"1"),)), soon())
        client.transact(Transaction((), (Put("k", b"2"),)), soon())
    finally:
        client.close()
    (line,) = lines
    return server, frames(line.said), frames(line.heard)


def frames(said: bytes) -> list[bytes]:
    found = []
    while said:
        length = 4 + int.from_bytes(said[:4], "big")
        found.append(said[:length])
        said = said[length:]
    return found


def revision(server: CoordinationServer, connect: Any, soon: Any) -> int:
    found: int = connect(server, secret=Opener()).read("", soon()).revision
    return found


def test_p36_a_recorded_session_does_nothing_when_it_is_played_again(overheard: Any, connect: Any, peer: Any, soon: Any) -> None:
    """P36: as a whole, without its greeting, and what the store has said to the node."""
    server, from_node, from_store = overheard
    assert len(from_node) >= 4
    before = revision(server, connect, soon)
    for said in (from_node, from_node[2:], from_store, [*from_node[:1], *from_node[2:]]):
        thief = peer(server)
        thief.send(b"".join(said))
        told = thief.read_to_end()
        assert not [word for word in (b"incarnation", b"outcome") if word in told], said
    assert revision(server, connect, soon) == before


@pytest.mark.parametrize("how", ["repeated", "reordered", "left out", "changed", "cut short", "reflected"])
def test_p36_a_sealed_frame_counts_once_whole_and_in_its_place(serve: Any, connect: Any, peer: Any, soon: Any, how: str) -> None:
    """P36: whatever is between a node and its store can only break the connection."""
    server = serve(OTHER_USER)
    node = peer(server).greet(secret=SECRET)
    seal = node._handshake.outgoing
    before = revision(server, connect, soon)
    one, two = make_frame(put("one"), seal), make_frame(put("two"), seal)
    said = {
        "repeated": one + one,
        "reordered": two + one,
        "left out": two,
        "changed": one.replace(b"one", b"owe"),
        "cut short": (len(one) - 4 - 16).to_bytes(4, "big") + one[4:-16],
        "reflected": frames(node.received)[-1],
    }[how]
    node.send(said)
    assert b"wrong seal" in node.read_to_end()
    assert revision(server, connect, soon) == before + (how == "repeated")


def test_p36_half_a_frame_is_not_done(serve: Any, connect: Any, peer: Any, soon: Any) -> None:
    server = serve(OTHER_USER)
    before = revision(server, connect, soon)
    for cut in (1, 3, 4, 20, -1):
        node = peer(server).greet(secret=SECRET)
        node.send(make_frame(put("k"), node._handshake.outgoing)[:cut])
        node.socket.shutdown(socket.SHUT_WR)
        node.read_to_end()
    assert revision(server, connect, soon) == before


def test_p36_a_greeting_that_claims_less_gets_less(serve: Any, connect: Any, peer: Any, soon: Any) -> None:
    """P36: a node is let in without the secret for nothing that it says, and what it says behind its greeting is not heard."""
    server = serve(OTHER_USER)
    before = revision(server, connect, soon)
    hello = {"magic": handshake.MAGIC, "version": handshake.PROTOCOL_VERSION, "nonce": "00" * 16, "run_id": "job"}
    for more in ({"secret": False}, {"secret": False, "opens": True}, {"secret": True}, {"secret": False, "opens": 1}):
        stranger = peer(server)
        unable, wish = make_frame(b'{"unable":true}', None), make_frame(put("closed"), None)
        stranger.send(make_frame(json.dumps({**hello, **more}).encode(), None) + unable + wish)
        told = stranger.read_to_end()
        assert not [word for word in (b"incarnation", b"outcome") if word in told], more
    assert revision(server, connect, soon) == before
