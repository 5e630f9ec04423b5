"""The licence: workers run as long as their agent says, and their warden holds it to that, whatever has become of the agent."""

from __future__ import annotations

import array
import importlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.pace import is_kept

from rallypoint.coordination import engine
from rallypoint.errors import LicenceOverError
from rallypoint.output.log_specs import DefaultLogsSpecs
from rallypoint.processes import warden_client
from rallypoint.processes.licence import Licence, read_testimony, read_until
from rallypoint.processes.subprocesses import start_processes
from rallypoint.processes.warden import Warden
from rallypoint.processes.warden_client import Expired, Launch, Report, Started, WardenClient
from rallypoint.processes.warden_context import WardedContext

DEADLINE_S = 10.0
START_S = 3.0  # in which workers start, on any machine

# Beats every 5 ms, and leaves a daemon that does the same; each writes its process id and the time of its latest beat.
BEATS = """
import os, sys, time
folder = sys.argv[1]
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
else:
    os.wait()
path = f"{folder}/{os.getpid()}"
while True:
    with open(path + ".new", "w") as file:
        file.write(str(time.monotonic()))
    os.rename(path + ".new", path)
    time.sleep(0.005)
"""

Alive = Callable[[int], bool]
WaitUntil = Callable[..., Any]


@pytest.fixture
def licence() -> Iterator[Licence]:
    one = Licence()
    yield one
    one.close()


class Beats:
    """What workers and daemons tell of themselves in a folder."""

    def __init__(self, folder: Path, alive: Alive, wait_until: WaitUntil) -> None:
        self._folder, self._alive, self._wait_until = folder, alive, wait_until

    def pids(self) -> list[int]:
        return [int(path.name) for path in self._folder.iterdir() if path.name.isdigit()]

    def await_start(self, count: int) -> list[int]:
        self._wait_until(lambda: len(self.pids()) == count)
        return self.pids()

    def await_end(self) -> float:
        """When the last of them was still there."""
        self._wait_until(lambda: not any(map(self._alive, self.pids())))
        return max(float((self._folder / str(pid)).read_text()) for pid in self.pids())


@pytest.fixture
def beats(tmp_path: Path, alive: Alive, wait_until: WaitUntil) -> Beats:
    (tmp_path / "beats").mkdir()
    return Beats(tmp_path / "beats", alive, wait_until)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., WardedContext]]:
    """``start(workers, licence)`` starts workers that beat, under this licence."""
    contexts: list[WardedContext] = []

    def run(workers: int, licence: Licence) -> WardedContext:
        args: dict[int, tuple[Any, ...]] = {rank: ("-c", BEATS, str(tmp_path / "beats")) for rank in range(workers)}
        specs = DefaultLogsSpecs(str(tmp_path / "logs"))
        envs: dict[int, dict[str, str]] = {rank: {} for rank in args}
        context = start_processes("trainer", sys.executable, args, envs, specs, licence_fd=licence.fileno())
        assert isinstance(context, WardedContext)
        contexts.append(context)
        return context

    yield run
    for context in contexts:
        context.close(signal.SIGKILL)


# --- the page --------------------------------------------------------------------------------------------------------------


def test_the_page_says_what_was_written_last(licence: Licence) -> None:
    assert read_until(licence.fileno()) == math.inf
    for until in (12.5, 0.0, 1e9, math.inf):
        licence.extend(until)
        assert read_until(licence.fileno()) == until


def test_the_page_keeps_a_testimony_until_it_is_taken_back(licence: Licence) -> None:
    assert read_testimony(licence.fileno()) is None
    long, short = (engine.Testimony("agent", ((2, ("127.0.0.1", 1234)),), (b"hello" * n, b"key", b"context")) for n in (50, 1))
    for one in (long, short):
        licence.entrust(one)
        assert read_testimony(licence.fileno()) == one.fields()
    licence.entrust(None)
    assert read_testimony(licence.fileno()) is None
    with pytest.raises(ValueError, match="does not fit"):
        licence.entrust(engine.Testimony("agent", (), (b"x" * 5000,)))


def test_a_page_that_is_half_written_allows_nothing(licence: Licence) -> None:
    os.pwrite(licence.fileno(), array.array("d", [1e9, 2e9]).tobytes(), 0)
    assert read_until(licence.fileno()) == 0.0


def test_readers_never_see_half_a_change(licence: Licence) -> None:
    values = [float(number) * 1.000001 for number in range(1, 1000)]
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            for value in values:
                licence.extend(value)

    licence.extend(values[0])
    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert {read_until(licence.fileno()) for _ in range(3000)} <= set(values)
    finally:
        is_over.set()
        writer.join()


def test_a_fork_cannot_write_it(licence: Licence) -> None:
    fd = licence.fileno()
    pid = os.fork()
    if pid == 0:
        os._exit(int(os.path.exists(f"/proc/self/fd/{fd}")))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    licence.extend(5.0)
    assert read_until(licence.fileno()) == 5.0


# --- its end ---------------------------------------------------------------------------------------------------------------


def test_v5_workers_and_their_daemons_are_killed_when_their_licence_is_over(
    start: Callable[..., WardedContext], licence: Licence, beats: Beats
) -> None:
    """The agent's main thread does nothing at all, as if it hung in a write (V1, V2) or stood still (V5)."""
    until = time.monotonic() + START_S
    licence.extend(until)
    context = start(2, licence)
    beats.await_start(4)
    assert is_kept(beats.await_end(), until)
    assert not context.licence_expired, "it has not been looked at yet"
    result = context.wait(DEADLINE_S)
    assert result is not None
    assert context.licence_expired
    assert context.expired_at is not None
    assert until <= context.expired_at
    assert is_kept(context.expired_at, until)
    assert {failure.exitcode for failure in result.failures.values()} == {-signal.SIGKILL}


def test_v5_renewing_it_keeps_them(start: Callable[..., WardedContext], licence: Licence, beats: Beats, alive: Alive) -> None:
    began_at = time.monotonic()
    licence.extend(began_at + 3.0)
    context = start(1, licence)
    pids = beats.await_start(2)
    while time.monotonic() < began_at + 4.0:  # by then the warden has looked at the page again
        until = time.monotonic() + 3.0
        licence.extend(until)
        assert context.wait(0.2) is None
        assert all(map(alive, pids))
    assert is_kept(beats.await_end(), until)
    assert context.wait(DEADLINE_S) is not None
    assert context.licence_expired


@pytest.mark.parametrize("until", [0.0, 1.0])
def test_v5_nothing_is_started_once_it_is_over(
    start: Callable[..., WardedContext], licence: Licence, beats: Beats, until: float
) -> None:
    licence.extend(until)
    with pytest.raises(LicenceOverError, match="no worker was started"):
        start(2, licence)
    assert beats.pids() == []


def test_v5_a_warden_whose_licence_was_over_serves_the_next_group(
    start: Callable[..., WardedContext], licence: Licence, beats: Beats
) -> None:
    with warden_client.keep_wardens():
        licence.extend(time.monotonic() + 0.5)
        first = start(2, licence)
        assert first.wait(DEADLINE_S) is not None
        assert first.licence_expired
        first.close(signal.SIGKILL)
        idle = warden_client.take()
        pid = idle.pid
        warden_client.put_back(idle)
        before = len(beats.pids())
        licence.extend(time.monotonic() + 60.0)
        second = start(1, licence)
        beats.await_start(before + 2)
        assert second.wait(0) is None
        assert not second.licence_expired
        second.close(signal.SIGKILL)
        idle = warden_client.take()
        assert idle.pid == pid
        idle.close()


# An agent of its own: it tells its warden's and workers' process ids, and then does what it is told to.
AGENT = """
import os, signal, sys, time
from rallypoint.processes.licence import Licence
from rallypoint.output.log_specs import DefaultLogsSpecs
from rallypoint.processes.subprocesses import start_processes

folder, code, limit_s, then = sys.argv[1:]
licence = Licence()
licence.extend(time.monotonic() + float(limit_s))
logs = DefaultLogsSpecs(folder + "-logs")
context = start_processes("trainer", sys.executable, {0: ("-c", code, folder)}, {0: {}}, logs, licence_fd=licence.fileno())
print("warden", context._warden.pid, flush=True)
exec(then)
context.wait(20)
print("expired", context.licence_expired, flush=True)
context.close(signal.SIGKILL)
"""
BLOCKS = """
read, write = os.pipe()
os.set_blocking(write, False)
try:
    while True:
        os.write(write, bytes(4096))
except BlockingIOError:
    os.set_blocking(write, True)
print("blocked", flush=True)
os.write(write, bytes(4096))
"""


@pytest.fixture
def start_agent(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    agents: list[subprocess.Popen[str]] = []

    def run(limit_s: float, then: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", AGENT, str(tmp_path / "beats"), BEATS, str(limit_s), then]
        agents.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return agents[-1]

    yield run
    for agent in agents:
        agent.kill()
        agent.communicate()


def test_v5_an_agent_that_is_stopped_loses_its_workers_in_time(
    start_agent: Callable[..., subprocess.Popen[str]], beats: Beats
) -> None:
    """V5: SIGSTOP of the agent. It finds out why when it goes on."""
    agent = start_agent(START_S)
    assert agent.stdout is not None
    assert agent.stdout.readline().startswith("warden ")
    beats.await_start(2)
    agent.send_signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    assert is_kept(beats.await_end(), stopped_at + START_S)
    agent.send_signal(signal.SIGCONT)
    assert agent.stdout.readline() == "expired True\n"
    assert agent.wait(DEADLINE_S) == 0


def test_v1_an_agent_that_is_stuck_in_a_write_loses_its_workers_in_time(
    start_agent: Callable[..., subprocess.Popen[str]], beats: Beats
) -> None:
    """V1, V2: what the agent speaks into is full, and it stands there for ever."""
    agent = start_agent(START_S, BLOCKS)
    assert agent.stdout is not None
    assert agent.stdout.readline().startswith("warden ")
    assert agent.stdout.readline() == "blocked\n"
    beats.await_start(2)
    blocked_at = time.monotonic()
    assert is_kept(beats.await_end(), blocked_at + START_S)


# --- nothing holds it up ---------------------------------------------------------------------------------------------------


@pytest.fixture
def warden() -> Iterator[WardenClient]:
    client = WardenClient.start()
    yield client
    client.close()


def hear(warden: WardenClient, kind: type[Report]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while (left := deadline - time.monotonic()) > 0:
        for news in warden.receive(left):
            if isinstance(news, kind):
                return news
    pytest.fail(f"no report of {kind.__name__}")


SLEEPS = Launch(0, ("sleep", "60"), dict(os.environ), {})


def test_v5_an_agent_that_reads_no_reports_does_not_hold_up_the_kill(warden: WardenClient, licence: Licence) -> None:
    """The line to the agent is full, as it is when that was stopped while many of its workers ended."""
    licence.extend(time.monotonic() + 1.5)
    warden.spawn([SLEEPS], licence.fileno())
    started = hear(warden, Started)
    for _ in range(3000):
        warden.watch_rest()  # each is answered
    died = select.poll()
    died.register(pidfd := os.pidfd_open(started.pid), select.POLLIN)
    assert died.poll(DEADLINE_S * 1000)
    os.close(pidfd)
    hear(warden, Expired)


def test_v5_half_a_request_does_not_hold_up_the_kill(warden: WardenClient, licence: Licence) -> None:
    """The agent was stopped in the middle of a message."""
    licence.extend(time.monotonic() + 0.5)
    warden.spawn([SLEEPS], licence.fileno())
    hear(warden, Started)
    warden._sock.send((1000).to_bytes(4, "little") + bytes(10))
    hear(warden, Expired)


def test_v5_a_worker_that_hangs_before_it_is_started_does_not_hold_up_the_kill(licence: Licence) -> None:
    """As one does whose program, or working folder, lies on a dead network share."""
    ours, theirs = socket.socketpair()
    agent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        try:
            os.setsid()
            Warden(theirs, agent_pid, lambda _: time.sleep(60)).run()
        finally:
            os._exit(0)
    theirs.close()
    warden = WardenClient(ours, pid)
    try:
        licence.extend(time.monotonic() + 0.5)
        warden.spawn([SLEEPS], licence.fileno())
        hear(warden, Expired)
    finally:
        warden.close()


def wakings(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)


@pytest.mark.parametrize("until", [None, math.inf])
def test_without_a_limit_the_warden_sleeps(warden: WardenClient, licence: Licence, until: float | None) -> None:
    if until is not None:
        licence.extend(until)
    warden.spawn([SLEEPS], None if until is None else licence.fileno())
    hear(warden, Started)
    before = -1
    while wakings(warden.pid) != before:  # until it has done what there was to do
        before = wakings(warden.pid)
        assert not warden.receive(0.2)
    assert not warden.receive(1.5)
    assert wakings(warden.pid) == before


# --- who has it ------------------------------------------------------------------------------------------------------------


LISTING = """
import os

def list_files(path):
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    with open("/proc/self/maps") as maps, open(path, "w") as file:
        file.write("\\n".join([*(os.readlink(fd) for fd in fds if os.path.islink(fd)), maps.read()]))
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_no_function_worker_has_the_page(licence: Licence, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"listing_{method}.py").write_text(LISTING)
    monkeypatch.syspath_prepend(str(tmp_path))
    list_files = importlib.import_module(f"listing_{method}").list_files
    licence.extend(time.monotonic() + 60.0)
    specs = DefaultLogsSpecs(str(tmp_path / "logs"))
    args: dict[int, tuple[Any, ...]] = {rank: (str(tmp_path / str(rank)),) for rank in range(2)}
    how = {"start_method": method, "licence_fd": licence.fileno()}
    context = start_processes("trainer", list_files, args, {0: {}, 1: {}}, specs, **how)
    try:
        result = context.wait(30)
        assert result is not None
        assert not result.is_failed()
    finally:
        context.close(signal.SIGKILL)
    for rank in range(2):
        assert "rally-licence" not in (tmp_path / str(rank)).read_text()


def test_no_program_has_the_page(warden: WardenClient, licence: Licence) -> None:
    read, write = os.pipe()
    code = "import os; os.write(1, repr(sorted(map(int, os.listdir('/proc/self/fd')))).encode())"
    warden.spawn([Launch(0, (sys.executable, "-c", textwrap.dedent(code)), dict(os.environ), {1: write})], licence.fileno())
    hear(warden, warden_client.Exited)
    os.close(write)
    assert os.read(read, 1000) == b"[0, 1, 2, 3]", "3 is the listing itself"
    os.close(read)
