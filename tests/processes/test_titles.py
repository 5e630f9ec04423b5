"""Workers by their names in ``ps``: what is shown, and that nobody is named who might still read his command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.processes.titles import FIRST_LOOK_S, MOST_LOOKS, Title, Titles, fit, is_python

PYTHON = "/opt/some/venv/bin/python3"


def title(*command: str, job: str = "my-job", function: str = "") -> Title:
    return Title(3, 8, job, command, function)


def shown(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start a program that is over when its input ends; it says a line when it is ready. It ignores no signal that we ignore."""
    with_input: list[Any] = []

    def begin(command: list[str], **options: Any) -> Any:
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, restore_signals=True, **streams, **options)
        with_input.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in with_input:
        process.communicate()


def look(*named: tuple[int, Title], times: int = 1) -> Titles:
    """What an agent does, without the waiting; those that were looked at often enough get nothing more."""
    titles = Titles()
    titles.name(dict(named), 0.0)
    for _ in range(times):
        at = titles.next_look_at()
        if at is not None:
            titles.look(at)
            assert titles._outbox.flush(60.0)
    return titles


@pytest.mark.parametrize(
    ("given", "room", "text"),
    [
        (title(PYTHON, "-u", "train.py", "--lr", "3"), 100, "rank 3/8 my-job: python3 train.py --lr 3"),
        (title(PYTHON, "-u", "-m", "a.b"), 100, "rank 3/8 my-job: python3 -m a.b"),
        (title(PYTHON, "train.py", "-u"), 100, "rank 3/8 my-job: python3 train.py -u"),
        (title(PYTHON, "-u", "train.py", job="none"), 100, "rank 3/8: python3 train.py"),
        (title(PYTHON, "-c", "a long text", function="train"), 100, "rank 3/8 my-job: train"),
        (title(function="train"), 100, "rank 3/8 my-job: train"),
        (title(PYTHON, "-u", "train.py"), 31, "rank 3/8 my-j: python3 train.py"),
        (title(PYTHON, "-u", "train.py"), 28, "rank 3/8: python3 train.py"),
        (title(PYTHON, "-u", "train.py"), 20, "rank 3/8: python3 tr"),
        (title(PYTHON, "-u", "a\nb\x1b[2J\0", job="x\x07y" + "z" * 500), 1000, f"rank 3/8 x y{'z' * 34}...: python3 a b [2J"),
        (title(PYTHON, "-u", "ä" * 20, job="none"), 20, "rank 3/8: python3 ä"),
    ],
)  # fmt: skip
def test_who_it_is_and_what_it_runs(given: Title, room: int, text: str) -> None:
    assert fit(given, room).decode() == text


@pytest.mark.parametrize("name", ["python", "/usr/bin/python3.13t", "pypy3", "sh", "/opt/python/bin/wrapper"])
def test_pythons_are_known_by_their_names(name: str) -> None:
    assert is_python((name,)) == (name not in ("sh", "/opt/python/bin/wrapper"))


FACTS = """
import multiprocessing, os, subprocess, sys
def double(number):
    return 2 * number
def facts():
    pools = [multiprocessing.get_context(one).Pool(1) for one in ("spawn", "forkserver", "fork")]
    found = [pool.map(double, [21]) for pool in pools]
    for pool in pools:
        pool.close()
        pool.join()
    child = subprocess.run([sys.executable, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True)
    return [sys.executable, sys.argv, sys.orig_argv, sys.prefix, os.readlink("/proc/self/exe"), found, child.stdout]
if __name__ == "__main__":
    print("ready", flush=True)
    sys.stdin.read(1)
    print(facts(), flush=True)
"""


def test_it_finds_itself(start: Callable[..., Any], tmp_path: Path) -> None:
    """As it was started; and what it starts itself, also with multiprocessing, is of the same Python: a virtual environment's."""
    program = tmp_path / "facts.py"
    program.write_text(FACTS)
    command = [sys.executable, "-u", str(program), "some", "arguments"]
    before, after = start(command), start(command)
    look((after.pid, title(*command)))
    assert shown(after.pid).startswith(f"rank 3/8 my-job: {os.path.basename(sys.executable)} {program}")
    assert Path(f"/proc/{after.pid}/comm").read_text() == Path(f"/proc/{before.pid}/comm").read_text()
    facts = [process.communicate("\n")[0] for process in (before, after)]
    assert facts[0] == facts[1]
    assert sys.executable in facts[0]


def test_a_script_that_stands_for_python(start: Callable[..., Any], tmp_path: Path) -> None:
    shim = tmp_path / "python"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    shim.chmod(0o755)
    arguments = ["-u", "-c", "import sys; print('ready'); sys.stdin.read()", "x"]
    process = start([str(shim), *arguments])
    look((process.pid, title(str(shim), *arguments)))
    assert shown(process.pid).startswith("rank 3/8 my-job: python -c import sys")


def test_who_has_not_read_his_command_keeps_it(start: Callable[..., Any], tmp_path: Path) -> None:
    """It is called python, and could be one that has just been started."""
    early = tmp_path / "python"
    early.symlink_to("/bin/sh")
    command = [str(early), "-c", "echo ready; read line"]
    process = start(command)
    titles = look((process.pid, title(*command)), times=2)
    assert shown(process.pid) == "\0".join(command)
    assert titles.next_look_at() is not None


def test_it_is_not_looked_for_ever(start: Callable[..., Any], tmp_path: Path) -> None:
    early = tmp_path / "python"
    early.symlink_to("/bin/sh")
    command = [str(early), "-c", "echo ready; read line"]
    process = start(command)
    assert look((process.pid, title(*command)), times=MOST_LOOKS + 1).next_look_at() is None
    assert FIRST_LOOK_S * 2**MOST_LOOKS > 60


def test_who_has_changed_his_command_keeps_it(start: Callable[..., Any]) -> None:
    own = """
import sys
fields = open("/proc/self/stat", "rb").read().rpartition(b")")[2].split()
with open("/proc/self/mem", "r+b", buffering=0) as memory:
    memory.seek(int(fields[45]))
    memory.write(b"mine".ljust(int(fields[46]) - int(fields[45]), bytes(1)))
print("ready", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", own]
    process = start(command)
    assert look((process.pid, title(*command)), times=2).next_look_at() is None
    assert shown(process.pid) == "mine"


def test_who_is_no_python_is_not_even_looked_at(start: Callable[..., Any]) -> None:
    command = ["/bin/sh", "-c", "echo ready; read line"]
    process = start(command)
    assert look((process.pid, title(*command))).next_look_at() is None
    assert shown(process.pid) == "\0".join(command)


def test_a_fork_has_the_command_of_its_parent() -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        before = shown(os.getpid())
        look((pid, title(function="train")))
        assert shown(pid).startswith("rank 3/8")
        assert shown(os.getpid()) == before
    finally:
        os.close(write)
        os.waitpid(pid, 0)
        os.close(read)


def test_who_has_ended_is_not_missed() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert look((process.pid, title(PYTHON, "x")), times=2).next_look_at() is None
