"""What the live screen knows after each look, and the rows that it makes of that."""

from __future__ import annotations

import pytest
from tests.tui.recorded import HERE, job, look, node, worker

from rallypoint.inspection.view import JobView, job_of
from rallypoint.tui import model
from rallypoint.tui.model import BAD, DIM, ORDERS, PLAIN, WARN, Order, Row, Watch

BY_RANK, BY_STEP = ORDERS[:2]


def one_worker(step: int | None = None, cpu_s: float | None = None, pid: int = 7) -> JobView:
    return job_of([node(0, [worker(0, 0, 0.0).replace(step=step, cpu_s=cpu_s, pid=pid)])])


@pytest.mark.parametrize(
    ("steps", "rate"),
    [
        ([5], None),
        ([5, 15], 10.0),
        ([5, 15, 25, 35], 10.0),
        ([None, None], None),
        ([5, 5, 5], None),  # not yet known: it may be a slow one
        ([1, 1, 1, 1, 2, 2, 2, 2, 3], 0.25),  # one step in four looks is no zero between two steps
        ([1, 1, 1, 1, 2, 2, 2], 0.25),
        ([1, 2, 3, 3, 3, 3, 3, 3], 2 / 7),  # it has got stuck
        ([100, 110, 50, 60], 10.0),  # it went back to a checkpoint
        (list(range(0, 200, 10)), 10.0),
    ],
)
def test_the_rate_is_taken_from_the_changes_of_the_step(steps: list[int | None], rate: float | None) -> None:
    (row,) = model.rows_of(look([one_worker(step) for step in steps]), {}, HERE)
    assert row.rate == (None if rate is None else pytest.approx(rate))


@pytest.mark.parametrize(
    ("cpu_s", "share"),
    [([1.0], None), ([1.0, 1.5], 0.5), ([1.0, 1.5, 5.5], 4.0), ([None, 1.0], None), ([2.0, None], None), ([2.0, 1.0], 0.0)],
)
def test_the_processor_share_is_that_between_two_looks(cpu_s: list[float | None], share: float | None) -> None:
    (row,) = model.rows_of(look([one_worker(cpu_s=one) for one in cpu_s]), {}, HERE)
    assert row.cpu_share == share


def test_another_process_in_the_place_of_a_rank_begins_anew() -> None:
    (row,) = model.rows_of(look([one_worker(5, 100.0, pid=7), one_worker(15, 1.0, pid=8)]), {}, HERE)
    assert (row.rate, row.cpu_share, row.pid) == (None, None, 8)


def test_a_row_for_each_worker_by_rank_and_for_each_node_without() -> None:
    nodes = [
        node(1, [worker(2, 0, 0.0), worker(3, 1, 0.0)]),
        node(0, [worker(0, 0, 0.0), worker(1, 1, 0.0)]),
        node(7, [], generation=0, node_rank=None, phase="waiting"),
    ]
    rows = model.rows_of(look([job_of(nodes, ["host-8", "host-8"])]), {}, HERE)
    assert [(row.rank, row.node, row.state, row.mood) for row in rows] == [
        (0, "0 host-0", "running", PLAIN),
        (1, "0 host-0", "running", PLAIN),
        (2, "1 host-1", "running", PLAIN),
        (3, "1 host-1", "running", PLAIN),
        (None, "- host-7", "spare", DIM),
        (None, "? host-8", "no answer", BAD),
        (None, "? host-8", "no answer", BAD),
    ]
    assert len({row.key for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("changes", "phase", "state", "mood"),
    [
        ({"state": "sleeping", "doing": "running"}, "running", "sleeping", PLAIN),
        ({"doing": "save"}, "running", "running (save)", PLAIN),
        ({"state": "stopped"}, "running", "stopped", BAD),
        ({"state": "gone"}, "running", "gone", BAD),
        ({"step": 50}, "running", "behind, running", WARN),
        ({}, "stopping", "stopping, running", DIM),
    ],
)
def test_how_a_worker_is(changes: dict[str, object], phase: str, state: str, mood: str) -> None:
    workers = [worker(rank, rank, 0.0, **(changes if rank == 0 else {})) for rank in range(3)]
    row = model.rows_of(look([job_of([node(0, workers, phase=phase)])]), {}, HERE)[0]
    assert (row.state, row.mood) == (state, mood)


def test_gpus_are_those_of_processes_on_this_machine() -> None:
    """Another host may have a process of the same number."""
    gpus = {4000: (90.0, 5), 4002: (10.0, 6)}
    assert [row.gpu for row in model.rows_of(look([job()]), gpus, HERE)] == [(90.0, 5), None, None, None, None, None]


def row(rank: int | None, node: str = "0 host-a", state: str = "running", **more: object) -> Row:
    return Row(("n", -1 if rank is None else rank), node, state, rank=rank, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("order", "is_reversed", "ranks"),
    [
        (BY_RANK, False, [0, 1, 2, None]),
        (BY_RANK, True, [2, 1, 0, None]),
        (BY_STEP, False, [2, 0, 1, None]),  # whose step is not known comes last, either way
        (BY_STEP, True, [0, 2, 1, None]),
        (next(order for order in ORDERS if order.title == "MEMORY"), False, [1, 0, 2, None]),
    ],
)
def test_rows_are_sorted(order: Order, is_reversed: bool, ranks: list[int | None]) -> None:
    rows = [row(0, step=20, memory_bytes=2), row(1, memory_bytes=3), row(2, step=10, memory_bytes=1), row(None)]
    assert [one.rank for one in model.arranged(rows, order, is_reversed)] == ranks


@pytest.mark.parametrize(
    ("wanted", "ranks"),
    [
        ("", [0, 1, 10, None]),
        ("1", [1]),
        ("1-10", [1, 10]),
        ("host-B", [10]),
        ("behind", [1]),
        ("host-a 0-5 running", [0, 1]),
        ("spare", [None]),
        ("nothing", []),
    ],
)
def test_rows_are_found_by_words(wanted: str, ranks: list[int | None]) -> None:
    rows = [row(0), row(1, state="behind, running"), row(10, "1 host-b"), row(None, "- host-c", "spare")]
    assert [one.rank for one in model.arranged(rows, BY_RANK, wanted=wanted)] == ranks


def test_a_job_is_over_when_it_was_not_found_for_a_while() -> None:
    """A launcher that is being replaced is no end, nor is one that does not answer."""
    watch = look([job()])
    for _ in range(model.LOOKS_WITHOUT_JOB - 1):
        watch = model.missed(watch, "no job runs here")
    assert not model.is_over(watch)
    assert not model.is_over(model.unanswered(watch, "process 7 does not answer"))
    assert not model.is_over(model.missed(model.seen(watch, job(), 9.0), "no job runs here"))
    assert model.is_over(model.missed(watch, "no job runs here"))
    assert watch.job == job()


def test_what_a_row_stands_for() -> None:
    view = job()
    found, chosen = model.find_worker(view, ("id-1", 1))
    assert found is view.nodes[1]
    assert chosen is view.nodes[1].workers[1]
    assert model.find_worker(view, ("id-1", 5)) == (view.nodes[1], None)
    assert model.find_worker(view, ("id-9", 0)) == (None, None)
    assert model.rows_of(Watch("tri"), {}, HERE) == []
