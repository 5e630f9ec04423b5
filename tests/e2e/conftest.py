"""What the end-to-end tests share: any command beside the test, and every process that it led to, however far it has moved.

A process that is to be found again carries a mark in its environment, which no fork, new session or change of parent removes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.pace import is_kept

MARK = "RALLY_E2E_MARK"
WARDEN = "rally-warden"


def stat_fields(pid: int) -> tuple[str, str, int] | None:
    """Name, state letter and parent of a process, or None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name = stat[stat.index("(") + 1 : stat.rindex(")")]
    state, parent = stat[stat.rindex(")") + 2 :].split()[:2]
    return name, state, int(parent)


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


class Processes:
    """Questions to /proc."""

    def children(self, parent: int) -> dict[int, tuple[str, str]]:
        """Name and state of each child."""
        found = {pid: stat_fields(pid) for pid in all_pids()}
        return {pid: fields[:2] for pid, fields in found.items() if fields is not None and fields[2] == parent}

    def warden(self, agent: int) -> int | None:
        """The agent's warden, once it has taken its name."""
        return next((pid for pid, (name, state) in self.children(agent).items() if name == WARDEN and state not in "ZX"), None)

    def rss_kb(self, pid: int) -> int:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(re.search(r"^Rss:\s+(\d+) kB", rollup, re.MULTILINE)[1])  # type: ignore[index]


@pytest.fixture(scope="session")
def processes() -> Processes:
    return Processes()


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """``marked()``: every process alive that this test led to. Those that a failed test leaves are killed after it."""
    mark = f"{MARK}={uuid.uuid4().hex}".encode()
    name, _, value = mark.decode().partition("=")
    monkeypatch.setenv(name, value)

    def has_mark(pid: int) -> bool:
        with contextlib.suppress(OSError):  # it is gone, or is somebody else's
            fields = stat_fields(pid)
            return fields is not None and fields[1] not in "ZX" and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False

    def alive_now() -> list[int]:
        return [pid for pid in all_pids() if pid != os.getpid() and has_mark(pid)]

    yield alive_now
    for pid in alive_now():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def numbers_after(word: str, text: str) -> list[int]:
    """Every N of the whole lines ``word N``."""
    return [int(number) for number in re.findall(rf"^{word} (\d+)$\n", text, re.MULTILINE)]


@pytest.fixture(scope="session")
def numbers() -> Callable[[str, str], list[int]]:
    """``numbers(word, text)``: every N of the whole lines ``word N``, which is how workers tell their process ids."""
    return numbers_after


@pytest.fixture(scope="session")
def rallyrun_command() -> Callable[..., list[str]]:
    """``rallyrun_command(*args)``: the command itself, to be started in some unusual way."""
    return lambda *args: [sys.executable, "-m", "rallypoint", "run", *map(str, args)]


class Command:
    """A command beside the test; what it and its children print is in two files, or in one."""

    def __init__(self, command: Sequence[str], folder: Path, together: bool, options: dict[str, Any]) -> None:
        self._out, self._err = folder / "stdout.txt", folder / ("stdout.txt" if together else "stderr.txt")
        with self._out.open("ab") as out, self._err.open("ab") as err:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            self.process = subprocess.Popen(command, **{"cwd": folder.parent, **streams, **options})
        self.pid = self.process.pid

    @property
    def stdout(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    def wait(self, timeout_s: float = 30.0) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout_s:g} s\n--- stdout ---\n{self.stdout}\n--- stderr ---\n{self.stderr}")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def start_command(tmp_path: Path, clear_after_kill: Callable[[], None]) -> Iterator[Callable[..., Command]]:
    """``start_command(command, together=False, **popen)`` starts any command; with `together` its two streams share a file."""
    running: list[Command] = []

    def start(command: Sequence[str], together: bool = False, **options: Any) -> Command:
        folder = tmp_path / f"command_{len(running)}"
        folder.mkdir()
        running.append(Command(command, folder, together, options))
        return running[-1]

    yield start
    for command in running:
        command.end()
    if any(command.process.returncode == -signal.SIGKILL for command in running):
        clear_after_kill()


def controller_mount(name: str) -> Path | None:
    """Where this controller of version 1 is mounted."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, options, *_ = line.split()
        if kind == "cgroup" and name in options.split(","):
            return Path(mount)
    return None


@pytest.fixture
def cgroup(wait_until: Callable[..., object]) -> Iterator[Callable[[str], Path]]:
    """``cgroup(controller)``: a new cgroup of version 1, removed after the test; skips where there is no such controller."""
    made: list[Path] = []

    def make(controller: str) -> Path:
        mount = controller_mount(controller)
        if mount is None:
            pytest.skip(f"no version 1 cgroup controller {controller!r} is mounted")
        folder = mount / f"rallypoint-e2e-{uuid.uuid4().hex[:12]}"
        try:
            folder.mkdir()
        except OSError as error:
            pytest.skip(f"no cgroup can be made under {mount}: {error.strerror}")
        made.append(folder)
        return folder

    def is_removed(folder: Path) -> bool:
        with contextlib.suppress(OSError):  # a member has not been reaped yet
            folder.rmdir()
        return not folder.exists()

    yield make
    for folder in made:
        if (folder / "freezer.state").exists():
            (folder / "freezer.state").write_text("THAWED")
        for pid in (folder / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        wait_until(lambda folder=folder: is_removed(folder))


@pytest.fixture(scope="session")
def within() -> Callable[[str, float, float], None]:
    """``within(what, took_s, promised_s)`` prints the figure, and fails where the promise is not kept, see `tests.pace`."""

    def check(what: str, took_s: float, promised_s: float) -> None:
        print(f"{what}: {took_s:.3f} s (promised: {promised_s:g} s)")
        assert is_kept(took_s, promised_s), what

    return check


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """``small_disk``: a file system of one megabyte; skips where none can be mounted."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=64", "tmpfs", str(mount)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True, timeout=60)
