"""Small things as people read and write them: sizes, yes and no, addresses, runs of numbers, plurals.

Each form stands here once, so that a word that one setting takes is taken by all of them, and a list of ranks looks the same in
every message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

__all__ = [
    "Run", "count_of", "failure_kind", "fitted", "host_port", "joined", "listed", "many", "node_label", "parse_rate",
    "parse_size", "parse_span", "parse_truth", "plural", "ranges", "rate_text", "runs", "signal_names", "size_text", "span_text",
    "time_text", "who_of", "without_numbers",
]  # fmt: skip

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SPAN_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_LONGEST_SPAN_S = 1e10
_RATES = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_HOST_CHARS_MAX = 40
_TRUE_WORDS = ("1", "true", "t", "yes", "y", "on")
_FALSE_WORDS = ("0", "false", "f", "no", "n", "off")


def parse_size(text: str) -> int:
    """The number of bytes that ``4096``, ``500M`` or ``2G`` stands for; ValueError for anything else."""
    text = text.strip().upper()
    unit = _UNITS.get(text[-1:])
    return int(text[:-1]) * unit if unit else int(text)


def size_text(count: int) -> str:
    """So many bytes, in three digits or so: ``512 B``, ``1.5 GiB``."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"


def parse_span(text: str) -> float:
    """The seconds that ``90s``, ``1.5s``, ``10m``, ``1h30m`` or ``2d`` stands for; ValueError for anything else."""
    seconds, number = 0.0, ""
    for char in text:
        if char not in _SPAN_UNITS:
            number += char
            continue
        if not all(part.isascii() and part.isdigit() for part in number.split(".", 1)):
            raise ValueError(f"{text!r} is no length of time, as 8s, 1.5s, 10m and 1h30m are")
        seconds, number = seconds + float(number) * _SPAN_UNITS[char], ""
    if number or not text or seconds > _LONGEST_SPAN_S:
        raise ValueError(f"{text!r} is no length of time, as 8s, 1.5s, 10m and 1h30m are")
    return round(seconds, 6)  # 1m54.942s are no sum of floats


def span_text(seconds: float) -> str:
    """As `parse_span` reads it, to the millisecond: ``8s``, ``1m30.5s``, ``2h``."""
    minutes, milliseconds = divmod(round(max(seconds, 0.0) * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "m"), (milliseconds / 1000, "s")]
    return "".join(f"{value:.12g}{unit}" for value, unit in parts if value) or "0s"


def parse_rate(text: str) -> int:
    """The bits per second that ``500Mbit`` or ``1.5Gbit/s`` stands for; ValueError for anything else."""
    text = text.strip().upper().removesuffix("/S")
    number = text.removesuffix("BIT")
    unit = _RATES.get(number[-1:])
    number = number[:-1] if unit else number
    if not text.endswith("BIT") or not number.replace(".", "", 1).isdecimal():
        raise ValueError(f"{text!r} is no rate")
    return int(float(number) * (unit or 1))


def rate_text(bits_per_s: float) -> str:
    """In three digits or so: ``0 bit/s``, ``940 Mbit/s``, ``9.4 Gbit/s``."""
    rate, unit = bits_per_s, ""
    for larger in _RATES:
        if rate < 1000:
            break
        rate, unit = rate / 1000, larger
    return f"{rate:.0f} {unit}bit/s" if rate >= 100 or not unit else f"{rate:.1f} {unit}bit/s"


def time_text(seconds: float) -> str:
    """In whole seconds, for a text that changes every second: ``12 s``, ``9 min 48 s``, ``2 h 5 min``."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest_s = divmod(whole, 60)
    return f"{minutes} min {rest_s} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def parse_truth(value: object) -> bool:
    """Yes or no, as a word in any case or as a number; ValueError for anything else."""
    word = str(value).strip().lower() if isinstance(value, (str, int)) else ""
    if word not in _TRUE_WORDS + _FALSE_WORDS:
        raise ValueError(f"{value!r} is neither true nor false")
    return word in _TRUE_WORDS


def host_port(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


Run = tuple[int, int]  # the first and the last of some numbers without a gap


def runs(numbers: Iterable[int]) -> list[Run]:
    """The first and the last of each run of numbers without a gap, in order."""
    return joined((number, number) for number in numbers)


def joined(parts: Iterable[Run]) -> list[Run]:
    """The same numbers in as few runs as possible, in order."""
    found: list[Run] = []
    for first, last in sorted(parts):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


def count_of(parts: Iterable[Run]) -> int:
    """How many numbers there are in runs that do not overlap."""
    return sum(last - first + 1 for first, last in parts)


def ranges(numbers: Iterable[int], separator: str = ",", most: int | None = None) -> str:
    """0, 1, 2, 5 as ``0-2,5``; with at most so many pieces, and dots for the rest."""
    return _ranges_text(runs(numbers), separator, most)


def _ranges_text(parts: Sequence[Run], separator: str, most: int | None) -> str:
    found = [str(first) if first == last else f"{first}-{last}" for first, last in parts]
    return separator.join(found if most is None or len(found) <= most else [*found[:most], "..."])


def plural(number: int, one: str, several: str = "") -> str:
    """The word for so many of a thing; `several` where an s will not do."""
    return one if number == 1 else several or f"{one}s"


def many(number: int, one: str, several: str = "") -> str:
    """So many of a thing: ``1 node``, ``2 nodes``."""
    return f"{number} {plural(number, one, several)}"


def who_of(ranks: Sequence[Run], world_size: int = 0, most: int | None = 8) -> str:
    """``rank 3``, ``ranks 0, 2-3``, or ``all 6 workers`` where these are all there are."""
    if count_of(ranks) == world_size > 1:
        return "both workers" if world_size == 2 else f"all {world_size} workers"
    return f"{plural(count_of(ranks), 'rank')} {_ranges_text(ranks, ', ', most)}"


def stopped_text(by: str) -> str:
    """How a job has ended that somebody stopped."""
    return f"{by} stopped the job"


def node_label(group_rank: int | None, host: str, ranks: Iterable[int]) -> str:
    """``1 (vm, ranks 2-3)``, for after the word node; only the host's name where nothing else is known yet."""
    found = runs(ranks)
    if group_rank is None or not found:
        return host
    return f"{group_rank} ({host[:_HOST_CHARS_MAX]}, {who_of(found)})"


def failure_kind(exitcode: int, message: str, place: str) -> tuple[int, str, str]:
    """What two failures have in common that are the same: how they ended, their words, and the innermost place.

    Numbers in the words do not count. They are often what tells workers apart: a rank, a device, a process id, a port.
    """
    return exitcode, without_numbers(message), place


def without_numbers(text: str) -> str:
    """The same with a ``#`` for each."""
    return "".join("#" if is_number else "".join(chars) for is_number, chars in groupby(text, str.isdigit))


def listed(names: Sequence[str], most: int = 16) -> str:
    """Some of the names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def fitted(text: str, width: int) -> str:
    """No longer than that; a dot shows that something is missing."""
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"[:width]


def signal_names(text: str) -> str:
    """A list of signals by their whole names, as in SIGUSR1,SIGUSR2."""
    names = [name.strip().upper() for name in text.split(",") if name.strip()]
    return ",".join(name if name.startswith("SIG") else f"SIG{name}" for name in names)
