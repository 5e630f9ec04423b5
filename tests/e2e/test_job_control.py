"""A shell with job control: Ctrl-Z, ``fg``, and a job in the background."""

from __future__ import annotations

import fcntl
import os
import pty
import random
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import WARDEN, stat_fields

# All of a shell that matters here. Its job begins in the foreground ("fg") or in the background; what is typed while it
# is not in the foreground is for the shell, which takes "fg" for what it is, and repeats all else.
SHELL = """
import os, select, signal, sys

signal.signal(signal.SIGTTOU, signal.SIG_IGN)
in_front = sys.argv[1] == "fg"
job = os.fork()
if job == 0:
    os.setpgid(0, 0)
    if in_front:
        os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execvp(sys.argv[2], sys.argv[2:])
try:
    os.setpgid(job, job)
except OSError:
    pass  # it has done so itself
if in_front:
    os.tcsetpgrp(0, job)
print("job", job, flush=True)
while True:
    if not in_front:
        os.tcsetpgrp(0, os.getpgrp())
        line = sys.stdin.readline().strip()
        if line != "fg":
            print(f"shell got {line}", flush=True)
            continue
        in_front = True
        os.tcsetpgrp(0, job)
        print("continued", flush=True)
        os.killpg(job, signal.SIGCONT)
    _, status = os.waitpid(job, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        in_front = False
        os.tcsetpgrp(0, os.getpgrp())
        print("stopped", flush=True)
    else:
        print("ended", os.waitstatus_to_exitcode(status), flush=True)
        break
"""

WORKER = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "60"])
os.write(1, f"worker {os.getpid()}\\nchild {child.pid}\\n".encode())
time.sleep(60)
"""


class Shell:
    """A terminal, with a shell that has one job."""

    def __init__(self, where: str, command: list[str], cwd: Path) -> None:
        self._ours, theirs = pty.openpty()
        self._seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-c", SHELL, where, *command], cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509  # no thread runs here
        )  # fmt: skip
        os.close(theirs)

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def text(self) -> str:
        """All that the terminal has shown so far."""
        while select.select([self._ours], [], [], 0)[0]:
            try:
                self._seen += os.read(self._ours, 65536)
            except OSError:  # nobody holds the other end any more
                break
        return self._seen.decode(errors="replace").replace("\r\n", "\n")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def shell(tmp_path: Path, marked: Any, wait_until: Any) -> Iterator[Callable[..., Shell]]:
    """``shell(where, command)``: a terminal whose shell has this job in its foreground ("fg") or background ("bg")."""
    made: list[Shell] = []

    def start(where: str, command: list[str]) -> Shell:
        made.append(Shell(where, command, tmp_path))
        return made[-1]

    yield start
    for one in made:
        one.close()


def states(pids: list[int]) -> set[str]:
    return {fields[1] for pid in pids if (fields := stat_fields(pid)) is not None}


def test_v5_ctrl_z_stops_the_workers_and_fg_continues_them(
    shell: Any, rallyrun_command: Any, script: Any, numbers: Any, wait_until: Any, marked: Any
):
    """V5: with what they started; as often as one likes, and nothing of it is taken for a failure."""
    job = shell("fg", rallyrun_command("--standalone", "--nproc-per-node", "2", script(WORKER)))
    wait_until(lambda: len(numbers("child", job.text())) == 2)
    pids = numbers("worker", job.text()) + numbers("child", job.text())
    for times in (1, 2, 3):
        job.press(b"\x1a")
        wait_until(lambda times=times: job.text().count("stopped\n") == times)
        wait_until(lambda: states(pids) == {"T"})
        job.press(b"fg\n")
        wait_until(lambda: "T" not in states([*pids, *numbers("job", job.text())]))
    job.press(b"\x03")
    wait_until(lambda: "ended 130\n" in job.text())
    assert "Traceback" not in job.text()
    assert "failed" not in job.text()
    wait_until(lambda: not marked())


def test_f03_a_prompt_is_seen_before_its_answer(
    shell: Any, rallyrun_command: Any, script: Any, numbers: Any, wait_until: Any, marked: Any
):
    """F03: Python writes the prompt of input() to stderr, without a line end; a part of any other line shows as well."""
    worker = script("""
        import sys
        answer = input("value? ")
        sys.stderr.write(f"you said {answer}, ")
        print(input())
        """)
    job = shell("fg", rallyrun_command("--standalone", worker))
    wait_until(lambda: "value? " in job.text())
    job.press(b"42\n")
    wait_until(lambda: job.text().endswith("you said 42, "))
    job.press(b"enough\n")
    wait_until(lambda: "ended 0\n" in job.text())
    wait_until(lambda: not marked())


def test_f28_on_a_terminal_workers_have_it_themselves(
    shell: Any, rallyrun_command: Any, script: Any, numbers: Any, wait_until: Any, marked: Any
):
    """F28: colours and progress bars are as without us."""
    worker = script("import os; os.write(1, b'tty %d\\n' % os.isatty(1))")
    job = shell("fg", rallyrun_command("--standalone", "--nproc-per-node", "2", worker))
    wait_until(lambda: "ended 0\n" in job.text())
    assert job.text().count("tty 1") == 2
    wait_until(lambda: not marked())


def test_v5_ctrl_z_at_any_moment(shell: Any, rallyrun_command: Any, numbers: Any, wait_until: Any, marked: Any, tmp_path: Path):
    """V5: while the job starts, and while it stops: whatever there is stands still until it is continued."""
    program = "trap 'sleep 0.1; exit 7' TERM; echo up > $0.$RANK; while :; do sleep 0.01; done"
    dice = random.Random(5)
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = rallyrun_command("--standalone", "--nproc-per-node", "3", "--no-python", "sh", "-c", program, folder / "up")
        job = shell("fg", command)
        wait_until(lambda job=job: numbers("job", job.text()))
        (launcher,) = numbers("job", job.text())
        if number % 2:
            wait_until(lambda folder=folder: len(list(folder.iterdir())) == 3)
            os.kill(launcher, 15)
        press_at = time.monotonic() + dice.uniform(0, 0.25)
        wait_until(lambda at=press_at: time.monotonic() >= at)
        job.press(b"\x1a")
        wait_until(lambda job=job: "stopped\n" in job.text() or "ended" in job.text())

        def running(job: Shell = job) -> list[int]:
            """Who is not stopped, of all but the shell and the warden; who has vforked one that is waits for it (D)."""
            fields = {pid: stat_fields(pid) for pid in marked() if pid != job.process.pid}
            return [pid for pid, one in fields.items() if one is not None and one[0] != WARDEN and one[1] not in "TDZX"]

        wait_until(lambda: not running())
        assert not running()
        job.press(b"fg\n")
        if not number % 2:
            wait_until(lambda folder=folder: len(list(folder.iterdir())) == 3)
            wait_until(lambda job=job: "continued" in job.text())
            job.press(b"\x03")
        wait_until(lambda job=job: "ended" in job.text())
        assert "Traceback" not in job.text()
        wait_until(lambda job=job: set(marked()) <= {job.process.pid})


READS = """
import os, sys
os.write(1, f"worker {os.getpid()}\\n".encode())
os.write(1, f"read {sys.stdin.readline()!r}\\n".encode())
"""


def test_m6_a_job_in_the_background_does_not_take_what_is_typed_at_the_shell(
    shell: Any, rallyrun_command: Any, script: Any, wait_until: Any
):
    """m6: its workers read from /dev/null."""
    job = shell("bg", rallyrun_command("--standalone", script(READS)))
    wait_until(lambda: "worker" in job.text())
    for number in range(5):
        job.press(f"line {number}\n".encode())
    wait_until(lambda: "shell got line 4\n" in job.text())
    wait_until(lambda: "read ''\n" in job.text())
    assert [f"shell got line {number}\n" in job.text() for number in range(5)] == [True] * 5
    job.press(b"fg\n")
    wait_until(lambda: "ended 0\n" in job.text())


def test_m6_a_job_in_the_foreground_reads_the_terminal(shell: Any, rallyrun_command: Any, script: Any, wait_until: Any):
    job = shell("fg", rallyrun_command("--standalone", script(READS)))
    wait_until(lambda: "worker" in job.text())
    job.press(b"hello\n")
    wait_until(lambda: "read 'hello\\n'\n" in job.text())
    wait_until(lambda: "ended 0\n" in job.text())


def test_m6_a_pipe_is_read_in_the_background_too(shell: Any, rallyrun_command: Any, script: Any, wait_until: Any):
    command = ["sh", "-c", 'echo piped | "$@"', "sh", *rallyrun_command("--standalone", script(READS))]
    job = shell("bg", command)
    wait_until(lambda: "read 'piped\\n'\n" in job.text())
    job.press(b"fg\n")
    wait_until(lambda: "ended 0\n" in job.text())
