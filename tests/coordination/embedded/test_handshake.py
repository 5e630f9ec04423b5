"""Who is let in, who is not, and what those who are not have learnt."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.coordination.embedded import handshake
from rallypoint.coordination.embedded.handshake import (
    Boxes,
    ClientHandshake,
    HandshakeRefused,
    NameQuestion,
    ServerHandshake,
    Welcome,
)
from rallypoint.coordination.embedded.wire import SMALL_FRAME_BYTES, FrameError, make_frame

WELCOME = Welcome("the incarnation", "the session")


def server(run_id: str = "job", secret: bytes | None = None) -> ServerHandshake:
    return ServerHandshake(run_id, secret, WELCOME)


class Blind:
    """Can open nothing."""

    has_opened = False

    def open(self, boxes: Mapping[str, str]) -> None:
        return None


def boxed(*bodies: bytes) -> ServerHandshake:
    """A store whose secret is in boxes, as large as they get, after it has heard so much."""
    boxes = Boxes({"munge": "x" * 600, "home": f"{'0' * 16} {'0' * 32}"}, lambda: "")
    store = ServerHandshake("job", b"s", WELCOME, boxes=boxes)
    for body in bodies:
        assert len(store.answer(body)) < SMALL_FRAME_BYTES
    return store


def sent(side: ServerHandshake, body: bytes) -> bytes:
    """What the store puts on the wire after its answer, without the length."""
    answer = side.answer(body)
    return make_frame(answer, side.outgoing)[4:]


def meet(client: ClientHandshake, store: ServerHandshake) -> Welcome | None:
    answer: bytes | None = client.hello()
    while answer is not None:
        answer = client.answer(sent(store, answer))
    assert store.is_over
    return client.welcome


@pytest.mark.parametrize("secret", [None, b"s", b"x" * 1000])
@pytest.mark.parametrize("run_id", ["job", "", "jöb \U0001f600", "x" * 5000, "\udcff"])
def test_those_who_belong_together_meet(secret: bytes | None, run_id: str) -> None:
    assert meet(ClientHandshake(run_id, secret), server(run_id, secret)) == WELCOME


def test_every_connection_has_its_own_keys() -> None:
    pairs = []
    for _ in range(2):
        client, store = ClientHandshake("job", b"secret"), server(secret=b"secret")
        meet(client, store)
        assert client.outgoing is not None
        assert store.incoming is not None
        assert store.outgoing is not None
        mine, theirs = client.outgoing.of_next(b"x"), store.incoming.of_next(b"x")
        assert mine == theirs
        pairs += [mine, store.outgoing.of_next(b"x")]
    assert len(set(pairs)) == 4


@pytest.mark.parametrize(
    ("client", "store", "why"),
    [
        (ClientHandshake("a", None), server("b"), "the store of job 'b', and the node belongs to job 'a'"),
        (ClientHandshake("job", b"s"), server(), "the node has a secret, and this store has none"),
        (ClientHandshake("job", None), server(secret=b"s"), "asks for a secret, and the node has none"),
        (ClientHandshake("job", b"s"), server(secret=b"t"), "the secret, or the name of the job, is not the same"),
        (ClientHandshake("a", b"s"), server("b", secret=b"s"), "the secret, or the name of the job, is not the same"),
        (ClientHandshake("a" * 5000 + "x", None), server("a" * 5000 + "y"), "the store of job 'aaa"),
    ],
)
def test_p13_those_who_do_not_are_told_why(client: ClientHandshake, store: ServerHandshake, why: str) -> None:
    """P13: another job's agent is refused by name. P36: by a secret, without a name."""
    with pytest.raises(HandshakeRefused, match=why):
        meet(client, store)
    assert client.welcome is None
    assert not store.is_over


def test_other_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    hello = json.loads(ClientHandshake("job", None).hello())
    with pytest.raises(HandshakeRefused, match="the store speaks version 2 of the protocol and the node version 7"):
        server().answer(json.dumps({**hello, "version": 7}).encode())
    challenge = json.dumps({"version": 7, "nonce": "00" * 16}).encode()
    with pytest.raises(HandshakeRefused, match="this node speaks version 2 of the protocol and the store version 7"):
        ClientHandshake("job", b"s").answer(challenge)


def test_p36_a_store_that_does_not_know_the_secret_is_refused() -> None:
    """P36: it has got one proof over nonces of ours, and its welcome counts for nothing, sealed or not."""
    for welcome in (json.dumps({"incarnation": "x", "session": "y"}).encode(), b"\0" * 80):
        client = ClientHandshake("job", b"secret")
        client.answer(json.dumps({"version": handshake.PROTOCOL_VERSION, "nonce": "00" * 16}).encode())
        with pytest.raises((HandshakeRefused, FrameError)):
            client.answer(welcome)
        assert client.welcome is None


def test_p36_a_proof_is_good_for_one_connection() -> None:
    """P36: a proof that was overheard opens nothing."""
    client = ClientHandshake("job", b"secret")
    proof = client.answer(sent(server(secret=b"secret"), client.hello()))
    assert proof is not None
    other = server(secret=b"secret")
    other.answer(client.hello())
    with pytest.raises(HandshakeRefused):
        other.answer(proof)


def test_a_refusal_is_shown_as_far_as_it_can_be_printed() -> None:
    with pytest.raises(HandshakeRefused) as refused:
        ClientHandshake("job", None).answer(json.dumps({"refused": "\x1b[2J" + "x" * 800}).encode())
    assert str(refused.value) == "?[2J" + "x" * 496


SIDES = {
    "store": server,
    "store with a secret": lambda: server(secret=b"s"),
    "node": lambda: ClientHandshake("job", None),
    "node with a secret": lambda: ClientHandshake("job", b"s"),
    "asker": lambda: NameQuestion(None),
    "asker with a secret": lambda: NameQuestion(b"s"),
    "store with boxes": boxed,
    "store that has offered its boxes": lambda: boxed(ClientHandshake("job", Blind()).hello()),
    "store that has offered them to an asker": lambda: boxed(NameQuestion(Blind()).hello()),
    "node that opens nothing": lambda: ClientHandshake("job", Blind()),
    "asker that opens nothing": lambda: NameQuestion(Blind()),
}
FIELDS = st.sampled_from(
    [
        "magic",
        "version",
        "nonce",
        "secret",
        "refused",
        "proof",
        "question",
        "job",
        "boxes",
        "opens",
        "unable",
        "run_id",
        "testimony",
    ]
)
CONTENTS = st.sampled_from([handshake.MAGIC, 1, 2, None, True, False, "00" * 16, "00" * 32, "zz", "", "job", {}, {"munge": "x"}])
GREETINGS = st.dictionaries(FIELDS, CONTENTS).map(lambda one: json.dumps(one).encode())


@pytest.mark.parametrize("side", SIDES)
@given(body=st.binary(max_size=80) | GREETINGS)
def test_whatever_comes_is_understood_or_refused(side: str, body: bytes) -> None:
    try:
        SIDES[side]().answer(body)
    except (FrameError, HandshakeRefused):
        return


def test_all_that_is_said_fits_into_small_frames() -> None:
    client = ClientHandshake("\U0001f600" * 2000, None)
    assert len(client.hello()) < SMALL_FRAME_BYTES
    assert len(ServerHandshake.refusal("x" * 5000)) < SMALL_FRAME_BYTES
