"""Run a side of the conformance suite in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import rallypoint

ROOT = Path(__file__).parents[3]
FACTS = Path(__file__).with_name("facts.json")
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
SIDE_S = 400.0
# Torch's stores look up the name of everybody whom they meet, and wait for seconds where no name server answers.
NO_NAME_SERVER = {"RES_OPTIONS": "attempts:0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
# Parts of the suite for which torch takes about the same time.
PARTS = (
    ("processes", "launcher", "errors", "metrics"),
    ("rendezvous", "stores", "events", "utilities"),
    ("arguments", "timers", "agents", "health"),
)


def run_sides(*sides: str) -> dict[str, dict[str, Any]]:
    """The facts of each side by case; all of their parts run at the same time, for mostly they wait."""
    parts = [(side, families) for side in sides for families in PARTS]
    with ThreadPoolExecutor(len(parts)) as pool:
        found = list(pool.map(run_side, *zip(*parts, strict=True)))
    facts: dict[str, dict[str, Any]] = {side: {} for side in sides}
    for (side, _), answers in zip(parts, found, strict=True):
        facts[side] |= answers
    return facts


def run_side(side: str, chosen: tuple[str, ...]) -> dict[str, Any]:
    """The facts by case; torch is hidden from ``without`` by leaving site-packages out."""
    flags = ["-S"] if side == "without" else []
    command = [sys.executable, *flags, "-m", "tests.compat.conformance.runner", side, *chosen]
    path = os.pathsep.join([str(ROOT), str(Path(rallypoint.__file__).parents[1])])
    env = {**os.environ, **NO_NAME_SERVER, "PYTHONPATH": path}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            text, _ = process.communicate(timeout=SIDE_S)
        finally:
            _kill_group(process.pid)  # whatever a case has left of itself
    assert process.returncode == 0, f"the runner for {side} ended with {process.returncode}"
    answers = [json.loads(line) for line in text.splitlines()]
    return {answer["case"]: answer["facts"] for answer in answers}


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
