"""Which agents are asked for a job, and the end of a log as it is in its file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.tui.recorded import node

from rallypoint.errors import RallypointError, UsageError
from rallypoint.inspection import client
from rallypoint.inspection.client import Agent
from rallypoint.inspection.log_ends import END_BYTES, LogEnd, LogWish
from rallypoint.inspection.view import JobView, job_of
from rallypoint.tui import model
from rallypoint.tui.lines import LogPlace, Question
from rallypoint.tui.model import Watch
from rallypoint.tui.source import JobSource, Tail


def place(folder: Path) -> LogPlace:
    return LogPlace("rank 3", (str(folder / "stdout.log"), str(folder / "stderr.log")), "there are none")


def test_the_log_that_was_written_last_comes_first(tmp_path: Path) -> None:
    source = JobSource("")
    assert source.tail(place(tmp_path), 0, 10) == Tail("rank 3", ("there are none",), is_note=True)
    out, err = tmp_path / "stdout.log", tmp_path / "stderr.log"
    out.write_text("one\ntwo\n")
    err.write_text("")
    os.utime(out, (1, 1))
    assert source.tail(place(tmp_path), 0, 10).texts == ("one", "two")  # the other is newer, and empty
    err.write_text("a warning\n")
    first, second = source.tail(place(tmp_path), 0, 10), source.tail(place(tmp_path), 1, 10)
    assert (first.texts, second.texts) == (("a warning",), ("one", "two"))
    assert first.title.startswith("rank 3: stderr.log, 10 B, written ")


def test_of_a_long_log_only_the_end_is_read(tmp_path: Path) -> None:
    (tmp_path / "stdout.log").write_text("".join(f"line {number:06}\n" for number in range(20_000)))
    tail = JobSource("").tail(place(tmp_path), 0, 100_000)
    assert tail.texts[-1] == "line 019999"
    assert all(len(text) == len("line 000000") for text in tail.texts)
    assert len(tail.texts) <= END_BYTES / 12


def test_the_log_of_a_rank_on_another_host_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it lies on a disk that is shared."""
    Machine(monkeypatch, a="tri")
    source, elsewhere = JobSource("tri"), place(tmp_path).replace(rank=3, node_id="id-1")
    asked: list[tuple[str, LogWish]] = []
    told = LogEnd("/there/stderr.log", 10, 2.0, False, "one\ntwo\n")

    def log_end(_: client.LocalJob, node_id: str, wish: LogWish) -> LogEnd:
        asked.append((node_id, wish))
        if told.error == "gone":
            raise RallypointError("its node has not sent it within 3 s")
        return told

    monkeypatch.setattr(client.LocalJob, "log_end", log_end)
    found = source.tail(elsewhere, 1, 10)
    assert (found.title, found.texts) == ("rank 3: stderr.log, 10 B, written 2 s ago", ("one", "two"))
    assert asked == [("id-1", LogWish(3, choice=1))]
    told = LogEnd(error="no file has it")
    assert source.tail(elsewhere, 0, 10) == Tail("rank 3", ("no file has it",), is_note=True)
    told = LogEnd(error="gone")
    why = "there are none, and its node was asked in vain: its node has not sent it within 3 s"
    assert source.tail(elsewhere, 0, 10).texts == (why,)
    (tmp_path / "stdout.log").write_text("shared\n")
    assert source.tail(elsewhere, 0, 10).texts == ("shared",)
    assert len(asked) == 3


class Machine:
    """The agents of a machine by their sockets, with their jobs; None for one that does not answer. Notes who is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **jobs: str | None) -> None:
        self.jobs: dict[str, str | None] = jobs
        self.asked: list[str] = []
        self.told: list[str] = []
        monkeypatch.setattr(client, "list_agents", self.list_agents)
        monkeypatch.setattr(client.LocalJob, "status", self.status)

        def tell(job: client.LocalJob, what: str, **_: object) -> str:
            self.told += [f"{what} {agent.node.job}" for agent in job.agents]
            return "done"

        monkeypatch.setattr(client.LocalJob, "_tell", tell)

    def list_agents(self, paths: Sequence[str] | None = None) -> tuple[list[Agent], list[str]]:
        chosen = [path for path in (self.jobs if paths is None else paths) if path in self.jobs]
        self.asked += chosen
        agents = [Agent(path, node(0, []).replace(job=job)) for path in chosen if (job := self.jobs[path])]
        return agents, [f"{path}: it does not answer" for path in chosen if self.jobs[path] is None]

    @staticmethod
    def status(job: client.LocalJob, patience_s: float) -> JobView:
        return job_of([agent.node for agent in job.agents])


def test_one_agent_that_answers_is_asked_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may be stopped, and would be waited for at every look."""
    machine, source = Machine(monkeypatch, a="tri", b="tri", c="other"), JobSource("tr")
    watch = source.look(Watch(""))
    assert (watch.name, machine.asked) == ("tri", ["a", "b", "c"])
    machine.jobs["b"] = None
    watch = source.look(watch)
    assert (watch.trouble, machine.asked[3:]) == ("", ["a"])
    del machine.jobs["a"]
    watch = source.look(watch)
    assert (watch.trouble, watch.missing) == ("process b: it does not answer", 0)


def test_a_job_whose_name_begins_alike_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is it shown when the first has ended, nor stopped in its place."""
    machine, source = Machine(monkeypatch, a="tri", c="tri-2"), JobSource("tri")
    watch = source.look(Watch(""))
    assert source.ask(Question("", "stop")) == "done"
    del machine.jobs["a"]
    watch = source.look(watch)
    assert (watch.name, watch.missing) == ("tri", 1)
    with pytest.raises(UsageError, match="no job"):
        source.ask(Question("", "stop"))
    assert machine.told == ["stop tri"]
    assert not model.is_over(watch)


def test_which_job_is_meant_has_to_be_said_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, a="tri", c="other")
    assert JobSource("").look(Watch("")).trouble == "2 jobs run on this machine; name one of them: other, tri"
