"""Small things as people read and write them: sizes, yes and no, addresses, runs of numbers, plurals.

Each form stands here once, so that a word that one setting takes is taken by all of them, and a list of ranks looks the same in
every message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["host_port", "listed", "many", "parse_size", "parse_truth", "plural", "ranges", "runs"]

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_TRUE_WORDS = ("1", "true", "t", "yes", "y", "on")
_FALSE_WORDS = ("0", "false", "f", "no", "n", "off")


def parse_size(text: str) -> int:
    """The number of bytes that ``4096``, ``500M`` or ``2G`` stands for; ValueError for anything else."""
    text = text.strip().upper()
    unit = _UNITS.get(text[-1:])
    return int(text[:-1]) * unit if unit else int(text)


def parse_truth(value: object) -> bool:
    """Yes or no, as a word in any case or as a number; ValueError for anything else."""
    word = str(value).strip().lower() if isinstance(value, (str, int)) else ""
    if word not in _TRUE_WORDS + _FALSE_WORDS:
        raise ValueError(f"{value!r} is neither true nor false")
    return word in _TRUE_WORDS


def host_port(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The first and the last of each run of numbers without a gap, in order."""
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def ranges(numbers: Iterable[int], separator: str = ",", most: int | None = None) -> str:
    """0, 1, 2, 5 as ``0-2,5``; with at most so many pieces, and dots for the rest."""
    found = [str(first) if first == last else f"{first}-{last}" for first, last in runs(numbers)]
    return separator.join(found if most is None or len(found) <= most else [*found[:most], "..."])


def plural(number: int, one: str, several: str = "") -> str:
    """The word for so many of a thing; `several` where an s will not do."""
    return one if number == 1 else several or f"{one}s"


def many(number: int, one: str, several: str = "") -> str:
    """So many of a thing: ``1 node``, ``2 nodes``."""
    return f"{number} {plural(number, one, several)}"


def listed(names: Sequence[str], most: int = 16) -> str:
    """Some of the names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
