"""Words for faults, alone and in files of them: what is written is read back, and what is wrong is named with its line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.chaos.faults import FILL, KILL, KINDS, LASTING, PREEMPT, RANK, SHAPES, SLOW, Fault, kinds_of, read_fault, text_of
from rallypoint.chaos.schedule import Entry, read_schedule, schedule_text
from rallypoint.errors import UsageError

NAMES = st.text("abcz019-._", min_size=1).filter(lambda name: name not in ("for", "to", "with", "now", "of"))
WORDS = ("kill", "stop", "slow", "rank", "node", "agent", "of", "for", "to", "with", "now", "3", "8s", "50%", "2G")
MILLISECONDS = st.integers(1, 24 * 3_600_000)


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    kind = draw(st.sampled_from(KINDS))
    what = draw(st.sampled_from(SHAPES[kind]))
    return Fault(
        kind,
        what,
        str(draw(st.integers(0, 99_999_999))) if what == RANK else draw(NAMES),
        for_s=draw(MILLISECONDS) / 1000 if kind in LASTING else 0.0,
        percent=draw(st.integers(1, 99)) if kind == SLOW else 0,
        size=draw(st.integers(0, 1 << 60)) if kind == FILL else 0,
        at_once=kind == PREEMPT and draw(st.booleans()),
    )


schedules = st.lists(st.tuples(st.integers(0, 10**9), faults())).map(
    lambda found: tuple(Entry(at / 1000, fault) for at, fault in sorted(found, key=lambda one: one[0]))
)


@given(faults())
def test_a_fault_is_read_as_it_is_written(fault: Fault) -> None:
    assert read_fault(text_of(fault)) == fault


@given(schedules)
def test_a_schedule_is_read_as_it_is_written(entries: tuple[Entry, ...]) -> None:
    text = schedule_text(entries)
    if entries:
        assert tuple(entry.replace(line=0) for entry in read_schedule(text, "drill")) == entries
        assert [entry.line for entry in read_schedule(text, "drill")] == list(range(1, len(entries) + 1))


@given(st.text() | st.lists(st.sampled_from(WORDS)).map(" ".join))
def test_any_other_words_are_refused_by_a_value_error_alone(text: str) -> None:
    try:
        fault = read_fault(text)
    except ValueError:
        return
    assert read_fault(text_of(fault)) == fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill rank 03", Fault(KILL, RANK, "3")),
        ("kill agent of node host-1", Fault(KILL, "agent", "host-1")),
        ("stop node 1 for 1m30s", Fault("stop", "node", "1", for_s=90.0)),
        ("slow rank 0 for 2s to 50", Fault(SLOW, RANK, "0", for_s=2.0, percent=50)),
        ("fill disk of node 0 with 2G for 0.5s", Fault(FILL, "disk", "0", for_s=0.5, size=2 << 30)),
        ("preempt node 1 now", Fault(PREEMPT, "node", "1", at_once=True)),
    ],
)
def test_what_people_write(text: str, fault: Fault) -> None:
    assert read_fault(text) == fault


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "'' is no fault; there are kill, stop"),
        ("pause rank 3", "'pause' is no fault"),
        ("kill", "'nothing' is nobody to do that to; it is written so: kill rank 3"),
        ("kill rank", "it does not say which rank"),
        ("kill rank x", "'x' is no rank"),
        ("kill agent 1", "'agent 1' is nobody to do that to"),
        ("kill disk of node 1", "a disk is nothing to kill"),
        ("kill rank 3 for 8s", "'for' is not understood"),
        ("stop rank 3", "it does not say for how long; it is written so: stop rank 3 for 8s"),
        ("stop rank 3 for 8", "'8' is no length of time"),
        ("stop rank 3 for 8s for 9s", "'for' stands there twice"),
        ("stop rank 3 for 25h", "25h is too long"),
        ("stop rank 3 for 0.0001s", "0s is too long"),
        ("slow rank 3 for 8s", "it does not say how slow"),
        ("slow rank 3 to 100% for 8s", "'100%' is no share"),
        ("fill memory of node 0 with lots for 8s", "'lots' is no size"),
        ("cut rank 3 for 8s", "a rank is nothing to cut"),
    ],
)
def test_what_is_wrong_is_said(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        read_fault(text)
    assert error in str(raised.value)


def test_kinds_are_in_one_order_whoever_names_them() -> None:
    assert kinds_of(["stop", "kill", "stop"]) == ("kill", "stop")
    with pytest.raises(ValueError, match="'kil' is no fault; there are kill, stop"):
        kinds_of(["kil"])


def test_a_file_with_comments_and_empty_lines() -> None:
    text = "# before the first checkpoint\n\n+30s  kill rank 3   # that one\n+1m\tstop node 1 for 8s\n"
    assert [(entry.line, entry.at_s, text_of(entry.fault)) for entry in read_schedule(text, "drill.txt")] == [
        (3, 30.0, "kill rank 3"),
        (4, 60.0, "stop node 1 for 8s"),
    ]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "drill.txt names no fault; a line of it is: +30s kill rank 3"),
        ("30s kill rank 3", "drill.txt, line 1: '30s' is no time after the start, as +30s and +1m30s are"),
        ("+30 kill rank 3", "drill.txt, line 1: '30' is no length of time"),
        ("+30s", "drill.txt, line 1: '' is no fault"),
        ("\n+1m kill rank 3\n+20s kill rank 2", "line 3: +20s is before line 2, and all times count from the start"),
        ("+1s kill rank x\n+2s kill rank 1\n+3s stop rank 1", "line 1: 'x' is no rank; it is written so: "),
        ("+1s kill rank x\n+2s kill rank 1\n+3s stop rank 1", "; drill.txt, line 3: it does not say for how long"),
        ("+1s x\n" * 20, "; and 12 lines more"),
        ("\n" * 100_001, "has more than 100000 lines"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_wrong_is_said_with_its_line(text: str, error: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_schedule(text, "drill.txt")
    assert error in str(raised.value)
