"""How a run ends: the exit code for a scheduler, and the words for a person."""

from __future__ import annotations

import errno
import signal
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.conftest import AT_ONCE_S, poll_until

import rallypoint.agent
from rallypoint import errors
from rallypoint.base import outbox, report
from rallypoint.cli import main as cli
from rallypoint.cli import usage
from rallypoint.failures.process_failure import ChildFailedError, ProcessFailure


class Launch(ModuleType):
    """Stands for the launcher: remembers what it was asked to start, and ends as it is told."""

    def __init__(self) -> None:
        super().__init__("rallypoint.agent.launch")
        self.error: BaseException | None = None
        self.calls: list[Any] = []

    def elastic_launch(self, config: Any, entrypoint: Any) -> Any:
        def launch(*args: str) -> dict[int, Any]:
            self.calls.append((config, entrypoint, args))
            report.info("the job runs")
            report.debug("a detail")
            if self.error is not None:
                raise self.error
            return {}

        return launch


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Launch:
    fake = Launch()
    monkeypatch.setitem(sys.modules, "rallypoint.agent.launch", fake)
    monkeypatch.setattr(rallypoint.agent, "launch", fake, raising=False)
    return fake


@pytest.fixture
def train(script: Any) -> str:
    return str(script("print('hello')"))


@pytest.mark.parametrize("is_owed", [True, False])
def test_f28_what_workers_printed_waits_for_a_slow_reader(monkeypatch: pytest.MonkeyPatch, is_owed: bool) -> None:
    """F28: as long as that takes, as the workers themselves would have; a line of ours does not wait so long."""
    monkeypatch.setattr(cli, "_LAST_LINES_S", 0.1)
    asked, is_read = [], threading.Event()
    monkeypatch.setattr(outbox, "is_owing", lambda: bool(asked.append(len(asked)) or box.owed))
    box = outbox.Outbox(lambda _: is_read.wait(AT_ONCE_S), is_for_people=True)
    box.owed = int(is_owed)
    box.put("a line", may_wait=False)
    reader = threading.Thread(target=lambda: poll_until(lambda: len(asked) >= 3, AT_ONCE_S) and is_read.set())
    reader.start()
    cli._await_readers(was_stopped=False)
    assert is_read.is_set() == is_owed
    assert len(asked) >= (3 if is_owed else 1)
    asked.extend(range(3))
    reader.join()
    assert box.flush(AT_ONCE_S)


def test_what_is_said_later_in_the_process_goes_to_its_logger_again(
    launch: Launch, train: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert cli.main([train]) == 0
    assert cli.main(["nosuch.py"]) == 2
    report.warn("later")
    assert "later" in caplog.text


def child_failed(exitcode: int) -> ChildFailedError:
    return ChildFailedError("train.py", {0: ProcessFailure(local_rank=0, pid=1234, exitcode=exitcode, error_file="")})


def test_success(launch: Launch, train: str, capfd: pytest.CaptureFixture[str]):
    assert cli.main(["--standalone", train, "--x"]) == 0
    [(config, entry, args)] = launch.calls
    assert (config.nproc_per_node, entry, args) == (1, sys.executable, ("-u", train, "--x"))
    assert capfd.readouterr() == ("", "rallyrun: the job runs\n")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (errors.UsageError("the field x\nis wrong"), (2, "rallyrun: error: the field x is wrong")),
        (errors.RendezvousTimeoutError("1 of 2 nodes came"), (3, "rallyrun: error: 1 of 2 nodes came")),
        (errors.UnkillableWorkersError([77], 10.0), (4, "pid 77")),
        (errors.WorkerStartError("cannot start x"), (1, "rallyrun: error: cannot start x")),
        (errors.worker_start_error(errno.ENOENT, "no x"), (1, "rallyrun: error: no x")),
        (OSError(errno.EMFILE, "Too many open files", "a.py"), (4, "cannot run the workers: no more files may be opened here")),
        (BlockingIOError(errno.EAGAIN, "Try again"), (4, "this host cannot run the workers: Try again")),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), (4, "cannot run the workers: No such file or directory")),
        (MemoryError(), (4, "cannot run the workers: there is no memory left on this machine")),
        (ModuleNotFoundError("No module named 'rallypoint.x'"), (4, "cannot run the workers: No module named 'rallypoint.x'")),
        (RuntimeError("can't start new thread"), (4, "cannot run the workers: no more processes or threads may be")),
        (errors.JobFailedError("rank 3 failed", ["who"], 7), (1, "rallyrun: error: the job has failed: rank 3 failed")),
        (errors.RendezvousClosedError("the job has ended: its host left"), (3, "rallyrun: error: the job has ended")),
        (errors.JobStoppedError("the job was stopped on purpose: SIGINT", 2), (130, "rallyrun: error: the job was stopped on")),
        (errors.JobStoppedError("it was stopped: me", 15, for_all=True), (79, "rallyrun: it was stopped: me; exit code 79")),
        (errors.StoppedError("me stopped the job"), (79, "rallyrun: me stopped the job; exit code 79: it was on purpose")),
        (errors.PreemptedError("all have saved"), (75, "rallyrun: all have saved; exit code 75: start it again to go on")),
        (errors.PreemptedError("no time", all_saved=False), (76, "rallyrun: no time; exit code 76: start it again to go")),
        (errors.JobPreemptedError("all have saved"), (75, "rallyrun: all have saved; exit code 75: start it again to go on")),
        (errors.JobPreemptedError("no time", all_saved=False), (76, "rallyrun: no time; exit code 76")),
        (errors.SignalException("got it", signal.SIGTERM), (143, "")),
        (errors.SignalException("got it", signal.SIGINT), (130, "")),
        (KeyboardInterrupt(), (130, "")),
    ],
)
def test_each_end_has_its_code_and_at_most_one_line(
    launch: Launch, train: str, capfd: pytest.CaptureFixture[str], error: BaseException, outcome: tuple[int, str]
):
    """P37: documented codes tell a scheduler what to do. P20: an interrupt leaves no traceback."""
    launch.error = error
    code, words = outcome
    assert cli.main([train]) == code
    out, err = capfd.readouterr()
    said = err.removeprefix("rallyrun: the job runs\n")
    assert out == ""
    assert words in said
    assert said.count("\n") == (1 if words else 0)


def test_what_the_host_lacks_is_told_although_the_words_for_it_cannot_be_read(
    launch: Launch, train: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "rallypoint.base.limits", None)
    monkeypatch.delattr(rallypoint.base, "limits", raising=False)
    no_files = OSError(errno.EMFILE, "Too many open files", "a.py")
    for error, words in ((no_files, "Too many open files: a.py"), (MemoryError(), "out of memory")):
        launch.error = error
        assert cli.main([train]) == 4
        assert f"rallyrun: error: this host cannot run the workers: {words}" in capfd.readouterr().err


@pytest.mark.parametrize(("exitcode", "code"), [(3, 3), (1, 1), (-9, 137), (-11, 139), (0, 1)])
def test_the_first_causes_exit_code_can_be_passed_on(launch: Launch, train: str, exitcode: int, code: int):
    """P37: 1 by default; the worker's own code, or 128 + its signal, if asked for."""
    launch.error = child_failed(exitcode)
    assert cli.main([train]) == 1
    assert cli.main(["--pass-exit-code", train]) == code


@pytest.mark.parametrize(("exitcode", "code"), [(7, 7), (-9, 137), (0, 1), (None, 1)])
def test_a_cause_on_another_node_has_the_same_exit_code_here(launch: Launch, train: str, exitcode: int | None, code: int):
    """P37: all nodes of a job pass on one code, whether workers of theirs failed too or not."""
    launch.error = errors.JobFailedError("rank 3 failed", [], exitcode)
    assert cli.main([train]) == 1
    assert cli.main(["--pass-exit-code", train]) == code
    if exitcode is not None:
        launch.error = child_failed(99)
        launch.error.cause_exitcode = exitcode
        assert cli.main(["--pass-exit-code", train]) == code


def test_a_failure_without_a_known_worker(launch: Launch, train: str):
    launch.error = ChildFailedError("train.py", {})
    launch.error.format_msg = lambda *_args: "it failed"
    assert cli.main(["--pass-exit-code", train]) == 1


def test_a_failure_prints_its_summary(launch: Launch, train: str, capfd: pytest.CaptureFixture[str]):
    launch.error = child_failed(3)
    cli.main([train])
    assert str(launch.error) in capfd.readouterr().err


@pytest.mark.parametrize("error", [RuntimeError("impossible"), OSError(errno.EBADF, "impossible"), KeyError("impossible")])
def test_a_bug_of_ours_is_told_as_one(launch: Launch, train: str, capfd: pytest.CaptureFixture[str], error: Exception):
    launch.error = error
    assert cli.main([train]) == 70
    err = capfd.readouterr().err
    assert "impossible" in err
    assert "Traceback" in err
    assert "a bug in rallypoint" in err


def test_loglevel(launch: Launch, train: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    for level, lines in (("", 1), ("DEBUG", 2), ("10", 2), ("warning", 0), ("nonsense", 1)):
        monkeypatch.setenv("LOGLEVEL", level)
        cli.main([train])
        assert capfd.readouterr().err.count("\n") == lines, level


def test_what_has_no_unicode_form_is_still_said(launch: Launch, capfd: pytest.CaptureFixture[str]):
    assert cli.main(["no\udcff.py"]) == 2
    assert "no\\udcff.py" in capfd.readouterr().err


def test_a_closed_stderr_ends_nothing(launch: Launch, train: str, monkeypatch: pytest.MonkeyPatch):
    def closed(_fd: int, _data: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(cli.os, "write", closed)
    assert cli.main([train]) == 0


def test_arguments_of_another_parser_can_be_run(launch: Launch, train: str):
    cli.run(SimpleNamespace(training_script=train, training_script_args=["a"], nproc_per_node="2", rdzv_backend="c10d"))
    [(config, _, args)] = launch.calls
    assert (config.nproc_per_node, config.rdzv_backend, args) == (2, "c10d", ("-u", train, "a"))


def test_answers(launch: Launch, capfd: pytest.CaptureFixture[str]):
    for argv, words in ((["--version"], f"rallyrun {rallypoint.__version__}\n"), (["-h"], "usage: rallyrun")):
        assert cli.main(argv) == 0
        assert capfd.readouterr().out.startswith(words)
    for shell in ("bash", "zsh", "fish", "tcsh"):
        assert cli.main(["--print-completion", shell]) == 0
        assert "rallyrun" in capfd.readouterr().out
    assert launch.calls == []


def test_the_command_rallypoint(launch: Launch, train: str, capfd: pytest.CaptureFixture[str]):
    assert cli.rallypoint_main(["run", "--standalone", train]) == 0
    assert len(launch.calls) == 1
    for argv, words in (
        (["--version"], f"rallypoint {rallypoint.__version__}"),
        (["--help"], "rallypoint run"),
        ([], "rallypoint run"),
        (["run", "--version"], "rallyrun "),
    ):
        assert cli.rallypoint_main(argv) == 0
        assert words in capfd.readouterr().out


@pytest.mark.parametrize(
    ("command", "advice"), [("ru", "did you mean rallypoint run?"), ("launch", f"the commands are: {', '.join(usage.COMMANDS)}")]
)
def test_an_unknown_command(command: str, advice: str, capfd: pytest.CaptureFixture[str]):
    assert cli.rallypoint_main([command]) == 2
    assert capfd.readouterr().err == f"rallypoint: error: unknown command '{command}'; {advice}\n"


def test_the_arguments_of_the_process_are_the_default(launch: Launch, train: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["rallyrun", train, "x"])
    assert cli.main() == 0
    monkeypatch.setattr(sys, "argv", ["rallypoint", "run", train, "x"])
    assert cli.rallypoint_main() == 0
    assert [args for _, _, args in launch.calls] == [("-u", train, "x")] * 2
