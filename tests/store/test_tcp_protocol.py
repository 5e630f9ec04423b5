"""The wire format of torch's TCPStore: whatever the network does to a stream of requests, the same ones come out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.store import tcp_protocol as wire
from rallypoint.store.tcp_protocol import ProtocolError, RequestReader, request

Request = tuple[int, list[bytes], int]
OPERATIONS = range(19)
COUNTED = [wire.CHECK, wire.WAIT, wire.MULTI_GET, wire.MULTI_SET]
WITH_KEY = [operation for operation in OPERATIONS if wire.SHAPES[operation].limits]
WITH_VALUE = [operation for operation in WITH_KEY if len(wire.SHAPES[operation].limits) > 1]
NUMBERS = {wire.U32: st.integers(0, 2**32 - 1), wire.I64: st.integers(-(2**63), 2**63 - 1), None: st.just(wire.NO_NUMBER)}
U64_MAX = 2**64 - 1


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Any request that is within the limits, mostly small."""
    operation = draw(st.sampled_from(OPERATIONS))
    shape = wire.SHAPES[operation]
    times = draw(st.integers(0, 4)) if shape.is_counted else 1
    strings = [draw(st.binary(max_size=40)) for _ in range(times * len(shape.limits))]
    return operation, strings, draw(NUMBERS[shape.number])


@st.composite
def cut_streams(draw: st.DrawFn) -> tuple[list[Request], list[bytes]]:
    """Requests, and what they are on the wire, in pieces, the last of which may be missing."""
    said = draw(st.lists(requests(), max_size=6))
    stream = b"".join(request(*one) for one in said)
    cuts = draw(st.lists(st.integers(0, len(stream)), max_size=12))
    return said, [stream[a:b] for a, b in pairwise(sorted({0, *cuts, *draw(st.sampled_from([(), (len(stream),)]))}))]


def ends_of(said: Sequence[Request]) -> list[int]:
    """Where each request ends in the stream."""
    ends = [0]
    for one in said:
        ends.append(ends[-1] + len(request(*one)))
    return ends


def read(reader: RequestReader, data: bytes) -> list[Request]:
    reader.feed(data)
    return list(reader.requests())


# --- any stream, cut anywhere ----------------------------------------------------------------------------------------------


@given(cut_streams())
def test_requests_come_out_as_soon_as_they_are_complete_wherever_the_stream_is_cut(
    case: tuple[list[Request], list[bytes]],
) -> None:
    said, pieces = case
    reader, ends = RequestReader(), ends_of(said)
    heard: list[Request] = []
    fed = 0
    for piece in pieces:
        heard += read(reader, piece)
        fed += len(piece)
        assert heard == said[: sum(end <= fed for end in ends[1:])]
        assert reader.held_bytes == fed - ends[len(heard)]
        assert bool(reader.wanted_bytes) == bool(reader.held_bytes)
        if reader.wanted_bytes:
            assert fed + reader.wanted_bytes <= ends[len(heard) + 1], "it waits for bytes that never come"


@given(cut_streams())
def test_whoever_stops_in_between_goes_on_later(case: tuple[list[Request], list[bytes]]) -> None:
    said, pieces = case
    reader, ends = RequestReader(), ends_of(said)
    heard: list[Request] = []
    fed = 0
    for piece in pieces:
        reader.feed(piece)
        fed += len(piece)
        while one := next(reader.requests(), None):
            heard.append(one)
            assert reader.held_bytes == fed - ends[len(heard)]
    assert heard == said[: len(heard)]
    assert reader.held_bytes == fed - ends[len(heard)]


@given(st.lists(requests(), max_size=6))
def test_byte_by_byte(said: list[Request]) -> None:
    reader = RequestReader()
    stream = b"".join(request(*one) for one in said)
    assert [one for place in range(len(stream)) for one in read(reader, stream[place : place + 1])] == said
    assert (reader.held_bytes, reader.wanted_bytes) == (0, 0)


@given(st.lists(st.binary(max_size=60), max_size=8))
def test_noise_is_refused_or_understood_but_never_anything_else(pieces: list[bytes]) -> None:
    reader = RequestReader()
    try:
        for piece in pieces:
            if piece:
                said = read(reader, piece)
                assert all(operation in OPERATIONS for operation, _, _ in said)
                assert reader.held_bytes <= sum(map(len, pieces))
    except ProtocolError:
        pass


# --- limits ----------------------------------------------------------------------------------------------------------------


def head_of(operation: int, key_bytes: int | None = None, count: int | None = None) -> bytes:
    """The beginning of a request, up to a length that may lie."""
    counted = wire.U64.pack(count if count is not None else 1) if wire.SHAPES[operation].is_counted else b""
    return bytes([operation]) + counted + (wire.U64.pack(key_bytes) if key_bytes is not None else b"")


@pytest.mark.parametrize("length", [wire.MAX_KEY_BYTES + 1, wire.MAX_VALUE_BYTES, 2**63, U64_MAX])
def test_a_key_that_is_too_long_is_refused_before_it_comes(length: int) -> None:
    for operation in WITH_KEY:
        with pytest.raises(
            ProtocolError, match=f"{wire.SHAPES[operation].name} with a key of {length} bytes, and 8192 is the most"
        ):
            read(RequestReader(), head_of(operation, length))


@pytest.mark.parametrize("length", [wire.MAX_VALUE_BYTES + 1, 2**63, U64_MAX])
def test_a_value_that_is_too_long_is_refused_before_it_comes(length: int) -> None:
    for operation, place in [*((operation, 1) for operation in WITH_VALUE), (wire.COMPARE_SET, 2)]:
        head = head_of(operation) + wire.packed(b"k") * place + wire.U64.pack(length)
        why = f"{wire.SHAPES[operation].name} with a value of {length} bytes, and 8388608 is the most"
        with pytest.raises(ProtocolError, match=why):
            read(RequestReader(), head)


@pytest.mark.parametrize("count", [wire.MAX_KEYS + 1, 2**63, U64_MAX])
def test_too_many_keys_are_refused_before_they_come(count: int) -> None:
    for operation in COUNTED:
        with pytest.raises(ProtocolError, match=f"{wire.SHAPES[operation].name} of {count} keys at once, and 131072 is the most"):
            read(RequestReader(), head_of(operation, count=count))


def test_an_operation_that_there_is_not_is_refused() -> None:
    for operation in range(19, 256):
        with pytest.raises(ProtocolError, match=f"there is no operation {operation}"):
            read(RequestReader(), bytes([operation]))


def test_a_limit_counts_for_a_later_string_of_a_request_in_pieces() -> None:
    reader = RequestReader()
    said = request(wire.MULTI_SET, [b"a", b"1", b"b", b"2"])
    assert read(reader, said[:20]) == []
    with pytest.raises(ProtocolError, match="a key of 8193 bytes"):
        read(reader, said[20:27] + wire.U64.pack(8193))


def test_what_is_just_within_the_limits_is_read() -> None:
    key, value = b"k" * wire.MAX_KEY_BYTES, b"v" * wire.MAX_VALUE_BYTES
    keys = [b"%06x" % number for number in range(wire.MAX_KEYS)]
    said: list[Request] = [(wire.COMPARE_SET, [key, value, value], 0), (wire.WAIT, keys, 0), (wire.ADD, [key], -(2**63))]
    assert read(RequestReader(), b"".join(request(*one) for one in said)) == said


@pytest.mark.parametrize(
    ("operation", "make_strings", "why"),
    [
        (wire.GET, lambda: [b"k" * 8193], "GET with a key of 8193 bytes"),
        (wire.SET, lambda: [b"k", bytes(wire.MAX_VALUE_BYTES + 1)], "SET with a value of 8388609 bytes"),
        (wire.COMPARE_SET, lambda: [b"k", b"", bytes(wire.MAX_VALUE_BYTES + 1)], "COMPARE_SET with a value of 8388609 bytes"),
        (wire.MULTI_SET, lambda: [b"k", b"v", b"k" * 8193, b"v"], "MULTI_SET with a key of 8193 bytes"),
        (wire.CHECK, lambda: [b""] * (wire.MAX_KEYS + 1), "CHECK of 131073 keys at once"),
        (wire.MULTI_SET, lambda: [b""] * (2 * wire.MAX_KEYS + 2), "MULTI_SET of 131073 keys at once"),
    ],
)
def test_a_request_that_servers_refuse_is_not_made(operation: int, make_strings: Callable[[], list[bytes]], why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        request(operation, make_strings())


def test_a_multi_set_of_the_most_keys_is_made_and_read() -> None:
    strings = [b""] * (2 * wire.MAX_KEYS)
    assert read(RequestReader(), request(wire.MULTI_SET, strings)) == [(wire.MULTI_SET, strings, 0)]


# --- what it costs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def lengths_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where lengths and counts were read."""
    places: list[int] = []
    unpack = wire.U64.unpack_from

    def counting(data: bytes, place: int) -> tuple[int]:
        places.append(place)
        number: int = unpack(data, place)[0]
        return (number,)

    monkeypatch.setattr(wire, "_unpack_u64", counting)
    return places


class Piece(bytes):
    """Bytes that count how often somebody asks for their length, as whoever adds up all pieces does."""

    asked = 0

    def __len__(self) -> int:
        Piece.asked += 1
        return super().__len__()


def test_a_large_value_in_small_pieces_is_not_looked_at_again_with_each_of_them(lengths_read: list[int]) -> None:
    said: Request = (wire.SET, [b"key", bytes(wire.MAX_VALUE_BYTES)], 0)
    stream, reader = request(*said), RequestReader()
    pieces = [stream[place : place + 1024] for place in range(0, len(stream), 1024)]
    Piece.asked = 0
    for piece in pieces[:-1]:
        assert read(reader, Piece(piece)) == []
        assert reader.wanted_bytes > 0
        assert reader.held_bytes > 0
    assert read(reader, pieces[-1]) == [said]
    assert len(pieces) > 8000
    assert len(lengths_read) <= 4
    assert Piece.asked < 10 * len(pieces)


def test_of_many_strings_in_small_pieces_each_is_read_once_more_at_most(lengths_read: list[int]) -> None:
    said: Request = (wire.MULTI_GET, [b"%0100d" % number for number in range(2000)], 0)
    stream, reader = request(*said), RequestReader()
    heard = [one for place in range(0, len(stream), 37) for one in read(reader, stream[place : place + 37])]
    assert heard == [said]
    assert len(lengths_read) <= 2 * len(said[1]) + 1


def test_a_reader_that_has_read_all_keeps_nothing() -> None:
    reader = RequestReader()
    stream = request(wire.SET, [b"key", bytes(wire.MAX_VALUE_BYTES)])
    (said,) = read(reader, stream[:1000]) + read(reader, stream[1000:])
    value = said[1][1]
    kept = [getattr(reader, name) for name in RequestReader.__slots__]
    assert not any(one is value or (isinstance(one, bytes | bytearray | list) and len(one) > 0) for one in kept)
