"""``rallypoint top`` where it cannot draw anything: one line says why, and what to do instead."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest


def on_a_terminal(term: str, *words: str, python: tuple[str, ...] = ("-m", "rallypoint", "top")) -> tuple[int, str]:
    """The exit code, and all that is printed."""
    master, slave = pty.openpty()
    command = [sys.executable, *python, *words]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": term})
    os.close(slave)
    said = b""
    try:
        while block := os.read(master, 65536):
            said += block
    except OSError:  # nobody has it open any more
        pass
    os.close(master)
    return process.wait(), said.decode()


@pytest.mark.parametrize(
    ("term", "words", "said"),
    [
        ("dumb", [], "it cannot draw on a terminal of the kind 'dumb'; `rallypoint status` prints how a job stands"),
        ("", [], "it cannot draw on a terminal of the kind 'unknown'; `rallypoint status` prints how a job stands"),
        ("xterm", ["nothing-like-it"], "no job of this user runs on this machine"),
        ("xterm", ["one", "two"], "usage: rallypoint top [JOB]"),
        ("xterm", ["--all"], "usage: rallypoint top [JOB]"),
    ],
)
def test_where_it_cannot_be_shown_one_line_says_why(term: str, words: list[str], said: str, short_runtime: str) -> None:
    assert on_a_terminal(term, *words) == (2, f"rallypoint top: error: {said}\r\n")


def test_without_a_terminal_it_says_so(short_runtime: str) -> None:
    done = subprocess.run([sys.executable, "-m", "rallypoint", "top"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    said = "it cannot draw on what is no terminal; `rallypoint status` prints how a job stands"
    assert done.stderr == f"rallypoint top: error: {said}\n"


def test_without_textual_it_says_how_to_get_it() -> None:
    program = "import sys; sys.modules['textual'] = None; from rallypoint.cli.top import top_main; sys.exit(top_main([]))"
    said = "rallypoint top: error: it needs Textual, which is not installed: pip install 'rallypoint[tui]'\r\n"
    assert on_a_terminal("xterm", python=("-c", program)) == (2, said)


def test_help_needs_neither() -> None:
    done = subprocess.run([sys.executable, "-m", "rallypoint", "top", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: rallypoint top [JOB]\n")


@pytest.fixture
def short_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder in which no agent of another test is found."""
    monkeypatch.setenv("RALLYPOINT_RUNTIME_DIR", str(tmp_path))
    return str(tmp_path)
