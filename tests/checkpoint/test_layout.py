"""Which snapshot counts, and that half a one never does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.checkpoint.layout import (
    BOUNDARY,
    Begun,
    Mark,
    Moment,
    newest_common,
    place_parts,
    read_mark,
    slot_to_write,
    write_mark,
)

WIDE, NARROW = st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1)
MARKS = st.builds(Mark, WIDE, st.integers(-(2**63), 2**63 - 1), WIDE, NARROW, NARROW, WIDE, WIDE)


def mark(count: int, rank: int = 0, world: int = 2, generation: int = 1) -> Mark:
    return Mark(count, generation, 10 * count, rank, world, 100, 1000)


@given(MARKS)
def test_a_mark_is_read_as_it_was_written(one: Mark) -> None:
    assert read_mark(write_mark(one) + b"whatever comes behind it") == one


@given(MARKS, MARKS, st.data())
def test_a_mark_that_was_not_written_to_its_end_is_none(old: Mark, new: Mark, data: st.DataObject) -> None:
    before, after = write_mark(old), write_mark(new)
    for earlier in (before, bytes(len(before))):
        cut = data.draw(st.integers(0, len(after)))
        assert read_mark(after[:cut] + earlier[cut:]) in (None, old, new)
        assert read_mark(earlier[:cut]) in (None, old)


def test_an_empty_slot_has_no_mark() -> None:
    assert read_mark(b"") is None
    assert read_mark(bytes(4096)) is None


@pytest.mark.parametrize(
    ("marks", "begun", "slot"),
    [
        ([None, None], None, 0),
        ([mark(1), None], None, 1),
        ([None, mark(1)], None, 0),
        ([mark(1), mark(2)], None, 0),
        ([mark(3), mark(2)], None, 1),
        ([mark(3), mark(2), mark(1)], None, 2),
        ([mark(3), mark(2, rank=1)], None, 1),
        ([mark(3, rank=1), mark(2)], None, 0),
        ([mark(3, world=4), mark(2)], None, 0),
        ([mark(1), mark(2)], Begun(2, (1, 20)), 0),
        ([mark(1), mark(2)], Begun(2, (1, 10)), 1),
        ([mark(3, generation=2), mark(2)], Begun(2, (1, 20)), 1),
        ([mark(3, generation=2), mark(2)], Begun(2, (1, 10)), 1),
        ([mark(1), mark(2)], Begun(2, None), 0),
    ],
)
def test_what_is_overwritten_is_what_can_be_spared(marks: list[Mark | None], begun: Begun | None, slot: int) -> None:
    assert slot_to_write(marks, 0, 2, begun) == slot


@pytest.mark.parametrize(
    ("moments", "newest"),
    [
        ([[(1, 3), (1, 4)]], (1, 4)),
        ([[(1, 3), (1, 4)], [(1, 4), (1, 3)]], (1, 4)),
        ([[(1, 3), (1, 4)], [(1, 3)]], (1, 3)),
        ([[(1, 4), (1, 5)], [(1, 3), (1, 4)]], (1, 4)),
        ([[(1, 5), (1, 6)], [(1, 3), (1, 4)]], None),
        ([[(1, 4), (2, 5)], [(1, 4), (1, 5)]], (1, 4)),
        ([[(1, 9), (2, 3)], [(1, 9), (2, 3)]], (2, 3)),
        ([[(1, 5)], []], None),
        ([[]], None),
        ([], None),
    ],
)
def test_a_moment_counts_if_all_have_it(moments: list[list[Moment]], newest: Moment | None) -> None:
    assert newest_common(moments) == newest


def test_what_an_earlier_job_has_left_is_older_than_all_of_this_one() -> None:
    assert mark(9, generation=70).of_earlier_job().moment < mark(1, generation=1).moment
    assert mark(1, generation=2).of_earlier_job().moment < mark(1, generation=3).of_earlier_job().moment


@given(st.integers(0, 10_000), st.lists(st.integers(0, 10_000)))
def test_parts_lie_behind_the_head_on_boundaries_and_apart(head: int, sizes: list[int]) -> None:
    places, end = place_parts(head, sizes)
    last = head
    for place, size in zip(places, sizes, strict=True):
        assert place >= last
        assert place % BOUNDARY == 0
        last = place + size
    assert end == last
