"""Which file each stream of each rank goes to, and that no run ever touches another one's logs."""

from __future__ import annotations

import os
import pickle
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.errors import UsageError
from rallypoint.output.log_specs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, check_log_dir, to_map

ENV_RUN_ID, ENV_RESTART_COUNT = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
NOBODY = 65534


def envs(count: int = 2, run_id: str = "job", restart_count: int = 0) -> dict[int, dict[str, str]]:
    return {rank: {ENV_RUN_ID: run_id, ENV_RESTART_COUNT: str(restart_count)} for rank in range(count)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", Std.NONE),
        ("1", Std.OUT),
        ("2", Std.ERR),
        ("3", Std.ALL),
        ("0:1", {0: Std.OUT}),
        ("0:1,1:2", {0: Std.OUT, 1: Std.ERR}),
        ("0:1,10:3,128:0", {0: Std.OUT, 10: Std.ALL, 128: Std.NONE}),
    ],
)
def test_streams_are_chosen_for_any_rank(text: str, expected: object) -> None:
    """P47: ranks of 10 and more can be named."""
    assert Std.from_str(text) == expected


@pytest.mark.parametrize(
    ("text", "culprit"),
    [("9", "'9'"), ("", "''"), ("x", "'x'"), ("4", "'4'"), ("0:9", "'9'"), ("a:1", "'a'"), ("-1:1", "'-1'"), ("0:1,2", "''"),
     ("0:1,", "''"), ("0:1:2", "'1:2'"), ("²:1", "'²'"), ("1" * 5000 + ":1", "is not a local rank")],
)  # fmt: skip
def test_bad_choice_is_refused_by_name(text: str, culprit: str) -> None:
    with pytest.raises(UsageError, match="redirects/tee") as caught:
        Std.from_str(text)
    assert culprit in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_choice_is_spread_over_the_ranks_that_there_are() -> None:
    assert to_map(Std.OUT, 2) == {0: Std.OUT, 1: Std.OUT}
    assert to_map({1: Std.ALL, 7: Std.OUT}, 3) == {0: Std.NONE, 1: Std.ALL, 2: Std.NONE}


def test_layout(tmp_path: Path) -> None:
    """P35: one folder a run and a folder for each group of workers in it."""
    specs = DefaultLogsSpecs(log_dir=str(tmp_path), redirects=Std.OUT, tee=Std.ERR)
    dest = specs.reify(envs())
    (run_dir,) = tmp_path.glob("job_*")
    attempt = run_dir / "attempt_0"
    assert specs.run_log_dir == str(run_dir)
    assert dest == LogsDest(
        stdouts={rank: str(attempt / str(rank) / "stdout.log") for rank in (0, 1)},
        stderrs={rank: str(attempt / str(rank) / "stderr.log") for rank in (0, 1)},
        tee_stdouts={},
        tee_stderrs={rank: str(attempt / str(rank) / "stderr.log") for rank in (0, 1)},
        error_files={rank: str(attempt / str(rank) / "error.json") for rank in (0, 1)},
        filtered_stdout=str(attempt / "filtered_stdout.log"),
        filtered_stderr=str(attempt / "filtered_stderr.log"),
    )
    assert sorted(entry.name for entry in attempt.iterdir()) == ["0", "1"]


def test_by_default_nothing_is_redirected(tmp_path: Path) -> None:
    dest = DefaultLogsSpecs(log_dir=str(tmp_path)).reify(envs())
    assert dest.stdouts == dest.stderrs == {0: "", 1: ""}
    assert dest.tee_stdouts == dest.tee_stderrs == {}


def test_streams_are_chosen_per_rank(tmp_path: Path) -> None:
    dest = DefaultLogsSpecs(log_dir=str(tmp_path), redirects={0: Std.OUT, 99: Std.ALL}, tee={1: Std.OUT}).reify(envs(3))
    assert [bool(dest.stdouts[rank]) for rank in range(3)] == [True, True, False]
    assert list(dest.tee_stdouts) == [1]
    assert not any(dest.stderrs.values())


def test_ranks_outside_the_filter_are_kept_off_the_console(tmp_path: Path) -> None:
    """A tee'd stream still goes to its file; one that would go to the console alone goes nowhere."""
    specs = DefaultLogsSpecs(log_dir=str(tmp_path), redirects={2: Std.OUT}, tee={0: Std.OUT, 1: Std.OUT}, local_ranks_filter={0})
    dest = specs.reify(envs(3))
    assert list(dest.tee_stdouts) == [0]
    assert dest.stdouts[1].endswith("attempt_0/1/stdout.log")
    assert dest.stdouts[2].endswith("attempt_0/2/stdout.log")
    assert dest.stderrs == {0: "", 1: os.devnull, 2: os.devnull}


def test_no_attempt_ever_uses_the_folder_of_another(tmp_path: Path) -> None:
    """P35: the folder follows the restart count, but a membership change, which spends none, still gets a new one."""
    specs = DefaultLogsSpecs(log_dir=str(tmp_path))
    names = [_attempt(specs.reify(envs(restart_count=count))) for count in (0, 0, 5, 3)]
    assert names == ["attempt_0", "attempt_1", "attempt_5", "attempt_6"]


def test_a_folder_that_is_there_already_is_left_alone(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(log_dir=str(tmp_path))
    first = specs.reify(envs())
    Path(first.error_files[0]).write_text("why it failed")
    (Path(specs.run_log_dir) / "attempt_1").mkdir()
    assert _attempt(specs.reify(envs())) == "attempt_2"
    assert Path(first.error_files[0]).read_text() == "why it failed"


def test_two_runs_of_one_id_do_not_share_a_folder(tmp_path: Path) -> None:
    for _ in range(2):
        DefaultLogsSpecs(log_dir=str(tmp_path)).reify(envs())
    assert len(list(tmp_path.glob("job_*"))) == 2


def test_a_pickled_copy_goes_on_in_the_same_run(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(log_dir=str(tmp_path), tee={3: Std.ALL})
    specs.reify(envs())
    copy = pickle.loads(pickle.dumps(specs))
    assert repr(copy) == repr(specs)
    assert (_attempt(copy.reify(envs())), _attempt(specs.reify(envs()))) == ("attempt_1", "attempt_2")


@pytest.mark.parametrize("run_id", ["../../etc", "a/b\nc", "x" * 1000, "é" * 1000, "", ".", "\udcff\0"])
def test_any_run_id_becomes_one_folder_name(tmp_path: Path, run_id: str) -> None:
    dest = DefaultLogsSpecs(log_dir=str(tmp_path)).reify(envs(run_id=run_id))
    assert Path(dest.error_files[0]).parents[3] == tmp_path
    assert "\n" not in dest.error_files[0]


def test_paths_do_not_depend_on_where_a_worker_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    specs = DefaultLogsSpecs(log_dir="logs/deep")
    assert specs.root_log_dir == "logs/deep"
    assert not (tmp_path / "logs").exists(), "the constructor touched the disk"
    assert specs.reify(envs()).error_files[0].startswith(str(tmp_path / "logs/deep/job_"))


def test_the_temporary_folder_is_private_and_goes_when_empty(private_tmpdir: Path) -> None:
    specs = DefaultLogsSpecs(tee=Std.ALL)
    assert list(private_tmpdir.iterdir()) == [], "the constructor touched the disk"
    dest = specs.reify(envs())
    root = Path(specs.root_log_dir)
    assert root.parent == private_tmpdir
    assert root.name.startswith("rallypoint_")
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    Path(dest.stdouts[0]).touch()
    assert specs.discard_if_empty()
    assert list(private_tmpdir.iterdir()) == []


def test_specs_can_be_used_again_after_their_folder_is_gone(private_tmpdir: Path) -> None:
    specs = DefaultLogsSpecs()
    for _ in range(2):
        assert _attempt(specs.reify(envs())) == "attempt_0"
        assert specs.discard_if_empty()
    assert list(private_tmpdir.iterdir()) == []


def test_the_temporary_folder_stays_when_anything_was_logged() -> None:
    """P35: nothing that somebody wrote is removed, not even beside empty files."""
    specs = DefaultLogsSpecs(redirects=Std.ALL)
    dest = specs.reify(envs())
    Path(dest.stdouts[0]).touch()
    Path(dest.stderrs[1]).write_text("Traceback")
    assert not specs.discard_if_empty()
    assert Path(dest.stdouts[0]).exists()
    assert Path(dest.stderrs[1]).read_text() == "Traceback"
    shutil.rmtree(specs.root_log_dir)


@pytest.mark.parametrize("has_threads", [True, False])
def test_the_folders_of_many_workers_go_too(private_tmpdir: Path, monkeypatch: pytest.MonkeyPatch, has_threads: bool) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    specs = DefaultLogsSpecs(tee=Std.ALL)
    for _ in range(3):
        specs.reify(envs(50))
    if not has_threads:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    assert specs.discard_if_empty()
    assert list(private_tmpdir.iterdir()) == []


def test_what_comes_up_while_the_temporary_folder_is_removed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """P35: somebody writes after it was seen that all is empty."""
    specs = DefaultLogsSpecs(redirects=Std.ALL)
    late = Path(specs.reify(envs()).stderrs[1])
    look = os.walk

    def look_and_write(*args: Any, **kwargs: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        yield from look(*args, **kwargs)
        late.write_text("Traceback")

    monkeypatch.setattr(os, "walk", look_and_write)
    assert not specs.discard_if_empty()
    assert late.read_text() == "Traceback"
    shutil.rmtree(specs.root_log_dir)


def test_a_log_folder_of_the_user_is_never_removed(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"))
    specs.reify(envs())
    assert not specs.discard_if_empty()
    assert (tmp_path / "logs").is_dir()


def test_dev_null_keeps_no_file_at_all(tmp_path: Path) -> None:
    dest = DefaultLogsSpecs(log_dir=os.devnull, redirects=Std.OUT, tee=Std.ERR).reify(envs(1))
    assert dest == LogsDest({0: os.devnull}, {0: os.devnull}, {}, {0: os.devnull}, {0: ""}, "", "")
    check_log_dir(os.devnull)


def test_a_log_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match=r"^log_dir: "):
            check_log_dir(str(path))
        with pytest.raises(UsageError, match=r"^log_dir.*(File exists|Not a directory)"):
            DefaultLogsSpecs(log_dir=str(path)).reify(envs())


def test_a_temporary_folder_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    with pytest.raises(UsageError, match=r"TMPDIR.*No such file"):
        DefaultLogsSpecs().reify(envs())


def test_checking_a_log_folder_makes_nothing(tmp_path: Path) -> None:
    check_log_dir(str(tmp_path / "a" / "b"))
    check_log_dir(None)
    assert list(tmp_path.iterdir()) == [tmp_path / "tmp"]


CHECK_AS_NOBODY = """
import os, sys
from rallypoint.errors import UsageError
from rallypoint.output.log_specs import check_log_dir
if os.geteuid() == 0:
    os.setgroups([])
    os.setuid({nobody})
try:
    check_log_dir(sys.argv[1])
except UsageError as error:
    print(error)
"""


def test_an_unwritable_log_folder_is_refused_with_its_reason(tmp_path: Path) -> None:
    """Not as root, who may write anywhere."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    result = subprocess.run(
        [sys.executable, "-c", CHECK_AS_NOBODY.format(nobody=NOBODY), locked / "logs"],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert result.stderr == ""
    assert result.stdout.startswith("log_dir: ")
    assert "Permission denied" in result.stdout


def test_own_specs_need_only_reify() -> None:
    class Own(LogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            return LogsDest(stdouts=dict.fromkeys(envs, "x"))

    assert Own(log_dir="logs").root_log_dir == "logs"
    assert Own().reify(envs(1)).stdouts == {0: "x"}
    with pytest.raises(TypeError):
        LogsSpecs()  # type: ignore[abstract]


def _attempt(dest: LogsDest) -> str:
    return Path(dest.error_files[0]).parent.parent.name
