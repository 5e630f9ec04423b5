"""JSON of our own: written without the json module, kept small whatever is put into it, and read field by field, each checked.

`to_json` is for what the agent itself writes on its way: texts, numbers, truth values, None, and lists and mappings of those. The
text is the one that `json.dumps` gives, but the import of json would take a tenth of the time that a job has to start.

The rest is for what workers wrote and other nodes sent: text is cut by the room that it will take, not by its letters, because
JSON of nothing but ASCII, the widest way to write it, needs up to twelve bytes for one. The sizes here are of that form, with
spaces after separators, so every other form is smaller. And each field is read by a *reader*: a function that gives back what it
was given, as it is to be used, or raises a ValueError that says what it must be.
"""

from __future__ import annotations

from _json import encode_basestring_ascii  # the part of json that is made of C
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    T = TypeVar("T")
    Reader = Callable[[object], T]

__all__ = [
    "COUNT_MAX", "clip", "count_fitting", "from_json", "read_count", "read_fields", "read_flag", "read_integer", "read_list",
    "read_seconds", "read_text", "reader", "size", "to_json", "whole",
]  # fmt: skip

COUNT_MAX = 10**9
_CUT = "..."


def to_json(value: object) -> str:
    """The value as JSON, on one line; TypeError for anything that JSON has no form for."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return encode_basestring_ascii(value)
        case int():
            return int.__repr__(value)
        case float():
            return _number(value)
        case Mapping():
            return "{" + ", ".join(f"{_key(key)}: {to_json(one)}" for key, one in value.items()) + "}"
        case Sequence() if not isinstance(value, bytes | bytearray | memoryview):
            return "[" + ", ".join(map(to_json, value)) + "]"
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _key(key: object) -> str:
    """Keys are texts in JSON; of a number, a truth value or None it is the text that stands for it."""
    match key:
        case str():
            return encode_basestring_ascii(key)
        case None | int() | float():
            return f'"{to_json(key)}"'
    raise TypeError(f"{type(key).__name__} cannot be a key in JSON")


def _number(value: float) -> str:
    """What JSON has no number for is written as null, so that any reader can read the line."""
    return float.__repr__(value) if _is_finite(value) else "null"


def _is_finite(value: float) -> bool:
    return value - value == 0


def clip(text: str, most_bytes: int, most_chars: int | None = None) -> str:
    """One printable line of at most so many bytes, and characters if they are given."""
    chars = most_bytes if most_chars is None else most_chars
    start = text[: 4 * chars]  # enough for all but the strangest; the rest is not even looked at
    printable = start if start.isprintable() else "".join(char if char.isprintable() else " " for char in start)
    line = " ".join(printable.split())
    if len(start) == len(text) and len(line) <= chars and _text_size(line) <= most_bytes:
        return line
    fitting = _count_up_to(map(_text_size, line), most_bytes - len(_CUT))
    return line[: min(fitting, chars - len(_CUT))] + _CUT


def _text_size(text: str) -> int:
    """Without the quotes around it; the text is printable."""
    if text.isascii():
        return len(text) + text.count('"') + text.count("\\")
    return sum(12 if char > "\uffff" else 6 if char > "~" else _text_size(char) for char in text)


def size(encoded: object) -> int:
    """At most so many bytes of JSON are made of this: text, finite numbers, booleans, None, and lists and dicts of them."""
    match encoded:
        case str():
            return _text_size(encoded) + 2
        case dict():
            return sum(size(key) + size(value) + 4 for key, value in encoded.items()) + 2
        case list():
            return sum(size(value) + 2 for value in encoded) + 2
    return len(repr(encoded))


def count_fitting(encoded: Iterable[object], room_bytes: int) -> int:
    """How many of these, from the first on, there is room for."""
    return _count_up_to((size(one) + 2 for one in encoded), room_bytes)


def _count_up_to(sizes: Iterable[int], room_bytes: int) -> int:
    return sum(total <= room_bytes for total in accumulate(sizes))


def from_json(text: str | bytes) -> Any:
    """What the text says; a ValueError if it is no JSON, or nested more deeply than anybody can read."""
    import json

    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_fields(data: object, readers: Mapping[str, Reader[Any]]) -> dict[str, Any]:
    """Exactly these fields, each read by its reader. Whatever is wrong is a ValueError that names the field."""
    if not isinstance(data, dict) or data.keys() != readers.keys():
        raise ValueError(f"a record must have exactly the fields {', '.join(readers)}")
    return {name: _read_field(name, data[name], read) for name, read in readers.items()}


def _read_field(name: str, value: object, read: Reader[T]) -> T:
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def read_text(most_bytes: int, value: object) -> str:
    if not isinstance(value, str) or len(value) > most_bytes or not value.isprintable() or _text_size(value) > most_bytes:
        raise ValueError(f"must be printable text of at most {most_bytes} bytes")
    return value


def reader(fits: Callable[[Any], bool], expected: str) -> Reader[Any]:
    """Of what is used as it is, if it `fits`."""

    def read(value: object) -> Any:
        if not fits(value):
            raise ValueError(expected)
        return value

    return read


def whole(least: int, most: int, expected: str) -> Reader[int]:
    return reader(lambda value: type(value) is int and least <= value <= most, expected)


read_flag: Reader[bool] = reader(lambda value: type(value) is bool, "must be true or false")
read_integer = whole(-(2**31), 2**31 - 1, "must be an integer of 32 bits")


def read_count(value: object) -> int:
    if not 0 <= read_integer(value) <= COUNT_MAX:
        raise ValueError(f"must be between 0 and {COUNT_MAX}")
    return read_integer(value)


def read_seconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not _is_finite(value):
        raise ValueError("must be a finite number")
    return float(value)


def read_list(most: int, read: Reader[T], value: object) -> tuple[T, ...]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"must be a list of at most {most}")
    return tuple(map(read, value))
