"""Where workers stand, as it is told: what there is to read, which ranks there are not, and what is taken for it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.json_text import to_json
from rallypoint.base.text import Run, runs
from rallypoint.inspection.stack_view import (
    BY_KERNEL,
    BY_PY_SPY,
    BY_SIGNAL,
    ProcessDump,
    StacksView,
    WorkerDump,
    grouped,
    lines_of,
    missing,
    read_dump,
    shortened,
    stacks_view,
)
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


PYTHON = 'Thread 0x1 (most recent call first):\n  File "train.py", line 7 in step\n  File "train.py", line 20 in main\n'
PY_SPY = """\
Process 5: python train.py
Python v3.11.2 (/usr/bin/python3)

Thread 5 (idle): "MainThread"
    step (train.py:7)
    main (train.py:20)
Thread 9 (active): "loader"
    read (data.py:3)
"""


def test_each_different_stack_is_told_once_whoever_has_told_it() -> None:
    kernel = ProcessDump(7, BY_KERNEL, "thread 7 (python3 (a)): asleep in futex\nthread 8 (x): running", why="py-spy is missing")
    workers = [
        WorkerDump("a-job", "n0", 0, 4, (ProcessDump(4, BY_SIGNAL, PYTHON),)),
        WorkerDump("a-job", "n1", 1, 5, (ProcessDump(5, BY_PY_SPY, PY_SPY),)),
        WorkerDump("a-job", "n1", 2, 6, (), "process 6 is stopped"),
        WorkerDump("a-job", "n2", 3, 7, (kernel,)),
    ]
    assert grouped(StacksView(tuple(workers), ("n3",), "only some were asked")) == [
        "no answer from n3",
        "only some were asked",
        "rank 2: process 6 is stopped",
        "",
        "ranks 0-1, main thread:",
        "  step (train.py:7)",
        "  main (train.py:20)",
        "",
        "rank 3, main thread:",
        "  no Python stack: py-spy is missing",
        "  in the kernel: asleep in futex",
        "",
        "rank 1, another thread:",
        "  read (data.py:3)",
    ]
