"""``rallypoint explain --follow``: what is told when, what is told once, and when it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.story.agent_log import BEGIN_MS, AgentLog

from rallypoint.cli.explain import _Reader, render
from rallypoint.cli.follow import LAST_WORD_S, SETTLED_S, Teller, is_over
from rallypoint.story.event_records import read_told
from rallypoint.story.story import Entry, EventLog, Kind, Present, Story, tell

HERE = os.uname().nodename


def entry(kind: str, at_ms: float = 0.0, **facts: Any) -> Entry:
    return Entry(at_ms, ("alpha",), kind, facts)


def story_of(*logs: AgentLog, present: Present | None = None) -> Story:
    read = [EventLog(str(number), tuple(map(read_told, log.lines))) for number, log in enumerate(logs)]
    return tell(read, present=present or Present())


def test_something_is_told_once_and_when_it_has_been_known_for_a_moment() -> None:
    teller, failed = Teller(), entry(Kind.FAILED, rank=1, pid=7, generation=1)
    assert teller.news([failed], 10.0, is_all=False) == []
    assert teller.news([failed], 10.0 + SETTLED_S, is_all=False) == [failed]
    later = entry(Kind.FAILED, rank=1, pid=7, generation=1, ranks=[1, 2])
    assert teller.news([later], 20.0, is_all=False) == []
    again = entry(Kind.FAILED, rank=1, pid=9, generation=2)
    assert teller.news([later, again], 30.0, is_all=False) == []
    assert teller.news([later, again], 30.0 + SETTLED_S, is_all=False) == [again]


def test_two_of_a_kind_are_both_told() -> None:
    teller, twice = Teller(), [entry(Kind.STOPPED, at_ms, why="scaled up", generation=1) for at_ms in (1.0, 2.0)]
    assert teller.news(twice[:1], 0.0, is_all=True) == twice[:1]
    assert teller.news(twice, 1.0, is_all=True) == twice[1:]


def test_a_generation_is_told_when_it_runs_and_silence_only_in_the_end() -> None:
    teller = Teller()
    formed, runs = entry(Kind.GENERATION, generation=1), entry(Kind.GENERATION, generation=1, ready_s=0.5)
    silent = entry(Kind.SILENT)
    teller.news([formed, silent], 0.0, is_all=False)
    assert teller.news([formed, silent], 10.0, is_all=False) == []
    assert teller.news([runs, silent], 10.0, is_all=False) == [runs]
    assert teller.news([runs, silent], 11.0, is_all=True) == [silent]


def open_log(hostname: str, pid: int = 7) -> AgentLog:
    log = AgentLog(hostname, pid=pid)
    log.run(1.0, 1)
    return log


def ended_log(hostname: str) -> AgentLog:
    log = open_log(hostname)
    log.end(10.0)
    return log


@pytest.mark.parametrize(
    ("logs", "running", "quiet_s", "over"),
    [
        ([ended_log(HERE)], [], 0.0, True),
        ([open_log(HERE)], [], 0.0, True),  # it was killed
        ([open_log(HERE)], [7], 1000.0, False),
        ([ended_log(HERE), open_log(HERE, pid=8)], [8], 1000.0, False),
        ([open_log("elsewhere")], [], 1000.0, False),
        ([ended_log("elsewhere")], [], 0.0, True),
        ([ended_log(HERE), open_log("elsewhere")], [], 0.0, False),
        ([ended_log(HERE), open_log("elsewhere")], [], LAST_WORD_S, True),  # it was lost
    ],
)
def test_it_is_over_when_nothing_more_can_come(logs: list[AgentLog], running: list[int], quiet_s: float, over: bool) -> None:
    present = Present(logs[0].begin_ms + 20_000, frozenset((HERE, pid) for pid in running))
    assert is_over(story_of(*logs, present=present).runs, quiet_s) == over


def test_the_head_of_a_live_run_tells_its_restarts() -> None:
    log = open_log(HERE)
    log.stop(4.0, "rank 1 failed", restarts=1)
    log.run(5.0, 2, restarts=1)
    story = story_of(log, present=Present(log.begin_ms + 7_200_000, frozenset({(HERE, 7)})))
    first, second, *_ = render(story).splitlines()
    assert first.endswith(" is still running")
    assert " for 2 h 0 min 0 s so far, 1 restart; goodput " in second


def test_it_stays_with_its_run_and_sees_who_joins(tmp_path: Path) -> None:
    open_log("alpha").write(tmp_path / "job_1")
    reader = _Reader([str(tmp_path)], show_all=False, note="")
    AgentLog("gamma", run_id="newer", begin_ms=BEGIN_MS + 500_000).write(tmp_path / "newer_1")
    AgentLog("beta", begin_ms=BEGIN_MS + 500).write(tmp_path / "job_2")
    for _ in range(2):
        reader.read_again()
        [story] = reader.read()
        assert (story.run_id, [run.node for run in story.runs]) == ("job", ["alpha", "beta"])


def test_it_ends_when_nobody_reads_it(tmp_path: Path) -> None:
    """As after ``| head``; of an agent elsewhere nobody knows whether it lives."""
    folder = open_log("elsewhere").write(tmp_path / "job_1")
    command = [sys.executable, "-m", "rallypoint", "explain", "--follow", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stderr is not None
        assert following.stdout.readline().startswith("run job ")
        while "generation 1" not in following.stdout.readline():
            pass
        following.stdout.close()
        assert following.wait(60) == 0
        assert following.stderr.read() == ""
