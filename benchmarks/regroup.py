"""Two agents on one machine, 1:2 nodes: a node that joins, and one that is killed with its workers.

Torchrun is not measured beside it: with torch 2.13 a joining node ends both agents after a minute, and a killed one is never
noticed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.contestants import PROGRAMS, RALLYRUN, clean_environment
from benchmarks.figures import Figure, at_most
from benchmarks.rendezvous import free_port

__all__ = ["measure"]

ROUNDS = 5
WORKERS = 2
TIMEOUT_S = 20.0


def measure() -> list[Figure]:
    joins: list[float] = []
    losses: list[float] = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            join_s, loss_s = _round(Path(folder))
        joins.append(join_s)
        losses.append(loss_s)
    return [
        Figure("regroup: second agent's exec to the larger world running", "s", {RALLYRUN: joins}, (at_most(1, "s"),)),
        Figure("regroup: kill -9 of an agent to the smaller world running", "s", {RALLYRUN: losses}, (at_most(1, "s"),)),
    ]


def _round(starts: Path) -> tuple[float, float]:
    """A job of its own for each: a node that dies again and again is held back."""
    command = _command(free_port(), starts)
    with _agent(command):
        _wait(starts, 1, 0.0)
        began = time.monotonic()
        with _agent(command) as second:
            larger_at = _wait(starts, 2, began)
            killed_at = time.monotonic()
            second.kill()
            return larger_at - began, _wait(starts, 1, killed_at) - killed_at


def _command(port: int, starts: Path) -> list[str]:
    rallyrun = str(Path(sys.executable).parent / RALLYRUN)
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "last_call_timeout=0.1"]
    size = ["--nnodes", "1:2", "--nproc-per-node", str(WORKERS)]
    return [rallyrun, *size, *meeting, str(PROGRAMS / "world.py"), str(starts)]


@contextmanager
def _agent(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    agent = subprocess.Popen(command, env=clean_environment(), **quiet)  # type: ignore[call-overload]
    try:
        yield agent
    finally:
        if agent.poll() is None:
            os.kill(agent.pid, signal.SIGTERM)
        agent.wait(TIMEOUT_S)


def _wait(starts: Path, nodes: int, since: float) -> float:
    """When the last worker of a world of so many nodes, begun after `since`, had started."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        found = [float(path.read_text()) for path in starts.glob(f"{nodes * WORKERS}.*") if path.suffix != ".new"]
        new = [at for at in found if at > since]
        if len(new) >= nodes * WORKERS:
            return max(new)
        time.sleep(0.002)
    raise RuntimeError(f"no world of {nodes} nodes within {TIMEOUT_S:g} s")
