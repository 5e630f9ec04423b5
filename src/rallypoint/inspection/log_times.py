"""Times that lines of logs begin with: how they are found, compared and counted.

A log file has no times of its own; what its lines begin with is all there is. The first line of a file that begins with a time
shows how this file writes them, its `Clock`. A record is such a line with those below it that have no time, as a traceback has
none. Times of one clock are compared as bytes, in the order in which they are written; one of another clock is translated.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import accumulate

from rallypoint.base.records import Value
from rallypoint.base.text import parse_span
from rallypoint.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Clock", "find_clock", "parse_since", "split_records", "stamp_of", "to_microseconds", "translate", "without_time"]

_STAMP = re.compile(
    rb"^(\[?)(\d{4}-\d\d-\d\d)([T ])(\d\d:\d\d:\d\d)(?:([.,])(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?(?![\d.,])", re.MULTILINE
)
_SECOND = 1_000_000  # in microseconds
_AS_ZERO = bytes.maketrans(b"0123456789", b"0000000000")
_DATE_CHARS = len("2026-11-16 19:08:28")
_DAY = re.compile(r"\d{4}-\d\d-\d\d")


class Clock(Value):
    """How times are written: ``[2026-11-16 19:08:28,123`` has a bracket, a space, a comma, three digits, and no zone."""

    bracket: bytes = b""
    middle: bytes = b" "
    point: bytes = b""
    digits: int = 0
    zone: bytes = b""

    @property
    def size(self) -> int:
        """Of what is compared: the time without the bracket and the zone."""
        return _DATE_CHARS + len(self.point) + self.digits

    def is_alike(self, other: Clock) -> bool:
        """Whether times of both can be compared as they stand."""
        return self.replace(bracket=b"") == other.replace(bracket=b"")


def find_clock(lines: bytes) -> Clock | None:
    """That of the first line which begins with a time."""
    found = _STAMP.search(lines)
    if found is None:
        return None
    bracket, _, middle, _, point, digits, zone = found.groups(b"")
    return Clock(bracket, middle, point, len(digits), zone)


def without_time(line: bytes) -> tuple[bytes, bytes]:
    """The time that a line begins with, if it does, and the rest of it."""
    found = _STAMP.match(line)
    return (found[0], line[found.end() :]) if found else (b"", line)


@lru_cache(maxsize=8192)
def _beginning(clock: Clock, prefix: bytes) -> re.Pattern[bytes]:
    """A line end before a record."""
    time = rb"\d{4}-\d\d-\d\d" + clock.middle + rb"\d\d:\d\d:\d\d" + re.escape(clock.point) + rb"\d" * clock.digits
    return re.compile(rb"\n(?=" + re.escape(prefix + clock.bracket) + time + re.escape(clock.zone) + rb"(?![\d.,]))")


def _all_begin_so(lines: list[bytes], clock: Clock, start: int) -> bool:
    """Whether each line begins with a time, as in most logs; found out in less time than a pattern takes. False: perhaps."""
    if clock.zone not in (b"", b"Z"):  # its digits are not any
        return False
    shape = clock.bracket + b"0000-00-00" + clock.middle + b"00:00:00" + clock.point + b"0" * clock.digits + clock.zone + b" "
    width = len(shape)
    heads = bytearray(b"".join([line[start : start + width] for line in lines]).translate(_AS_ZERO))
    if len(heads) != width * len(lines) or heads[width - 1 :: width].translate(None, b"0.,") != heads[width - 1 :: width]:
        return False
    heads[width - 1 :: width] = b" " * len(lines)  # whatever else comes after a time
    return heads == shape * len(lines)


def split_records(lines: bytes, clock: Clock, last: bytes, prefix: bytes = b"") -> tuple[list[bytes], list[bytes]]:
    """Whole lines, of which each has the prefix, as records without the last newline; and their times, which never go back.

    Lines before the first time belong to the record before them, which was of the time `last`, if there was one, or else have
    the time of the next.
    """
    lines = lines.removesuffix(b"\n")
    start = len(prefix) + len(clock.bracket)
    end = start + clock.size
    records = lines.split(b"\n")
    is_plain = _all_begin_so(records, clock, len(prefix))
    if not is_plain:
        records = _beginning(clock, prefix).split(lines)
    times = [record[start:end] for record in records]
    if not is_plain and _beginning(clock, prefix).match(b"\n" + records[0][: end + len(clock.zone) + 1]) is None:
        times[0] = last or (times[1] if len(times) > 1 else b"")
    if last > times[0] or times != sorted(times):
        times = list(accumulate(times, max, initial=last))[1:]
    return records, times


# --- as numbers ------------------------------------------------------------------------------------------------------------


def to_microseconds(stamp: bytes, clock: Clock, here_s: int) -> int:
    """Since 1970; where the clock names no zone, it is that of this machine, so many seconds east of Greenwich."""
    year, month, day = int(stamp[:4]), int(stamp[5:7]), int(stamp[8:10])
    seconds = _days(year, month, day) * 86400 + int(stamp[11:13]) * 3600 + int(stamp[14:16]) * 60 + int(stamp[17:19])
    fraction = int(stamp[20 : 20 + clock.digits].ljust(6, b"0")[:6]) if clock.digits else 0
    return (seconds - _east_s(clock, here_s)) * _SECOND + fraction


def stamp_of(microseconds: int, clock: Clock, here_s: int) -> bytes:
    """A moment as this clock would have written it."""
    seconds, fraction = divmod(microseconds, _SECOND)
    days, second = divmod(seconds + _east_s(clock, here_s), 86400)
    year, month, day = _date(days)
    text = b"%04d-%02d-%02d%b%02d:%02d:%02d" % (year, month, day, clock.middle, second // 3600, second // 60 % 60, second % 60)
    return text + clock.point + (b"%06d" % fraction).ljust(9, b"0")[: clock.digits]


def translate(stamps: Sequence[bytes], clock: Clock, to: Clock, here_s: int) -> list[bytes]:
    """Times of one clock as another would have written them."""
    if clock.is_alike(to):
        return list(stamps)
    return [stamp_of(to_microseconds(stamp, clock, here_s), to, here_s) if stamp else stamp for stamp in stamps]


def _east_s(clock: Clock, here_s: int) -> int:
    if not clock.zone:
        return here_s
    if clock.zone == b"Z":
        return 0
    east_s = int(clock.zone[1:3]) * 3600 + int(clock.zone[-2:]) * 60
    return -east_s if clock.zone.startswith(b"-") else east_s


def _days(year: int, month: int, day: int) -> int:
    """Days since 1970; years are counted from March, so that the leap day is their last."""
    year -= month <= 2
    since_march = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return 365 * year + year // 4 - year // 100 + year // 400 + since_march - 719_468


def _date(days: int) -> tuple[int, int, int]:
    """The year, month and day that are so many days after the first of 1970."""
    era, day_of_era = divmod(days + 719_468, 146_097)
    year = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    since_march = day_of_era - (365 * year + year // 4 - year // 100)
    part = (5 * since_march + 2) // 153
    month = part + 3 if part < 10 else part - 9
    return era * 400 + year + (month <= 2), month, since_march - (153 * part + 2) // 5 + 1


def parse_since(text: str, now_s: float, here_s: int) -> int:
    """The moment that ``10m``, ``1h30m`` or ``2026-11-16T19:08:28`` means, in microseconds since 1970; UsageError: none."""
    try:
        return int((now_s - parse_span(text)) * _SECOND)
    except ValueError:
        pass  # then it is a time
    stamp = f"{text}T00:00:00" if _DAY.fullmatch(text) else text
    raw = stamp.encode()
    clock = find_clock(raw)
    if clock is None or clock.bracket or len(raw) != clock.size + len(clock.zone):
        raise UsageError(f"--since {text!r} is neither an age, as 90s, 10m, 1h30m and 2d are, nor a time as 2026-11-16T19:08:28")
    return to_microseconds(raw, clock, here_s)
