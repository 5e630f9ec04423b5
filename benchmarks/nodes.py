"""Agents of a job of 1:2 nodes, on this machine, and how to tell that a world of theirs runs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.contestants import PROGRAMS, Contestant, clean_environment
from benchmarks.jobs import launcher_processes

__all__ = ["WORKERS", "node_command", "running_agent", "thaw", "wait_for_world"]

WORKERS = 2
TIMEOUT_S = 20.0


def node_command(contestant: Contestant, port: int, starts: Path) -> list[str]:
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "last_call_timeout=0.1"]
    size = ["--nnodes", "1:2", "--nproc-per-node", str(WORKERS)]
    return [str(contestant.path), *size, *meeting, str(PROGRAMS / "world.py"), str(starts)]


@contextmanager
def running_agent(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    agent = subprocess.Popen(command, env=clean_environment(), **quiet)  # type: ignore[call-overload]
    try:
        yield agent
    finally:
        if agent.poll() is None:
            thaw(agent.pid)
            os.kill(agent.pid, signal.SIGTERM)
        agent.wait(TIMEOUT_S)


def wait_for_world(starts: Path, nodes: int, since: float) -> float:
    """When the last worker of a world of so many nodes, begun after `since`, had started."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        found = [float(path.read_text()) for path in starts.glob(f"{nodes * WORKERS}.*") if path.suffix != ".new"]
        new = [at for at in found if at > since]
        if len(new) >= nodes * WORKERS:
            return max(new)
        time.sleep(0.002)
    raise RuntimeError(f"no world of {nodes} nodes within {TIMEOUT_S:g} s")


def thaw(agent: int) -> None:
    for pid in reversed(launcher_processes(agent, set())):
        os.kill(pid, signal.SIGCONT)
