"""As much of HTTP/1.1 as etcd's gateway needs: one question after the other on one connection, and answers that never end.

The standard library's client would do, but for three things: its time-outs are for each read, not for the answer; nobody can
interrupt it; and it takes longer to import than a whole start of rallypoint.
"""

from __future__ import annotations

import time

from rallypoint.store.bell import Bell
from rallypoint.store.etcd_socket import Late, Wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping

    Clock = Callable[[], float]

__all__ = ["HttpConnection", "NotHttp"]

HEAD_BYTES = 64 * 1024
BODY_BYTES = 256 * 1024 * 1024
SIZE_DIGITS = 16
END_OF_HEAD, END_OF_LINE = b"\r\n\r\n", b"\r\n"


class NotHttp(Exception):
    """What answers does not speak HTTP, or says more than anybody asked for."""


class HttpConnection:
    """A connection to one endpoint, opened when it is made. What `Wire` raises comes from all its calls."""

    def __init__(
        self,
        endpoint: tuple[str, int],
        tls: ssl.SSLContext | None,
        deadline: float,
        interrupt: Bell | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        host, port = endpoint
        self._name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._wire = Wire(host, port, tls, interrupt, clock)
        self._body = bytearray()  # of the answer, as far as it has come
        self._left: int | None = None  # of the body, or of its present chunk; None before the first chunk
        self._is_chunked = False
        self._is_last = False  # whether the other side closes after this answer
        self._ends_by_closing = False  # whether that is the only way to tell where the answer ends
        try:
            self._wire.open(deadline)
        except BaseException:  # whatever it was, nothing half done may stay; it is raised again
            self.close()
            raise

    @property
    def can_ask(self) -> bool:
        """Whether it is open, and between two questions."""
        return not self._is_last and self._wire.is_quiet()

    def interrupt_by(self, bell: Bell | None) -> None:
        """From now on this bell interrupts whoever waits."""
        self._wire.interrupt = bell

    def local_address(self) -> str:
        return self._wire.local_address()

    def close(self) -> None:
        self._wire.close()

    def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes, deadline: float) -> None:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._name}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._wire.send("\r\n".join([*lines, "", ""]).encode("latin-1") + body, deadline)

    def has_answer(self, deadline: float) -> bool:
        """Wait for the first bytes of an answer; whether they came in time."""
        try:
            if not self._wire.received:
                self._wire.receive(deadline)
        except Late:
            return False
        return True

    def read_answer(self, deadline: float) -> tuple[int, bytes]:
        """The status and the whole body."""
        status = self.read_head(deadline)
        while self._read_more(deadline):
            """Until it is complete."""
        body, self._body = bytes(self._body), bytearray()
        return status, body

    def read_head(self, deadline: float) -> int:
        """The status of an answer whose body is then read by lines."""
        while (end := self._wire.received.find(END_OF_HEAD)) < 0:
            self._refuse_if_foreign()
            self._wire.receive(deadline)
        first, *lines = self._take(end + len(END_OF_HEAD))[:end].decode("latin-1").split("\r\n")
        status = self._status(first)
        headers = {name.strip().lower(): value.strip().lower() for name, _, value in (line.partition(":") for line in lines)}
        self._is_last = headers.get("connection") == "close" or first.startswith("HTTP/1.0")
        self._is_chunked = headers.get("transfer-encoding") == "chunked"
        self._ends_by_closing = self._is_last and not self._is_chunked and "content-length" not in headers
        unchunked = BODY_BYTES if self._ends_by_closing else _size(headers.get("content-length", "0"), 10)
        self._left = None if self._is_chunked else unchunked
        return status

    def read_line(self, deadline: float) -> bytes:
        """The next line of the body, or what is left at its end; nothing after that."""
        searched = 0
        while (end := self._body.find(b"\n", searched)) < 0:
            searched = len(self._body)
            if not self._read_more(deadline):
                break
        end = len(self._body) if end < 0 else end + 1
        line = bytes(self._body[:end])
        del self._body[:end]
        return line

    # --- pieces ------------------------------------------------------------------------------------------------------------

    def _refuse_if_foreign(self) -> None:
        """At the first byte that cannot be HTTP, since whoever speaks another language may wait for us to go on."""
        if not bytes(self._wire.received).startswith(b"HTTP/1."[: len(self._wire.received)]):
            raise NotHttp("it does not speak HTTP")
        if len(self._wire.received) > HEAD_BYTES:
            raise NotHttp(f"its answer begins with more than {HEAD_BYTES} bytes of headers")

    def _status(self, line: str) -> int:
        version, _, rest = line.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise NotHttp("it does not speak HTTP")
        return int(rest[:3])

    def _read_more(self, deadline: float) -> bool:
        """A piece of the body; False at its end."""
        if self._is_chunked and not self._left:
            self._left = self._next_chunk(deadline)
        if not self._left or not self._has_more(deadline):
            return False
        piece = self._take(self._left)
        self._body += piece
        self._left -= len(piece)
        if len(self._body) > BODY_BYTES:
            raise NotHttp(f"its answer has more than {BODY_BYTES} bytes")
        return True

    def _has_more(self, deadline: float) -> bool:
        try:
            if not self._wire.received:
                self._wire.receive(deadline)
        except ConnectionResetError:
            if not self._ends_by_closing:
                raise
            return False
        return True

    def _next_chunk(self, deadline: float) -> int:
        """The size of the next chunk; 0 is the end, whose empty line is taken too."""
        is_first = self._left is None
        size = self._next_line(deadline) if is_first else self._next_line(deadline) or self._next_line(deadline)
        count = _size(size.partition(";")[0], 16)
        if count == 0:
            self._is_chunked, self._left = False, 0
            self._next_line(deadline)
        return count

    def _next_line(self, deadline: float) -> str:
        while (end := self._wire.received.find(END_OF_LINE)) < 0:
            if len(self._wire.received) > HEAD_BYTES:
                raise NotHttp("the size of a part of its answer is missing")
            self._wire.receive(deadline)
        return self._take(end + len(END_OF_LINE))[:end].decode("latin-1")

    def _take(self, most: int) -> bytes:
        piece = bytes(self._wire.received[:most])
        del self._wire.received[:most]
        return piece


def _size(digits: str, base: int) -> int:
    try:
        if len(digits) > SIZE_DIGITS or digits[:1] in "+-":
            raise ValueError
        return int(digits, base)
    except ValueError:
        raise NotHttp("the size of its answer cannot be understood") from None
