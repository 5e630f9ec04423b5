"""HTTP as far as etcd's gateway needs it: whole answers however they are cut, and no wait that does not end."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.coordination.etcd.peers import Visitor, fake_endpoint

from rallypoint.coordination.etcd.http import HttpConnection, Interrupted, Late, NotHttp
from rallypoint.net.wake_fd import WakeFd

SHORT_S = 0.2


def soon() -> float:
    return time.monotonic() + 10


@contextlib.contextmanager
def asked(answer: Callable[[Visitor], None], interrupt: WakeFd | None = None) -> Iterator[HttpConnection]:
    """A connection over which a question was asked that is answered so."""

    def handle(visitor: Visitor) -> None:
        visitor.request()
        answer(visitor)

    with fake_endpoint(handle) as endpoint:
        connection = HttpConnection(endpoint.address, None, soon(), interrupt)
        try:
            connection.ask("POST", "/v3/kv/range", {"A": "b"}, b"{}", soon())
            yield connection
        finally:
            connection.close()


def sending(*pieces: bytes) -> Callable[[Visitor], None]:
    def answer(visitor: Visitor) -> None:
        visitor.send(*pieces)
        visitor.wait_for_end()

    return answer


def chunked(pieces: list[bytes]) -> bytes:
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[one:other] for one, other in pairwise(edges)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=5), st.lists(st.integers(0, 500), max_size=6), st.booleans())
def test_an_answer_is_read_whole_however_it_is_cut(pieces: list[bytes], places: list[int], is_chunked: bool) -> None:
    body = b"".join(pieces)
    plain = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    data = chunked(pieces) + b"0\r\n\r\n" if is_chunked else plain
    with asked(sending(*cut(data, places))) as connection:
        assert connection.read_answer(soon()) == (200, body)
        assert connection.can_ask


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=20).map(lambda one: one.replace(b"\n", b"x") + b"\n"), max_size=5), st.data())
def test_an_answer_that_does_not_end_is_read_by_lines(lines: list[bytes], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, 200), max_size=6))
    pieces = cut(b"".join(lines), places)
    with asked(sending(chunked(pieces))) as connection:
        assert connection.read_head(soon()) == 200
        assert [connection.read_line(soon()) for _ in lines] == lines


def test_what_is_interrupted_goes_on_where_it_was() -> None:
    go_on = threading.Event()

    def answer(visitor: Visitor) -> None:
        visitor.send(chunked([b"one\nha"]))
        go_on.wait(10)
        visitor.send(b"3\r\nlf\n\r\n", b"0\r\n\r\n")
        visitor.wait_for_end()

    bell = WakeFd()
    with asked(answer, bell) as connection:
        assert connection.read_head(soon()) == 200
        assert connection.read_line(soon()) == b"one\n"
        bell.set()
        with pytest.raises(Interrupted):
            connection.read_line(math.inf)
        bell.clear()
        go_on.set()
        assert [connection.read_line(soon()), connection.read_line(soon())] == [b"half\n", b""]
    bell.close()


def test_another_thread_interrupts_whoever_waits() -> None:
    bell = WakeFd()
    timer = threading.Timer(SHORT_S, bell.set)
    with asked(lambda visitor: visitor.wait_for_end(), bell) as connection:
        timer.start()
        with pytest.raises(Interrupted):
            connection.read_answer(soon())
    timer.join()
    bell.close()


def test_a_slow_answer_does_not_outlast_its_deadline() -> None:
    """Each byte comes in time; the answer does not."""

    def answer(visitor: Visitor) -> None:
        while True:
            visitor.send(b"H")
            time.sleep(0.02)

    began = time.monotonic()
    with asked(lambda visitor: [visitor.send(b"HTTP/1.1 200 OK\r\nX: "), answer(visitor)][1]) as connection:
        with pytest.raises(Late):
            connection.read_answer(began + SHORT_S)
        assert time.monotonic() < began + 5 * SHORT_S


def test_nothing_at_all_is_no_answer_in_time() -> None:
    with asked(lambda visitor: visitor.wait_for_end()) as connection:
        assert not connection.has_answer(time.monotonic() + SHORT_S)


@pytest.mark.parametrize(
    "foreign",
    [b"SSH-2.0-OpenSSH_9.2\r\n", b"\0\0\x12\x04", b"HTTP/2 200\r\n\r\n", b"HTTP/1.1 hello\r\n\r\n", b"h"],
)
def test_who_speaks_another_language_is_found_out_at_once(foreign: bytes) -> None:
    with asked(sending(foreign)) as connection, pytest.raises(NotHttp, match="does not speak HTTP"):
        connection.read_answer(soon())


@pytest.mark.parametrize(
    "endless",
    [
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1e9\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 100_000,
    ],
    ids=["headers", "long number", "negative", "no number", "no chunk", "no end of a chunk's size"],
)
def test_an_answer_without_bounds_is_refused(endless: bytes) -> None:
    with asked(sending(endless)) as connection, pytest.raises(NotHttp):
        connection.read_answer(soon())


def test_an_answer_that_only_its_end_ends() -> None:
    def answer(visitor: Visitor) -> None:
        visitor.send(b"HTTP/1.0 400 Bad Request\r\n\r\nwe speak", b" TLS")

    with asked(answer) as connection:
        assert connection.read_answer(soon()) == (400, b"we speak TLS")
        assert not connection.can_ask


def test_a_connection_that_was_closed_meanwhile_is_not_used_again() -> None:
    def answer(visitor: Visitor) -> None:
        visitor.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    with asked(answer) as connection:
        assert connection.read_answer(soon()) == (200, b"{}")
        deadline = time.monotonic() + 10
        while connection.can_ask:
            assert time.monotonic() < deadline


def test_half_an_answer_is_none() -> None:
    def answer(visitor: Visitor) -> None:
        visitor.send(b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{}")

    with asked(answer) as connection, pytest.raises(ConnectionError):
        connection.read_answer(soon())


def test_nobody_listens() -> None:
    with fake_endpoint(lambda visitor: None) as endpoint:
        address = endpoint.address
    with pytest.raises(ConnectionRefusedError):
        HttpConnection(address, None, soon())
