"""Messages and frames: what is allowed goes through unchanged, however it is cut, and everything else is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.coordination.embedded import wire
from rallypoint.coordination.embedded.wire import (
    LARGE_FRAME_BYTES,
    SEAL_BYTES,
    SMALL_FRAME_BYTES,
    FrameError,
    Inbox,
    Seal,
    make_frame,
)
from rallypoint.coordination.model import Compare, Delete, Event, Get, Item, Put, Transaction

KEYS = st.text(max_size=20)
NUMBERS = st.integers(0, 2**63 - 1)
ITEMS = st.builds(Item, KEYS, st.binary(max_size=40), NUMBERS, NUMBERS, NUMBERS)
OPERATIONS = st.one_of(
    st.builds(Put, KEYS, st.binary(max_size=40), NUMBERS), st.builds(Delete, KEYS, st.booleans()), st.builds(Get, KEYS)
)
LISTS = st.lists(OPERATIONS, max_size=5).map(tuple)
COMPARES = st.lists(st.builds(Compare, KEYS, st.sampled_from(["create", "mod"]), NUMBERS), max_size=5).map(tuple)
TRANSACTIONS = st.builds(Transaction, COMPARES, LISTS, LISTS)
EVENTS = st.one_of(
    st.builds(Event, NUMBERS, KEYS, ITEMS, st.just("put")),
    st.builds(Event, NUMBERS, KEYS, st.none(), st.sampled_from(["deleted", "expired", "vouched"])),
)
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["put", "get", "delete", "mod"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


def through_the_wire(message: list[object]) -> list[Any]:
    return wire.decode(wire.encode(message))


@given(TRANSACTIONS)
def test_transactions_come_through(transaction: Transaction) -> None:
    _, _, *fields = through_the_wire([1, "transact", *wire.encode_transaction(transaction)])
    assert wire.decode_transaction(*fields) == transaction


@given(st.lists(EVENTS, max_size=5))
def test_events_come_through(events: list[Event]) -> None:
    fields = through_the_wire([0, "events", *map(wire.encode_event, events)])[2:]
    assert [wire.decode_event(field) for field in fields] == events


@given(ANYTHING, ANYTHING, ANYTHING)
def test_whatever_comes_is_a_transaction_or_is_refused(compares: object, then: object, otherwise: object) -> None:
    try:
        decoded = wire.decode_transaction(compares, then, otherwise)
    except wire.RequestError:
        return
    assert wire.decode_transaction(*json.loads(json.dumps(wire.encode_transaction(decoded)))) == decoded


@given(st.binary(max_size=60) | ANYTHING.map(lambda thing: json.dumps(thing).encode()))
def test_whatever_comes_is_a_message_or_is_refused(body: bytes) -> None:
    try:
        number, what, *_ = wire.decode(body)
    except wire.RequestError:
        return
    assert type(number) is int
    assert type(what) is str


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{}", b"[]", b"[1]", b"[true,\"read\",\"\"]", b"[-1,\"read\",\"\"]", b"[1.0,\"read\"]", b"[NaN,\"read\"]", b"[1,2]",
        b"[" * 100_000, b"[" + b"9" * 100_000 + b",\"read\"]", b"[1,\"read\",\"\xff\"]", b"[1,\"read\",\"a\"",
        b"[9223372036854775808,\"x\"]",
    ],
)  # fmt: skip
def test_no_messages(body: bytes) -> None:
    with pytest.raises(wire.RequestError):
        wire.decode(body)


@pytest.mark.parametrize(
    "operation",
    [
        ["put", "k", "\u0100", 0], ["put", "k", "v"], ["put", "k", "v", True], ["put", "k", "v", -1], ["put", 1, "v", 0],
        ["put", "k" * 1025, "v", 0], ["put", "k", "v" * (wire.VALUE_BYTES + 1), 0], ["put", "k", None, 0], ["get"], ["get", None],
        ["delete", "k"], ["delete", "k", 1], ["delete", "k", False, 0], ["pop", "k"], [], "get", None, {"get": "k"},
    ],
)  # fmt: skip
def test_no_operations(operation: object) -> None:
    with pytest.raises(wire.RequestError):
        wire.decode_transaction([], [operation], [])


def test_a_transaction_is_bounded() -> None:
    most = [["get", "k"]] * wire.OPERATIONS
    wire.decode_transaction([], most, most)
    for too_many in (([], [*most, most[0]], []), ([], [], [*most, most[0]]), ([["k", "mod", 0]] * (wire.OPERATIONS + 1), [], [])):
        with pytest.raises(wire.RequestError):
            wire.decode_transaction(*too_many)


@pytest.mark.parametrize("operations", [(Put("k", b"x" * (wire.VALUE_BYTES + 1)),), (Put("k" * 1025, b""),), (Get("k"),) * 129])
def test_who_asks_for_too_much_is_told_before_it_is_sent(operations: tuple[Put | Get, ...]) -> None:
    with pytest.raises(ValueError, match=r"a transaction of more than 128|a key may have"):
        wire.encode_transaction(Transaction((), operations))


@pytest.mark.parametrize("seconds", [0.0, -1, 1e9, float("nan"), float("inf"), True, "1", None])
def test_no_time_to_live(seconds: object) -> None:
    with pytest.raises(wire.RequestError):
        wire.seconds(seconds)


def test_long_answers_come_in_parts_that_fit_into_frames() -> None:
    worst = [Item("\U0001f600" * wire.KEY_CHARACTERS, bytes(range(256)) * (wire.VALUE_BYTES // 256), 1, 1)]
    small = [Item(f"\U0001f600{number}" * 50, b"\xff" * 300, 1, 1) for number in range(1000)]
    for items in (worst * 3, small, [*small, *worst, *small], [None] * 5000, []):
        bodies = list(wire.encode_in_parts((7, "snapshot", 3), items))
        assert max(map(len, bodies)) + SEAL_BYTES <= LARGE_FRAME_BYTES
        *parts, last = map(wire.decode, bodies)
        assert last[:3] == [7, "snapshot", 3]
        assert all(part[:2] == [7, "part"] for part in parts)
        found = [item for part in (*parts, last) for item in part[-1]]
        assert [None if item is None else wire.decode_item(item) for item in found] == items


BODIES = st.lists(st.binary(max_size=60), max_size=8)
KEY = b"k" * 32


def inbox(seal: Seal | None = None) -> Inbox:
    box = Inbox()
    box.seal = seal
    return box


def take_all(box: Inbox) -> list[bytes]:
    return list(iter(box.take, None))


@given(BODIES, st.integers(1, 50), st.booleans())
def test_frames_come_out_as_they_were_put_in_however_they_are_cut(bodies: list[bytes], cut: int, sealed: bool) -> None:
    sender = Seal(KEY) if sealed else None
    stream = b"".join(make_frame(body, sender) for body in bodies)
    box = inbox(Seal(KEY) if sealed else None)
    found = []
    for start in range(0, len(stream), cut):
        box.feed(stream[start : start + cut])
        found += take_all(box)
    assert found == bodies
    assert len(box) == 0


def test_a_frame_may_be_small_before_the_welcome_and_large_after() -> None:
    box = inbox()
    box.feed((SMALL_FRAME_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(FrameError, match="1025 bytes, where 1024 are allowed"):
        box.take()
    box.limit = LARGE_FRAME_BYTES
    assert box.take() is None


@given(st.binary(min_size=1, max_size=40), st.data())
def test_one_changed_bit_breaks_the_seal(body: bytes, data: st.DataObject) -> None:
    """P36: what was changed on the way is not taken."""
    frame = bytearray(make_frame(body, Seal(KEY)))
    bit = data.draw(st.integers(32, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    box = inbox(Seal(KEY))
    box.feed(bytes(frame))
    with pytest.raises(FrameError, match="seal"):
        box.take()


@pytest.mark.parametrize("order", [(0, 0), (1, 0), (1,), (0, 2)], ids=["repeated", "exchanged", "first left out", "one left out"])
def test_frames_out_of_order_break_the_seal(order: tuple[int, ...]) -> None:
    """P36: replayed, reordered and suppressed frames are noticed."""
    sender = Seal(KEY)
    frames = [make_frame(body, sender) for body in (b"first", b"second", b"third")]
    box = inbox(Seal(KEY))
    box.feed(b"".join(frames[index] for index in order))
    with pytest.raises(FrameError, match="seal"):
        take_all(box)


def test_a_frame_too_short_for_a_seal_breaks_it() -> None:
    box = inbox(Seal(KEY))
    box.feed(make_frame(b"short", None))
    with pytest.raises(FrameError, match="seal"):
        box.take()
