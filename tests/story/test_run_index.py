"""Which runs there were: noted as they begin, found without a path, and never in anybody's way."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from tests.story.agent_log import BEGIN_MS, AgentLog, clean_run

from rallypoint.cli.explain import explain_main
from rallypoint.story import run_index


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def run_in(folder: Path) -> Path:
    return clean_run().write(folder)


def links(state: Path) -> list[Path]:
    return sorted((state / "rallypoint" / "runs" / os.uname().nodename).iterdir())


def test_the_newest_run_that_has_its_events_is_found(tmp_path: Path, state: Path) -> None:
    assert run_index.newest() == ""
    first, second, third = (run_in(tmp_path / name) for name in ("a_1", "b_2", "c_3"))
    for folder in (first, second, third):
        run_index.note(str(folder))
    assert run_index.newest() == str(third)
    (third / "events.jsonl").unlink()
    run_index.forget(str(second))
    assert run_index.newest() == str(first)
    assert [link.readlink() for link in links(state)] == [first, third]


def test_it_is_private_and_bounded(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_index, "MOST_RUNS", 3)
    for number in range(5):
        run_index.note(str(tmp_path / str(number)))
    kept = links(state)
    assert [link.readlink().name for link in kept] == ["2", "3", "4"]
    assert stat.S_IMODE((state / "rallypoint").stat().st_mode) == 0o700
    assert stat.S_IMODE(kept[0].parent.stat().st_mode) == 0o700


def test_runs_of_other_hosts_in_the_same_home_are_theirs(tmp_path: Path, state: Path) -> None:
    other = state / "rallypoint" / "runs" / "elsewhere"
    other.mkdir(parents=True)
    (other / "09999999999999999999_x").symlink_to(run_in(tmp_path / "a_1"))
    assert run_index.newest() == ""


@pytest.mark.parametrize("home", ["", "relative"])
def test_without_a_home_nothing_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", home)
    monkeypatch.setenv("HOME", "")
    run_index.note(str(tmp_path))
    assert run_index.newest() == ""
    assert os.listdir(tmp_path) == ["tmp"]


def test_the_home_is_where_it_is_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    run_index.note(str(tmp_path / "x"))
    assert len(links(tmp_path / ".local" / "state")) == 1


@pytest.mark.root
def test_root_leaves_nothing_in_the_home_of_somebody_else(tmp_path: Path, state: Path) -> None:
    state.mkdir()
    os.chown(state, 12345, -1)
    run_index.note(str(tmp_path))
    assert os.listdir(state) == []


def test_explain_without_a_path(tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the other nodes of that run which log beside it, and without older runs there."""
    assert explain_main([]) == 2
    assert capsys.readouterr().err.startswith("rallypoint explain: error: no run of yours on this host is on record; write ")
    AgentLog("old", run_id="earlier", begin_ms=BEGIN_MS - 10_000_000).write(tmp_path / "logs" / "earlier_1")
    AgentLog("beta").write(tmp_path / "logs" / "job_2")
    folder = run_in(tmp_path / "logs" / "job_1")
    run_index.note(str(folder))
    assert explain_main([]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("run job ")
    assert "2 agents: alpha, beta" in text
    assert f"this is your newest run on this host, in {folder}" in text
