"""What a person sees at the terminal while something is awaited: one line, which is gone afterwards, and harms nobody's text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests import ports
from tests.conftest import WaitUntil
from tests.e2e.terminals import Terminal, terminal_with

LINES = 24
MY_TERMINAL = {"CI": "", "LOGLEVEL": "", "OMP_NUM_THREADS": "1"}
ALONE = ("--standalone", "--nproc-per-node", "1")
LIVE = re.compile(r"waiting|stopping|restart \d of")
# It says that it was told to stop, and goes on; what is in the file `say` it writes straight to the terminal, in one piece.
STUBBORN = """
import os, signal, sys, time
def refuse(*_): os.write(1, b"I would rather not\\n")
signal.signal(signal.SIGINT, refuse); signal.signal(signal.SIGTERM, refuse)
os.write(1, b"at work\\n")
while True:
    try:
        text = open(sys.argv[1], "rb").read(); os.unlink(sys.argv[1])
        os.write(1, text)
    except FileNotFoundError:
        pass
    time.sleep(0.02)
"""
FAILS_TWICE = """
import os, sys, time
with open(sys.argv[1], "a") as file:
    file.write(f"{time.monotonic()}\\n")
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
sys.exit(3 if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 2 else 0)
"""


@pytest.fixture(params=[80, 40])
def columns(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@contextmanager
def on_terminal(columns: int, *args: object, **env: str) -> Iterator[Terminal]:
    """The launcher in the foreground of a terminal."""
    command = [sys.executable, "-m", "rallypoint", "run", *map(str, args)]
    with terminal_with(command, columns, LINES, {**MY_TERMINAL, **env}, is_controlling=True) as screen:
        yield screen


def all_shown(screen: Terminal) -> list[str]:
    return [*screen.scrollback, *screen.text]


def live_lines(shown: list[str]) -> list[str]:
    """Those that are no whole line of ours and none of a worker's."""
    return [line for line in shown if LIVE.match(line)]


def wakes_not_once(pid: int, within_s: float) -> bool:
    """Whether none of its threads did anything for so long, which is longer than the line lets pass between two looks."""

    def switches() -> dict[str, list[str]]:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return {task.name: re.findall(r"ctxt_switches:\s(\d+)", (task / "status").read_text()) for task in tasks}

    before = switches()
    time.sleep(within_s)  # a measurement
    return switches() == before


def test_a_node_that_is_missing_for_a_moment(columns: int, start_rallyrun: Any, script: Any) -> None:
    """P19: who is here, for how long already, and until when; nothing is left once the other has come, no thread either."""
    worker = script('import os, time\nos.write(1, b"at work %s\\n" % os.environ["RANK"].encode())\ntime.sleep(1)')
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{ports.free_port()}")
    job = ("--nnodes", "2", "--nproc-per-node", "1", *rendezvous, worker)
    full, short = r"waiting: 1 of 2 nodes; here: .+ · \d+ s · gives up in 9 min \d+ s", r"waiting: 1 of 2 nodes.* · \d+ s"
    with on_terminal(columns, *job) as screen:
        screen.until(lambda shown: any(re.fullmatch(full if columns == 80 else short, line) for line in shown))
        first = live_lines(screen.text)
        screen.until(lambda shown: live_lines(shown) not in ([], first))  # it goes on
        assert len(live_lines(screen.text)) == 1
        other = start_rallyrun(job)
        screen.until_shown("at work 0")
        assert live_lines(all_shown(screen)) == []
        assert screen.ended() == 0
        assert other.wait() == 0
        assert live_lines(all_shown(screen)) == []
        assert "rallyrun: generation 1 started: 2" in "".join(all_shown(screen))
        assert "waiting" not in "".join(all_shown(screen))
    assert "\x1b" not in other.stderr


def test_a_worker_that_does_not_stop(columns: int, script: Any, tmp_path: Path, wait_until: WaitUntil) -> None:
    """How many are left and when they are killed. What the worker writes to the terminal meanwhile is whole."""
    order = tmp_path / "say"
    with on_terminal(columns, *ALONE, "--shutdown-timeout", "100", script(STUBBORN), order) as screen:
        screen.until_shown("at work")
        wait_until(lambda: wakes_not_once(screen.process.pid, 1.5))
        screen.press("\x03")
        screen.until(lambda shown: any(re.search(r"1 left.* · SIGKILL in 1 min \d+ s", line) for line in shown))
        screen.until_shown("I would rather not")  # after the terminal's own ^C
        (order.parent / "next").write_bytes(b"saved the first half\nsaved the second half\n")
        (order.parent / "next").rename(order)
        screen.until_shown("saved the second half")
        screen.until(lambda shown: len(live_lines(shown)) == 1)  # drawn anew, further down
        for line in ("saved the first half", "saved the second half"):
            assert line in screen.text
        screen.press("\x03")
        assert screen.ended() == 130
        assert live_lines(all_shown(screen)) == []


def test_a_restart_that_is_put_off(columns: int, script: Any, tmp_path: Path) -> None:
    flags = (*ALONE, "--max-restarts", "3", "--restart-backoff", "10")  # for as long can the line be seen
    with on_terminal(columns, *flags, script(FAILS_TWICE), tmp_path / "starts") as screen:
        screen.until(lambda shown: any(re.fullmatch(r"restart 2 of 3 in \d+ s", line) for line in shown))
        assert "attempt 2" not in screen.text
        assert screen.ended() == 0
        assert live_lines(all_shown(screen)) == []
        assert [line for line in screen.text if line.startswith("attempt")] == ["attempt 0", "attempt 1", "attempt 2"]


def test_ctrl_s_delays_nothing(script: Any, tmp_path: Path, wait_until: WaitUntil) -> None:
    """M2: the line waits for the terminal, and the restart waits for neither."""
    starts = tmp_path / "starts"
    flags = (*ALONE, "--max-restarts", "3", "--restart-backoff", "10")  # for as long can the line be seen
    with on_terminal(80, *flags, script(FAILS_TWICE), starts) as screen:
        screen.until(live_lines)
        screen.press("\x13")
        wait_until(lambda: len(starts.read_text().split()) == 3)
        screen.press("\x11")
        assert screen.ended() == 0
        assert live_lines(all_shown(screen)) == []


def test_a_terminal_that_becomes_narrow(script: Any, tmp_path: Path) -> None:
    with on_terminal(80, *ALONE, "--shutdown-timeout", "100", script(STUBBORN), tmp_path / "say") as screen:
        screen.until_shown("at work")
        screen.press("\x03")
        screen.until_shown("1 left, rank 0")
        screen.resize(40, LINES)
        screen.until(lambda shown: any(re.fullmatch(r"stopping: 1 left · SIGKILL in 1 min \d+ s", line) for line in shown))
        screen.press("\x03")
        assert screen.ended() == 130


def test_ctrl_z_leaves_nothing_and_fg_shows_it_again(script: Any, tmp_path: Path) -> None:
    """In a shell, which says that the job was stopped in the very row of the line. In the background there is none."""
    job = (*ALONE, "--shutdown-timeout", "100", script(STUBBORN), tmp_path / "say")
    with terminal_with(["bash", "--norc", "--noprofile", "-i"], 100, LINES, {**MY_TERMINAL, "PS1": "$ "}) as screen:
        screen.until_shown("$")
        screen.press(f"{sys.executable} -m rallypoint run {' '.join(map(str, job))}\n")
        screen.until_shown("at work")
        screen.press("\x03")
        screen.until(live_lines)
        screen.press("\x1a")
        screen.until_shown("Stopped")
        screen.press("bg\n")
        screen.press("echo still\\ here\n")
        screen.until(lambda shown: "still here" in shown)
        assert live_lines(all_shown(screen)) == []
        screen.press("fg\n")
        screen.until(live_lines)
        screen.press("\x03")
        screen.until(lambda shown: shown[screen.cursor[0]] == "$")
        assert live_lines(all_shown(screen)) == []
        screen.press("exit\n")
        screen.ended()


QUIET = [{"TERM": "dumb"}, {"CI": "true"}, {"LOGLEVEL": "WARNING"}]


@pytest.mark.parametrize("env", QUIET, ids=[next(iter(env)) for env in QUIET])
def test_who_does_not_want_it(env: dict[str, str], script: Any, tmp_path: Path) -> None:
    flags = (*ALONE, "--max-restarts", "3", "--restart-backoff", "2")
    with on_terminal(80, *flags, script(FAILS_TWICE), tmp_path / "starts", **env) as screen:
        assert screen.ended() == 0
        assert b"\x1b" not in screen.bytes


def test_a_pipe_gets_nothing_and_nothing_is_loaded_for_it(script: Any, tmp_path: Path) -> None:
    """Byte for byte what is said to a pipe, where a terminal would show the line twice."""
    flags = [*ALONE, "--max-restarts", "3", "--restart-backoff", "2", str(script(FAILS_TWICE)), str(tmp_path / "starts")]
    program = (
        "import sys\nfrom rallypoint.cli.main import main\ncode = main(sys.argv[1:])\n"
        "print(sorted({'rallypoint.output.live_line', 'rallypoint.output.waits'} & set(sys.modules)))\nsys.exit(code)"
    )
    env = {**os.environ, **MY_TERMINAL, "TERM": "xterm-256color"}
    done = subprocess.run([sys.executable, "-c", program, *flags], capture_output=True, text=True, env=env, timeout=100)
    assert done.stdout == "attempt 0\nattempt 1\nattempt 2\n[]\n"
    failed = "rallyrun: rank 0 (pid N) failed: exited with code 3 and left no traceback; restarting all workers"
    assert re.sub(r"pid \d+", "pid N", done.stderr).splitlines() == [
        f"{failed} (restart 1 of 3)", f"{failed} (restart 2 of 3, after 2 s)",
    ]  # fmt: skip
