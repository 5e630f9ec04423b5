"""Where workers stand, as it is told: what there is to read, which ranks there are not, and what is taken for it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.json_text import to_json
from rallypoint.base.text import Run, runs
from rallypoint.inspection.stack_view import ProcessDump, WorkerDump, lines_of, missing, read_dump, shortened, stacks_view
from rallypoint.inspection.view import to_document

RANKS = st.sets(st.integers(0, 30), max_size=12)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda one: st.lists(one) | st.dictionaries(st.sampled_from(["rank", "pid", "processes", "text", "job", "error"]), one),
)


@pytest.mark.parametrize(
    ("process", "lines"),
    [
        (ProcessDump(7, "socket", "a\nb", socket="/s"), ["=== process 7 at /s", "a", "b"]),
        (ProcessDump(7, "signal", "a", command="python x"), ["=== process 7 python x", "a"]),
        (ProcessDump(7, "signal", why="it is stopped"), ["=== process 7", "no stacks: it is stopped"]),
        (ProcessDump(7, "py-spy", "a"), ["=== process 7, by py-spy", "a"]),
        (
            ProcessDump(7, "kernel", "thread 7 (x): asleep", why="who knows"),
            ["=== process 7, as the kernel sees it; its Python stacks are not known: who knows", "thread 7 (x): asleep"],
        ),
    ],
)
def test_how_it_reads(process: ProcessDump, lines: list[str]) -> None:
    assert lines_of(process) == lines


@given(RANKS, RANKS)
def test_the_ranks_that_there_are_not(wanted: set[int], known: set[int]) -> None:
    assert missing(runs(wanted), runs(known)) == runs(wanted - known)


def test_no_range_is_too_large_to_be_compared() -> None:
    everything: Run = (0, 10**7)
    assert missing([everything], [(0, 3), (5, 5)]) == [(4, 4), (6, 10**7)]


def test_workers_are_in_the_order_of_their_ranks() -> None:
    seen = stacks_view([WorkerDump("", "", rank, 1) for rank in (3, None, 0)])
    assert [worker.rank for worker in seen.workers] == [None, 0, 3]


def test_texts_are_cut_where_there_is_no_room() -> None:
    worker = WorkerDump("", "", 0, 1, (ProcessDump(1, "socket", "x" * 100), ProcessDump(2, "socket", "short")))
    (cut,) = shortened([worker], 20)
    assert [one.text for one in cut.processes] == ["x" * 8 + "\n(cut short)", "short"]


def test_it_comes_back_as_it_was() -> None:
    processes = (ProcessDump(7, "signal", "a\n b", "python x", why=""), ProcessDump(8, "kernel", why="it has ended"))
    worker = WorkerDump("a-job", "a", 3, 7, processes, "one did not answer")
    assert read_dump(json.loads(to_json(to_document(worker)))) == worker


@given(ANYTHING)
def test_nothing_that_comes_does_worse_than_a_value_error(found: object) -> None:
    try:
        read_dump(found)
    except ValueError:
        return
