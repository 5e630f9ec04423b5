"""Links in log folders: to the newest run, to its newest attempt, and to workers by global rank."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.base import defaults, report
from rallypoint.output.log_links import link_maker
from rallypoint.output.log_specs import DefaultLogsSpecs, Std
from rallypoint.story.event_logs import select


def envs(first_rank: int = 0, run_id: str = "job", restart_count: int = 0) -> dict[int, dict[str, str]]:
    """Of two workers."""
    shared = {defaults.ENV_RUN_ID: run_id, defaults.ENV_RESTART_COUNT: str(restart_count)}
    return {local: {**shared, defaults.ENV_RANK: str(first_rank + local)} for local in range(2)}


def start(specs: DefaultLogsSpecs, first_rank: int = 0, restart_count: int = 0) -> Path:
    """As an agent does that starts workers: the folder of the run, with its links."""
    specs.reify(envs(first_rank, restart_count=restart_count))
    specs.link()
    assert link_maker.flush(60.0)
    return Path(specs.run_log_dir)


@pytest.fixture
def said() -> Iterator[list[tuple[int, str]]]:
    lines: list[tuple[int, str]] = []
    report.set_sink(lambda level, text: lines.append((level, text)), report.DEBUG)
    yield lines
    report.set_sink(None)


def test_the_newest_attempt_and_each_rank_are_found(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), redirects=Std.ALL)
    run = start(specs, first_rank=6)
    start(specs, first_rank=8, restart_count=1)
    assert (tmp_path / "logs/latest").readlink() == Path(run.name)
    assert (run / "latest").readlink() == Path("attempt_1")
    for attempt, ranks in (("attempt_0", (6, 7)), ("attempt_1", (8, 9))):
        links = {path.name: path.readlink() for path in (run / attempt / "ranks").iterdir()}
        assert links == {f"rank_{rank}": Path("..", str(local)) for local, rank in enumerate(ranks)}
    assert (tmp_path / "logs/latest/latest/ranks/rank_9").resolve() == run / "attempt_1" / "1"
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [run.name, "latest"]


def test_a_restart_of_an_older_run_does_not_make_it_the_newest(tmp_path: Path) -> None:
    older, newer = (DefaultLogsSpecs(log_dir=str(tmp_path / "logs")) for _ in range(2))
    start(older)
    newest = start(newer)
    start(older, restart_count=1)
    assert (tmp_path / "logs/latest").resolve() == newest


def test_links_may_be_moved_and_the_story_of_a_log_folder_names_the_run_itself(tmp_path: Path) -> None:
    run = start(DefaultLogsSpecs(log_dir=str(tmp_path / "logs")))
    event = '{"name": "rallypoint.run.started", "source": "AGENT", "timestamp": 1, "metadata": {"t": 0.0, "run_id": "job"}}\n'
    (run / "events.jsonl").write_text(event)
    (tmp_path / "logs").rename(tmp_path / "moved")
    assert [log.path for log in select([str(tmp_path / "moved")]).logs] == [str(tmp_path / "moved" / run.name / "events.jsonl")]
    assert len(select([str(tmp_path / "moved/latest")]).logs) == 1


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_somebody_keeps_under_that_name_stays(tmp_path: Path, is_folder: bool) -> None:
    own = tmp_path / "logs" / "latest"
    own.parent.mkdir()
    own.mkdir() if is_folder else own.write_text("mine")
    run = start(DefaultLogsSpecs(log_dir=str(own.parent)))
    assert own.is_dir() if is_folder else own.read_text() == "mine"
    assert sorted(path.name for path in own.parent.iterdir()) == [run.name, "latest"]


def test_where_there_can_be_no_links_nothing_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[tuple[int, str]]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")  # as vfat does

    monkeypatch.setattr(os, "symlink", refuse)
    specs = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"))
    run = start(specs)
    shutil.rmtree(run)
    specs.link()
    assert link_maker.flush(60.0)
    assert {level for level, _ in said} == {report.DEBUG}


def test_a_temporary_folder_goes_with_its_links(private_tmpdir: Path) -> None:
    specs = DefaultLogsSpecs(tee=Std.ALL)
    run = start(specs)
    assert (run / "latest/ranks/rank_1").is_dir()
    assert not (run.parent / "latest").is_symlink(), "there is one run in it"
    assert specs.discard_if_empty()
    assert list(private_tmpdir.iterdir()) == []
