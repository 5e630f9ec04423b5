"""Lines of many files as one: nothing is lost, twice or reordered, times are kept to, and what many say is said once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.inspection import log_lines
from rallypoint.inspection.log_lines import (
    Cutter,
    Group,
    Lane,
    Mark,
    as_json,
    collapse,
    json_beginning,
    label,
    line_of_group,
    matching,
    merge,
    prefixed,
)

Lines = list[bytes]


def at(second: int, text: str) -> bytes:
    return b"2026-11-16 19:08:%02d %b" % (second, text.encode())


def blocks_of(lines: Sequence[bytes], size: int) -> Iterator[bytes]:
    for start in range(0, len(lines), size):
        yield b"".join(line + b"\n" for line in lines[start : start + size])


def merged(
    lanes: Sequence[Sequence[bytes]], written: Sequence[int] = (), size: int = 2, since_us: int | None = None
) -> list[bytes]:
    """The lines, each with its lane's number and a colon."""
    made = []
    for number, lines in enumerate(lanes):
        moment = written[number] if written else 0
        made.append(Lane(Mark(number, "stdout"), blocks_of(lines, size), moment))
        made[-1].prefix = b"%d:" % number
    chunks = merge(made, lambda _, records, __: records, 0, since_us)
    return [line for chunk in chunks for record in chunk for line in record.split(b"\n")]


# --- whole lines -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=5).map(lambda raw: raw.replace(b"x", b"\n"))))
def test_a_cutter_gives_whole_lines_and_all_of_them(blocks: list[bytes]) -> None:
    cutter = Cutter()
    given_out = [cutter.feed(block) for block in blocks]
    assert all(not some or some.endswith(b"\n") for some in given_out)
    text = b"".join(blocks)
    assert b"".join([*given_out, cutter.rest()]) == text + (b"\n" if text and not text.endswith(b"\n") else b"")
    assert cutter.rest() == b""


def test_an_endless_line_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "LINE_MAX", 10)
    cutter = Cutter()
    assert [cutter.feed(b"123456"), cutter.feed(b"789012")] == [b"", b"123456789012\n"]


# --- by time ---------------------------------------------------------------------------------------------------------------


def test_lines_come_in_the_order_of_their_times() -> None:
    lanes = [[at(1, "a"), b"  below", at(3, "b")], [at(2, "c"), at(4, "d")]]
    assert merged(lanes) == [b"0:" + at(1, "a"), b"0:  below", b"1:" + at(2, "c"), b"0:" + at(3, "b"), b"1:" + at(4, "d")]


def test_a_file_without_times_comes_as_a_whole_when_it_was_last_written() -> None:
    second = 1_794_856_080 + 3  # 2026-11-16 19:08:03 in Greenwich
    lanes = [[b"x", b"y", b"z"], [at(2, "c"), at(4, "d")], [b"later"]]
    order = [b"1:" + at(2, "c"), b"0:x", b"0:y", b"0:z", b"1:" + at(4, "d"), b"2:later"]
    assert merged(lanes, [second * 1_000_000, 0, (second + 60) * 1_000_000]) == order


def test_files_without_times_that_end_together_come_by_their_ranks() -> None:
    assert merged([[b"x"], [b"y"]], [1_900_000, 1_100_000]) == [b"0:x", b"1:y"]
    assert merged([[b"x"], [b"y"]], [2_900_000, 1_100_000]) == [b"1:y", b"0:x"]


def test_times_of_several_clocks() -> None:
    other = [b"2026-11-16T20:08:02.500+01:00 x", b"2026-11-16T20:08:09.500+01:00 y"]
    assert [line[:2] for line in merged([[at(1, "a"), at(3, "b")], other])] == [b"0:", b"1:", b"0:", b"1:"]


def test_since() -> None:
    since_us = (1_794_856_080 + 3) * 1_000_000
    lanes = [[at(1, "a"), b"below a", at(3, "b"), b"below b"], [b"old"], [b"new"]]
    assert merged(lanes, [0, since_us - 1, since_us], since_us=since_us) == [b"2:new", b"0:" + at(3, "b"), b"0:below b"]


LINES = st.one_of(st.integers(0, 5).map(lambda second: at(second, "x")), st.just(b"below"), st.just(b""))


@given(st.lists(st.lists(LINES, max_size=12), max_size=4), st.integers(1, 5), st.data())
def test_nothing_is_lost_twice_or_reordered(lanes: list[Lines], size: int, data: st.DataObject) -> None:
    written = [data.draw(st.integers(1_794_856_080, 1_794_856_090)) * 1_000_000 for _ in lanes]
    found = merged(lanes, written, size)
    for number, lines in enumerate(lanes):
        prefix = b"%d:" % number
        assert [line.removeprefix(prefix) for line in found if line.startswith(prefix)] == lines
    assert len(found) == sum(map(len, lanes))


@given(st.lists(st.lists(st.integers(0, 59), max_size=12).map(sorted), max_size=4), st.integers(1, 5))
def test_what_has_times_is_in_their_order(seconds: list[list[int]], size: int) -> None:
    found = merged([[at(second, "x") for second in some] for some in seconds], size=size)
    times = [line.partition(b":")[2] for line in found]
    assert times == sorted(times)


# --- by what they say ------------------------------------------------------------------------------------------------------


def collapsed(lanes: Sequence[Sequence[bytes]]) -> list[Group]:
    return list(collapse([(Mark(rank, "stdout"), iter(lines), b"") for rank, lines in enumerate(lanes)]))


def told(lanes: Sequence[Sequence[bytes]]) -> list[str]:
    return [f"{label(group.marks, names_stderr=False)}: {group.line.decode()}" for group in collapsed(lanes)]


def test_what_all_say_is_said_once() -> None:
    lanes = [[b"start", b"only me", b"step"], [b"start", b"step"], [b"start", b"step", b"only me too"]]
    assert told(lanes) == ["ranks 0-2: start", "rank 0: only me", "ranks 0-2: step", "rank 2: only me too"]


def test_times_do_not_keep_them_apart() -> None:
    (group,) = collapsed([[at(1, "step")], [at(2, "step")]])
    assert [mark.rank for mark in group.marks] == [0, 1]
    assert line_of_group(group).time == "2026-11-16T19:08:01"
    assert line_of_group(group).ranks == (0, 1)


def test_those_who_wait_for_each_other_do_not_wait_for_ever() -> None:
    assert told([[b"a", b"b"], [b"b", b"a"]]) == ["rank 0: a", "ranks 0-1: b", "rank 1: a"]


def test_streams_are_told_apart() -> None:
    lanes = [(Mark(0, "stdout"), iter([b"x"]), b""), (Mark(1, "stderr"), iter([b"x"]), b"")]
    assert [label(group.marks, names_stderr=True) for group in collapse(lanes)] == ["rank 0", "rank 1 stderr"]


@given(
    st.lists(st.lists(st.sampled_from([b"a", b"b", b"c", at(1, "a"), at(2, "a")]), max_size=12), max_size=4), st.integers(1, 12)
)
def test_each_rank_has_said_what_it_said(lanes: list[Lines], lookahead: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_lines, "LOOKAHEAD", lookahead)
        groups = collapsed(lanes)
    for rank, lines in enumerate(lanes):
        said = [group.line for group in groups if rank in [mark.rank for mark in group.marks]]
        assert [line[19:] if line.startswith(b"2") else line for line in said] == [
            line[19:] if line.startswith(b"2") else line for line in lines
        ]


@given(st.lists(st.sampled_from([b"a", b"b"]), max_size=9), st.integers(1, 5))
def test_the_same_from_all_is_one_run_of_lines(lines: Lines, ranks: int) -> None:
    assert [group.line for group in collapsed([lines] * ranks)] == lines


# --- as they are shown -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("marks", "names_stderr", "expected"),
    [
        ([Mark(3, "stdout")], True, "rank 3"),
        ([Mark(3, "stderr")], True, "rank 3 stderr"),
        ([Mark(3, "stderr")], False, "rank 3"),
        ([Mark(3, "stderr", 2)], True, "rank 3 stderr attempt 2"),
        ([Mark(rank, "stdout", 1) for rank in (1, 2, 3, 7)], True, "ranks 1-3,7 attempt 1"),
    ],
)
def test_labels(marks: list[Mark], names_stderr: bool, expected: str) -> None:
    assert label(marks, names_stderr) == expected


def test_grep_is_for_lines_and_not_for_records() -> None:
    pattern = re.compile(rb"^b|\d$")
    assert matching(b"abc\nbcd\n\nx1", pattern) == b"bcd\nx1"
    assert matching(b"abc", pattern) is None
    assert matching(b"", re.compile(b"")) == b""
    assert prefixed([b"abc\nbcd\nx1", b"abc", b"b"], b"p ", pattern) == [b"p bcd\np x1", None, b"p b"]


def test_json_is_a_line_for_a_line() -> None:
    text = as_json(json_beginning(Mark(3, "stderr", 1, "n")), b'a\xff\n"b', b"[2026-11-16 19:08:28,123")
    assert text.splitlines() == [
        '{"rank": 3, "stream": "stderr", "attempt": 1, "node": "n", "time": "2026-11-16T19:08:28.123", "text": "a\\\\xff"}',
        '{"rank": 3, "stream": "stderr", "attempt": 1, "node": "n", "time": "2026-11-16T19:08:28.123", "text": "\\"b"}',
    ]
