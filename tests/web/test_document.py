"""What the page is told: rates by two looks, who is behind, bounds on everything."""

from __future__ import annotations

import json

import pytest
from tests.web.made_jobs import make_node, make_spans, make_worker

from rallypoint.base.json_text import to_json
from rallypoint.inspection.view import JobView, job_of
from rallypoint.story.phases import Ledger
from rallypoint.web import document
from rallypoint.web.document import COLUMNS, Looks, describe, look, spans, tidy_log


def job_at(step: int | None, cpu_s: float = 0.0, pid: int = 5) -> JobView:
    return job_of([make_node(0, (make_worker(0, step).replace(cpu_s=cpu_s, pid=pid),))])


def row(job: JobView, looks: Looks) -> dict[str, object]:
    [values] = describe(job, job.nodes[0], looks, (), 0.0)["nodes"][0]["workers"]
    return dict(zip(COLUMNS, values, strict=True))


def test_how_fast_it_goes_takes_two_looks() -> None:
    first = look(job_at(100, 7.0), None, 50.0)
    assert (row(job_at(100), first)["rate"], row(job_at(100), first)["cpu"]) == (None, None)
    second = look(job_at(104, 7.5), first, 51.0)
    shown = row(job_at(104), second)
    assert (shown["rate"], shown["cpu"], shown["step"]) == (4.0, 0.5, 104)


def test_steps_are_counted_over_seconds_and_the_past_is_forgotten() -> None:
    """A step may take longer than the time between two looks; and what was long ago says nothing about now."""
    looks, now = look(job_at(0), None, 0.0), 0.0
    rates = []
    for second in range(1, 61):
        now = float(second)
        job = job_at(second // 4 if second <= 30 else 7)
        looks = look(job, looks, now)
        rates.append(row(job, looks)["rate"])
    assert all(isinstance(rate, float) and 0.15 < rate < 0.35 for rate in rates[12:30])
    assert rates[-1] == 0.0


def test_a_new_process_begins_anew() -> None:
    first = look(job_at(100, 50.0), None, 0.0)
    restarted = job_at(3, 0.1, pid=6)
    assert row(restarted, look(restarted, first, 1.0))["rate"] is None
    went_back = job_at(3, 0.1)
    shown = row(went_back, look(went_back, first, 1.0))
    assert (shown["rate"], shown["cpu"]) == (None, None)


def test_who_is_behind_by_more_than_the_looks_differ() -> None:
    def behind(lag: int, rate: int) -> list[int]:
        def job(at: int) -> JobView:
            workers = tuple(make_worker(rank, 1000 + rate * at - (lag if rank == 3 else 0)) for rank in range(4))
            return job_of([make_node(0, workers)])

        looks = look(job(1), look(job(0), None, 0.0), 1.0)
        return list(describe(job(1), job(1).nodes[0], looks, (), 1.0)["behind"])

    assert behind(lag=2, rate=0) == []
    assert behind(lag=5, rate=1) == [3]
    assert behind(lag=5, rate=20) == []  # a quarter of a second
    assert behind(lag=50, rate=20) == [3]


def test_the_document_is_json_and_tells_the_job() -> None:
    job = job_of([make_node(number, (make_worker(number, 7),), nodes=3, world_size=2) for number in range(2)], ["node-2"])
    told = describe(job, job.nodes[1], look(job, None, 0.0), make_spans(0.0), 0.0)
    assert json.loads(to_json(told)) == told
    assert (told["job"], told["phase"], told["step"], told["generation"], told["node_count"]) == ("job-7", "running", 7, 2, 2)
    assert (told["silent"], told["silent_count"], told["own"]) == (["node-2"], 1, "node-1")
    assert told["goodput"] == 0.6
    assert told["history"] == [[60, "restart", "rank 1 (pid 7) failed: exited with code 3"]]
    assert [(span["phase"], span["ago_s"], span["lasted_s"], span["kept_s"]) for span in told["timeline"]] == [
        ("starting", 100, 5, None), ("running", 95, 30, 0), ("waiting", 65, 5, None), ("running", 60, 60, None),
    ]  # fmt: skip


def test_there_is_a_bound_on_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "WORKERS_LISTED", 5)
    monkeypatch.setattr(document, "NODES_LISTED", 2)
    job = job_of([make_node(number, tuple(make_worker(4 * number + rank) for rank in range(4))) for number in range(3)])
    told = describe(job, job.nodes[0], look(job, None, 0.0), (), 0.0)
    assert [(node["count"], len(node["workers"])) for node in told["nodes"]] == [(4, 4), (4, 1)]
    assert told["node_count"] == 3


def test_a_thousand_ranks_are_a_small_document() -> None:
    job = job_of([make_node(number, tuple(make_worker(8 * number + rank, 123456) for rank in range(8))) for number in range(125)])
    looks = look(job, look(job, None, 0.0), 1.0)
    assert len(to_json(describe(job, job.nodes[0], looks, make_spans(0.0), 0.0))) < 150_000


def test_no_job_and_one_that_has_told_nothing_yet() -> None:
    own = make_node(0, phase="waiting", node_rank=None, generation=0, seconds={}, history=())
    for job in (job_of([own]), job_of([])):
        told = describe(job, own, look(job, None, 0.0), (), 0.0)
        assert (told["job"], told["step"], told["rate"], told["goodput"], told["behind"]) == ("job-7", None, None, None, [])


def test_the_present_phase_comes_last() -> None:
    ledger = Ledger("running", 30.0, {})
    assert [(one.phase, one.ended_at) for one in spans([document.Span("starting", 0.0, 30.0, 0)], ledger, 1, 90.0)] == [
        ("starting", 30.0), ("running", 90.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("plain\n", "plain\n"),
        ("\x1b[1;31mred\x1b[0m and \x1b]8;;http://x\x07link\x1b]8;;\x07\n", "red and link\n"),
        ("10%\r50%\r100%\ndone\r\n", "100%\ndone\n"),
        ("<script>alert(1)</script>", "<script>alert(1)</script>"),
        ("x" * 20_000, "x" * 10_000 + " ..."),
    ],
)
def test_a_log_as_a_terminal_shows_it(written: str, shown: str) -> None:
    assert tidy_log(written) == shown
