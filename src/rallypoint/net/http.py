"""As much of HTTP/1.1 as a server of small answers needs: bytes in, requests out, and answers as bytes.

A `RequestReader` is fed whatever comes over one connection, in pieces of any size, and gives one request after the other. What
it does not understand at once and for sure it refuses, and a connection that was refused cannot go on: nobody
can tell where its next request would begin. So there is no way to read one message as two, or two as one: line ends are CRLF, a
length is given once and in digits, and bodies in chunks are not taken.

Invariants: what is kept of a connection is never more than the limits of a head and a body and one piece; the requests that
come out do not depend on how the bytes were cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from rallypoint.base.records import Value

__all__ = ["METHODS", "Refusal", "Request", "RequestReader", "Response", "is_named_so", "render", "render_head"]

HEAD_BYTES = 8 * 1024
BODY_BYTES = 64 * 1024
LENGTH_DIGITS = 16
METHODS = ("GET", "HEAD", "POST")
END_OF_HEAD = b"\r\n\r\n"
REASONS = {
    200: "OK", 202: "Accepted", 204: "No Content", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found",
    405: "Method Not Allowed", 408: "Request Timeout", 409: "Conflict", 411: "Length Required", 413: "Content Too Large",
    429: "Too Many Requests", 431: "Request Header Fields Too Large", 500: "Internal Server Error", 501: "Not Implemented",
    503: "Service Unavailable",
}  # fmt: skip

BEGINNING = re.compile(rb"[A-Z]{0,16}(?: |\Z)")
BEGINNING_BYTES = 17
REQUEST_LINE = re.compile(r"([A-Z]{1,16}) ([\x21-\x7e]+) HTTP/1\.([01])")
HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\x00-\x08\x0a-\x1f\x7f]*)")
ORIGIN = re.compile(r"https?://[^/?#]*", re.IGNORECASE)  # before the path, as clients of a proxy write it
ENCODED = re.compile(rb"%([0-9A-Fa-f]{2})")
ADDRESS = re.compile(r"\[[0-9a-f:.%]+\]|\d{1,3}(?:\.\d{1,3}){3}")
ONLY_ONCE = {"content-length", "host", "transfer-encoding"}


class Request(Value):
    """What somebody asks for; the path is decoded, the query is not."""

    method: str
    path: str
    query: str
    headers: dict[str, str]  # by their names in lower case
    body: bytes
    keeps_open: bool  # whether the connection is to be used again


class Refusal(Value):
    """Why a connection cannot go on, as the status of its last answer and a sentence."""

    status: int
    why: str


class Response(Value):
    """An answer; a `body` of text is sent as UTF-8."""

    status: int = 200
    body: bytes | str = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


class RequestReader:
    """The requests of one connection."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._head: Request | None = None  # of the request whose body is still coming
        self._body_bytes = 0
        self._refusal: Refusal | None = None

    @property
    def has_begun(self) -> bool:
        """Whether there is a part of a request, of which the rest has not come."""
        return self._head is not None or bool(self._received)

    def feed(self, data: bytes) -> None:
        self._received += data

    def take(self) -> Request | Refusal | None:
        """The next request, or None while the rest of it has not come, or why there will be none."""
        if self._refusal is None:
            taken = self._take()
            self._refusal = taken if isinstance(taken, Refusal) else None
            return taken
        return self._refusal

    def _take(self) -> Request | Refusal | None:
        if self._head is None:
            refusal = self._take_head()
            if refusal is not None or self._head is None:
                return refusal
        if len(self._received) < self._body_bytes:
            return None
        request, self._head = self._head.replace(body=self._cut(self._body_bytes)) if self._body_bytes else self._head, None
        return request

    def _take_head(self) -> Refusal | None:
        while self._received.startswith(b"\r\n"):  # some clients send an empty line after a body
            del self._received[:2]
        refusal = self._refuse_foreign()
        if refusal is not None:
            return refusal
        end = self._received.find(END_OF_HEAD, 0, HEAD_BYTES + len(END_OF_HEAD))
        if end < 0:
            is_too_long = len(self._received) >= HEAD_BYTES + len(END_OF_HEAD)
            return Refusal(431, f"the head of a request may have {HEAD_BYTES} bytes") if is_too_long else None
        head = _parse_head(self._cut(end + len(END_OF_HEAD))[:end].decode("latin-1"))
        if isinstance(head, Refusal):
            return head
        body_bytes = _body_bytes(head)
        if isinstance(body_bytes, Refusal):
            return body_bytes
        self._head, self._body_bytes = head, body_bytes
        return None

    def _refuse_foreign(self) -> Refusal | None:
        """At the first byte that cannot be right, since whoever speaks another language may wait for us to go on."""
        if bytes(self._received[:2]) in (b"", b"\r"):
            return None
        end = self._received.find(b"\n", 0, HEAD_BYTES)
        line = self._received[: BEGINNING_BYTES if end < 0 else end]
        if not BEGINNING.match(line[:BEGINNING_BYTES]):
            return Refusal(400, "this is not HTTP")
        if end >= 0 and not (line.endswith(b"\r") and REQUEST_LINE.fullmatch(line[:-1].decode("latin-1"))):
            return _BAD_REQUEST_LINE
        return None

    def _cut(self, count: int) -> bytes:
        piece = bytes(self._received[:count])
        del self._received[:count]
        return piece


_BAD_REQUEST_LINE = Refusal(400, "the first line of a request is METHOD PATH HTTP/1.1, and lines end with CRLF")


def _parse_head(text: str) -> Request | Refusal:
    line, *lines = text.split("\r\n")
    first = REQUEST_LINE.fullmatch(line)
    if first is None:
        return _BAD_REQUEST_LINE
    headers = _parse_headers(lines)
    target = _parse_target(first[2])
    if isinstance(headers, Refusal):
        return headers
    if target is None:
        return Refusal(400, "the path of the request cannot be understood")
    if first[3] == "1" and "host" not in headers:
        return Refusal(400, "a request of HTTP/1.1 has a Host header")
    if first[1] not in METHODS:
        return Refusal(405, f"the methods here are {', '.join(METHODS)}")
    return Request(first[1], *target, headers, b"", _keeps_open(first[3], headers.get("connection", "")))


def _parse_headers(lines: list[str]) -> dict[str, str] | Refusal:
    headers: dict[str, str] = {}
    for line in lines:
        match = HEADER.fullmatch(line)
        if match is None:
            return Refusal(400, "a header is NAME: VALUE, on one line")
        name, value = match[1].lower(), match[2].strip(" \t")
        if name in headers:
            if name in ONLY_ONCE:
                return Refusal(400, f"the header {name} is there twice")
            value = f"{headers[name]}, {value}"
        headers[name] = value
    return headers


def _parse_target(target: str) -> tuple[str, str] | None:
    """The path and the query."""
    if origin := ORIGIN.match(target):
        target = target[origin.end() :] or "/"
    path, _, query = target.partition("#")[0].partition("?")
    if not path.startswith("/"):
        return None
    return (_decoded(path) if "%" in path else path), query


def _decoded(path: str) -> str:
    return ENCODED.sub(lambda match: bytes([int(match[1], 16)]), path.encode("latin-1")).decode(errors="replace")


def _keeps_open(minor_version: str, connection: str) -> bool:
    options = {option.strip() for option in connection.lower().split(",")}
    return "close" not in options if minor_version == "1" else "keep-alive" in options


def _body_bytes(head: Request) -> int | Refusal:
    if "transfer-encoding" in head.headers:
        return Refusal(411, "a body is sent whole, with its Content-Length")
    digits = head.headers.get("content-length", "0")
    if not (digits.isascii() and digits.isdecimal()):
        return Refusal(400, "Content-Length is a number")
    if len(digits) > LENGTH_DIGITS or int(digits) > BODY_BYTES:
        return Refusal(413, f"the body of a request may have {BODY_BYTES} bytes")
    return int(digits)


def is_named_so(host: str | None, names: Collection[str]) -> bool:
    """Whether a request is meant for us, by its Host header: an address, localhost, or one of our names.

    A page from elsewhere can have a browser ask here under a name of its own, which it has let point to us. No such name is ours.
    Who sends no header is no browser.
    """
    if host is None:
        return True
    name = re.sub(r":\d*\Z", "", host.lower()).rstrip(".")
    return name == "localhost" or name.endswith(".localhost") or name in names or ADDRESS.fullmatch(name) is not None


def render(response: Response, date: str, method: str = "GET", keeps_open: bool = False) -> bytes:
    """The answer as it is sent; one to HEAD has no body, but says how long it would be. ValueError: it cannot be sent."""
    body = response.body.encode() if isinstance(response.body, str) else response.body
    return render_head(response, date, len(body), keeps_open) + (b"" if method == "HEAD" else body)


def render_head(response: Response, date: str, body_bytes: int | None = None, keeps_open: bool = False) -> bytes:
    """All before the body. None: nobody knows how long that will be, and it ends with the connection."""
    headers = {
        "Date": date,
        "Content-Type": response.content_type,
        **({} if body_bytes is None else {"Content-Length": str(body_bytes)}),
        "Connection": "keep-alive" if keeps_open else "close",
    }
    head = "".join(_header_line(*item) for item in (*headers.items(), *response.headers))
    first = f"HTTP/1.1 {response.status:03d} {REASONS.get(response.status, 'Unknown')}\r\n"
    return f"{first}{head}\r\n".encode("latin-1")


def _header_line(name: str, value: str) -> str:
    line = f"{name}: {value}"
    if HEADER.fullmatch(line) is None:
        raise ValueError(f"{line!r} is not a header")
    return line + "\r\n"
