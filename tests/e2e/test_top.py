"""``rallypoint top`` on a real terminal, with a real job."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import WaitUntil, process_state
from tests.e2e.terminals import Terminal, terminal_with

from rallypoint import inspect

COLUMNS, LINES = 80, 24
RUNS_ON = """
import os, time
from rallypoint import worker
step = 0
print("rank", os.environ["RANK"], "is at work", flush=True)
while True:
    worker.progress(step := step + 1)
    time.sleep(0.05)
"""


@contextmanager
def terminal(*words: str, env: Mapping[str, str] | None = None) -> Iterator[Terminal]:
    with terminal_with([sys.executable, "-m", "rallypoint", "top", *words], COLUMNS, LINES, env) as screen:
        yield screen


@pytest.fixture
def job(start_rallyrun: Any, script: Any, tmp_path: Path) -> Any:
    flags = ["--standalone", "--nproc-per-node", "2", "--log-dir", tmp_path / "logs", "--redirects", "3", "--hang-timeout", "300"]
    running = start_rallyrun([*flags, script(RUNS_ON)])
    running.wait_for(lambda: len(list((tmp_path / "logs").rglob("stdout.log"))) == 2)
    running.wait_for(lambda: len(inspect.jobs()) == 1)  # it can be asked a moment after its workers have started
    return running


def steps_of(shown: list[str]) -> list[int]:
    """The steps of ranks 0 and 1, from where their title stands; a row of which a part is drawn has none."""
    title = next((line for line in shown if line.lstrip().startswith("RANK")), "")
    end = title.find("STEP") + len("STEP")
    rows = [line for line in shown if line[:end].split()[:1] in (["0"], ["1"])]
    return [int(step) for step in (row[:end].split()[-1] for row in rows) if step.isdecimal()]


def is_chosen_rank(shown: list[str], rank: int) -> bool:
    return any(line.startswith(f"rank {rank}, pid ") for line in shown)


def test_a_real_job_on_a_real_terminal(job: Any, alive: Callable[[int], bool], wait_until: WaitUntil) -> None:
    """Its ranks with their steps, the log and the stacks of one; Ctrl-Z and q leave the job alone, and s stops it."""
    with terminal(str(job.pid)) as screen:
        screen.until_shown("1 node, 2 ranks", "steps/s", "RANK", "rank 0 is at work", "s Stop")
        screen.until(lambda shown: [line.split()[:1] for line in shown[4:6]] == [["0"], ["1"]])
        screen.until(lambda shown: len(steps := steps_of(shown)) == 2 and min(steps) > 0)
        screen.press("j")
        screen.until_shown("rank 1 is at work")
        screen.press("t")
        screen.until_shown("stacks of rank 1", "worker.py")
        screen.press("q")
        screen.until_shown("rank 1 is at work")
        screen.press("\x1a")
        wait_until(lambda: process_state(screen.process.pid) == ("T", os.getpid()))
        screen.forget()
        screen.process.send_signal(signal.SIGCONT)
        screen.until_shown("RANK", "rank 1 is at work", "s Stop")  # what has not changed is drawn again too
        screen.press("q")
        assert screen.ended() == 0
    assert alive(job.pid)
    with terminal(env={"NO_COLOR": "1"}) as screen:
        screen.until_shown("1 node, 2 ranks")
        screen.press("s")
        screen.until_shown("Stop ")
        screen.press("y")
        assert screen.ended() == 0
        assert any("it has ended on this machine" in line for line in screen.text)
        colours = {part.split(b"m")[0] for part in screen.bytes.split(b"\x1b[")[1:] if b"38;2;" in part.split(b"m")[0]}
        greys = [colour.split(b"38;2;")[1].split(b";")[:3] for colour in colours]
        assert all(len(set(grey)) == 1 for grey in greys)
    assert job.wait() == 79
