"""Times that lines begin with: found in the forms that programs use, compared, and never going back."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.errors import UsageError
from rallypoint.inspection.log_times import (
    Clock,
    find_clock,
    parse_since,
    split_records,
    stamp_of,
    to_microseconds,
    translate,
    without_time,
)

COMMA = Clock(point=b",", digits=3)
ZULU = Clock(middle=b"T", point=b".", digits=6, zone=b"Z")


@pytest.mark.parametrize(
    ("line", "clock"),
    [
        (b"2026-11-16 19:08:28,123 INFO hello", COMMA),
        (b"[2026-11-16 19:08:28,123] [INFO] hello", COMMA.replace(bracket=b"[")),
        (b"2026-11-16T19:08:28.123456Z hello", ZULU),
        (b"2026-11-16T19:08:28+01:00 hello", Clock(middle=b"T", zone=b"+01:00")),
        (b"2026-11-16T19:08:28-0530", Clock(middle=b"T", zone=b"-0530")),
        (b"2026-11-16 19:08:28", Clock()),
        (b"no time\nand here 2026-11-16 19:08:28\n2026-11-16 19:08:28: here", Clock()),
        (b"step 3", None),
        (b"2026-11-16", None),
        (b" 2026-11-16 19:08:28", None),
        (b"2026-11-16 19:08:281", None),
    ],
)
def test_the_form_of_times(line: bytes, clock: Clock | None) -> None:
    assert find_clock(line) == clock


def test_a_line_without_its_time() -> None:
    assert without_time(b"2026-11-16 19:08:28,123 step 1") == (b"2026-11-16 19:08:28,123", b" step 1")
    assert without_time(b"step 1 2026-11-16 19:08:28") == (b"", b"step 1 2026-11-16 19:08:28")


def test_lines_without_a_time_stay_with_the_one_above() -> None:
    lines = b"2026-11-16 19:08:28,100 a\nTraceback\n  line\n2026-11-16 19:08:28,200 b\n"
    records, times = split_records(lines, COMMA, b"")
    assert records == [b"2026-11-16 19:08:28,100 a\nTraceback\n  line", b"2026-11-16 19:08:28,200 b"]
    assert times == [b"2026-11-16 19:08:28,100", b"2026-11-16 19:08:28,200"]


def test_what_a_block_begins_with_belongs_to_the_block_before() -> None:
    assert split_records(b"rest\n2026-11-16 19:08:28,200 b\n", COMMA, b"2026-11-16 19:08:28,100")[1][0].endswith(b",100")
    assert split_records(b"header\n2026-11-16 19:08:28,200 b\n", COMMA, b"")[1][0].endswith(b",200")


def test_a_clock_that_is_set_back_reorders_nothing() -> None:
    lines = b"2026-11-16 19:08:28,200 a\n2026-11-16 19:08:28,100 b\n"
    assert split_records(lines, COMMA, b"")[1] == [b"2026-11-16 19:08:28,200"] * 2


PIECES = st.sampled_from([b"2026-11-16 19:08:2%d,%03d x" % (second, ms) for second in (8, 9) for ms in (0, 5, 999)] + [b"", b"t"])


@given(st.lists(PIECES, min_size=1), st.sampled_from([b"", b"[rank 3] ", b"\x1b[36m[rank 0]\x1b[0m "]))
def test_records_are_all_of_the_lines_and_their_times_never_go_back(lines: list[bytes], prefix: bytes) -> None:
    text = b"".join(prefix + line + b"\n" for line in lines)
    records, times = split_records(text, COMMA, b"", prefix)
    assert b"\n".join(records) + b"\n" == text
    assert times == sorted(times)
    assert len(times) == len(records)


MOMENTS = st.datetimes(min_value=datetime(1970, 1, 2), max_value=datetime(2200, 1, 1))


@given(
    MOMENTS, st.sampled_from([COMMA, ZULU, Clock(zone=b"-0530"), Clock(middle=b"T", zone=b"+01:00")]), st.sampled_from([0, 3600])
)
def test_moments_are_those_of_the_calendar(moment: datetime, clock: Clock, here_s: int) -> None:
    east = {b"": timedelta(seconds=here_s), b"Z": timedelta(), b"-0530": -timedelta(hours=5, minutes=30)}
    zone = timezone(east.get(clock.zone, timedelta(hours=1)))
    microseconds = (moment.replace(tzinfo=timezone.utc) - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(microseconds=1)
    there = moment.replace(tzinfo=timezone.utc).astimezone(zone)
    expected = there.strftime(f"%Y-%m-%d{clock.middle.decode()}%H:%M:%S").rjust(19, "0")
    stamp = stamp_of(microseconds, clock, here_s)
    assert stamp[:19].decode() == expected
    unit = 10 ** (6 - clock.digits)
    assert to_microseconds(stamp, clock, here_s) == microseconds // unit * unit


def test_times_of_another_clock_are_translated() -> None:
    assert translate([b"2026-11-16T19:08:28.123456", b""], ZULU, COMMA, 3600) == [b"2026-11-16 20:08:28,123", b""]
    assert translate([b"x"], COMMA.replace(bracket=b"["), COMMA, 0) == [b"x"]


@pytest.mark.parametrize(
    ("text", "moment_s"),
    [("90s", 910), ("10m", 400), ("0.5m", 970), ("1m30s", 910), ("1970-01-01T00:00:05", -3595), ("1970-01-01T00:00:05Z", 5)],
)
def test_since(text: str, moment_s: int) -> None:
    assert parse_since(text, 1000.0, 3600) == moment_s * 1_000_000
    assert parse_since("1970-01-02", 1000.0, 0) == 86_400_000_000


@pytest.mark.parametrize("text", ["", "10", "m", "yesterday", "10 m", "2026-11-16T19:08", "[2026-11-16 19:08:28", "-5m"])
def test_since_what(text: str) -> None:
    with pytest.raises(UsageError, match="--since"):
        parse_since(text, 0.0, 0)
