"""Three scenes, of a few seconds each: a worker that is killed, one that hangs, and a node that is lost.

Everything in them is real: launchers, workers, signals; the nodes of the third scene meet on the loopback. What launchers and
workers say is shown as it comes, with the time since the scene began.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rallypoint.net.endpoint import get_free_port

__all__ = ["TITLES", "DemoFailed", "play"]

TITLES = ("A worker is killed", "A worker hangs", "A node is lost")
STEPS = 12
HURT_AT = 5
NEVER = -1
PATIENCE_S = 60.0
PROGRAM = Path(__file__).with_name("train.py")
_STARTED = re.compile(r"pid (\d+) rank (\d+) of (\d+) from step (\d+)")
_STEP = re.compile(rf"step (\d+) of {STEPS}")
_SHOWN = ("failed", "hang", "restart", "lost", "generation", "rank ")
_HOSTS = "hosts the coordination store"

Say = Callable[[str], None]


class DemoFailed(Exception):
    """What a scene was to show did not come."""


class Worker:
    """A worker that has started, as it told of itself."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self.pid, self.rank, self.size, self.step = map(int, words)
        self.at = time.monotonic()


class Launcher:
    """A launcher, whose lines are shown as they come, and what its workers have told."""

    def __init__(self, name: str, flags: list[str], arguments: list[str], say: Say) -> None:
        self.workers: list[Worker] = []
        self.step = 0
        self.is_host = False
        self._name, self._say = name, say
        self._changed = threading.Condition()
        command = [sys.executable, "-m", "rallypoint", "run", *flags, str(PROGRAM), *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        streams = (self.process.stdout, self._hear_worker), (self.process.stderr, self._hear_launcher)
        self._readers = [threading.Thread(target=self._read, args=both) for both in streams]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Iterator[str], hear: Callable[[str], None]) -> None:
        for line in stream:
            with self._changed:
                hear(line.rstrip())
                self._changed.notify_all()

    def _hear_worker(self, line: str) -> None:
        if started := _STARTED.fullmatch(line):
            self.workers.append(Worker(started.groups()))
        elif step := _STEP.fullmatch(line):
            self.step = int(step[1])

    def _hear_launcher(self, line: str) -> None:
        self.is_host |= _HOSTS in line
        if any(word in line for word in _SHOWN):
            self._say(f"{self._name}{line.removeprefix('rallyrun: ').replace(str(PROGRAM), PROGRAM.name)}")

    def wait_for(self, condition: Callable[[], object]) -> None:
        with self._changed:
            if not self._changed.wait_for(condition, PATIENCE_S):
                raise DemoFailed(f"{self._name}waited {PATIENCE_S:g} s for what should have come in one")

    def started_since(self, moment: float, size: int) -> list[Worker]:
        return [worker for worker in self.workers if worker.at >= moment and worker.size == size]

    def end(self) -> int:
        """Its exit code; it is ended if it has not by itself."""
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            if self.process.poll() is None:
                self.process.terminate()
                self.process.wait()
            for reader in self._readers:
                reader.join()
            for stream in (self.process.stdout, self.process.stderr):
                assert stream is not None
                stream.close()


def play(number: int, say: Say) -> None:
    """Play one of the scenes, from 0; DemoFailed if it does not end as it should."""
    with tempfile.TemporaryDirectory(prefix="rallypoint-demo-", ignore_cleanup_errors=True) as folder:
        (_kill_a_worker, _let_a_worker_hang, _lose_a_node)[number](Path(folder), say)


@contextmanager
def _launcher(name: str, flags: list[str], folder: Path, hang_at: int, say: Say) -> Iterator[Launcher]:
    shown = [flag if re.fullmatch(r"[\w.:=,-]+", flag) else repr(flag) for flag in flags]
    say(f"{name}$ rallyrun {' '.join(shown)} train.py")
    steps = folder / "steps"
    steps.mkdir(exist_ok=True)
    launcher = Launcher(name, ["--log-dir", str(folder / "logs"), *flags], [str(steps), str(STEPS), str(hang_at)], say)
    try:
        yield launcher
    except BaseException:
        launcher.process.terminate()
        launcher.end()
        raise


def _finish(launcher: Launcher, say: Say) -> None:
    if (code := launcher.end()) != 0:
        raise DemoFailed(f"exit code {code} instead of 0")
    say(f"done: all {STEPS} steps, exit code 0")


def _kill_a_worker(folder: Path, say: Say) -> None:
    flags = ["--standalone", "--nproc-per-node", "4", "--max-restarts", "3", "--omp-num-threads", "1"]
    with _launcher("", flags, folder, NEVER, say) as launcher:
        launcher.wait_for(lambda: launcher.step >= HURT_AT)
        victim = next(worker for worker in launcher.workers if worker.rank == 2)
        say(f"  now: kill -9 of rank 2, at step {launcher.step}")
        killed_at = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        launcher.wait_for(lambda: len(launcher.started_since(killed_at, 4)) == 4)
        _tell_recovery(launcher.started_since(killed_at, 4), killed_at, "the kill", say)
        _finish(launcher, say)


def _let_a_worker_hang(folder: Path, say: Say) -> None:
    flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "--omp-num-threads", "1", "--hang-timeout", "2"]
    with _launcher("", flags, folder, HURT_AT, say) as launcher:
        launcher.wait_for(lambda: launcher.step >= HURT_AT)
        hung_at = time.monotonic()
        say("  now: rank 1 waits for a lock that nobody gives back")
        launcher.wait_for(lambda: len(launcher.started_since(hung_at, 2)) == 2)
        _tell_recovery(launcher.started_since(hung_at, 2), hung_at, "the hang began", say)
        _finish(launcher, say)


def _lose_a_node(folder: Path, say: Say) -> None:
    endpoint = f"127.0.0.1:{get_free_port()}"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "demo", "--rdzv-conf", "last_call_timeout=30"]
    flags = ["--nnodes", "1:2", "--nproc-per-node", "2", *meeting, "--omp-num-threads", "1"]
    with _launcher("node A: ", flags, folder, NEVER, say) as first:
        first.wait_for(lambda: first.is_host)
        with _launcher("node B: ", flags, folder, NEVER, say) as second:
            first.wait_for(lambda: first.step >= HURT_AT)
            say("  now: kill -9 of node B's launcher")
            killed_at = time.monotonic()
            second.process.kill()
            first.wait_for(lambda: len(first.started_since(killed_at, 2)) == 2)
            second.end()
        _tell_recovery(first.started_since(killed_at, 2), killed_at, "the kill", say)
        _finish(first, say)


def _tell_recovery(workers: list[Worker], hurt_at: float, what: str, say: Say) -> None:
    took_s = max(worker.at for worker in workers) - hurt_at
    say(f"  {len(workers)} workers go on from step {workers[0].step}, {took_s:.2f} s after {what}")
