"""A process's own stdout and stderr, sent to a file for a while."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.processes.redirects import IS_MACOS, IS_WINDOWS, get_libc, get_std_cm, redirect, redirect_stderr, redirect_stdout


def test_all_that_writes_to_stdout_is_redirected(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out"
    file.write_text("what was there before is overwritten\n")
    print("before")
    with redirect_stdout(to_file=str(file)):
        print("python")
        sys.stdout.flush()
        subprocess.run(["echo", "child"], check=True)
        libc = get_libc()
        assert libc is not None
        libc.printf(b"c\n")
    print("after")
    assert file.read_text() == "python\nchild\nc\n"
    assert capfd.readouterr().out == "before\nafter\n"


def test_each_stream_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with redirect_stderr(str(tmp_path / "err")):
        print("shown")
        print("kept", file=sys.stderr)
    assert (tmp_path / "err").read_text() == "kept\n"
    assert capfd.readouterr() == ("shown\n", "")


def test_redirections_can_be_nested(tmp_path: Path) -> None:
    with redirect("stdout", str(tmp_path / "a")):
        print("1")
        with redirect("stdout", str(tmp_path / "b")):
            print("2")
        print("3")
    assert ((tmp_path / "a").read_text(), (tmp_path / "b").read_text()) == ("1\n3\n", "2\n")


def test_an_exception_ends_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def tell_and_fail() -> None:
        with redirect_stdout(str(tmp_path / "out")):
            print("told")
            raise KeyError

    with pytest.raises(KeyError):
        tell_and_fail()
    print("back")
    assert (tmp_path / "out").read_text() == "told\n"
    assert capfd.readouterr().out == "back\n"


def test_what_cannot_be_redirected(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="stdlog"), redirect("stdlog", str(tmp_path / "out")):
        pass
    with pytest.raises(FileNotFoundError), redirect_stdout(str(tmp_path / "no" / "folder")):
        pass
    print("still here")
    assert not (tmp_path / "out").exists()
    assert capfd.readouterr().out == "still here\n"


def test_a_file_that_is_not_named_redirects_nothing(tmp_path: Path) -> None:
    assert isinstance(get_std_cm("", redirect_stdout), contextlib.nullcontext)
    with get_std_cm(str(tmp_path / "out"), redirect_stdout):
        print("redirected")
    assert (tmp_path / "out").read_text() == "redirected\n"


def test_the_platform() -> None:
    assert not IS_MACOS
    assert not IS_WINDOWS
