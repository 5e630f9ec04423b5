"""What goes between a node and its store: frames, each a length and a body, with a secret a seal, and the words in them as JSON.

    u32, big-endian: how many bytes follow | body | 16 bytes of HMAC-SHA256 over the frame's number and its body

Each direction has its own key, made for this one connection, and counts its frames. So a frame that was made up, changed,
repeated, left out, moved, or taken from the other direction or from another connection, does not fit, and ends the connection.

Once they have met, a request is ``[number, what, …]`` and is answered by ``[the same number, what, …]``. What the store tells
unasked has the number 0. An answer that is long comes as parts, ``[number, "part", [items]]``, one behind the other, and then the
answer with the last of them. Values travel as the characters 0 to 255. Everything that comes is checked, in type, range and size,
before it is used. `RequestError` means a peer that does not follow the rules.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterable, Iterator, Sequence

from rallypoint.coordination.model import Compare, Delete, EndLease, Event, Get, Item, Operation, Put, Transaction

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "FrameError", "Inbox", "RequestError", "Seal", "TlsError", "decode", "decode_event", "decode_item", "decode_transaction",
    "encode", "encode_event", "encode_in_parts", "encode_item", "encode_transaction", "make_frame", "open_seal",
]  # fmt: skip

LENGTH_BYTES = 4
SEAL_BYTES = 16
SMALL_FRAME_BYTES = 1024  # before the welcome, so that a stranger cannot make us hold much
LARGE_FRAME_BYTES = 1024 * 1024


class FrameError(ValueError):
    """What came is not what may come now; the connection cannot be used any more."""


class TlsError(OSError):
    """What both sides need is not there: a certificate that the other trusts, or TLS at all."""


class Seal:
    """Proves that a frame comes from who knows the key, and is the next one."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def of_next(self, body: bytes) -> bytes:
        numbered = self._count.to_bytes(8, "big") + body
        self._count += 1
        return hmac.digest(self._key, numbered, "sha256")[:SEAL_BYTES]


def make_frame(body: bytes, seal: Seal | None) -> bytes:
    if seal is None:
        return len(body).to_bytes(LENGTH_BYTES, "big") + body
    return (len(body) + SEAL_BYTES).to_bytes(LENGTH_BYTES, "big") + body + seal.of_next(body)


def open_seal(frame: bytes, seal: Seal) -> bytes:
    """The body of a sealed frame, if the seal is the one that is due."""
    body = frame[:-SEAL_BYTES]
    if not hmac.compare_digest(frame[len(body) :], seal.of_next(body)):
        raise FrameError("a frame with the wrong seal: forged, changed, repeated or out of order")
    return body


class Inbox:
    """Bytes as they come, to be taken out frame by frame.

    What is allowed may change between two frames: `limit` and `seal` hold for the frames that are taken from then on.
    """

    def __init__(self) -> None:
        self.limit = SMALL_FRAME_BYTES
        self.seal: Seal | None = None
        self._buffer = bytearray()
        self._taken = 0

    def __len__(self) -> int:
        """How many bytes are held."""
        return len(self._buffer) - self._taken

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def take(self) -> bytes | None:
        """The next body, or None while it is not there as a whole."""
        start = self._taken + LENGTH_BYTES
        length = int.from_bytes(self._buffer[self._taken : start], "big")
        if len(self._buffer) >= start and length > self.limit:
            raise FrameError(f"a frame of {length} bytes, where {self.limit} are allowed")
        if len(self._buffer) < start or len(self._buffer) < start + length:
            self._forget_taken()
            return None
        self._taken = start + length
        frame = bytes(self._buffer[start : self._taken])
        return frame if self.seal is None else open_seal(frame, self.seal)

    def _forget_taken(self) -> None:
        if self._taken:
            del self._buffer[: self._taken]
            self._taken = 0


KEY_CHARACTERS = 1024
VALUE_BYTES = 160 * 1024  # each byte takes up to six in JSON, and a value has to fit into one frame
OPERATIONS = 128  # in each list of a transaction, that of its comparisons too
MOST_WATCHES = 16
NUMBERS = 2**63
NUMBER_DIGITS = 20
SHORTEST_TTL_S, LONGEST_TTL_S = 0.05, 24 * 3600.0
PART_BYTES = 64 * 1024  # of keys and values: twelve times as many at the worst, when they are written down
ITEM_BYTES = 64  # what an item takes besides its key and its value


class RequestError(FrameError):
    """A message that breaks the rules."""


def _read_number(digits: str) -> int:
    """Very long numbers take very long to read, so they are not."""
    if len(digits) > NUMBER_DIGITS:
        raise ValueError("a number of too many digits")
    return int(digits)


_write = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_read = json.JSONDecoder(parse_int=_read_number).decode


def encode(message: Sequence[object]) -> bytes:
    return _write(message).encode("ascii")


def decode(body: bytes) -> list[Any]:
    """A message, of which so far only this is known: a list of a number, a word, and more."""
    try:
        message = _read(body.decode("ascii"))
    except (ValueError, RecursionError):  # RecursionError: nested too deeply
        raise RequestError("a frame that holds no message") from None
    if type(message) is not list or len(message) < 2 or type(message[1]) is not str:
        raise RequestError("a frame that holds no message")
    number(message[0])
    return message


def number(value: object) -> int:
    if type(value) is not int or not 0 <= value < NUMBERS:
        raise RequestError("something else where a number was due")
    return value


def text(value: object) -> str:
    """A key or a prefix."""
    if type(value) is not str or len(value) > KEY_CHARACTERS:
        raise RequestError(f"something else where a key of at most {KEY_CHARACTERS} characters was due")
    return value


def flag(value: object) -> bool:
    if type(value) is not bool:
        raise RequestError("something else where true or false was due")
    return value


def seconds(value: object) -> float:
    if type(value) not in (int, float) or not SHORTEST_TTL_S <= value <= LONGEST_TTL_S:  # type: ignore[operator]
        raise RequestError(f"something else where {SHORTEST_TTL_S:g} to {LONGEST_TTL_S:g} seconds were due")
    return float(value)  # type: ignore[arg-type]


def _value(value: object) -> bytes:
    if type(value) is not str or len(value) > VALUE_BYTES:
        raise RequestError(f"something else where a value of at most {VALUE_BYTES} bytes was due")
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError:
        raise RequestError("a value that is not made of bytes") from None


def _list(value: object, most: int | None = None) -> list[Any]:
    if type(value) is not list or (most is not None and len(value) > most):
        raise RequestError("something else where a list was due" + (f" of at most {most}" if most else ""))
    return value


def encode_transaction(transaction: Transaction) -> list[object]:
    """As it is sent; ValueError if it is larger than a store takes."""
    if max(len(transaction.compares), len(transaction.then), len(transaction.otherwise)) > OPERATIONS:
        raise ValueError(f"a transaction of more than {OPERATIONS} comparisons or operations")
    return [
        [[compare.key, compare.target, compare.revision] for compare in transaction.compares],
        [_encode_operation(operation) for operation in transaction.then],
        [_encode_operation(operation) for operation in transaction.otherwise],
    ]


def _encode_operation(operation: Operation) -> list[object]:
    match operation:
        case Put(key, value, lease):
            if len(key) > KEY_CHARACTERS or len(value) > VALUE_BYTES:
                raise ValueError(f"{key[:40]!r}: a key may have {KEY_CHARACTERS} characters, and a value {VALUE_BYTES} bytes")
            return ["put", key, value.decode("latin-1"), lease]
        case Delete(key, is_prefix):
            return ["delete", key, is_prefix]
        case Get(key):
            return ["get", key]
        case EndLease(lease):
            return ["end", lease]


def decode_transaction(compares: object, then: object, otherwise: object) -> Transaction:
    return Transaction(
        tuple([_decode_compare(compare) for compare in _list(compares, OPERATIONS)]),
        tuple([_decode_operation(operation) for operation in _list(then, OPERATIONS)]),
        tuple([_decode_operation(operation) for operation in _list(otherwise, OPERATIONS)]),
    )


def _decode_compare(raw: object) -> Compare:
    match raw:
        case [key, "create" | "mod" as target, revision]:
            return Compare(text(key), target, number(revision))
    raise RequestError("something else where a comparison was due")


def _decode_operation(raw: object) -> Operation:
    match raw:
        case ["put", key, value, lease]:
            return Put(text(key), _value(value), number(lease))
        case ["get", key]:
            return Get(text(key))
        case ["delete", key, is_prefix]:
            return Delete(text(key), flag(is_prefix))
        case ["end", lease]:
            return EndLease(number(lease))
    raise RequestError("something else where an operation was due")


def encode_item(item: Item | None) -> list[object] | None:
    if item is None:
        return None
    return [item.key, item.value.decode("latin-1"), item.create_revision, item.mod_revision, item.lease]


def decode_item(raw: object) -> Item:
    match raw:
        case [key, value, created, changed, lease]:
            return Item(text(key), _value(value), number(created), number(changed), number(lease))
    raise RequestError("something else where an item was due")


def encode_event(event: Event) -> list[object]:
    return [event.revision, event.key, event.cause, encode_item(event.item)]


def decode_event(raw: object) -> Event:
    match raw:
        case [revision, key, "put" | "deleted" | "expired" | "vouched" as cause, item]:
            return Event(number(revision), text(key), None if item is None else decode_item(item), cause)
    raise RequestError("something else where a change was due")


def encode_in_parts(answer: Sequence[object], things: Iterable[Item | Event | None]) -> Iterator[bytes]:
    """The bodies that tell `things`: all but the last as parts, the last as `answer` with what remains."""
    part: list[object] = []
    size = 0
    for thing in things:
        more = _size(thing)
        if part and size + more > PART_BYTES:
            yield encode([answer[0], "part", part])
            part, size = [], 0
        part.append(encode_event(thing) if isinstance(thing, Event) else encode_item(thing))
        size += more
    yield encode([*answer, part])


def _size(thing: Item | Event | None) -> int:
    item = thing.item if isinstance(thing, Event) else thing
    value_bytes = 0 if item is None else len(item.value)
    return ITEM_BYTES + value_bytes + (0 if thing is None else len(thing.key))
