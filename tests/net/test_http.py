"""HTTP from bytes: well-formed requests come out whole however they are cut, and nothing else gets through."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rallypoint.net.http import BODY_BYTES, HEAD_BYTES, Refusal, Request, RequestReader, Response, render

DATE = "Sun, 06 Nov 1994 08:49:37 GMT"
HOST = b"Host: agent\r\n"


def read(data: bytes, cuts: list[int] | None = None) -> list[Request | Refusal]:
    """Everything that comes out, up to the first refusal, when the bytes come in these pieces."""
    reader = RequestReader()
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts or [])})
    taken: list[Request | Refusal] = []
    for begin, end in itertools.pairwise(places):
        reader.feed(data[begin:end])
        while (one := reader.take()) is not None:
            taken.append(one)
            if isinstance(one, Refusal):
                return taken
    return taken


def only(data: bytes) -> Request:
    [request] = read(data)
    assert isinstance(request, Request)
    return request


def status(data: bytes) -> int:
    [refusal] = read(data)
    assert isinstance(refusal, Refusal)
    return refusal.status


# --- tables ----------------------------------------------------------------------------------------------------------------


def test_a_request_as_curl_sends_it() -> None:
    request = only(b"GET /healthz?verbose=1 HTTP/1.1\r\nHost: localhost:8080\r\nUser-Agent: curl/8.0\r\nAccept: */*\r\n\r\n")
    headers = {"host": "localhost:8080", "user-agent": "curl/8.0", "accept": "*/*"}
    assert request == Request("GET", "/healthz", "verbose=1", headers, b"", True)


def test_a_body_is_as_long_as_was_said() -> None:
    first, second = read(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabcGET /b HTTP/1.1\r\nHost: x\r\n\r\n")
    assert isinstance(first, Request)
    assert isinstance(second, Request)
    assert (first.body, second.path) == (b"abc", "/b")


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("/", "/", ""),
        ("/a%20b%2Fc", "/a b/c", ""),
        ("/%zz%", "/%zz%", ""),
        ("/%ff", "/\N{REPLACEMENT CHARACTER}", ""),
        ("/a?b?c#d", "/a", "b?c"),
        ("http://host:80/a?b", "/a", "b"),
        ("HTTPS://host", "/", ""),
    ],
)
def test_targets(target: str, path: str, query: str) -> None:
    request = only(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert (request.path, request.query) == (path, query)


@pytest.mark.parametrize(
    ("version", "connection", "keeps_open"),
    [
        ("1.1", "", True),
        ("1.1", "Connection: close\r\n", False),
        ("1.1", "connection: TE, Close\r\n", False),
        ("1.0", "", False),
        ("1.0", "Connection: Keep-Alive\r\n", True),
    ],
)
def test_whether_the_connection_is_kept(version: str, connection: str, keeps_open: bool) -> None:
    assert only(f"GET / HTTP/{version}\r\nHost: x\r\n{connection}\r\n".encode()).keeps_open is keeps_open


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01",  # the beginning of TLS
        b"\x00",
        b"get / HTTP/1.1\r\n",
        b"GET",
    ],
)
def test_what_cannot_be_http_is_refused_at_its_first_bytes(data: bytes) -> None:
    outcome = read(data)
    assert outcome == ([] if data == b"GET" else [Refusal(400, "this is not HTTP")])


@pytest.mark.parametrize(
    "data",
    [
        b"GET /\r\n",  # before HTTP had versions
        b"GET / HTTP/2.0\r\n",
        b"GET / HTTP/1.1\n",
        b"GET  / HTTP/1.1\r\n",
        b"GET /\xff HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # to which host?
        b"GET * HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET a HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"no colon\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"a : b\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"a: b\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"a: b\nc: d\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"a: \x00\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1, 1\r\n\r\nab",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 0x1\r\n\r\na",
        "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: ²\r\n\r\nab".encode("latin-1"),
    ],
)
def test_bad_requests(data: bytes) -> None:
    assert status(data) == 400


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "CONNECT"])
def test_other_methods(method: str) -> None:
    assert status(f"{method} /a HTTP/1.1\r\nHost: x\r\n\r\n".encode()) == 405


def test_limits() -> None:
    filler = b"a: " + b"b" * (HEAD_BYTES - len(b"GET / HTTP/1.1\r\n" + HOST + b"a: ")) + b"\r\n\r\n"
    longest = b"GET / HTTP/1.1\r\n" + HOST + filler
    assert only(longest).method == "GET"
    assert status(longest.replace(b"a: ", b"aa: ")) == 431
    assert status(b"GET /" + b"a" * HEAD_BYTES) == 431
    assert status(b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % (BODY_BYTES + 1)) == 413
    assert status(b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n") == 413
    assert status(b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n") == 411
    body = b"x" * BODY_BYTES
    assert only(b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % BODY_BYTES + body).body == body


def test_a_refusal_is_for_good() -> None:
    reader = RequestReader()
    reader.feed(b"PUT / HTTP/1.1\r\nHost: x\r\n\r\n")
    first = reader.take()
    reader.feed(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert isinstance(first, Refusal)
    assert reader.take() == first


def test_answers() -> None:
    whole = render(Response(200, "\N{GREEK SMALL LETTER MU}", headers=(("X-A", "b"),)), DATE, keeps_open=True)
    assert whole == (
        b"HTTP/1.1 200 OK\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\nContent-Type: text/plain; charset=utf-8\r\n"
        b"Content-Length: 2\r\nConnection: keep-alive\r\nX-A: b\r\n\r\n\xce\xbc"
    )
    assert render(Response(200, "abc"), DATE, "HEAD").endswith(b"Content-Length: 3\r\nConnection: close\r\n\r\n")


@pytest.mark.parametrize("header", [("a", "b\r\nc: d"), ("a\r\nb", "c"), ("", "a"), ("a", "\0"), ("a b", "c")])
def test_an_answer_cannot_smuggle_headers(header: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="is not a header"):
        render(Response(200, headers=(header,)), DATE)


# --- properties ------------------------------------------------------------------------------------------------------------

tokens = st.text("abcXYZ019-_", min_size=1, max_size=8)
texts = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=12)
cuts = st.lists(st.integers(0, 10_000), max_size=12)
requests = st.builds(
    lambda method, path, headers, body: (method, "/" + path, headers, body),
    st.sampled_from(["GET", "HEAD", "POST"]),
    st.text("abc/._~-", max_size=8),
    st.dictionaries(tokens.map(lambda name: f"x-{name.lower()}"), texts.map(lambda text: text.strip(" \t")), max_size=3),
    st.binary(max_size=30),
)


def written(method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *(f"{a}: {b}" for a, b in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@given(st.lists(requests, max_size=4), cuts, st.booleans())
def test_requests_come_out_as_they_went_in(
    sent: list[tuple[str, str, dict[str, str], bytes]], cuts: list[int], spaced: bool
) -> None:
    data = (b"\r\n" if spaced else b"").join(written(*one) for one in sent)
    got = read(data, cuts)
    assert [(one.method, one.path, one.body) for one in got if isinstance(one, Request)] == [
        (method, path, body) for method, path, _, body in sent
    ]
    for one, (_, _, headers, _) in zip(got, sent, strict=True):
        assert isinstance(one, Request)
        assert headers.items() <= one.headers.items()


pieces = st.sampled_from(
    [b"GET ", b"POST ", b"PUT ", b"/", b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b"Host: x\r\n", b"Content-Length: 2\r\n", b"\r\n",
     b"\r", b"\n", b"\r\n\r\n", b"ab", b" ", b":", b"Content-Length: 99999\r\n", b"Transfer-Encoding: chunked\r\n", b"\x00"]
)  # fmt: skip


@given(st.one_of(st.binary(max_size=60), st.lists(pieces, max_size=12).map(b"".join)), cuts)
@example(b"\r\nGET / HTTP/1.0\r\n\r\n", [1])
@example(b"\r", [])
def test_it_does_not_matter_how_the_bytes_are_cut(data: bytes, cuts: list[int]) -> None:
    assert read(data, cuts) == read(data)
    assert read(data, list(range(len(data)))) == read(data)


@given(st.lists(st.binary(min_size=1, max_size=3_000), max_size=12))
def test_what_is_kept_is_bounded(chunks: list[bytes]) -> None:
    reader = RequestReader()
    reader.feed(b"GET / HTTP/1.1\r\nHost: x\r\na: ")
    for chunk in chunks:
        reader.feed(chunk)
        taken = reader.take()
        while isinstance(taken, Request):
            taken = reader.take()
        if taken is not None:
            return
        assert len(reader._received) < HEAD_BYTES + BODY_BYTES
