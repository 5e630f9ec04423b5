"""JSON, written without the json module, whose import would take a tenth of the time that a job has to start.

For what the agent itself writes on its way: texts, numbers, truth values, None, and lists and mappings of those. The text
is the one that `json.dumps` gives.
"""

from __future__ import annotations

from _json import encode_basestring_ascii  # the part of json that is made of C
from collections.abc import Mapping, Sequence

__all__ = ["to_json"]


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
    return float.__repr__(value) if value - value == 0 else "null"
