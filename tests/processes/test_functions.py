"""Functions as workers, by each of the three start methods.

A function that a fresh interpreter is to run must be importable there, so most of those below live in a module that is written
to disk. What depends on ``__main__`` runs as a program of its own. So does what makes multiprocessing's resource tracker start,
which would stay with pytest for good.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.conftest import AT_ONCE_S
from tests.pace import is_under

from rallypoint.agent.config import LaunchConfig
from rallypoint.agent.launch import elastic_launch
from rallypoint.errors import UsageError
from rallypoint.failures.process_failure import ChildFailedError
from rallypoint.output.log_specs import DefaultLogsSpecs, Std
from rallypoint.processes.context import PContext, RunProcsResult
from rallypoint.processes.functions import MultiprocessContext
from rallypoint.processes.subprocesses import start_processes

METHODS = ("spawn", "fork", "forkserver")
every_method = pytest.mark.parametrize("method", METHODS)

FUNCTIONS = '''
import atexit, os, signal, subprocess, sys, threading, time

BEFORE_THE_START = []

class Refusal(Exception):
    """An exception of the user's own."""

class Unreadable:
    """Can be pickled, and not unpickled."""
    def __reduce__(self):
        return _explode, ()

def _explode():
    raise Refusal("cannot be read back")

def environment():
    return dict(os.environ)

def give_back(*args):
    return args

def nothing():
    pass

def rank():
    return int(os.environ["RANK"])

def pid():
    return os.getpid()

def large(megabytes):
    return bytes([int(os.environ["RANK"])]) * (megabytes << 20)

def fail(text):
    raise Refusal(text)

def fail_on_one(text):
    if os.environ["RANK"] == "1":
        raise Refusal(text)
    time.sleep(60)

def leave(code):
    sys.exit(code)

def vanish(code):
    os._exit(code)

def die(number):
    os.kill(os.getpid(), number)

def unpicklable():
    return threading.Lock()

def unreadable():
    return Unreadable()

def sleep():
    time.sleep(60)

def return_early(folder):
    """Rank 0 at once, deaf to SIGTERM; the others when they are told to: to return, or to fail."""
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, lambda *_: None)
        atexit.register(open, f"{folder}/left", "w")
        open(f"{folder}/returned", "w").close()
        return os.getpid()
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.005)
    if open(f"{folder}/go").read() == "fail":
        raise Refusal("told to")
    return os.getpid()

def speak():
    print("to stdout", flush=True)
    print("to stderr", file=sys.stderr)
    sys.stdout.write("not flushed")

def work_longer(seconds):
    """Rank 1 stays at work for this time, which the other has left to wait."""
    end = time.monotonic() + seconds if os.environ["RANK"] == "1" else 0
    while time.monotonic() < end:
        open("/proc/self/stat").read()
        time.sleep(0.02)

def seen_before():
    return list(BEFORE_THE_START)

def signals():
    return {number.name: repr(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}

def open_files():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the listing itself
            pass
    return found
'''


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that workers can import; and pytest's own program, which they would all import first, is out of their way."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "worker_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "worker_functions", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # a process of xdist has none
    return importlib.import_module("worker_functions")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., PContext]]:
    """``start(function, *args, method=…, workers=…)``; what is left is closed after the test."""
    contexts: list[PContext] = []

    def run(function: Any, *args: Any, method: str = "spawn", workers: int = 1, **settings: Any) -> PContext:
        given = {
            "args": dict.fromkeys(range(workers), args),
            "envs": {rank: {"RANK": str(rank)} for rank in range(workers)},
            "logs_specs": DefaultLogsSpecs(str(tmp_path / "logs")),
            **settings,
        }
        contexts.append(start_processes(name="trainer", entrypoint=function, start_method=method, **given))
        return contexts[-1]

    yield run
    for context in contexts:
        context.close(signal.SIGKILL)


def finished(context: PContext) -> RunProcsResult:
    result = context.wait(20)
    assert result is not None, "still running after 20 s"
    return result


def config(tmp_path: Path, method: str = "spawn", workers: int = 1, **fields: Any) -> LaunchConfig:
    settings: dict[str, Any] = {
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost",
        "max_restarts": 0,
        "logs_specs": DefaultLogsSpecs(str(tmp_path / "logs")),
        **fields,
    }
    return LaunchConfig(1, 1, workers, start_method=method, **settings)


# --- return values ---------------------------------------------------------------------------------------------------------


@every_method
def test_return_values_come_back_by_rank(method: str, functions: ModuleType, start: Callable[..., PContext]) -> None:
    context = start(functions.rank, method=method, workers=3)
    assert isinstance(context, MultiprocessContext)
    result = finished(context)
    assert result.return_values == {0: 0, 1: 1, 2: 2}
    assert not result.is_failed()


@every_method
def test_a_launch_of_a_function(method: str, functions: ModuleType, tmp_path: Path) -> None:
    assert elastic_launch(config(tmp_path, method, workers=2), functions.give_back)("a", 1) == {0: ("a", 1), 1: ("a", 1)}


@every_method
def test_return_values_of_50_megabytes(method: str, functions: ModuleType, start: Callable[..., PContext]) -> None:
    values = finished(start(functions.large, 50, method=method, workers=2)).return_values
    assert {rank: (len(value), value[:1], value[-1:]) for rank, value in values.items()} == {
        0: (50 << 20, b"\0", b"\0"),
        1: (50 << 20, b"\1", b"\1"),
    }


@every_method
def test_a_function_that_returns_nothing(method: str, functions: ModuleType, start: Callable[..., PContext]) -> None:
    assert finished(start(functions.nothing, method=method)).return_values == {0: None}


@every_method
def test_the_result_is_the_same_again_also_after_close(
    method: str, functions: ModuleType, start: Callable[..., PContext]
) -> None:
    context = start(functions.rank, method=method)
    first = finished(context)
    assert context.wait(0) == first
    context.close()
    assert context.wait(0) == first


@every_method
def test_pids_are_those_of_the_functions(method: str, functions: ModuleType, start: Callable[..., PContext]) -> None:
    context = start(functions.pid, method=method, workers=2)
    assert finished(context).return_values == context.pids()


# --- failures --------------------------------------------------------------------------------------------------------------


@every_method
def test_an_exception_is_told_with_its_message_and_traceback(
    method: str, functions: ModuleType, start: Callable[..., PContext]
) -> None:
    failure = finished(start(functions.fail, "the gradient exploded", method=method)).failures[0]
    assert failure.exitcode == 1
    assert failure.message == "Refusal: the gradient exploded"
    recorded = json.loads(Path(failure.error_file).read_text())["message"]
    assert recorded["message"] == failure.message
    assert "Traceback (most recent call last)" in recorded["extraInfo"]["py_callstack"]
    assert "in fail" in recorded["extraInfo"]["py_callstack"]
    assert int(recorded["extraInfo"]["timestamp"]) <= time.time()


@every_method
def test_a_launch_whose_function_fails_names_it_and_its_rank(method: str, functions: ModuleType, tmp_path: Path) -> None:
    launch = elastic_launch(config(tmp_path, method, workers=2), functions.fail_on_one)
    with pytest.raises(ChildFailedError) as caught:
        launch("no")
    assert caught.value.name == "fail_on_one"
    assert list(caught.value.failures) == [1]
    assert "Refusal: no" in str(caught.value)


@every_method
@pytest.mark.parametrize("code", [3, 0])
def test_sys_exit_is_the_exit_code(method: str, code: int, functions: ModuleType, start: Callable[..., PContext]) -> None:
    result = finished(start(functions.leave, code, method=method))
    if code:
        assert {rank: failure.exitcode for rank, failure in result.failures.items()} == {0: code}
    else:
        assert result.return_values == {0: None}


@every_method
def test_a_worker_that_is_killed(method: str, functions: ModuleType, start: Callable[..., PContext]) -> None:
    failure = finished(start(functions.die, signal.SIGKILL, method=method)).failures[0]
    assert failure.exitcode == -signal.SIGKILL
    assert "SIGKILL" in failure.message


@every_method
def test_a_worker_that_vanishes_with_code_0_breaks_nothing(
    method: str, functions: ModuleType, start: Callable[..., PContext]
) -> None:
    """It left no value, as a C library that calls exit() does; that is a failure to tell or None, not an error of ours."""
    result = finished(start(functions.vanish, 0, method=method))
    assert result.is_failed() or result.return_values == {0: None}


@every_method
def test_a_return_value_that_cannot_be_pickled_is_a_clear_failure(
    method: str, functions: ModuleType, start: Callable[..., PContext], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """F14: one sentence names function, rank and type; no frame of ours, and no line on stderr, says it again."""
    logs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.ERR)
    with capfd.disabled():  # a fork would inherit pytest's replacement of sys.stderr
        failure = finished(start(functions.unpicklable, method=method, logs_specs=logs)).failures[0]
    assert failure.exitcode == 1
    told = "TypeError: unpicklable returned a _thread.lock on rank 0, which cannot be sent to the launcher (cannot pickle "
    assert failure.message.startswith(told)
    assert (failure.traceback(), failure.stderr_tail) == (None, "")


def test_a_return_value_that_cannot_be_read_back_is_told_with_its_rank(
    functions: ModuleType, start: Callable[..., PContext]
) -> None:
    context = start(functions.unreadable)
    with pytest.raises(Exception, match=r"(?s)(rank|worker) 0.*(cannot be read back|Refusal)"):
        finished(context)


@every_method
def test_what_is_running_is_ended_by_close(
    method: str, functions: ModuleType, start: Callable[..., PContext], alive: Callable[[int], bool]
) -> None:
    context = start(functions.sleep, method=method, workers=2)
    assert context.wait(0) is None
    assert all(map(alive, context.pids().values()))
    context.close()
    assert not any(map(alive, context.pids().values()))


# --- leaving together ------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_stays(
    functions: ModuleType, start: Callable[..., PContext], tmp_path: Path, wait_until: Any
) -> Callable[[str], MultiprocessContext]:
    """``one_stays(method)``: two workers, of which the first has returned, and the second waits for the file ``go``."""

    def run(method: str) -> MultiprocessContext:
        context = start(functions.return_early, str(tmp_path), method=method, workers=2)
        assert isinstance(context, MultiprocessContext)
        wait_until(lambda: context.wait(0) is not None or context.staying, 30)
        assert context.staying == {0}
        return context

    return run


def tell_the_other(folder: Path, word: str) -> None:
    (folder / "go.new").write_text(word)
    (folder / "go.new").rename(folder / "go")


@every_method
def test_f31_who_has_returned_stays_until_all_have(
    method: str, one_stays: Callable[[str], MultiprocessContext], tmp_path: Path, alive: Callable[[int], bool]
) -> None:
    """F31: no process ends, and nothing that was left to its end is done, before the last function has returned."""
    context = one_stays(method)
    assert alive(context.pids()[0])
    tell_the_other(tmp_path, "return")
    assert finished(context).return_values == context.pids()
    assert context.staying == frozenset()
    assert not alive(context.pids()[0])
    assert (tmp_path / "left").exists() == (method == "spawn")  # a fork does not do what is left to an interpreter's end


@every_method
def test_f31_who_stays_is_ended_with_the_group_though_it_is_deaf_to_the_signal(
    method: str, one_stays: Callable[[str], MultiprocessContext], tmp_path: Path, alive: Callable[[int], bool]
) -> None:
    """F31: when another fails, and when the group is closed, without the time of grace."""
    context = one_stays(method)
    if method == "fork":
        tell_the_other(tmp_path, "fail")
        assert set(finished(context).failures) == {1}
    began_at = time.monotonic()
    context.close(timeout=60)
    assert time.monotonic() - began_at < AT_ONCE_S
    assert not any(map(alive, context.pids().values()))


@every_method
def test_f31_who_stays_dies_with_its_launcher(
    method: str, script: Callable[..., Path], tmp_path: Path, wait_until: Any, alive: Callable[[int], bool]
) -> None:
    program = script(PREAMBLE.format(method=method) + STAYING, "program.py")
    launcher = subprocess.Popen([sys.executable, program], cwd=tmp_path)
    try:
        wait_until((tmp_path / "worker0.pid").exists, 30)
    finally:
        launcher.kill()
        launcher.wait()
    wait_until(lambda: not alive(int((tmp_path / "worker0.pid").read_text())))


def test_f31_who_stays_does_not_hang(functions: ModuleType, tmp_path: Path) -> None:
    """F31: it is as still as one that hangs, for longer than that may be."""
    launch = elastic_launch(config(tmp_path, workers=2, hang_timeout=1.0), functions.work_longer)
    assert launch(3.0) == {0: None, 1: None}


# --- what a worker finds ---------------------------------------------------------------------------------------------------


@every_method
def test_each_worker_has_its_own_environment(
    method: str, functions: ModuleType, start: Callable[..., PContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INHERITED", "from the launcher")
    envs = {0: {"RANK": "0", "OWN": "a"}, 1: {"RANK": "1", "INHERITED": "replaced"}}
    values = finished(start(functions.environment, method=method, workers=2, envs=envs)).return_values
    assert (values[0]["INHERITED"], values[0]["OWN"]) == ("from the launcher", "a")
    assert (values[1]["INHERITED"], values[1].get("OWN")) == ("replaced", None)
    assert values[0]["TORCHELASTIC_ERROR_FILE"].endswith("/0/error.json")
    assert values[1]["TORCHELASTIC_ERROR_FILE"].endswith("/1/error.json")
    assert "OWN" not in os.environ


@every_method
def test_each_worker_has_its_own_arguments(method: str, functions: ModuleType, start: Callable[..., PContext]) -> None:
    args = {0: ("zero",), 1: ("one", [1, {2}]), 2: ()}
    assert finished(start(functions.give_back, method=method, workers=3, args=args)).return_values == args


@every_method
def test_both_streams_reach_the_log_to_the_last_byte(
    method: str, functions: ModuleType, start: Callable[..., PContext], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.ALL)
    with capfd.disabled():  # a fork would inherit pytest's replacement of sys.stdout
        result = finished(start(functions.speak, method=method, logs_specs=logs))
    assert Path(result.stdouts[0]).read_text() == "to stdout\nnot flushed"
    assert "to stderr\n" in Path(result.stderrs[0]).read_text()


@every_method
def test_only_a_fork_sees_what_happened_before_the_start(
    method: str, functions: ModuleType, start: Callable[..., PContext]
) -> None:
    functions.BEFORE_THE_START.append("something")
    values = finished(start(functions.seen_before, method=method)).return_values
    assert values == {0: ["something"] if method == "fork" else []}


@every_method
def test_signals_are_as_a_fresh_python_has_them(method: str, functions: ModuleType, start: Callable[..., PContext]) -> None:
    (handlers,) = finished(start(functions.signals, method=method)).return_values.values()
    assert "SIG_DFL" in handlers["SIGTERM"]
    assert "default_int_handler" in handlers["SIGINT"]


def files_of_this_process() -> set[str]:
    names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return {os.readlink(name) for name in names if os.path.lexists(name)}


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_fresh_worker_inherits_no_file_of_ours(method: str, functions: ModuleType, start: Callable[..., PContext]) -> None:
    pipe = os.pipe()
    try:
        for fd in pipe:
            os.set_inheritable(fd, True)
        ours = os.readlink(f"/proc/self/fd/{pipe[0]}")
        (found,) = finished(start(functions.open_files, method=method)).return_values.values()
    finally:
        for fd in pipe:
            os.close(fd)
    assert ours not in found


@every_method
def test_a_worker_holds_no_line_between_agent_and_warden(
    method: str, functions: ModuleType, start: Callable[..., PContext]
) -> None:
    """Who holds one keeps the agent from seeing the warden's end; and the streams of its neighbours are not its affair."""
    before = files_of_this_process()
    shared = []  # the one line by which workers leave together
    for found in finished(start(functions.open_files, method=method, workers=3)).return_values.values():
        added = [name for name in found if name not in before]
        assert not [name for name in added if "pidfd" in name]
        shared.append([name for name in added if name.startswith("socket:")])
        assert method == "fork" or len([name for name in added if name.startswith("pipe:")]) <= 2, "more than its own two streams"
        assert len([name for name in added if "memfd:result" in name]) == 1, "more than its own result"
    assert len(shared[0]) == 1
    assert shared == [shared[0]] * 3


@every_method
def test_lambdas_and_closures(method: str, functions: ModuleType, start: Callable[..., PContext]) -> None:
    secret = 40
    context = start(lambda number: number + secret, 2, method=method)
    assert finished(context).return_values == {0: 42}


@every_method
def test_partial_functions_and_bound_methods(method: str, functions: ModuleType, start: Callable[..., PContext]) -> None:
    context = start(functools.partial(functions.give_back, "first"), "second", method=method)
    assert finished(context).return_values == {0: ("first", "second")}
    context = start("a,b".split, ",", method=method)
    assert finished(context).return_values == {0: ["a", "b"]}


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_arguments_that_cannot_be_sent_are_refused_by_name(
    method: str, functions: ModuleType, start: Callable[..., PContext]
) -> None:
    with pytest.raises(UsageError, match=r"give_back.*cannot be sent to a new process"):
        start(functions.give_back, threading.Lock(), method=method)


def test_a_fork_sends_nothing_and_takes_any_argument(functions: ModuleType, start: Callable[..., PContext]) -> None:
    context = start(lambda lock: lock.locked(), threading.Lock(), method="fork")
    assert finished(context).return_values == {0: False}


def test_an_unknown_start_method_is_refused(functions: ModuleType, start: Callable[..., PContext], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="start_method must be one of spawn, fork, forkserver, not 'thread'"):
        start(functions.nothing, method="thread")
    assert not (tmp_path / "logs").exists()


@every_method
def test_from_a_thread_of_the_calling_process(method: str, functions: ModuleType, tmp_path: Path) -> None:
    results: list[Any] = []
    launch = elastic_launch(config(tmp_path, method, workers=2), functions.rank)
    thread = threading.Thread(target=lambda: results.append(launch()))
    thread.start()
    thread.join(20)
    assert results == [{0: 0, 1: 1}]


@every_method
def test_from_two_threads_at_once(method: str, functions: ModuleType, tmp_path: Path) -> None:
    results: dict[int, Any] = {}

    def run(number: int) -> None:
        results[number] = elastic_launch(config(tmp_path / str(number), method), functions.give_back)(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == {0: {0: (0,)}, 1: {0: (1,)}}


@every_method
def test_groups_that_run_beside_each_other_do_not_hold_each_other_up(
    method: str, functions: ModuleType, start: Callable[..., PContext]
) -> None:
    """A forked group has copies of all that the agent holds open for the others; hanging up must not wait for those."""
    groups = [start(functions.sleep, method=method), start(functions.sleep, method="fork")]
    started_at = time.monotonic()
    for group in groups:
        group.close()
    assert time.monotonic() - started_at < AT_ONCE_S


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_signal_to_a_worker_that_has_just_been_forked_is_not_lost(
    functions: ModuleType, start: Callable[..., PContext], method: str
) -> None:
    """P08: what the warden itself outlives ends a worker from the moment at which it is known."""
    for _ in range(20 if method == "fork" else 3):
        context = start(functions.sleep, method=method)
        context.close(signal.SIGTERM, timeout=30)
        assert {ended.exitcode for ended in context._exits.values()} == {-signal.SIGTERM}  # type: ignore[attr-defined]


def test_a_fork_of_the_callers_own_does_not_hold_up_the_end(functions: ModuleType, start: Callable[..., PContext]) -> None:
    """As a program does that uses multiprocessing beside us."""
    group = start(functions.sleep)
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        started_at = time.monotonic()
        group.close()
        took_s = time.monotonic() - started_at
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert is_under(took_s, 2)


# --- programs --------------------------------------------------------------------------------------------------------------

PREAMBLE = """
import multiprocessing, os, subprocess, sys, time
from rallypoint import LaunchConfig, elastic_launch
from rallypoint.output.log_specs import DefaultLogsSpecs

def launch(function, *args, method={method!r}, workers=2):
    config = LaunchConfig(1, 1, workers, rdzv_backend="c10d", rdzv_endpoint="localhost", max_restarts=0, start_method=method,
                          logs_specs=DefaultLogsSpecs("logs"))
    return elastic_launch(config, function)(*args)
"""


@pytest.fixture
def run_program(script: Callable[..., Path], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run_program(text, method)`` runs a program that has ``launch(function, *args)``."""

    def run(text: str, method: str = "spawn") -> subprocess.CompletedProcess[str]:
        program = script(PREAMBLE.format(method=method) + text, "program.py")
        return subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=30)

    return run


@every_method
def test_functions_and_classes_of_the_main_program(method: str, run_program: Callable[..., Any]) -> None:
    done = run_program(
        """
class Point:
    def __init__(self, x):
        self.x = x

def double(point):
    return Point(2 * point.x + int(os.environ["RANK"]))

if __name__ == "__main__":
    print({rank: (type(value) is Point, value.x) for rank, value in launch(double, Point(21)).items()})
""",
        method,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("{0: (True, 42), 1: (True, 43)}\n", "", 0)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_program_without_a_main_guard_gets_a_clear_error_and_no_endless_starts(
    method: str, run_program: Callable[..., Any]
) -> None:
    done = run_program(
        """
def work():
    return 1

print("top of the program", flush=True)
launch(work)
""",
        method,
    )
    assert done.returncode == 1
    assert "__name__ == '__main__'" in done.stderr
    assert done.stdout.count("top of the program") <= 3  # once by the user, once in each of two workers


def test_a_forked_function_needs_no_main_guard(run_program: Callable[..., Any]) -> None:
    done = run_program("print(launch(lambda: int(os.environ['RANK'])))", "fork")
    assert (done.stdout, done.returncode) == ("{0: 0, 1: 1}\n", 0)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_that_starts_processes_of_its_own_may_do_so(method: str, run_program: Callable[..., Any]) -> None:
    """As data loaders do, by either of multiprocessing's common methods."""
    done = run_program(
        """
def work():
    for method in ("spawn", "fork"):
        process = multiprocessing.get_context(method).Process(target=print, args=(method,))
        process.start()
        process.join()
        assert process.exitcode == 0
    return "all done"

if __name__ == "__main__":
    print(launch(work, workers=1))
""",
        method,
    )
    assert (sorted(done.stdout.splitlines()), done.stderr) == (["fork", "spawn", "{0: 'all done'}"], "")


@every_method
def test_queues_locks_events_and_pipes_are_arguments(method: str, run_program: Callable[..., Any]) -> None:
    done = run_program(
        """
def work(queue, lock, event, counter, pipe, barrier):
    rank = int(os.environ["RANK"])
    with lock:
        counter.value += 1
    queue.put(("from", rank))
    barrier.wait(20)
    if rank == 0:
        pipe.send("through the pipe")
        event.set()
    return event.wait(20)

if __name__ == "__main__":
    context = multiprocessing.get_context(METHOD)
    queue, lock, event, counter = context.Queue(), context.Lock(), context.Event(), context.Value("i", 0)
    ours, theirs = context.Pipe()
    print(launch(work, queue, lock, event, counter, theirs, context.Barrier(2)))
    print(sorted(queue.get(timeout=5) for _ in range(2)), counter.value, event.is_set(), ours.recv(), lock.acquire(timeout=5))
""".replace("METHOD", repr(method)),
        method,
    )
    lines = ["{0: True, 1: True}", "[('from', 0), ('from', 1)] 2 True through the pipe True"]
    assert (done.stdout.splitlines(), done.stderr, done.returncode) == (lines, "", 0)


INTERACTIVE = (
    PREAMBLE
    + """
import functools
base = 40

def add(number):
    return base + number + int(os.environ["RANK"])

class Point:
    def __init__(self, x):
        self.x = x
"""
)


def run_interactively(text: str, method: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = INTERACTIVE.format(method=method) + text
    return subprocess.run([sys.executable, "-"], input=program, cwd=folder, capture_output=True, text=True, timeout=30)


@every_method
def test_functions_that_were_typed_in(method: str, tmp_path: Path) -> None:
    """P44: a function that no other interpreter can import, as in a notebook, is sent by value."""
    done = run_interactively("print(launch(add, 2))", method, tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("{0: 42, 1: 43}\n", "", 0)


TALK = """
def talk(queue, pipe):
    queue.put(base)
    pipe.send(base)

context = multiprocessing.get_context(METHOD)
queue, (ours, theirs) = context.Queue(), context.Pipe()
launch(talk, queue, theirs, workers=1)
print(queue.get(timeout=5), ours.recv() if ours.poll(5) else "nothing")
"""


@every_method
def test_functions_that_were_typed_in_take_queues_and_pipes_too(method: str, tmp_path: Path) -> None:
    """P44."""
    done = run_interactively(TALK.replace("METHOD", repr(method)), method, tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("40 40\n", "", 0)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    ("call", "printed"),
    [
        ("launch(functools.partial(add, 2))", "{0: 42, 1: 43}"),
        ("launch(len, [Point(1)])", "{0: 1, 1: 1}"),
        ("{rank: point.x for rank, point in launch(Point, 5).items()}", "{0: 5, 1: 5}"),
    ],
    ids=["in a partial", "a class in the arguments", "a class in the result"],
)
def test_whatever_was_typed_in_may_go_along(method: str, call: str, printed: str, tmp_path: Path) -> None:
    """P44."""
    done = run_interactively(f"print({call})", method, tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == (f"{printed}\n", "", 0)


def test_without_cloudpickle_a_typed_in_function_is_refused_with_advice(tmp_path: Path) -> None:
    text = "sys.modules['cloudpickle'] = None\nlaunch(add, 2)"
    done = run_interactively(text, "spawn", tmp_path)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "UsageError: the function add" in last
    assert "rallypoint[functions]" in last
    assert "start_method='fork'" in last


@every_method
def test_a_launcher_without_standard_input_or_with_all_streams_closed(
    method: str, script: Callable[..., Path], tmp_path: Path
) -> None:
    """As a daemon starts one: the numbers 0 to 2 are then free for anything."""
    text = """
def work():
    return int(os.environ["RANK"])

if __name__ == "__main__":
    values = launch(work)
    open("done", "w").write(repr(values))
"""
    program = script(PREAMBLE.format(method=method) + text, "program.py")
    for closed in ("0<&-", "0<&- 1>&- 2>&-"):
        done = subprocess.run(["/bin/sh", "-c", f'exec "{sys.executable}" "{program}" {closed}'], cwd=tmp_path, timeout=30)
        assert done.returncode == 0, closed
        assert (tmp_path / "done").read_text() == "{0: 0, 1: 1}"
        (tmp_path / "done").unlink()


# --- nothing is left behind ------------------------------------------------------------------------------------------------

FAMILY = """
def report(name):
    with open(f"{name}.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{name}.new", f"{name}.pid")

def work():
    rank = os.environ["RANK"]
    subprocess.Popen(["/bin/sh", "-c", f"echo $$ > child{rank}.new; mv child{rank}.new child{rank}.pid; exec sleep 60"],
                     start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            report(f"daemon{rank}")
            time.sleep(60)
        os._exit(0)
    report(f"worker{rank}")
    time.sleep(60)

if __name__ == "__main__":
    launch(work)
"""


STAYING = """
def work():
    if os.environ["RANK"] == "1":
        time.sleep(60)
    with open("worker0.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename("worker0.new", "worker0.pid")

if __name__ == "__main__":
    launch(work)
"""


@every_method
def test_nothing_outlives_a_launcher_that_is_killed(
    method: str, script: Callable[..., Path], tmp_path: Path, wait_until: Any, alive: Callable[[int], bool]
) -> None:
    """P09: workers, their children in new sessions, and daemons are gone within 5 s of the launcher's SIGKILL."""
    names = [f"{kind}{rank}.pid" for kind in ("worker", "child", "daemon") for rank in (0, 1)]
    program = script(PREAMBLE.format(method=method) + FAMILY, "program.py")
    launcher = subprocess.Popen([sys.executable, program], cwd=tmp_path)
    try:
        wait_until(lambda: all((tmp_path / name).exists() for name in names), 20)
        pids = {name: int((tmp_path / name).read_text()) for name in names}
        assert all(map(alive, pids.values()))
    finally:
        launcher.kill()
        launcher.wait()
    wait_until(lambda: not any(map(alive, pids.values())), 5)


@every_method
def test_a_worker_that_is_killed_from_outside_ends_the_launch_and_its_family(
    method: str, script: Callable[..., Path], tmp_path: Path, wait_until: Any, alive: Callable[[int], bool]
) -> None:
    names = [f"{kind}{rank}.pid" for kind in ("worker", "child", "daemon") for rank in (0, 1)]
    program = script(PREAMBLE.format(method=method) + FAMILY, "program.py")
    with open(tmp_path / "stderr", "w") as stderr:
        launcher = subprocess.Popen([sys.executable, program], cwd=tmp_path, stderr=stderr)
    try:
        wait_until(lambda: all((tmp_path / name).exists() for name in names), 20)
        pids = {name: int((tmp_path / name).read_text()) for name in names}
        os.kill(pids["worker1.pid"], signal.SIGKILL)
        assert launcher.wait(10) == 1
    finally:
        launcher.kill()
        launcher.wait()
    assert not any(map(alive, pids.values()))
    assert "SIGKILL" in (tmp_path / "stderr").read_text()


def test_ctrl_c_while_the_server_of_workers_is_still_importing(tmp_path: Path, wait_until: Any) -> None:
    """P20: also while a fork server imports what it is to run, which may take many seconds."""
    (tmp_path / "slow.py").write_text(
        "import os, time\n"
        "if os.environ.get('PARENT') != str(os.getpid()):\n"
        "    open('importing', 'w').close()\n"
        "    time.sleep(60)\n"
        "def work(): pass\n"
    )
    program = (
        "import os, sys\nos.environ['PARENT'] = str(os.getpid())\nimport slow\n"
        "from rallypoint import LaunchConfig, SignalException, elastic_launch\n"
        "try:\n"
        "    elastic_launch(LaunchConfig(1, 1, 2, rdzv_backend='c10d', start_method='forkserver'), slow.work)()\n"
        "except SignalException:\n"
        "    sys.exit(130)\n"
    )
    job = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    wait_until((tmp_path / "importing").exists)
    sent_at = time.monotonic()
    job.send_signal(signal.SIGINT)
    assert job.wait(20) == 130
    assert time.monotonic() - sent_at < AT_ONCE_S
