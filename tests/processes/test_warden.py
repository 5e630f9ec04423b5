"""The warden, by itself: it starts, reports, signals and, when its agent is gone, leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rallypoint.processes import warden_client
from rallypoint.processes.warden_client import Exited, FailedToStart, Launch, Lost, Report, Rest, Started, WardenClient

DEADLINE_S = 10.0


@pytest.fixture
def warden() -> Iterator[WardenClient]:
    client = WardenClient.start()
    yield client
    client.close()


def launch(code: str, rank: int = 0, fds: dict[int, int] | None = None) -> Launch:
    return Launch(rank, (sys.executable, "-c", textwrap.dedent(code)), dict(os.environ), fds or {})


def hear(warden: WardenClient, kind: type[Report], count: int = 1) -> list[Report]:
    """The next reports of this kind; others are passed over."""
    heard: list[Report] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(heard) < count and (left := deadline - time.monotonic()) > 0:
        heard += [news for news in warden.receive(left) if isinstance(news, kind)]
    assert len(heard) >= count, f"{len(heard)} of {count} reports of {kind.__name__}"
    return heard


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_it_reports_how_each_worker_started_and_ended(warden: WardenClient) -> None:
    warden.spawn([launch(f"raise SystemExit({code})", rank) for rank, code in enumerate([0, 3, 77])])
    reports = {one.local_rank: one for one in hear(warden, Exited, 3)}
    assert [reports[rank].exitcode for rank in range(3)] == [0, 3, 77]
    assert all(abs(one.at - time.time()) < 60 for one in reports.values())


def test_it_is_the_parent_and_each_worker_leads_a_session(warden: WardenClient) -> None:
    warden.spawn([launch("import time; time.sleep(60)")])
    (started,) = hear(warden, Started)
    assert parent_of(started.pid) == warden.pid
    assert os.getsid(started.pid) == started.pid
    warden.signal_worker(0, signal.SIGUSR1)
    (ended,) = hear(warden, Exited)
    assert ended.exitcode == -signal.SIGUSR1


def test_a_program_that_cannot_be_started_is_told_and_the_others_run(warden: WardenClient, tmp_path: Path) -> None:
    not_executable = tmp_path / "plain.txt"
    not_executable.write_text("text")
    bad = [Launch(rank, (program,), {}, {}) for rank, program in enumerate(["/no/such/program", str(not_executable)])]
    warden.spawn([*bad, launch("pass", 2)])
    failed = {one.local_rank: one for one in hear(warden, FailedToStart, 2)}
    assert "No such file" in failed[0].reason
    assert "Permission denied" in failed[1].reason


def test_files_arrive_under_their_numbers_whatever_these_are(warden: WardenClient) -> None:
    """Numbers that are taken in the warden, by its own socket for one, are no exception."""
    pipes = {number: os.pipe() for number in (1, 2, 3, 4, 5, 6, 7, 8, 9, 200)}
    code = f"import os\nfor number in {list(pipes)}: os.write(number, str(number).encode())"
    warden.spawn([launch(code, fds={number: write for number, (_, write) in pipes.items()})])
    hear(warden, Exited)
    for number, (read, write) in pipes.items():
        os.close(write)
        assert os.read(read, 100) == str(number).encode()
        os.close(read)


def test_a_worker_inherits_nothing_else(warden: WardenClient) -> None:
    read, write = os.pipe()
    warden.spawn([launch("import os; os.write(1, repr(sorted(map(int, os.listdir('/proc/self/fd')))).encode())", fds={1: write})])
    hear(warden, Exited)
    os.close(write)
    assert os.read(read, 1000) == b"[0, 1, 2, 3]", "3 is the listing itself"
    os.close(read)


def test_more_workers_than_file_descriptors_fit_one_message(warden: WardenClient) -> None:
    streams = {0: 0, 1: 1, 2: 2}
    warden.spawn([Launch(rank, ("true",), dict(os.environ), streams) for rank in range(100)])
    assert {one.local_rank for one in hear(warden, Exited, 100)} == set(range(100))


DAEMON = """
    import os, sys, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(sys.argv[1], "w") as file:
                file.write(str(os.getpid()))
            os.rename(sys.argv[1], sys.argv[1] + ".done")
            time.sleep(60)
        os._exit(0)
    os.wait()
"""


def test_what_workers_leave_behind_comes_to_it(warden: WardenClient, tmp_path: Path, wait_until: Callable[..., object]) -> None:
    base = launch(DAEMON)
    warden.spawn([base.replace(argv=(*base.argv, str(tmp_path / "pid")))])
    hear(warden, Exited)
    wait_until((tmp_path / "pid.done").exists)
    daemon = int((tmp_path / "pid.done").read_text())
    assert parent_of(daemon) == warden.pid
    warden.watch_rest()
    assert hear(warden, Rest)[0].pids == (daemon,)
    warden.signal_rest(daemon, signal.SIGTERM)
    assert hear(warden, Rest)[-1].pids == ()


def test_it_signals_no_stranger(warden: WardenClient, alive: Callable[[int], bool]) -> None:
    stranger = subprocess.Popen(["sleep", "60"])
    warden.signal_rest(stranger.pid, signal.SIGKILL)
    warden.watch_rest()
    hear(warden, Rest)
    assert alive(stranger.pid)
    stranger.kill()
    stranger.wait()


def test_signals_for_the_agent_do_not_end_it(warden: WardenClient) -> None:
    warden.watch_rest()
    hear(warden, Rest)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(warden.pid, number)
    warden.spawn([launch("raise SystemExit(5)")])
    assert hear(warden, Exited)[0].exitcode == 5


def test_its_loss_is_told_and_takes_the_workers_along(
    warden: WardenClient, alive: Callable[[int], bool], wait_until: Callable[..., object]
) -> None:
    warden.spawn([launch("import time; time.sleep(60)")])
    (started,) = hear(warden, Started)
    os.kill(warden.pid, signal.SIGKILL)
    hear(warden, Lost)
    assert warden.is_lost
    wait_until(lambda: not alive(started.pid))


def test_closing_it_kills_whatever_is_left(alive: Callable[[int], bool]) -> None:
    client = WardenClient.start()
    client.spawn([launch("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)")])
    (started,) = hear(client, Started)
    client.close()
    assert not alive(started.pid)


def test_an_idle_one_is_kept_only_while_somebody_keeps_it(alive: Callable[[int], bool]) -> None:
    with warden_client.keep_wardens():
        first = warden_client.take()
        pid = first.pid
        warden_client.put_back(first)
        assert warden_client.take() is first
        warden_client.put_back(first)
    assert not alive(pid)
    warden_client.put_back(second := warden_client.take())
    assert second.pid == 0, "nobody keeps it, so it was closed"


def test_one_that_was_dismissed_is_not_handed_out_and_is_gone_when_nobody_keeps_wardens(alive: Callable[[int], bool]) -> None:
    with warden_client.keep_wardens() as wardens:
        first = warden_client.take()
        pid = first.pid
        warden_client.put_back(first)
        wardens.dismiss()
        wardens.dismiss()  # once is enough
        second = warden_client.take()
        assert second is not first
        warden_client.put_back(second)
        assert second.pid == 0, "nobody keeps it, so it was closed"
    assert not alive(pid)


def test_an_idle_one_is_not_dismissed_while_another_agent_keeps_it(alive: Callable[[int], bool]) -> None:
    with warden_client.keep_wardens():
        first = warden_client.take()
        warden_client.put_back(first)
        with warden_client.keep_wardens() as others:
            others.dismiss()
            assert warden_client.take() is first
            warden_client.put_back(first)
        assert alive(first.pid)


def test_an_idle_one_that_was_killed_is_not_handed_out() -> None:
    with warden_client.keep_wardens():
        first = warden_client.take()
        os.kill(first.pid, signal.SIGKILL)
        hear(first, Lost)
        warden_client.put_back(first)
        second = warden_client.take()
        assert second is not first
        warden_client.put_back(second)
