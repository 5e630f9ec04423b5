"""What lasts is undone: when its time is over, when it is asked for, and whoever of the two who know of it is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import process_state

from rallypoint.chaos import grip
from rallypoint.chaos.grip import GoneError
from rallypoint.chaos.guard import Guard
from rallypoint.chaos.holds import why_no_cut
from rallypoint.errors import RallypointError

SPINS = "while True: pass"
OWNER = """
import os, sys, time
from rallypoint.chaos.guard import Guard
guard = Guard()
guard.hold(1, "stop", 600.0, [os.pidfd_open(int(sys.argv[1]))])
print("held", flush=True)
time.sleep(600)
"""
TALKS = """
import socket, sys
port, mine = int(sys.argv[1]), socket.create_server(("127.0.0.1", 0))
def connect():
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
socks = [connect()]
print(mine.getsockname()[1], flush=True)
guest, _ = mine.accept()
for line in sys.stdin:
    if line == "connect\\n":
        socks.append(connect())
        print("connected", flush=True)
        continue
    which = int(line)
    sock = guest if which < 0 else socks[which]
    sock.settimeout(0.2)
    try:
        print("heard", sock.recv(100).decode(), flush=True)
    except TimeoutError:
        print("silence", flush=True)
"""


@pytest.fixture
def guard() -> Iterator[Guard]:
    with Guard() as one:
        yield one


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``start(program, *arguments)``: a Python beside the test."""
    running: list[subprocess.Popen[str]] = []

    def begin(program: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, *map(str, arguments)]
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return running[-1]

    yield begin
    for one in running:
        one.kill()
        one.communicate()


@pytest.fixture
def spinning(start: Callable[..., subprocess.Popen[str]]) -> Iterator[tuple[int, int]]:
    """A process that never rests, and its descriptor."""
    pid = start(SPINS).pid
    fd = os.pidfd_open(pid)
    yield pid, fd
    os.close(fd)


def stands(pid: int) -> bool:
    state = process_state(pid)
    return state is not None and state[0] == "T"


def hear_off(guard: Guard, number: int) -> bool:
    return any(word.number == number and word.what == "off" for word in guard.hear(0.1))


def test_a_process_stands_for_its_time(guard: Guard, spinning: tuple[int, int], wait_until: Any) -> None:
    pid, fd = spinning
    guard.hold(1, "stop", 0.3, [fd])
    wait_until(lambda: hear_off(guard, 1))
    wait_until(lambda: not stands(pid))


def test_it_goes_on_when_that_is_asked_for(guard: Guard, spinning: tuple[int, int], wait_until: Any) -> None:
    pid, fd = spinning
    guard.hold(1, "stop", 600.0, [fd] * 450)  # which takes three packets
    wait_until(lambda: stands(pid))
    guard.release(1)
    wait_until(lambda: hear_off(guard, 1))
    wait_until(lambda: not stands(pid))


def test_a_slow_process_stands_and_runs_in_turn(guard: Guard, spinning: tuple[int, int], wait_until: Any) -> None:
    pid, fd = spinning
    guard.hold(1, "slow", 600.0, [fd], percent=50)
    for _ in range(3):
        wait_until(lambda: stands(pid))
        wait_until(lambda: not stands(pid))
    guard.release(1)
    wait_until(lambda: hear_off(guard, 1))
    wait_until(lambda: not stands(pid))


def test_it_goes_on_after_kill_9_of_whoever_had_it_stopped(start: Any, spinning: tuple[int, int], wait_until: Any) -> None:
    pid, _ = spinning
    owner = start(OWNER, pid)
    assert owner.stdout.readline() == "held\n"
    wait_until(lambda: stands(pid))
    owner.kill()
    wait_until(lambda: not stands(pid))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_goes_on_when_the_guardian_ends(number: int, spinning: tuple[int, int], wait_until: Any) -> None:
    pid, fd = spinning
    with Guard() as guard:
        guard.hold(1, "stop", 600.0, [fd])
        wait_until(lambda: stands(pid))
        guard._process.send_signal(number)
        wait_until(lambda: hear_off(guard, 1))
        wait_until(lambda: not stands(pid))
        assert guard.is_lost
        with pytest.raises(RallypointError, match="the process that would undo it does not answer"):
            guard.hold(2, "stop", 600.0, [fd])
        assert not stands(pid)


def test_the_terminals_signals_do_not_reach_it(guard: Guard, spinning: tuple[int, int], wait_until: Any) -> None:
    pid, fd = spinning
    guard.hold(1, "stop", 600.0, [fd])
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        guard._process.send_signal(number)
    guard.hold(2, "slow", 600.0, [], percent=50)  # it answers
    wait_until(lambda: stands(pid))
    assert os.getsid(guard._process.pid) == guard._process.pid


def test_a_process_that_has_ended_is_no_trouble(guard: Guard, start: Any, wait_until: Any) -> None:
    process = start("input()")
    fd = os.pidfd_open(process.pid)
    guard.hold(1, "stop", 600.0, [fd])
    process.kill()
    process.communicate()
    os.close(fd)
    guard.release(1)
    wait_until(lambda: hear_off(guard, 1))


class Talk:
    """A program that has made connections to the test, and has one of the test's."""

    def __init__(self, start: Any) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.process = start(TALKS, self.server.getsockname()[1])
        self.socks = [self.server.accept()[0]]
        self.guest = socket.create_connection(("127.0.0.1", int(self.process.stdout.readline())))

    def tell(self, which: int, text: str) -> str:
        """What it heard of that, within a moment."""
        (self.guest if which < 0 else self.socks[which]).sendall(text.encode())
        return self.ask(which)

    def ask(self, what: object) -> str:
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return str(self.process.stdout.readline()).strip()

    def close(self) -> None:
        for one in (self.server, self.guest, *self.socks):
            one.close()


@pytest.fixture
def talk(start: Any) -> Iterator[Talk]:
    one = Talk(start)
    yield one
    one.close()


@pytest.mark.parametrize("is_killed", [False, True], ids=["in time", "by whoever is left"])
def test_connections_that_were_made_hear_nothing_until_it_is_undone(
    is_killed: bool, guard: Guard, talk: Talk, wait_until: Any
) -> None:
    fd = os.pidfd_open(talk.process.pid)
    try:
        if why := why_no_cut((fd, talk.process.pid)):
            pytest.skip(why)
        assert talk.tell(0, "before") == "heard before"
        (word,) = guard.hold(1, "cut", 600.0, [fd], [talk.process.pid])
        assert word.text == "1"
        assert talk.tell(0, "lost for now") == "silence"
        assert talk.tell(-1, "by its own door") == "heard by its own door"
        assert talk.ask("connect") == "connected"
        talk.socks.append(talk.server.accept()[0])
        wait_until(lambda: talk.tell(1, "again") == "silence")
        if is_killed:
            guard._process.kill()
        else:
            guard.release(1)
        wait_until(lambda: hear_off(guard, 1))
        wait_until(lambda: "lost for now" in talk.ask(0))  # when it is sent again
    finally:
        os.close(fd)


def fillers(guard: Guard) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        pids = Path(f"/proc/{guard._process.pid}/task/{guard._process.pid}/children").read_text().split()
        return [int(pid) for pid in pids if (state := process_state(int(pid))) is not None and state[0] not in "ZX"]
    return []


def wait_for_news(guard: Guard, words: list[Any], wait_until: Any) -> str:
    def look() -> str:
        words.extend(guard.hear(0.1))
        return next((word.text for word in words if word.what == "news"), "")

    return str(wait_until(look))


def test_a_disk_is_filled_by_a_file_without_a_name(guard: Guard, tmp_path: Path, wait_until: Any) -> None:
    size = 8 << 20
    news = wait_for_news(guard, guard.hold(1, "fill", 600.0, folder=str(tmp_path), size=size), wait_until)
    assert news.startswith("8.0 MiB of its disk are taken, ")
    assert [path for path in tmp_path.iterdir() if path.is_file()] == []
    (filler,) = fillers(guard)
    files = [Path(f"/proc/{filler}/fd/{name}") for name in os.listdir(f"/proc/{filler}/fd")]
    assert [path.stat().st_size for path in files if str(path.readlink()).startswith(str(tmp_path))] == [size]
    guard.release(1)
    wait_until(lambda: not fillers(guard))


def test_memory_is_that_of_a_process_which_the_kernel_takes_first(guard: Guard, wait_until: Any) -> None:
    size = 64 << 20
    news = wait_for_news(guard, guard.hold(1, "fill", 0.5, folder="", size=size), wait_until)
    if "64.0 MiB" not in news:
        pytest.skip(news)
    wait_until(lambda: hear_off(guard, 1))
    wait_until(lambda: not fillers(guard))
    news = wait_for_news(guard, guard.hold(2, "fill", 600.0, folder="", size=size), wait_until)
    (filler,) = fillers(guard)
    assert Path(f"/proc/{filler}/oom_score_adj").read_text() == "1000\n"
    resident = int(Path(f"/proc/{filler}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert resident >= size
    guard._process.kill()
    wait_until(lambda: process_state(filler) is None or process_state(filler)[0] in "ZX")  # type: ignore[index]


def test_a_folder_that_is_not_there_is_said(guard: Guard, wait_until: Any) -> None:
    news = wait_for_news(guard, guard.hold(1, "fill", 600.0, folder="/nonexistent", size=1 << 20), wait_until)
    assert news == "it could not be filled: No such file or directory"


class Member:
    """An agent whose workers are the test's children: the test itself."""

    def __init__(self) -> None:
        self.pid, self.pidfd = os.getpid(), os.pidfd_open(os.getpid())


def test_nobody_is_held_who_is_not_the_agents(spinning: tuple[int, int]) -> None:
    member: Any = Member()
    try:
        held = grip._seized([spinning[0], os.getppid(), 1], member, "these")
        assert held.pids == (spinning[0],)
        held.close()
        for stranger in (os.getppid(), 1, 1 << 22):
            with pytest.raises(GoneError, match=f"it has ended, or is none of agent {os.getpid()}'s"):
                grip._seized([stranger, spinning[0]], member, "it")
    finally:
        os.close(member.pidfd)


def test_the_exit_code_of_another_process_is_read_where_the_kernel_tells_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    fd = os.pidfd_open(process.pid)
    process.wait()
    began = time.monotonic()
    assert grip._exit_code(fd) in (3, None)
    assert time.monotonic() - began < 60.0
    os.close(fd)


def test_the_last_words_of_a_run_are_read_from_its_events(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    ended = '{"name": "rallypoint.run.ended", "timestamp": 1, "metadata": {"succeeded": %s, "why": "rank 1 failed"}}\n'
    path.write_text(ended % "false" + '{"name": "other", "timestamp": 2}\nno json\n')
    assert grip._last_words(str(path)) == ("rank 1 failed", False)
    path.write_text(ended % "true")
    assert grip._last_words(str(path)) == ("", True)
    assert grip._last_words(str(tmp_path / "none")) == ("", False)
