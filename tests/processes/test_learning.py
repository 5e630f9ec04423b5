"""Where it is kept what a program imports, and whom that file is believed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conftest import WaitUntil

from rallypoint.base import defaults, outbox, report
from rallypoint.processes.learning import KEEP_AFTER_S, Learner, record_path
from rallypoint.processes.warden_client import Launch
from rallypoint.worker_site import SITE_FOLDER

LAUNCH = Launch(0, (sys.executable, "train.py"), {"PYTHONPATH": "/a"}, {})


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    report.set_sink(lambda _, text: lines.append(text))
    yield lines
    report.set_sink(None)


def measure(learner: Learner, text: str) -> None:
    """As the worker does, which is told where."""
    launch = learner.equip(LAUNCH)
    assert launch.env["PYTHONPATH"] == f"{SITE_FOLDER}:/a"
    is_alone, package, place = launch.env[defaults.ENV_IMPORTS].split(":", 2)
    assert (is_alone, package) == ("1", "")
    with open(place, "r+b", buffering=0) as file:
        file.write(f"imports\n{text}\n".encode())


def learn(path: Path | str, text: str = "torch 2.0 -") -> None:
    learner = Learner(sys.executable, ["-u", "train.py"], str(path))
    with outbox.on_duty():
        learner.choose()
        measure(learner, text)
        learner.close()


def chosen(path: Path) -> tuple[str, ...]:
    learner = Learner(sys.executable, ["-u", "train.py"], str(path))
    try:
        return learner.choose()
    finally:
        learner.close()


def test_it_is_kept_while_the_job_goes_on(tmp_path: Path, said: list[str], wait_until: WaitUntil) -> None:
    path = tmp_path / "cache" / "rallypoint" / "preload.json"
    with outbox.on_duty():
        learner = Learner(sys.executable, ["-u", "train.py"], str(path))
        assert learner.choose() == ()
        measure(learner, "torch 2.0 -")
        look_at = learner.next_look_at()
        assert look_at is not None
        assert look_at <= time.monotonic() + KEEP_AFTER_S
        learner.look(look_at - 1)
        assert not path.exists()
        learner.look(look_at)
        wait_until(path.exists)
        assert learner.next_look_at() is None
        learner.close()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert chosen(path) == ("torch",)
    assert said[-1] == "--preload auto: torch (2.0 s), as train.py imported them last"


def test_another_program_or_folder_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record"
    learn(path)
    for args in (["-u", "other.py"], ["-m", "train"], ["-u", str(tmp_path / "train.py")]):
        learner = Learner(sys.executable, args, str(path))
        assert learner.choose() == ()
        learner.close()
    assert chosen(path) == ("torch",)
    monkeypatch.chdir(tmp_path)
    assert chosen(path) == ()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.chmod(0o620), "others could have written it"),
        (lambda path: os.chown(path, 12345, -1), "others could have written it"),
        (lambda path: (path.rename(f"{path}.real"), path.symlink_to(f"{path}.real")), "Too many levels of symbolic links"),
        (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "others could have written it"),
        (lambda path: path.write_text('{"form": 1, "programs": [{}]}'), "programs: a record must have exactly the fields"),
        (lambda path: path.write_bytes(b"\xff"), "can't decode byte"),
        (lambda path: path.write_text(" " * (1 << 20)), "it has more than"),
    ],
    ids=["others may write", "of another user", "link", "pipe", "rubbish", "not text", "too large"],
)
def test_what_is_not_ours_is_not_believed(spoil: Callable[[Path], object], why: str, tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "record"
    learn(path)
    if "another user" in os.environ.get("PYTEST_CURRENT_TEST", "") and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    spoil(path)
    said.clear()
    assert chosen(path) == ()
    assert f"--preload auto: what was kept in {path} is not used: " in said[0]
    assert why in said[0]
    learn(path)
    assert chosen(path) == ("torch",), "it is written anew"


def test_where_nothing_can_be_kept_one_line_says_so(tmp_path: Path, said: list[str], wait_until: WaitUntil) -> None:
    path = tmp_path / "gone" / defaults.IMPORTS_FILE
    learn(path)
    told = f"what train.py imports cannot be kept in {path}: No such file or directory; --log-dir names another folder"
    wait_until(lambda: any(told in line for line in said))
    assert not (tmp_path / "gone").exists(), "a log folder that was removed is not made again"
    learn("")
    wait_until(lambda: any("cannot be kept: neither XDG_CACHE_HOME nor HOME names a folder" in line for line in said))


def test_what_was_refused_is_left_out_at_once(tmp_path: Path) -> None:
    path = tmp_path / "record"
    learn(path, "torch 2.0 -\nnumpy 1.0 -")
    with outbox.on_duty():
        learner = Learner(sys.executable, ["-u", "train.py"], str(path))
        assert learner.choose() == ("torch", "numpy")
        learner.note_refused("torch", "it has threads")
        assert learner.choose() == ("numpy",)
        learner.close()
    assert chosen(path) == ("numpy",)


@pytest.mark.parametrize(
    ("log_dir", "cache", "home", "path"),
    [
        ("/logs", "/cache", "/home", "/logs/.rallypoint-preload.json"),
        ("", "/cache", "/home", "/cache/rallypoint/preload.json"),
        ("/dev/null", "", "/home", "/home/.cache/rallypoint/preload.json"),
        ("", "relative", "/home", "/home/.cache/rallypoint/preload.json"),
        ("", "", "", ""),
    ],
)
def test_where_it_is_kept(log_dir: str, cache: str, home: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setenv("HOME", home)
    assert record_path(log_dir) == path
