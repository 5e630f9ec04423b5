"""The wire format of torch's TCPStore: what its clients send, and what they are told.

Numbers are little-endian. A request is one byte for the operation, then byte strings, each behind its length as 64 bits, then at
most one number; operations on many keys say first how many there are. A reply has no header at all: whoever asks knows what
must come. There are no request numbers and no marks between requests, so whoever breaks the format cannot be understood any
further, and is cut off.

The protocol knows no authentication: whoever reaches the port can read and write everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct

from rallypoint.base.records import Value

__all__ = [
    "ADD", "APPEND", "BARRIER", "CANCEL_WAIT", "CHECK", "COMPARE_SET", "DELETE_KEY", "GET", "GETNUMKEYS", "GREETING", "I64",
    "LIST_KEYS", "MAGIC", "MAX_KEYS", "MAX_KEY_BYTES", "MAX_VALUE_BYTES", "MULTI_GET", "MULTI_SET", "NOT_READY", "NO_NUMBER",
    "PING", "QUEUE_LEN", "QUEUE_POP", "QUEUE_PUSH", "READY", "SET", "STOP_WAITING", "U32", "U64", "VALIDATE", "WAIT",
    "WAIT_CANCELED", "ProtocolError", "RequestReader", "packed", "request",
]  # fmt: skip

(
    VALIDATE, SET, COMPARE_SET, GET, ADD, CHECK, WAIT, GETNUMKEYS, DELETE_KEY, APPEND, MULTI_GET, MULTI_SET, CANCEL_WAIT, PING,
    QUEUE_PUSH, QUEUE_POP, QUEUE_LEN, LIST_KEYS, BARRIER,
) = range(19)  # fmt: skip

U32, U64, I64 = Struct("<I"), Struct("<Q"), Struct("<q")
MAGIC = 0x3C85F7CE
GREETING = bytes([VALIDATE]) + U32.pack(MAGIC)  # what a client says first, and nobody else
READY, NOT_READY = b"\0", b"\1"  # to CHECK
STOP_WAITING, WAIT_CANCELED = b"\0", b"\1"  # to WAIT and BARRIER; to CANCEL_WAIT
MAX_KEY_BYTES = 8 * 1024
MAX_VALUE_BYTES = 8 * 1024 * 1024
MAX_KEYS = 131_072  # in one request
NO_NUMBER = 0
NONE = NOT_TOLD = -1
LAST_OPERATION = BARRIER

_unpack_u64 = U64.unpack_from


class ProtocolError(Exception):
    """The peer does not keep to the format, or to its limits."""


class Shape(Value):
    """How a request goes on behind its operation: byte strings of at most these lengths, as often as is told, and a number."""

    name: str
    limits: tuple[int, ...] = ()
    is_counted: bool = False
    number: Struct | None = None


_KEY, _KEY_VALUE = (MAX_KEY_BYTES,), (MAX_KEY_BYTES, MAX_VALUE_BYTES)
SHAPES: dict[int, Shape] = {
    VALIDATE: Shape("VALIDATE", number=U32),
    SET: Shape("SET", _KEY_VALUE),
    COMPARE_SET: Shape("COMPARE_SET", (*_KEY_VALUE, MAX_VALUE_BYTES)),
    GET: Shape("GET", _KEY),
    ADD: Shape("ADD", _KEY, number=I64),
    CHECK: Shape("CHECK", _KEY, is_counted=True),
    WAIT: Shape("WAIT", _KEY, is_counted=True),
    GETNUMKEYS: Shape("GETNUMKEYS"),
    DELETE_KEY: Shape("DELETE_KEY", _KEY),
    APPEND: Shape("APPEND", _KEY_VALUE),
    MULTI_GET: Shape("MULTI_GET", _KEY, is_counted=True),
    MULTI_SET: Shape("MULTI_SET", _KEY_VALUE, is_counted=True),
    CANCEL_WAIT: Shape("CANCEL_WAIT"),
    PING: Shape("PING", number=U32),
    QUEUE_PUSH: Shape("QUEUE_PUSH", _KEY_VALUE),
    QUEUE_POP: Shape("QUEUE_POP", _KEY),
    QUEUE_LEN: Shape("QUEUE_LEN", _KEY),
    LIST_KEYS: Shape("LIST_KEYS"),
    BARRIER: Shape("BARRIER", _KEY, number=I64),
}


# The same for the reader, which has no time to look at attributes.
_FORMS = [
    (len(shape.limits), shape.is_counted, (shape.number or U32).unpack_from, shape.number.size if shape.number else 0)
    for _, shape in sorted(SHAPES.items())
]


def packed(text: bytes) -> bytes:
    """A byte string behind its length."""
    return U64.pack(len(text)) + text


def request(operation: int, strings: Sequence[bytes] = (), number: int = NO_NUMBER) -> bytes:
    """A request as a client sends it. ProtocolError: it is larger than servers take."""
    shape = SHAPES[operation]
    pieces = [bytes([operation])]
    if shape.is_counted:
        pieces.append(U64.pack(_checked_count(operation, len(strings) // len(shape.limits))))
    for place, text in enumerate(strings):
        _check_length(operation, place, len(text))
        pieces.append(packed(text))
    if shape.number is not None:
        pieces.append(shape.number.pack(number))
    return b"".join(pieces)


def _checked_count(operation: int, count: int) -> int:
    if count > MAX_KEYS:
        raise ProtocolError(f"{SHAPES[operation].name} of {count} keys at once, and {MAX_KEYS} is the most")
    return count


def _check_length(operation: int, place: int, length: int) -> None:
    shape = SHAPES[operation]
    limit = shape.limits[place % len(shape.limits)]
    if length > limit:
        what = "key" if place % len(shape.limits) == 0 else "value"
        raise ProtocolError(f"{shape.name} with a {what} of {length} bytes, and {limit} is the most")


class RequestReader:
    """Requests out of a stream of bytes, as they come; all `requests` are to be taken before the next `feed`.

    What is there of a large request is read once, not again with each piece of it that comes.
    """

    __slots__ = ("_data", "_left", "_more", "_operation", "_place", "_read_bytes", "_strings", "wanted_bytes")

    def __init__(self) -> None:
        self._data = b""  # what is to be read, from _place on
        self._place = 0
        self._more = bytearray()  # what has come after it, while it is known not to be enough
        self.wanted_bytes = 0  # how many more it takes to read on with a request that is not complete
        self._operation = NONE  # of that request
        self._left = 0  # how many of its strings are still to come
        self._strings: list[bytes] = []  # those that are here
        self._read_bytes = 0  # their size

    @property
    def held_bytes(self) -> int:
        """What is kept of a request that is not complete."""
        read_bytes = self._read_bytes if self._operation != NONE else 0
        return read_bytes + len(self._data) - self._place + len(self._more)

    @property
    def has_more(self) -> bool:
        """Whether something has come that was not looked at yet, because whoever took the `requests` has stopped."""
        return self._place < len(self._data) and not self.wanted_bytes

    def feed(self, data: bytes) -> None:
        if not self.wanted_bytes:
            self._data, self._place = data, 0
            return
        self._more += data
        self.wanted_bytes = max(0, self.wanted_bytes - len(data))
        if not self.wanted_bytes:
            self._data += self._more
            self._more = bytearray()

    def requests(self) -> Iterator[tuple[int, list[bytes], int]]:
        """Those that are complete: operation, byte strings and number. Whoever stops in between can go on later."""
        data, place, end = self._data, self._place, len(self._data)
        if self.wanted_bytes:
            return
        while place < end:
            operation, left, strings = self._operation, self._left, self._strings
            if operation == NONE:
                operation, left, strings = data[place], NOT_TOLD, []
                place += 1
            if operation > LAST_OPERATION:
                raise ProtocolError(f"there is no operation {operation}")
            strings_each, is_counted, unpack_number, number_size = _FORMS[operation]
            wanted = 0
            if left == NOT_TOLD:
                if not is_counted:
                    left = strings_each
                elif place + 8 <= end:
                    left = _checked_count(operation, _unpack_u64(data, place)[0]) * strings_each
                    place += 8
                else:
                    wanted = 8
            while left > 0:
                start = place + 8
                if start > end:
                    wanted = 8
                    break
                length = _unpack_u64(data, place)[0]
                if length > MAX_KEY_BYTES:  # the least of the limits
                    _check_length(operation, len(strings), length)
                stop = start + length
                if stop > end:
                    wanted = 8 + length
                    break
                strings.append(data[start:stop])
                place = stop
                left -= 1
            if not wanted and place + number_size > end:
                wanted = number_size
            if wanted:
                self._suspend(operation, left, strings, place, wanted)
                return
            number = NO_NUMBER
            if number_size:
                number = unpack_number(data, place)[0]
                place += number_size
            self._operation, self._place = NONE, place
            yield operation, strings, number
        self._data, self._place, self._strings = b"", 0, []  # whoever says nothing more does not keep what it has said

    def _suspend(self, operation: int, left: int, strings: list[bytes], place: int, wanted_bytes: int) -> None:
        """Remember how far we are in a request whose next bytes are not all here."""
        self._read_bytes = place - self._place + (self._read_bytes if self._operation != NONE else 0)
        self._operation, self._left, self._strings = operation, left, strings
        self._data, self._place = self._data[place:], 0
        self.wanted_bytes = wanted_bytes - len(self._data)
