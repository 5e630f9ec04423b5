"""A job that runs beside the harness, and what /proc says about its processes."""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from benchmarks.contestants import PROGRAMS, Contestant, clean_environment

__all__ = ["Job", "Memory", "Report", "cpu_time_ms", "launcher_processes", "memory", "sleepers"]

LINE_TIMEOUT_S = 60.0
END_TIMEOUT_S = 45.0


class Report(NamedTuple):
    """The first line of a sleeping worker."""

    at: float
    attempt: int
    pid: int


class Memory(NamedTuple):
    rss_mb: float
    pss_mb: float


class Job:
    """A launcher whose standard output is read here, line by line; leaving the context ends it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._pending = b""
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            command, env=clean_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise SystemExit(f"benchmarks: {self.process.args!r} did not end on SIGTERM\n{self.errors()}") from None
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()
            self._errors.close()

    def lines(self, count: int) -> list[str]:
        """The next `count` lines."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        deadline = time.monotonic() + LINE_TIMEOUT_S
        while self._pending.count(b"\n") < count:
            ready = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]
            chunk = os.read(fd, 65536) if ready else b""
            if not chunk:
                raise SystemExit(f"benchmarks: {self.process.args!r} gave too few lines\n{self.errors()}")
            self._pending += chunk
        *whole, self._pending = self._pending.split(b"\n", count)
        return [line.decode() for line in whole]

    def reports(self, count: int) -> list[Report]:
        fields = [line.split() for line in self.lines(count)]
        return [Report(float(at), int(attempt), int(pid)) for at, attempt, pid in fields]

    def wait_for_line(self, text: str) -> None:
        """Until the launcher has said this."""
        deadline = time.monotonic() + LINE_TIMEOUT_S
        while text not in self.errors():
            if time.monotonic() > deadline:
                raise SystemExit(f"benchmarks: {self.process.args!r} did not say {text!r}\n{self.errors()}")
            time.sleep(0.01)

    def wait(self) -> int:
        return self.process.wait(END_TIMEOUT_S)

    def errors(self) -> str:
        fd = self._errors.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")  # the launcher has the same position in it


def sleepers(contestant: Contestant, count: int, options: Sequence[str] = ()) -> Job:
    """A job of `count` workers that report once and sleep."""
    return Job(contestant.command(count, options, [str(PROGRAMS / "sleeper.py")]))


def launcher_processes(launcher: int, workers: set[int]) -> list[int]:
    """The launcher and every helper of its own: all of its descendants except the workers and what is below them."""
    parents = _parents()
    found, level = [launcher], [launcher]
    while level:
        level = [pid for pid, parent in parents.items() if parent in level and pid not in workers]
        found += level
    return found


def memory(pids: Sequence[int]) -> Memory:
    rss_kb = pss_kb = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "Rss":
                rss_kb += int(rest.split()[0])
            elif name == "Pss":
                pss_kb += int(rest.split()[0])
    return Memory(rss_kb / 1024, pss_kb / 1024)


def cpu_time_ms(pids: Sequence[int]) -> float:
    """Time on a processor of all threads, to the nanosecond; utime and stime count in steps of 10 ms only."""
    files = [path for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(path.read_text().split()[0]) for path in files) / 1e6


def _parents() -> dict[int, int]:
    parents = {}
    for name in os.listdir("/proc"):
        try:
            stat = Path(f"/proc/{name}/stat").read_text() if name.isdigit() else ""
        except OSError:
            continue  # ended while we looked
        if stat:
            parents[int(name)] = int(stat[stat.rindex(")") + 2 :].split()[1])
    return parents
