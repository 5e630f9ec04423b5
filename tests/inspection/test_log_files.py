"""Files that are written and put aside while they are read: every line once, whatever happens between two looks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rallypoint.inspection import log_files
from rallypoint.inspection.log_files import Tap
from rallypoint.inspection.log_lines import Mark
from rallypoint.output.pump import LogFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stdout.log"


@pytest.fixture
def tap(path: Path) -> Iterator[Tap]:
    tap = Tap(str(path), Mark(0, "stdout"))
    yield tap
    tap.close()


def look(tap: Tap, is_over: bool = False) -> bytes:
    return b"".join(tap.lane(is_last=is_over, is_over=is_over, beside=1).blocks)


def test_lines_come_as_they_are_written(path: Path, tap: Tap) -> None:
    assert look(tap) == b""  # there is no such file yet
    with path.open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert (look(tap), tap.has_news) == (b"one\n", True)
        assert (look(tap), tap.has_news) == (b"", False)
        file.write(b"o\nthree")
        assert look(tap) == b"two\n"
    assert look(tap, is_over=True) == b"three\n"


@pytest.mark.parametrize("rotations", [0, 1, 2])
def test_a_file_that_is_put_aside_between_two_looks(path: Path, tap: Tap, rotations: int) -> None:
    """After two, the file that was read last is gone, and that which was put aside since has not been seen yet."""
    path.write_bytes(b"0\n")
    assert look(tap) == b"0\n"
    path.write_bytes(b"0\nmore\n")  # the same file: it is not replaced
    for number in range(rotations):
        os.replace(path, f"{path}.1")
        path.write_bytes(b"%d\n" % (number + 1))
    assert look(tap) == b"more\n" + b"".join(b"%d\n" % (number + 1) for number in range(rotations))
    assert look(tap) == b""


def test_what_was_put_aside_before_the_first_look_comes_first(path: Path, tap: Tap) -> None:
    Path(f"{path}.1").write_bytes(b"old\n")
    path.write_bytes(b"new\n")
    assert look(tap) == b"old\nnew\n"


def test_a_new_file_that_is_not_there_yet(path: Path, tap: Tap) -> None:
    path.write_bytes(b"1\n")
    os.replace(path, f"{path}.1")
    assert look(tap) == b"1\n"
    assert look(tap) == b""
    path.write_bytes(b"2\n")
    assert look(tap) == b"2\n"


def test_a_file_that_somebody_removes_or_empties(path: Path, tap: Tap) -> None:
    Path(f"{path}.1").write_bytes(b"old\n")
    path.write_bytes(b"new\n")
    look(tap)
    path.write_bytes(b"")
    assert look(tap) == b""
    path.write_bytes(b"a\n")
    assert look(tap) == b"a\n"
    path.unlink()
    assert look(tap) == b""  # and what was put aside is not read again


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.lists(st.one_of(st.integers(0, 30), st.none()), max_size=30), st.integers(12, 60))
def test_every_line_once_and_in_order(tmp_path: Path, steps: list[int | None], cap: int) -> None:
    """Lines of many lengths go through the launcher's own writer, which puts files aside; None is a look."""
    folder = tmp_path / os.urandom(4).hex()
    folder.mkdir()
    log, tap = LogFile(str(folder / "stdout.log"), cap).open(), Tap(str(folder / "stdout.log"), Mark(0, "stdout"))
    written = read = b""
    since_look = 0
    for number, step in enumerate(steps):
        line = b"" if step is None else b"%d %b\n" % (number, b"x" * min(step, cap - 6))
        since_look += len(line)
        if step is None or since_look > cap:  # one file may be filled between two looks, and no more
            read += look(tap)
            since_look = len(line)
        log.write(line)
        written += line
    assert read + look(tap, is_over=True) == written
    log.close()
    tap.close()


# --- the last lines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("older", "newer", "count", "expected", "found"),
    [
        (None, b"1\n2\n3\n", 2, b"2\n3\n", 2),
        (None, b"1\n2\n3", 2, b"2\n3\n", 2),
        (None, b"1\n2\n3\n", 9, b"1\n2\n3\n", 3),
        (None, b"1\n2\n3\n", 0, b"", 0),
        (b"1\n2\n", b"3\n", 2, b"2\n3\n", 2),
        (b"1\n2\n", b"3\n", 1, b"3\n", 1),
        (b"1\n2\n", b"3\n", 9, b"1\n2\n3\n", 3),
        (b"1\n2\n", b"", 1, b"2\n", 1),
        (None, None, 3, b"", 0),
        (None, b"\n\n\n", 2, b"\n\n", 2),
    ],
)
def test_the_last_lines(
    path: Path, tap: Tap, older: bytes | None, newer: bytes | None, count: int, expected: bytes, found: int
) -> None:
    if older is not None:
        Path(f"{path}.1").write_bytes(older)
    if newer is not None:
        path.write_bytes(newer)
    assert tap.seek_tail(count) == found
    assert look(tap, is_over=True) == expected


def test_the_last_lines_that_match(path: Path, tap: Tap) -> None:
    Path(f"{path}.1").write_bytes(b"a1\nb\n")
    path.write_bytes(b"a2\nb\na3\nb\n")
    assert tap.seek_tail(2, re.compile(b"a")) == 2
    assert look(tap) == b"a2\nb\na3\nb\n"
    assert tap.seek_tail(3, re.compile(b"a")) == 3
    assert look(tap) == b"a1\nb\na2\nb\na3\nb\n"


@given(st.lists(st.binary(max_size=9).map(lambda raw: raw.replace(b"\n", b"")), max_size=12), st.integers(0, 14), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_the_last_lines_of_any_file(tmp_path: Path, lines: list[bytes], count: int, has_end: bool) -> None:
    file = tmp_path / "some.log"
    text = b"".join(line + b"\n" for line in lines)
    file.write_bytes(text if has_end else text.removesuffix(b"\n"))
    tap = Tap(str(file), Mark(0, "stdout"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_files, "LEAST_BLOCK_BYTES", 7)
        tap.seek_tail(count)
        found = look(tap, is_over=True)
    tap.close()
    whole = text if has_end or not text.endswith(b"\n\n") else text.removesuffix(b"\n")
    whole = b"" if not has_end and text == b"\n" else whole
    assert found == b"".join([one + b"\n" for one in whole.split(b"\n")[:-1]][-count:] if count else [])
