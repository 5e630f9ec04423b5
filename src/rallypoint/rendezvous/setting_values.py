"""What the value of a setting may be, by its kind: from text, or what a program gives, to a checked value, and back to words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os import PathLike

from rallypoint import defaults
from rallypoint.rendezvous.handler import FALSE_WORDS, TRUE_WORDS
from rallypoint.sizes import parse_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Literal

    Kind = Literal["seconds", "seconds_or_0", "count", "rank", "truth", "path", "codes", "limit", "store", "number",
                   "worker_store", "ports", "size", "protocol", "text"]

__all__ = ["CONVERTERS", "shown"]

_MOST_S = 24 * 24 * 3600  # poll(2) counts milliseconds in 31 bits
_MOST_COUNT = 1_000_000
_MOST_CODES = 256
_MOST_PATH = 4096
_MOST_PORT = 65_535
_MOST_BYTES = 1 << 50
_NOTHING = ("", "none", "-1")


def shown(kind: Kind, value: Any) -> str:
    """A value in words, as it could be given."""
    if value is None or value == ():
        return ""
    match kind:
        case "seconds" | "seconds_or_0":
            return f"{value:g} s"
        case "codes":
            return "+".join(map(str, value))
        case "ports":
            return "any that is free" if value == (0, 0) else "-".join(map(str, dict.fromkeys(value)))
        case "truth":
            return "true" if value else "false"
        case _:
            return str(value)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _seconds(value: Any) -> float:
    seconds = _number(value)
    if not 0 < seconds <= _MOST_S:  # what is no number at all (nan) compares with nothing
        raise ValueError
    return seconds


def _seconds_or_0(value: Any) -> float:
    return 0.0 if _number(value) == 0 else _seconds(value)


def _whole(value: Any, least: int, most: int) -> int:
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise TypeError
    number = int(value)
    if not least <= number <= most:
        raise ValueError
    return number


def _count(value: Any) -> int:
    return _whole(value, 1, _MOST_COUNT)


def _whole_or_none(value: Any) -> int | None:
    """A number from 0; nothing, and -1 as torchrun writes it, is None."""
    return None if str(value).strip().lower() in _NOTHING else _whole(value, 0, _MOST_COUNT)


def _truth(value: Any) -> bool:
    word = str(value).strip().lower() if isinstance(value, (str, int)) else ""
    if word not in TRUE_WORDS + FALSE_WORDS:
        raise ValueError
    return word in TRUE_WORDS


def _path(value: Any) -> str:
    path = str(value) if isinstance(value, (str, PathLike)) else ""
    if not 0 < len(path) <= _MOST_PATH or any(character in path for character in "\n\r\0"):
        raise ValueError
    return path


def _codes(value: Any) -> tuple[int, ...]:
    """Separated by +, because ``--rdzv-conf`` is split at commas; elsewhere a comma will do. Sorted: order says nothing."""
    pieces: Iterable[Any] = filter(str.strip, value.replace(",", "+").split("+")) if isinstance(value, str) else value
    codes = {_whole(piece, -64, 255) for piece in pieces}
    if 0 in codes or len(codes) > _MOST_CODES:
        raise ValueError
    return tuple(sorted(codes))


def _store(value: Any) -> str:
    if value != "tcp":
        raise ValueError
    return "tcp"


def _worker_store(value: Any) -> str:
    if value not in (defaults.WORKER_STORE, defaults.WORKER_STORE_RANK0):
        raise ValueError
    return str(value)


def _ports(value: Any) -> tuple[int, int]:
    """One port, or the first and the last of several."""
    pieces = value if isinstance(value, tuple) else str(value).split("-")
    first, last = _whole(pieces[0], 0, _MOST_PORT), _whole(pieces[-1], 0, _MOST_PORT)
    if len(pieces) > 2 or last < first or (first == 0 and last > 0):
        raise ValueError
    return first, last


def _size(value: Any) -> int:
    return _whole(parse_size(value) if isinstance(value, str) else value, 1, _MOST_BYTES)


def _protocol(value: Any) -> str:
    if value not in ("http", "https"):
        raise ValueError
    return str(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError
    return value


_A_TIME = f"a number of seconds of at most {_MOST_S} (24 days)"
CONVERTERS: dict[Kind, tuple[Callable[[Any], Any], str]] = {
    "seconds": (_seconds, f"{_A_TIME}, more than 0"),
    "seconds_or_0": (_seconds_or_0, f"{_A_TIME}, 0 or more"),
    "count": (_count, f"a whole number from 1 to {_MOST_COUNT}"),
    "rank": (_whole_or_none, "a rank, from 0, or none"),
    "limit": (_whole_or_none, "a whole number of 0 or more, or none"),
    "truth": (_truth, "true or false"),
    "path": (_path, "the path of a file"),
    "codes": (_codes, "exit codes as in 2+64, 1 to 255 each, or -n for signal n"),
    "store": (
        _store,
        "tcp (file, a shared folder, can hold no lease and tell no change, so that a dead node would never be noticed: use c10d,"
        " which is over TCP, or etcd)",
    ),
    "number": (_number, "a number"),
    "worker_store": (_worker_store, f"{defaults.WORKER_STORE} or {defaults.WORKER_STORE_RANK0}"),
    "ports": (_ports, f"a port from 0 to {_MOST_PORT}, or the first and the last of several, as in 29600-29700"),
    "protocol": (_protocol, "http or https"),
    "text": (_text, "a text"),
    "size": (_size, "a number of bytes, as in 500M or 2G"),
}
"""For each kind, what makes a value of it (a ValueError or TypeError for what cannot be one), and in words what it must be."""
