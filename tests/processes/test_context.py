"""Groups of processes: starting them, waiting for them, and ending them, with real processes."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import AT_ONCE_S
from tests.pace import is_under

from rallypoint.errors import SignalException, UsageError, WorkerStartError
from rallypoint.output.log_specs import DefaultLogsSpecs, Std
from rallypoint.processes import warden_client
from rallypoint.processes.context import PContext, RunProcsResult
from rallypoint.processes.subprocesses import SubprocessContext, start_processes
from rallypoint.processes.warden_context import WardedContext

SH = "/bin/sh"
SLEEP = "exec sleep 60"

Alive = Callable[[int], bool]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., PContext]]:
    """``start("script of rank 0", "script of rank 1", …)`` runs each in a shell; what is left is closed after the test."""
    contexts: list[PContext] = []

    def run(*scripts: str, **settings: Any) -> PContext:
        args = {rank: ("-c", text) for rank, text in enumerate(scripts)}
        envs: dict[int, dict[str, str]] = {rank: {} for rank in args}
        given = {"args": args, "envs": envs, "logs_specs": DefaultLogsSpecs(str(tmp_path / "logs")), **settings}
        contexts.append(start_processes(name="trainer", entrypoint=SH, **given))
        return contexts[-1]

    yield run
    for context in contexts:
        context.close(signal.SIGKILL)


def finished(context: PContext) -> RunProcsResult:
    result = context.wait(10)
    assert result is not None, "still running after 10 s"
    return result


def exit_codes(result: RunProcsResult) -> dict[int, int]:
    return {rank: failure.exitcode for rank, failure in result.failures.items()}


# --- a warden that is stopped ----------------------------------------------------------------------------------------------


@pytest.fixture
def stop_warden(wait_until: Callable[..., object]) -> Callable[[PContext], None]:
    def stop(context: PContext) -> None:
        assert isinstance(context, WardedContext)
        assert context._warden is not None
        pid = context._warden.pid
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T"))

    return stop


def test_v5_workers_are_killed_past_a_warden_that_is_stopped(
    start: Callable[..., PContext], stop_warden: Callable[[PContext], None], alive: Alive, wait_until: Callable[..., object],
    tmp_path: Path,
) -> None:  # fmt: skip
    """V5: with their process groups, and from any thread; then the warden is told from one that is slow, and killed."""
    context = start(SLEEP, f"sleep 60 & echo $! > {tmp_path}/child; wait")
    assert isinstance(context, WardedContext)
    wait_until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text())
    pids = [*context.pids().values(), int((tmp_path / "child").read_text())]
    stop_warden(context)
    killer = threading.Thread(target=context.kill_at_once)
    killer.start()
    wait_until(lambda: not any(map(alive, pids)))
    killer.join()
    began_at = time.monotonic()
    context.close(signal.SIGKILL)
    assert time.monotonic() - began_at < AT_ONCE_S


def test_v5_a_stop_without_grace_does_not_wait_for_a_warden_that_is_stopped(
    start: Callable[..., PContext], stop_warden: Callable[[PContext], None], alive: Alive
) -> None:
    context = start(SLEEP, SLEEP)
    pids = list(context.pids().values())
    stop_warden(context)
    began_at = time.monotonic()
    context.close(signal.SIGKILL)
    assert time.monotonic() - began_at < AT_ONCE_S
    assert not any(map(alive, pids))


def test_v5_a_graceful_stop_waits_five_seconds_for_a_warden_that_is_stopped(
    start: Callable[..., PContext], stop_warden: Callable[[PContext], None], alive: Alive
) -> None:
    context = start(SLEEP, SLEEP)
    pids = list(context.pids().values())
    stop_warden(context)
    began_at = time.monotonic()
    context.close(signal.SIGTERM, 30)
    assert time.monotonic() - began_at < 5.0 + AT_ONCE_S
    assert not any(map(alive, pids))


def test_killing_past_the_warden_hits_nobody_after_the_end(start: Callable[..., PContext]) -> None:
    context = start("exit 0")
    assert isinstance(context, WardedContext)
    finished(context)
    context.kill_at_once()
    context.close()
    context.kill_at_once()


# --- waiting ---------------------------------------------------------------------------------------------------------------


def test_success_of_all(start: Callable[..., PContext]) -> None:
    context = start("exit 0", "exit 0")
    result = finished(context)
    assert not result.is_failed()
    assert result.return_values == {0: None, 1: None}
    assert result.failures == {}


def test_pids_are_those_of_the_programs(start: Callable[..., PContext], tmp_path: Path) -> None:
    context = start(f"echo $$ > {tmp_path}/0", f"echo $$ > {tmp_path}/1")
    assert isinstance(context, SubprocessContext)
    finished(context)
    assert context.pids() == {rank: int((tmp_path / str(rank)).read_text()) for rank in (0, 1)}
    assert context.nprocs == 2


def test_a_wait_of_0_only_looks(start: Callable[..., PContext], alive: Alive) -> None:
    context = start(SLEEP)
    started_at = time.monotonic()
    assert context.wait(0) is None
    assert time.monotonic() - started_at < AT_ONCE_S
    assert alive(context.pids()[0])


def test_a_wait_in_vain_takes_its_time_and_kills_nobody(start: Callable[..., PContext], alive: Alive) -> None:
    context = start(SLEEP, SLEEP)
    started_at = time.monotonic()
    assert context.wait(timeout=0.3) is None
    assert 0.3 <= time.monotonic() - started_at < AT_ONCE_S
    assert all(map(alive, context.pids().values()))


def test_an_end_is_seen_at_once_whatever_the_period(start: Callable[..., PContext]) -> None:
    context = start("sleep 0.2")
    started_at = time.monotonic()
    assert context.wait(period=60) is not None
    assert time.monotonic() - started_at < AT_ONCE_S


@pytest.mark.parametrize("ends", [True, False])
def test_one_failure_ends_the_wait_and_the_others_unless_they_are_left_to_an_agent(
    ends: bool, start: Callable[..., PContext], alive: Alive
) -> None:
    context = start(SLEEP, "exit 7", SLEEP)
    context.ends_with_failure = ends
    result = finished(context)
    assert result.is_failed()
    assert exit_codes(result) == {1: 7}
    assert result.return_values == {}
    assert [alive(context.pids()[rank]) for rank in (0, 2)] == [not ends] * 2
    assert result.failures[1].pid == context.pids()[1]
    assert result.failures[1].local_rank == 1


def test_one_success_does_not_end_the_wait(start: Callable[..., PContext], tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    context = start("exit 0", f"read line < {go}")
    assert context.wait(0.3) is None
    go.write_text("now\n")
    assert not finished(context).is_failed()


def test_later_failures_join_the_earlier(start: Callable[..., PContext], tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    context = start("exit 3", f"read line < {go}; exit 4")
    context.ends_with_failure = False
    assert exit_codes(finished(context)) == {0: 3}
    go.write_text("now\n")
    deadline = time.monotonic() + 10
    while len(finished(context).failures) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert exit_codes(finished(context)) == {0: 3, 1: 4}


def test_a_signal_that_ended_a_worker_is_its_exit_code(start: Callable[..., PContext]) -> None:
    context = start(SLEEP)
    os.kill(context.pids()[0], signal.SIGKILL)
    result = finished(context)
    assert exit_codes(result) == {0: -signal.SIGKILL}
    assert result.failures[0].signal_name() == "SIGKILL"


@pytest.mark.parametrize("text", ["exit 0", "exit 5"], ids=["success", "failure"])
def test_the_result_is_the_same_again_also_after_close(start: Callable[..., PContext], text: str) -> None:
    context = start(text)
    first = finished(context)
    assert context.wait(0) == first
    context.close()
    assert context.wait(0) == first


def test_workers_that_close_has_killed_did_not_succeed(start: Callable[..., PContext]) -> None:
    context = start(SLEEP, SLEEP)
    context.close()
    result = context.wait(0)
    assert result is None or result.is_failed()


def test_the_tail_of_stderr_is_with_the_failure(start: Callable[..., PContext]) -> None:
    context = start("echo nothing to see; echo 'the disk is full' >&2; exit 1")
    assert "the disk is full" in finished(context).failures[0].stderr_tail


def test_a_child_that_holds_the_pipes_does_not_hold_up_the_result(start: Callable[..., PContext]) -> None:
    context = start("sleep 60 & exit 1")
    started_at = time.monotonic()
    assert exit_codes(finished(context)) == {0: 1}
    assert time.monotonic() - started_at < AT_ONCE_S


def test_the_news_fd_is_readable_when_a_process_has_ended(start: Callable[..., PContext]) -> None:
    context = start("sleep 0.2", SLEEP)
    news_fd = context.news_fd()
    assert news_fd is not None
    assert select.select([news_fd], [], [], 10)[0] == [news_fd]
    assert context.wait(0) is None
    assert select.select([news_fd], [], [], 0)[0] == []


# --- the environment, the arguments and the streams ------------------------------------------------------------------------


def test_each_rank_has_its_own_arguments_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "from the launcher")
    monkeypatch.setenv("REPLACED", "from the launcher")
    context = start_processes(
        name="trainer",
        entrypoint=SH,
        args={rank: ("-c", 'echo "$0 $INHERITED $REPLACED $OWN"', f"arg{rank}") for rank in (0, 1)},
        envs={rank: {"OWN": f"own{rank}", "REPLACED": "replaced"} for rank in (0, 1)},
        logs_specs=DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.OUT),
    )
    result = finished(context)
    context.close()
    lines = {rank: Path(path).read_text() for rank, path in result.stdouts.items()}
    assert lines == {rank: f"arg{rank} from the launcher replaced own{rank}\n" for rank in (0, 1)}


def test_arguments_need_not_be_text(start: Callable[..., PContext], tmp_path: Path) -> None:
    args = {0: ("-c", f'printf "%s|" "$@" > {tmp_path}/seen', "sh", 3, 1.5, Path("/x"), "")}
    finished(start(args=args, envs={0: {}}))
    assert (tmp_path / "seen").read_text() == "3|1.5|/x||"


def test_an_argument_of_bytes_that_are_no_utf8_arrives_as_it_is(start: Callable[..., PContext], tmp_path: Path) -> None:
    args = {0: ("-c", f'printf "%s" "$1" > {tmp_path}/seen', "sh", os.fsdecode(b"caf\xe9"))}
    finished(start(args=args, envs={0: {}}))
    assert (tmp_path / "seen").read_bytes() == b"caf\xe9"


def test_a_program_is_searched_for_in_the_path(tmp_path: Path) -> None:
    context = start_processes("trainer", "true", {0: ()}, {0: {}}, DefaultLogsSpecs(str(tmp_path)))
    assert not finished(context).is_failed()
    context.close()


def test_workers_start_in_the_folder_of_the_caller_as_it_is_now(
    start: Callable[..., PContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finished(start("pwd > here"))
    assert (tmp_path / "here").read_text() == f"{tmp_path}\n"


def test_every_worker_leads_a_session_of_its_own(start: Callable[..., PContext]) -> None:
    context = start(SLEEP, SLEEP)
    assert {os.getsid(pid) for pid in context.pids().values()} == set(context.pids().values())


def test_more_workers_than_one_message_can_carry_files_for(start: Callable[..., PContext]) -> None:
    count = 130
    context = start(*["exit 0"] * count)
    assert len(set(context.pids().values())) == count
    assert set(finished(context).return_values) == set(range(count))


# --- starts that fail ------------------------------------------------------------------------------------------------------


def bad_program(kind: str, folder: Path) -> str:
    path = folder / "program"
    if kind == "not executable":
        path.write_text("#!/bin/sh\n")
    elif kind == "a folder":
        path.mkdir()
    elif kind == "no interpreter":
        path.write_text("#!/nowhere/sh\n")
        path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("missing", errno.ENOENT),
        ("not executable", errno.EACCES),
        ("a folder", errno.EACCES),
        ("no interpreter", errno.ENOENT),
    ],
)
def test_a_program_that_cannot_be_started(kind: str, number: int, tmp_path: Path) -> None:
    program = bad_program(kind, tmp_path)
    with pytest.raises(WorkerStartError, match=r"worker \d could not be started.*program") as caught:
        start_processes("trainer", program, {0: (), 1: ()}, {0: {}, 1: {}}, DefaultLogsSpecs(str(tmp_path / "logs")))
    assert caught.value.errno == number
    assert isinstance(caught.value, OSError)


def test_if_one_rank_cannot_be_started_none_is_left(tmp_path: Path, wait_until: Any, alive: Alive) -> None:
    """Also where the warden is kept for the next group, as agents do."""
    marker = tmp_path / "pid"
    too_long = "x" * (4 << 20)  # more than the kernel takes as one argument
    args = {0: ("-c", SLEEP, too_long), 1: ("-c", f"echo $$ > {marker}.new; mv {marker}.new {marker}; {SLEEP}")}
    with warden_client.keep_wardens():
        with pytest.raises(WorkerStartError, match="worker 0 could not be started"):
            start_processes("trainer", SH, args, {0: {}, 1: {}}, DefaultLogsSpecs(str(tmp_path / "logs")))
        assert not marker.exists() or wait_until(lambda: not alive(int(marker.read_text())), 2)
        assert_no_workers(wait_until)


def assert_no_workers(wait_until: Any) -> None:
    """The one process below us may be an idle warden, without children."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")

    def none_below() -> bool:
        return not any(Path(f"/proc/{pid}/task/{pid}/children").read_text() for pid in children.read_text().split())

    wait_until(none_below, 2)


@pytest.mark.parametrize(
    ("args", "env"), [(("-c", "exit\0 0"), {}), (("-c", "exit 0"), {"A": "b\0"})], ids=["argument", "environment"]
)
def test_what_no_program_can_be_given_is_said_and_not_run(args: tuple[str, ...], env: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises((UsageError, WorkerStartError), match=r"(?i)null|nul"):
        start_processes("trainer", SH, {0: args}, {0: env}, DefaultLogsSpecs(str(tmp_path / "logs"))).close()


@pytest.mark.parametrize(
    ("args", "envs", "complaint"),
    [
        ({}, {}, "args names no local rank"),
        ({1: ()}, {1: {}}, "args must name the local ranks 0..0"),
        ({0: (), 2: ()}, {0: {}, 2: {}}, "args must name the local ranks 0..1"),
        ({0: (), 1: ()}, {0: {}}, r"envs must name the local ranks 0..1, each once; it names \[0\]"),
        ({0: ()}, {0: {}, 1: {}}, "envs must name the local ranks 0..0"),
    ],
)
def test_ranks_that_make_no_sense_are_refused(
    args: dict[int, tuple[str, ...]], envs: dict[int, dict[str, str]], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=complaint):
        start_processes("trainer", SH, args, envs, DefaultLogsSpecs(str(tmp_path / "logs")))
    assert not (tmp_path / "logs").exists()


# --- closing ---------------------------------------------------------------------------------------------------------------


def test_close_ends_whatever_runs(start: Callable[..., PContext], alive: Alive) -> None:
    context = start(SLEEP, SLEEP)
    context.close()
    assert not any(map(alive, context.pids().values()))


def test_close_twice_and_after_the_end(start: Callable[..., PContext]) -> None:
    context = start("exit 0")
    finished(context)
    context.close()
    context.close(signal.SIGKILL, 0)


def test_close_before_start(tmp_path: Path) -> None:
    context = SubprocessContext("trainer", SH, {0: ()}, {0: {}}, DefaultLogsSpecs(str(tmp_path / "logs")))
    context.close()
    assert context.pids() == {}
    assert context.wait(0) is None
    assert not (tmp_path / "logs").exists()


TRAP = "trap 'echo %s > {out}; exit 0' %s; echo > {ready}; while :; do sleep 0.01; done"


@pytest.mark.parametrize(("number", "name"), [(None, "TERM"), (signal.SIGINT, "INT"), (signal.SIGUSR1, "USR1")])
def test_close_sends_the_signal_that_it_is_given(
    number: signal.Signals | None, name: str, start: Callable[..., PContext], tmp_path: Path, wait_until: Any
) -> None:
    out, ready = tmp_path / "received", tmp_path / "ready"
    context = start((TRAP % (name, name)).format(out=out, ready=ready))
    wait_until(ready.exists)
    context.close(number)
    assert out.read_text() == f"{name}\n"


def stubborn(folder: Path, rank: int) -> str:
    return f"trap '' TERM INT; echo > {folder}/ready{rank}; while :; do sleep 0.01; done"


def test_whoever_ignores_the_signal_is_killed_when_the_grace_is_over_all_at_once(
    start: Callable[..., PContext], tmp_path: Path, wait_until: Any, alive: Alive
) -> None:
    """P08: one grace, counted for each worker in parallel."""
    context = start(*[stubborn(tmp_path, rank) for rank in range(4)])
    wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(4)))
    started_at = time.monotonic()
    context.close(signal.SIGTERM, timeout=2.5)
    assert time.monotonic() - started_at >= 2.5
    assert is_under(time.monotonic() - started_at, 4 * 2.5)
    assert not any(map(alive, context.pids().values()))


def test_close_waits_no_longer_than_the_workers_need(start: Callable[..., PContext]) -> None:
    context = start(SLEEP, SLEEP)
    started_at = time.monotonic()
    context.close(timeout=30)
    assert time.monotonic() - started_at < AT_ONCE_S


def test_no_grace_at_all_kills_at_once(start: Callable[..., PContext], tmp_path: Path, wait_until: Any) -> None:
    context = start(stubborn(tmp_path, 0))
    wait_until((tmp_path / "ready0").exists)
    started_at = time.monotonic()
    context.close(timeout=0)
    assert time.monotonic() - started_at < AT_ONCE_S


def test_the_grace_is_over_when_there_is_no_time_left_for_it(
    start: Callable[..., PContext], tmp_path: Path, wait_until: Any
) -> None:
    """A fence that falls during a stop; before the stop it has no effect by itself."""
    context = start(stubborn(tmp_path, 0), stubborn(tmp_path, 1))
    assert isinstance(context, SubprocessContext)
    wait_until(lambda: all((tmp_path / name).exists() for name in ("ready0", "ready1")))
    readable, writable = os.pipe()
    os.write(writable, b"1")
    context.hurry_fd = readable
    assert context.wait(0.05) is None
    began = time.monotonic()
    context.close(signal.SIGTERM, timeout=30)
    assert time.monotonic() - began < AT_ONCE_S
    os.close(readable)
    os.close(writable)


def test_what_workers_left_behind_is_ended_too(
    start: Callable[..., PContext], tmp_path: Path, wait_until: Any, alive: Alive
) -> None:
    """P09: also in a session of its own, of a worker that has succeeded long ago."""
    pid_file = tmp_path / "pid"
    command = f"setsid sh -c 'echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; exec sleep 60' & exit 0"
    context = start(command)
    assert not finished(context).is_failed()
    wait_until(pid_file.exists)
    daemon = int(pid_file.read_text())
    assert alive(daemon)
    context.close()
    assert not alive(daemon)


# --- signals and the warden ------------------------------------------------------------------------------------------------


def test_a_signal_ends_any_wait_and_no_worker(start: Callable[..., PContext], alive: Alive) -> None:
    before = signal.getsignal(signal.SIGTERM)
    context = start(SLEEP)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(SignalException) as caught:
        context.wait(10)
    timer.join()
    assert caught.value.sigval is signal.SIGTERM
    assert alive(context.pids()[0])
    context.close(signal.SIGTERM)
    assert not alive(context.pids()[0])
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_signal_during_close_kills_at_once(start: Callable[..., PContext], tmp_path: Path, wait_until: Any) -> None:
    context = start(stubborn(tmp_path, 0))
    wait_until((tmp_path / "ready0").exists)
    timers = [threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT)) for delay_s in (0.2, 0.4)]
    for timer in timers:
        timer.start()
    started_at = time.monotonic()
    with pytest.raises(SignalException):
        context.close(signal.SIGTERM, timeout=30)
    for timer in timers:
        timer.join()
    assert time.monotonic() - started_at < AT_ONCE_S


def test_a_signal_during_close_is_not_lost(start: Callable[..., PContext], tmp_path: Path, wait_until: Any) -> None:
    """It is passed on to those that are being ended, and then told to the caller."""
    context = start(f"trap '' TERM; echo > {tmp_path}/up; while :; do sleep 0.01; done")
    wait_until((tmp_path / "up").exists)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(SignalException) as caught:
        context.close(signal.SIGTERM, timeout=30)
    timer.join()
    assert caught.value.sigval is signal.SIGINT


def test_the_signals_to_handle_are_those_of_the_workers_environment(start: Callable[..., PContext]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    context = start(args={0: ("-c", SLEEP)}, envs={0: {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGUSR2"}})
    assert signal.getsignal(signal.SIGTERM) == before
    os.kill(os.getpid(), signal.SIGUSR2)
    with pytest.raises(SignalException) as caught:
        context.wait(10)
    assert caught.value.sigval is signal.SIGUSR2


def in_thread(work: Callable[[], object]) -> None:
    """Run in a thread to its end; what it raises is raised here."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    if raised:
        raise raised[0]


def test_a_group_may_belong_to_any_thread(start: Callable[..., PContext]) -> None:
    def work() -> None:
        context = start("exit 0")
        assert not finished(context).is_failed()
        context.close()

    in_thread(work)


def test_a_group_of_another_thread_does_not_take_the_main_threads_signals_away(start: Callable[..., PContext]) -> None:
    groups: list[PContext] = []
    in_thread(lambda: groups.append(start(SLEEP)))
    ours = start(SLEEP)
    assert callable(signal.getsignal(signal.SIGHUP)), "SIGHUP would kill this process, with its workers"
    os.kill(os.getpid(), signal.SIGHUP)
    with pytest.raises(SignalException):
        ours.wait(10)
    ours.close()
    in_thread(groups[0].close)


def test_a_group_of_another_thread_may_outlive_that_of_the_main_thread(start: Callable[..., PContext]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    ours = start(SLEEP)
    groups: list[PContext] = []
    in_thread(lambda: groups.append(start(SLEEP)))
    ours.close()
    assert signal.getsignal(signal.SIGTERM) == before
    in_thread(groups[0].close)


def test_a_warden_that_is_killed_takes_all_workers_along_and_that_is_a_failure(
    start: Callable[..., PContext], wait_until: Any, alive: Alive
) -> None:
    context = start(SLEEP, SLEEP)
    assert isinstance(context, WardedContext)
    assert context._warden is not None
    os.kill(context._warden.pid, signal.SIGKILL)
    assert exit_codes(finished(context)) == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    wait_until(lambda: not any(map(alive, context.pids().values())), 5)


# --- contexts of somebody else ---------------------------------------------------------------------------------------------


class Polled(PContext):
    """A context that knows no better than to be asked; it is done at the third time."""

    def __init__(self) -> None:
        super().__init__("theirs", sys.executable, {0: ()}, {0: {}}, DefaultLogsSpecs(os.devnull))
        self.polls = 0
        self.closed: list[tuple[signal.Signals, float]] = []

    def pids(self) -> dict[int, int]:
        return {0: 1}

    def _start(self) -> None:
        pass

    def _poll(self) -> RunProcsResult | None:
        self.polls += 1
        return RunProcsResult({0: "done"}) if self.polls == 3 else None

    def _close(self, death_sig: signal.Signals, timeout: float) -> None:
        self.closed.append((death_sig, timeout))


def test_a_context_that_cannot_wake_us_is_polled() -> None:
    context = Polled()
    context.start()
    started_at = time.monotonic()
    assert context.wait(period=0.1) == RunProcsResult({0: "done"})
    assert 0.2 <= time.monotonic() - started_at < AT_ONCE_S
    context.close()
    context.close(signal.SIGKILL, 3)
    assert context.closed == [(signal.SIGTERM, 30)]


def test_a_timeout_shorter_than_the_period_is_kept() -> None:
    context = Polled()
    context.start()
    started_at = time.monotonic()
    assert context.wait(0.1, period=60) is None
    assert time.monotonic() - started_at < AT_ONCE_S
    context.close()


def test_a_start_that_fails_closes_what_was_opened() -> None:
    class Failing(Polled):
        def _start(self) -> None:
            raise RuntimeError("no")

    context = Failing()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError, match="no"):
        context.start()
    assert [number for number, _ in context.closed] == [signal.SIGKILL]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_fork_of_the_caller_keeps_its_signals_to_itself(start: Callable[..., PContext]) -> None:
    """A signal to a process that the caller forked ends that process, and is not taken for one to the caller."""
    context = start("sleep 60")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"up")
        time.sleep(60)
        os._exit(1)
    assert os.read(read, 2) == b"up"
    os.close(read)
    os.close(write)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert context.wait(0.1) is None
