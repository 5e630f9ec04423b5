"""A small agent for these tests: it starts real processes under a `HangWatch` and looks as often as the watch asks for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from rallypoint.hangs.watchdog import Hang, HangWatch, parse_hang_timeout

PREAMBLE = "import os, sys, threading, time\nrank = int(os.environ['LOCAL_RANK'])\n"


class Watching:
    """Workers, and the watch over them."""

    def __init__(self, folder: Path, limits: str, size: int = 1) -> None:
        parsed = parse_hang_timeout(limits)
        assert parsed is not None
        self.folder = folder
        self.watch = HangWatch(parsed, size)
        self.size = size
        self.workers: list[subprocess.Popen[str]] = []
        self.hung_at = 0.0

    def start(self, program: str | list[str], folder: str | None = None, **more_env: str) -> Watching:
        """Each worker runs this Python program, or one of its own."""
        programs = program if isinstance(program, list) else [program] * self.size
        commands = [[sys.executable, "-c", PREAMBLE + textwrap.dedent(one)] for one in programs]
        return self.run(commands, folder, **more_env)

    def run(self, commands: list[list[str]], folder: str | None = None, **more_env: str) -> Watching:
        for rank, command in enumerate(commands):
            env = {**os.environ, **self.watch.worker_env(rank, os.environ | more_env), "LOCAL_RANK": str(rank), **more_env}
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            self.workers.append(subprocess.Popen(command, env=env, **streams, text=True, start_new_session=True))  # type: ignore[call-overload]
        pids = {rank: worker.pid for rank, worker in enumerate(self.workers)}
        self.watch.begin(pids, {rank: 10 + rank for rank in pids}, str(self.folder) if folder is None else folder)
        return self

    def until_ready(self) -> Watching:
        """Each worker has printed a line."""
        for worker in self.workers:
            assert worker.stdout is not None
            assert worker.stdout.readline(), worker.stderr.read() if worker.stderr else ""
        return self

    def hang(self, within_s: float, until: Callable[[], object] = lambda: False) -> Hang | None:
        """The hang that is found; None if there is none in this time, or until something else is true."""
        end = time.monotonic() + within_s
        while (now := time.monotonic()) < end and not until():
            look_at = self.watch.next_look_at()
            assert look_at is not None
            if now < look_at:
                time.sleep(min(look_at, end) - now)
                continue
            found = self.watch.look(now)
            if found is not None:
                self.hung_at = time.monotonic()
                return found
        return None

    def stacks(self, rank: int | None = None) -> str:
        return (self.folder / "stacks.txt" if rank is None else self.folder / str(rank) / "stacks.txt").read_text()

    def close(self) -> None:
        self.watch.close()
        self.close_workers()

    def close_workers(self) -> None:
        for worker in self.workers:
            try:
                os.killpg(worker.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            worker.communicate()
        self.workers = []
