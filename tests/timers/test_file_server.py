"""The watchdog over a named pipe, with real workers."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.pace import is_under

from rallypoint.errors import UsageError
from rallypoint.timers import FileTimerClient, FileTimerRequest, FileTimerServer
from rallypoint.timers.file_timer import describe_expiry

Start = Callable[..., subprocess.Popen[bytes]]

WORKER = """
import os, sys, time
import rallypoint.timers as timer
timer.configure(timer.FileTimerClient(sys.argv[1]))
"""


@pytest.fixture
def pipe(tmp_path: Path) -> str:
    return str(tmp_path / "timers")


@pytest.fixture
def start_worker(pipe: str) -> Iterator[Start]:
    """Starts a process that runs this code with a client in place, or one that only sleeps."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str | None = None) -> subprocess.Popen[bytes]:
        command = ["sleep", "60"] if code is None else [sys.executable, "-c", WORKER + code, pipe]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


class Watch:
    """A server and what it told."""

    def __init__(self, pipe: str, **options: Any) -> None:
        self.events: list[tuple[str, FileTimerRequest | None]] = []
        self.reaped: list[tuple[int, str]] = []
        options = {"max_interval": 30, "log_event": lambda *event: self.events.append(event), "on_reaped": self.note, **options}
        self.server = FileTimerServer(pipe, "run", **options)

    def note(self, pid: int, request: FileTimerRequest) -> None:
        self.reaped.append((pid, describe_expiry(request)))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.events]


@pytest.fixture
def watch(pipe: str) -> Iterator[Callable[..., Watch]]:
    """Starts a server; its longest interval is far longer than any test, so whatever happens in time happens by events."""
    running: list[Watch] = []

    def start(**options: Any) -> Watch:
        running.append(Watch(pipe, **options))
        running[-1].server.start()
        return running[-1]

    yield start
    for one in running:
        one.server.stop()


def send(pipe: str, *requests: FileTimerRequest | bytes) -> None:
    fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    for request in requests:
        os.write(fd, request if isinstance(request, bytes) else request.to_json().encode() + b"\n")
    os.close(fd)


def soon() -> float:
    return time.time() + 0.1


# --- what happens to workers -----------------------------------------------------------------------------------------------


def test_a_worker_whose_timer_expires_is_killed(watch: Any, start_worker: Start) -> None:
    told = watch()
    worker = start_worker("with timer.expires(after=0.5, scope='step'): print(time.time(), flush=True); time.sleep(60)")
    assert worker.stdout is not None
    began = float(worker.stdout.readline())
    assert worker.wait(20) == -signal.SIGKILL
    assert 0.4 < time.time() - began < 5
    told.server.stop()
    assert told.names == ["watchdog started", "timer expired", "kill worker process", "watchdog stopped"]
    assert told.events[1][1].worker_pid == worker.pid
    ((pid, why),) = told.reaped
    assert pid == worker.pid
    assert re.fullmatch(r"timer step expired after 0\.[2-5] s", why)


def test_a_worker_that_releases_in_time_is_left_alone(watch: Any, start_worker: Start, wait_until: Any) -> None:
    told = watch()
    worker = start_worker(
        """
for step in range(5):
    with timer.expires(after=30, scope=f"step {step}"):
        pass
print("done", flush=True)
time.sleep(60)
"""
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"done\n"
    wait_until(lambda: not told.server.get_expired_timers(time.time() + 100))
    assert worker.poll() is None
    assert told.names == ["watchdog started"]


def test_the_outer_scope_is_watched_when_the_inner_is_left(watch: Any, start_worker: Start) -> None:
    told = watch()
    worker = start_worker(
        """
with timer.expires(after=0.6, scope="outer"):
    with timer.expires(after=30, scope="inner"):
        pass
    time.sleep(60)
"""
    )
    assert worker.wait(20) == -signal.SIGKILL
    ((_, why),) = told.reaped
    assert why.startswith("timer outer expired after 0.")


def test_the_worker_gets_the_signal_that_it_asked_for(watch: Any, start_worker: Start) -> None:
    watch()
    worker = start_worker("with timer.expires(0.2, 's', timer.FileTimerClient(sys.argv[1], signal=12)): time.sleep(60)")
    assert worker.wait(20) == -signal.SIGUSR2


def test_the_timer_that_expired_first_decides(watch: Any, pipe: str, start_worker: Start, wait_until: Any) -> None:
    told = watch()
    worker = start_worker()
    late = FileTimerRequest(worker.pid, "late", time.time() - 1, signal.SIGUSR1)
    early = FileTimerRequest(worker.pid, "early", time.time() - 9, signal.SIGTERM)
    send(pipe, late.to_json().encode() + b"\n" + early.to_json().encode() + b"\n")
    assert worker.wait(10) == -signal.SIGTERM
    wait_until(lambda: not told.server.get_expired_timers(time.time()))
    assert len(told.reaped) == 1


def test_without_a_signal_the_event_is_all(watch: Any, pipe: str, start_worker: Start, wait_until: Any) -> None:
    told = watch()
    worker = start_worker()
    send(pipe, FileTimerRequest(worker.pid, "only told", soon(), 0))
    wait_until(lambda: "timer expired" in told.names)
    told.server.stop()
    assert worker.poll() is None
    assert told.names == ["watchdog started", "timer expired", "watchdog stopped"]
    assert told.reaped == []


def test_whom_we_do_not_know_is_not_signalled(watch: Any, pipe: str, start_worker: Start, wait_until: Any) -> None:
    asked: list[int] = []
    told = watch(may_reap=lambda pid: asked.append(pid) or pid == mine.pid)
    mine, other = start_worker(), start_worker()
    send(pipe, *(FileTimerRequest(pid, "s", soon(), 9) for pid in (other.pid, os.getpid(), 1, mine.pid)))
    assert mine.wait(10) == -signal.SIGKILL
    wait_until(lambda: other.pid in asked)
    told.server.stop()
    assert other.poll() is None
    assert os.getpid() not in asked
    assert [pid for pid, _ in told.reaped] == [mine.pid]


def test_a_dead_worker_s_timers_are_forgotten(watch: Any, pipe: str, start_worker: Start, wait_until: Any) -> None:
    told = watch(max_interval=0.05)
    worker = start_worker()
    send(pipe, FileTimerRequest(worker.pid, "s", time.time() + 60, 9))
    wait_until(lambda: told.server.get_expired_timers(time.time() + 100))
    worker.kill()  # and nobody waits for it yet
    wait_until(lambda: not told.server.get_expired_timers(time.time() + 100))
    assert told.names == ["watchdog started"]


def test_a_worker_that_has_ended_is_not_blamed(watch: Any, start_worker: Start, wait_until: Any) -> None:
    told = watch()
    worker = start_worker()
    worker.kill()
    wait_until(lambda: not FileTimerServer.is_process_running(worker.pid))
    told.server.register_timers([FileTimerRequest(worker.pid, "s", time.time(), 9)])
    wait_until(lambda: not told.server.get_expired_timers(time.time() + 100))
    assert told.names == ["watchdog started"]


def test_callbacks_that_raise_save_nobody(watch: Any, pipe: str, start_worker: Start) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError

    watch(log_event=fail, on_reaped=fail)
    worker = start_worker()
    send(pipe, FileTimerRequest(worker.pid, "s", soon(), 9))
    assert worker.wait(10) == -signal.SIGKILL


def test_who_cannot_say_whom_it_knows_knows_nobody(watch: Any, start_worker: Start, wait_until: Any) -> None:
    told = watch(may_reap=lambda pid: 1 // 0)
    worker = start_worker()
    told.server.register_timers([FileTimerRequest(worker.pid, "s", time.time(), 9)])
    wait_until(lambda: not told.server.get_expired_timers(time.time()))
    told.server.stop()
    assert worker.poll() is None
    assert told.names == ["watchdog started", "watchdog stopped"]


def test_a_step_of_the_clock_kills_nobody(watch: Any, pipe: str, start_worker: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    told = watch(max_interval=0.05)
    worker = start_worker()
    real = time.time
    progress = real()
    told.server.register_timers([FileTimerRequest(worker.pid, "s", real() + 60, 9)])
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    deadline = time.monotonic() + 10
    while told.server.get_last_progress_time() < progress + 3600 and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert told.server.get_last_progress_time() >= int(progress + 3600)
    assert told.names == ["watchdog started"]
    assert worker.poll() is None
    assert set(told.server.get_expired_timers(real() + 3600 + 61)) == {worker.pid}


# --- the server itself -----------------------------------------------------------------------------------------------------


def test_the_pipe_is_ours_alone_and_goes_with_the_server(watch: Any, pipe: str) -> None:
    told = watch()
    mode = os.stat(pipe).st_mode
    assert stat.S_ISFIFO(mode)
    assert stat.S_IMODE(mode) == 0o600
    began = time.monotonic()
    told.server.stop()
    assert is_under(time.monotonic() - began, 5)
    assert not os.path.exists(pipe)
    told.server.stop()
    assert told.names == ["watchdog started", "watchdog stopped"]


def test_a_server_starts_again_and_knows_nothing_of_before(watch: Any, pipe: str, start_worker: Start) -> None:
    told = watch()
    old, new = start_worker(), start_worker()
    told.server.register_timers([FileTimerRequest(old.pid, "before", time.time() + 60, 9)])
    told.server.stop()
    assert told.server.get_expired_timers(time.time() + 100) == {}
    told.server.start()
    told.server.start()
    send(pipe, FileTimerRequest(new.pid, "after", soon(), 9))
    assert new.wait(10) == -signal.SIGKILL
    assert old.poll() is None


def test_another_server_takes_over_an_old_pipe(watch: Any, pipe: str, start_worker: Start) -> None:
    os.mkfifo(pipe, 0o644)
    watch()
    assert stat.S_IMODE(os.stat(pipe).st_mode) == 0o600
    worker = start_worker()
    send(pipe, FileTimerRequest(worker.pid, "s", soon(), 9))
    assert worker.wait(10) == -signal.SIGKILL


def test_what_is_not_ours_is_not_removed(watch: Any, pipe: str) -> None:
    told = watch()
    os.unlink(pipe)
    Path(pipe).write_text("precious")
    told.server.stop()
    assert Path(pipe).read_text() == "precious"


def test_nothing_starts_where_a_file_is(pipe: str) -> None:
    Path(pipe).write_text("precious")
    before = threading.active_count()
    with pytest.raises(UsageError, match="TORCHELASTIC_TIMER_FILE"):
        FileTimerServer(pipe, "run").start()
    assert Path(pipe).read_text() == "precious"
    assert threading.active_count() == before


def test_it_sleeps_while_nothing_happens(watch: Any, pipe: str, wait_until: Any) -> None:
    """A pipe that many have opened and closed is no reason to wake; the whole process uses next to no time."""
    told = watch()
    client = FileTimerClient(pipe)
    client.acquire("s", time.time() + 60)
    wait_until(lambda: told.server.get_expired_timers(time.time() + 100))
    client.release("s")
    wait_until(lambda: not told.server.get_expired_timers(time.time() + 100))
    before = time.process_time()
    threading.Event().wait(0.5)
    assert time.process_time() - before < 0.1


def test_run_once_is_one_round_and_the_end(watch: Any, pipe: str, start_worker: Start) -> None:
    told = watch()
    worker = start_worker()
    send(pipe, FileTimerRequest(worker.pid, "s", time.time() - 1, 9))
    told.server.run_once()
    assert worker.wait(10) == -signal.SIGKILL
    assert not os.path.exists(pipe)
    assert told.names == ["watchdog started", "timer expired", "kill worker process"]


def test_progress_is_what_the_watchdog_makes(watch: Any, wait_until: Any) -> None:
    began = int(time.time())
    told = watch(max_interval=0.05)
    assert isinstance(told.server.get_last_progress_time(), int)
    wait_until(lambda: told.server.get_last_progress_time() > began)


def test_it_may_be_stopped_from_its_own_callback(pipe: str, start_worker: Start, wait_until: Any) -> None:
    server = FileTimerServer(pipe, "run", 30, on_reaped=lambda pid, request: server.stop())
    server.start()
    worker = start_worker()
    send(pipe, FileTimerRequest(worker.pid, "s", soon(), 9))
    assert worker.wait(10) == -signal.SIGKILL
    wait_until(lambda: not os.path.exists(pipe))


def test_many_workers_share_the_pipe(watch: Any, pipe: str, start_worker: Start, wait_until: Any) -> None:
    """Eight workers with five hundred scopes each: every request arrives whole, so in the end nothing is left to expire."""
    told = watch()
    code = """
for step in range(500):
    with timer.expires(after=30, scope=f"step {step} " + 200 * "x"):
        pass
"""
    workers = [start_worker(code) for _ in range(8)]
    assert [worker.wait(60) for worker in workers] == [0] * 8
    last = start_worker()
    send(pipe, FileTimerRequest(last.pid, "s", time.time(), 9))  # is read after all that came before it
    assert last.wait(10) == -signal.SIGKILL
    wait_until(lambda: last.pid not in told.server.get_expired_timers(time.time() + 100))  # it is struck off once it is dead
    assert told.server.get_expired_timers(time.time() + 100) == {}
    assert len(told.reaped) == 1
