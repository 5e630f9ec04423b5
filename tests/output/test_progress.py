"""How far a command is that takes long: on a terminal, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.terminals import terminal_with
from tests.story.agent_log import clean_run

from rallypoint.output.progress import Meter
from rallypoint.story.event_logs import select

COUNTS = """
import os, sys, time
from rallypoint.base import report
from rallypoint.output.progress import metered

with metered("counting", 4, "sheep") as meter:
    for number in range(4):
        with report.stepping_aside(1):
            print("sheep", number, flush=True)
        meter.advance(1)
        while number == 1 and not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
print("done", flush=True)
"""
DONE = ["sheep 0", "sheep 1", "sheep 2", "sheep 3", "done"]


@pytest.mark.parametrize(("columns", "text"), [(80, "counting: 2 of 4 sheep · "), (40, "counting: 2 of 4 sheep")])
def test_a_person_sees_it_until_it_is_done(columns: int, text: str, tmp_path: Path) -> None:
    go_on = tmp_path / "go_on"
    with terminal_with([sys.executable, "-c", COUNTS, str(go_on)], columns, 10, {"CI": ""}) as screen:
        screen.until_shown(text)
        assert [line for line in screen.text if line.startswith("sheep")] == DONE[:2]
        go_on.touch()
        assert screen.ended() == 0
        assert [line for line in screen.text if line] == DONE


def test_a_pipe_gets_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", COUNTS, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.stdout.splitlines(), done.stderr) == (DONE, "")


def test_merged_log_files_on_their_way_into_a_pipe(tmp_path: Path) -> None:
    """Whose reader takes its time; stderr is the terminal. What is merged is what it was without that."""
    worker = tmp_path / "attempt_0" / "0"
    worker.mkdir(parents=True)
    (worker / "stdout.log").write_text("".join(f"line {number} {'x' * 100}\n" for number in range(40_000)))
    command = [sys.executable, "-m", "rallypoint", "logs", str(tmp_path)]
    with terminal_with(command, 80, 10, {"CI": ""}, stdout=subprocess.PIPE) as screen:
        screen.until(lambda shown: any(line.startswith("merging log files: ") for line in shown))
        assert screen.process.stdout is not None
        merged = screen.process.stdout.read()
        assert screen.ended() == 0
        assert not any(line.startswith("merging") for line in screen.text)
    assert merged == subprocess.run(command, capture_output=True, timeout=60).stdout
    assert merged.count(b"\n") == 40_000


def test_events_are_metered_by_their_bytes(tmp_path: Path) -> None:
    clean_run().write(tmp_path)
    meter = Meter("reading")
    assert meter.look().done == 0
    select([str(tmp_path)], meter=meter)
    assert meter.look().done == meter.look().whole == sum(one.stat().st_size for one in tmp_path.rglob("events.jsonl")) > 0
