"""Nobody reads: stdout and stderr are full pipes or a stopped terminal, the event file hangs. The job must not notice.

Whatever has to be done on a signal, a failure or a stop is done first, and said when somebody listens again. What the workers do
is seen in files, for there is no other way to hear of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests import ports
from tests.conftest import AT_ONCE_S

WAIT_S = 30.0
WORKER = """
import os, signal, sys, time
folder, rank, attempt = sys.argv[1], os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
def tell(what):
    with open(f"{folder}/draft.{os.getpid()}", "w") as draft:
        draft.write(str(os.getpid()))
    os.rename(f"{folder}/draft.{os.getpid()}", f"{folder}/{what}.{attempt}.{rank}")
def on_term(*_):
    tell("asked")
    if os.path.exists(f"{folder}/polite"):
        os._exit(0)
signal.signal(signal.SIGTERM, on_term)
os.write(2, f"worker {rank} of attempt {attempt}\\n".encode())
tell("started")
while not os.path.exists(f"{folder}/finish"):
    if os.path.exists(f"{folder}/fail.{attempt}.{rank}"):
        os.write(2, f"worker {rank} fails\\n".encode())
        sys.exit(9)
    time.sleep(0.005)
"""


def full_pipe() -> tuple[int, int]:
    """A pipe that takes nothing more until somebody reads it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for size in (65536, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"\0" * size)
    os.set_blocking(writer, True)
    return reader, writer


class Blocked:
    """A launcher whose stdout and stderr are a full pipe."""

    def __init__(self, args: Sequence[Any], folder: Path) -> None:
        self.reader, writer = full_pipe()
        command = [sys.executable, "-m", "rallypoint", "run", *map(str, args)]
        streams = {"stdin": subprocess.DEVNULL, "stdout": writer, "stderr": writer}
        self.process = subprocess.Popen(command, cwd=folder, **streams)
        os.close(writer)
        self.pid = self.process.pid

    def read_to_the_end(self) -> str:
        """All that was said; from now on somebody listens."""
        text, deadline = b"", time.monotonic() + WAIT_S
        while time.monotonic() < deadline and select.select([self.reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            block = os.read(self.reader, 1 << 20)
            if not block:
                return text.replace(b"\0", b"").decode()
            text += block
        pytest.fail(f"its output did not end within {WAIT_S:g} s: {text!r}")

    def wait(self, timeout_s: float = WAIT_S) -> int:
        return self.process.wait(timeout_s)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.reader)


@pytest.fixture
def blocked(tmp_path: Path, clear_after_kill: Callable[[], None]) -> Iterator[Callable[..., Blocked]]:
    """``blocked(args)`` starts the real command, which nobody reads."""
    made: list[Blocked] = []

    def start(args: Sequence[Any]) -> Blocked:
        made.append(Blocked(args, tmp_path))
        return made[-1]

    yield start
    for one in made:
        one.end()
    clear_after_kill()  # nor does one clear up that waits for nobody


class Workers:
    """The workers' side: what they have told, and what they are ordered to do, in files."""

    def __init__(self, folder: Path, program: Path, wait_until: Callable[..., object]) -> None:
        self.folder, self.program, self._wait_until = folder, program, wait_until

    def pids(self, what: str, attempt: int, ranks: int = 2, timeout_s: float = WAIT_S) -> list[int]:
        """Wait until all ranks have told this; their process ids."""
        files = [self.folder / f"{what}.{attempt}.{rank}" for rank in range(ranks)]
        self._wait_until(lambda: all(file.exists() for file in files), timeout_s)
        return [int(file.read_text()) for file in files]

    def order(self, what: str) -> None:
        (self.folder / what).touch()


@pytest.fixture
def workers(orders: Path, script: Callable[..., Path], wait_until: Callable[..., object]) -> Workers:
    return Workers(orders, script(WORKER), wait_until)


@pytest.fixture
def events_block(tmp_path: Path, wait_until: Callable[..., object]) -> Callable[[], None]:
    """``events_block()`` makes the event file of the only run one that nobody reads: to open it takes for ever."""

    def block() -> None:
        file = wait_until(lambda: next(iter(tmp_path.glob("logs/*/events.jsonl")), None))
        assert isinstance(file, Path)
        file.unlink()
        os.mkfifo(file)

    return block


STANDALONE = ["--standalone", "--nproc-per-node", "2", "--shutdown-timeout", "30"]


@pytest.mark.parametrize("flags", [[], ["--tee", "3", "--log-dir", "logs"], ["-r", "3", "--log-dir", "logs"]], ids=" ".join)
def test_M2_a_restart_that_nobody_can_be_told_of(blocked: Any, workers: Workers, flags: list[str]):
    """M2: a worker fails, the group is restarted and succeeds; all lines are there, in their order, once somebody reads."""
    workers.order("polite")
    job = blocked([*STANDALONE, "--max-restarts", "1", *flags, workers.program, workers.folder])
    workers.pids("started", 0)
    workers.order("fail.0.0")
    workers.pids("started", 1)
    workers.order("finish")
    text = job.read_to_the_end()
    assert job.wait() == 0, text
    told = [text.index(words) for words in ("OMP_NUM_THREADS", "rank 0", "restart 1 of 1")]
    assert told == sorted(told), text
    if "-r" not in flags:
        assert text.count("worker 0 of attempt") == 2, text
        assert text.count("worker 0 fails") == 1, text


def test_M2_a_restart_while_the_event_file_hangs(blocked: Any, workers: Workers, events_block: Any):
    """M2, V3: every output descriptor blocked, that of the events as well."""
    workers.order("polite")
    job = blocked([*STANDALONE, "--max-restarts", "2", "--log-dir", "logs", workers.program, workers.folder])
    workers.pids("started", 0)
    events_block()
    for attempt in range(2):
        workers.order(f"fail.{attempt}.1")
        workers.pids("started", attempt + 1)
    job.process.send_signal(signal.SIGTERM)
    workers.pids("asked", 2)
    assert job.wait() == 143


def test_M2_a_signal_is_passed_on(blocked: Any, workers: Workers, events_block: Any, alive: Any):
    """M2: workers that end on it end at once; the launcher gives its readers a few seconds and ends with the signal's code."""
    workers.order("polite")
    job = blocked([*STANDALONE, "--tee", "3", "--log-dir", "logs", workers.program, workers.folder])
    pids = workers.pids("started", 0)
    events_block()
    job.process.send_signal(signal.SIGTERM)
    assert workers.pids("asked", 0, timeout_s=AT_ONCE_S) == pids
    assert job.wait() == 143
    assert not any(map(alive, pids))


def test_f28_workers_that_print_for_nobody_can_be_stopped(blocked: Any, orders: Path, script: Any, wait_until: Any):
    """F28, M2: what they print waits in pipes and then so do they; the launcher does not."""
    printing = script("""
        import os, sys
        open(f"{sys.argv[1]}/{os.environ['RANK']}", "w").close()
        while True:
            print("a line")
        """)
    job = blocked([*STANDALONE, printing, orders])
    wait_until(lambda: len(list(orders.iterdir())) == 2, WAIT_S)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143


def test_M2_two_signals_kill(blocked: Any, workers: Workers, events_block: Any, alive: Any, wait_until: Any):
    """M2: whatever the console does; and a third one does not wait for readers either."""
    job = blocked([*STANDALONE, "--tee", "3", "--log-dir", "logs", workers.program, workers.folder])
    pids = workers.pids("started", 0)
    events_block()
    job.process.send_signal(signal.SIGTERM)
    workers.pids("asked", 0, timeout_s=AT_ONCE_S)
    job.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not any(map(alive, pids)), AT_ONCE_S)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() in (143, -signal.SIGTERM)


def test_M2_the_end_of_a_job_waits_for_readers_until_a_signal(blocked: Any, workers: Workers, wait_until: Any, alive: Any):
    """A job that failed has something to say, and waits for a reader as any program would; not longer than the next signal."""
    job = blocked([*STANDALONE, "--max-restarts", "0", workers.program, workers.folder])
    pids = workers.pids("started", 0)
    workers.order("polite")
    workers.order("fail.0.0")
    wait_until(lambda: not any(map(alive, pids)), AT_ONCE_S)

    def is_ended() -> bool:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGTERM)
        return job.process.poll() is not None

    wait_until(is_ended, AT_ONCE_S)
    assert job.process.returncode in (1, 143, -signal.SIGTERM)  # as it was, or by a signal that came before the end


# --- several nodes ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_nodes(start_rallyrun: Any, blocked: Any, workers: Workers) -> Callable[..., tuple[Any, Any]]:
    """``two_nodes(is_host_blocked)``: a job of two agents with one worker each, of which one is read by nobody."""

    def start(is_host_blocked: bool) -> tuple[Any, Any]:
        port = ports.free_port()
        size = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--shutdown-timeout", "20"]
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "blocked"]
        command = [*size, *meeting, workers.program, workers.folder]
        first = (blocked if is_host_blocked else start_rallyrun)(command)
        workers._wait_until(lambda: not ports.is_free(port), WAIT_S)
        second = (start_rallyrun if is_host_blocked else blocked)(command)
        workers.pids("started", 0)
        first.port = port
        return first, second

    return start


def test_V1_a_node_that_nobody_reads_stops_with_the_others(two_nodes: Any, workers: Workers, alive: Any):
    """V1: a worker of the other node fails; this one stops its own, and both go on together."""
    workers.order("polite")
    first, second = two_nodes(is_host_blocked=False)
    for attempt, rank in ((0, 0), (1, 1)):
        before = workers.pids("started", attempt)
        workers.order(f"fail.{attempt}.{rank}")
        after = workers.pids("started", attempt + 1)
        assert not any(map(alive, before))
        assert all(map(alive, after))
    workers.order("finish")
    assert first.wait() == 0, first.stderr
    second.read_to_the_end()
    assert second.wait() == 0


def test_V2_the_fence_acts_although_nobody_reads(two_nodes: Any, workers: Workers, alive: Any, wait_until: Any):
    """V2, V3: the store's host stands still; a node that hears nothing from it kills its workers, whatever its console does."""
    host, other = two_nodes(is_host_blocked=False)
    pids = [pid for pid in workers.pids("started", 0) if other.pid in ancestors(pid)]
    assert len(pids) == 1
    host.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: not any(map(alive, pids)), 3.0 + AT_ONCE_S)
    finally:
        host.send_signal(signal.SIGCONT)


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        stat = Path(f"/proc/{pid}/stat").read_text()
        pid = int(stat[stat.rindex(")") + 2 :].split()[1])
        found.append(pid)
    return found


def test_M3_a_stranger_at_the_port_of_a_host_that_nobody_reads(two_nodes: Any, workers: Workers):
    """M3: whoever is turned away is told of later; the store goes on serving."""
    workers.order("polite")
    host, other = two_nodes(is_host_blocked=True)
    for _ in range(3):
        with socket.create_connection(("localhost", host.port), 10) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):  # until it hangs up
                    pass
    workers.order("fail.0.0")
    workers.pids("started", 1)
    workers.order("finish")
    assert other.wait() == 0, other.stderr
    text = host.read_to_the_end()
    assert host.wait() == 0, text
    assert "the store has turned away" in text


# --- a terminal ------------------------------------------------------------------------------------------------------------


class Terminal:
    """A real terminal with a command in its foreground."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.keyboard, screen = pty.openpty()
        self._screen = os.open(os.ttyname(screen), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        self.process = subprocess.Popen(
            command, cwd=folder, stdin=screen, stdout=screen, stderr=screen, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509  # no thread runs here
        )  # fmt: skip
        os.close(screen)

    def takes_nothing(self) -> bool:
        try:
            os.write(self._screen, b".")
        except BlockingIOError:
            return True
        return False

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._screen)
        os.close(self.keyboard)


def test_M2_ctrl_s(rallyrun_command: Any, workers: Workers, wait_until: Any, tmp_path: Path, private_tmpdir: Path):
    """M2: a terminal that was told to stop shows nothing; workers are restarted, and stopped, all the same."""
    workers.order("polite")
    command = rallyrun_command(*STANDALONE, "--max-restarts", "1", workers.program, workers.folder)
    terminal = Terminal(command, tmp_path)
    try:
        workers.pids("started", 0)
        os.write(terminal.keyboard, b"\x13")
        wait_until(terminal.takes_nothing)
        workers.order("fail.0.1")
        workers.pids("started", 1)
        terminal.process.send_signal(signal.SIGTERM)
        workers.pids("asked", 1, timeout_s=AT_ONCE_S)
        assert terminal.process.wait(WAIT_S) == 143
    finally:
        terminal.end()
        for folder in private_tmpdir.glob("rallypoint_*"):
            shutil.rmtree(folder)


# --- a disk that hangs -----------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, which can be frozen; it is thawed and gone after the test."""
    image, mount = tmp_path / "disk.img", tmp_path / "disk"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    for command in (["mkfs.ext4", "-q", "-F", str(image)], ["mount", "-o", "loop", str(image), str(mount)]):
        try:
            made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except FileNotFoundError:
            pytest.skip(f"{command[0]} is not installed")
        if made.returncode:
            pytest.skip(f"no file system can be mounted here: {made.stderr}")
    yield mount
    subprocess.run(["fsfreeze", "--unfreeze", str(mount)], check=False, capture_output=True, timeout=60)
    unmount = ["umount", str(mount)]
    deadline = time.monotonic() + WAIT_S
    while subprocess.run(unmount, check=False, capture_output=True, timeout=60).returncode and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.root
def test_M2_a_frozen_disk(start_rallyrun: Any, workers: Workers, disk: Path, alive: Any):
    """M2, M5, V3: the logs hang; the workers are restarted without any, and hear of a signal."""
    workers.order("polite")
    flags = ["--max-restarts", "2", "--tee", "3", "--log-dir", disk / "logs"]
    job = start_rallyrun([*STANDALONE, *flags, workers.program, workers.folder])
    pids = workers.pids("started", 0)
    subprocess.run(["fsfreeze", "--freeze", str(disk)], check=True, timeout=60)
    try:
        for attempt in range(2):
            workers.order(f"fail.{attempt}.0")
            pids = workers.pids("started", attempt + 1)
        job.wait_for_line("run without log files")
        job.send_signal(signal.SIGTERM)
        workers.pids("asked", 2, timeout_s=AT_ONCE_S)
        workers._wait_until(lambda: not any(map(alive, pids)), AT_ONCE_S)
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(disk)], check=True, timeout=60)
    assert job.wait() == 143, job.stderr
