"""The error file: what a worker writes into it, and what is passed on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rallypoint.failures import error_files
from rallypoint.failures.error_files import ErrorHandler, get_error_handler, read_error_file, record
from rallypoint.failures.process_failure import ChildFailedError, ProcessFailure


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


class Quiet(ErrorHandler):
    """Leaves the fault handler of the test runner alone."""

    def initialize(self) -> None:
        pass


def run_worker(source: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **env})


def boom() -> None:
    raise ValueError("boom")


def fine() -> None:
    pass


def test_an_exception_is_recorded_and_raised_again(error_file: Path) -> None:
    with pytest.raises(ValueError, match="boom"):
        record(boom, Quiet())()
    message = json.loads(error_file.read_text())["message"]
    assert message["message"] == "ValueError: boom"
    assert 'raise ValueError("boom")' in message["extraInfo"]["py_callstack"]
    assert message["extraInfo"]["py_callstack"].endswith("ValueError: boom\n")
    assert message["extraInfo"]["timestamp"].isdigit()
    assert int(message["extraInfo"]["timestamp_ns"]) // 10**9 == int(message["extraInfo"]["timestamp"])
    assert os.listdir(error_file.parent).count("error.json") == 1
    assert not list(error_file.parent.glob("*.tmp"))


def test_a_real_worker_leaves_an_error_file(error_file: Path) -> None:
    worker = run_worker(
        """
        from rallypoint.failures.error_files import record
        @record
        def main():
            raise KeyError("no such layer")
        main()
        """
    )
    assert worker.returncode == 1
    assert read_error_file(str(error_file))["message"]["message"] == "KeyError: 'no such layer'"


def test_the_result_and_the_name_of_the_function_are_kept(error_file: Path) -> None:
    def add(left: int, right: int = 2) -> int:
        """Adds."""
        return left + right

    recorded = record(add, Quiet())
    assert recorded(1, right=3) == 4
    assert (recorded.__name__, recorded.__doc__) == ("add", "Adds.")
    assert not error_file.exists()


@pytest.mark.parametrize("code", [1, "a text", None])
def test_sys_exit_is_raised_again_but_not_recorded(error_file: Path, code: object) -> None:
    with pytest.raises(SystemExit) as raised:
        record(lambda: sys.exit(code), Quiet())()  # type: ignore[arg-type]
    assert raised.value.code == code
    assert not error_file.exists()


def test_sys_exit_0_is_a_return(error_file: Path) -> None:
    assert record(lambda: sys.exit(0), Quiet())() is None
    assert not error_file.exists()


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir(tmp_path))
    get_error_handler().record_exception(ValueError("boom"))
    assert sorted(os.listdir(tmp_path)) == before


def test_missing_folders_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a" / "b" / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    ErrorHandler().record_exception(ValueError("boom"))
    assert read_error_file(str(path))["message"]["message"] == "ValueError: boom"


def test_an_error_file_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "file" / "error.json"))
    with pytest.raises(ValueError, match="boom"):
        record(boom, Quiet())()


def test_a_handler_that_is_broken_does_not_hide_the_error(error_file: Path) -> None:
    class Broken(Quiet):
        def record_exception(self, e: BaseException) -> None:
            raise RuntimeError("the handler itself")

    with pytest.raises(ValueError, match="boom"):
        record(boom, Broken())()


def test_an_exception_whose_text_cannot_be_made(error_file: Path) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    ErrorHandler().record_exception(Mute())
    assert read_error_file(str(error_file))["message"]["message"].startswith("Mute: ")


def test_texts_that_are_no_unicode_survive(error_file: Path) -> None:
    ErrorHandler().record_exception(ValueError("\udcff\0\u2028"))
    assert read_error_file(str(error_file))["message"]["message"] == "ValueError: \udcff\0\u2028"


def failure_of_a_worker(error_file: str, exitcode: int = 7) -> ChildFailedError:
    return ChildFailedError("train.py", {0: ProcessFailure(0, 4711, exitcode, error_file)})


def fail(error: Exception) -> None:
    raise error


def test_a_launcher_passes_its_workers_error_on(error_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = tmp_path / "0" / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(workers))
    ErrorHandler().record_exception(ValueError("boom"))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    with pytest.raises(ChildFailedError):
        record(fail, Quiet())(failure_of_a_worker(str(workers)))
    expected = read_error_file(str(workers))
    expected["message"]["errorCode"] = 7
    assert read_error_file(str(error_file)) == expected


def test_a_launcher_whose_worker_left_no_error_file_leaves_none_either(error_file: Path) -> None:
    """What it knows stands on its stderr, where an outer launcher finds it."""
    with pytest.raises(ChildFailedError):
        record(fail, Quiet())(failure_of_a_worker("", exitcode=-signal.SIGSEGV))
    assert not error_file.exists()


class OfOldTimes:
    """A handler that was written for torch 2.13, and is no subclass of ours."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def initialize(self) -> None:
        self.calls.append("initialize")

    def record_exception(self, e: BaseException) -> None:
        self.calls.append(f"record_exception {e}")


def test_a_handler_written_for_an_older_torch_works() -> None:
    handler: Any = OfOldTimes()
    assert record(lambda: 5, handler)() == 5
    with pytest.raises(ValueError, match="boom"):
        record(fail, handler)(ValueError("boom"))
    assert handler.calls == ["initialize", "initialize", "record_exception boom"]


class OfToday(Quiet):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def set_entrypoint_fn_name(self, fn_name: str | None) -> None:
        self.calls.append(f"name {fn_name}")

    def initialize(self) -> None:
        self.calls.append("initialize")

    def record_exception(self, e: BaseException) -> None:
        self.calls.append(f"record_exception {e}")

    def record_success(self) -> None:
        self.calls.append("success")
        raise RuntimeError("in record_success")


def test_a_handler_is_told_which_function_runs_and_that_it_returned() -> None:
    """The name before all else; the success outside of what catches the function's exceptions. As torch 2.15 does."""
    handler = OfToday()
    with pytest.raises(RuntimeError, match="in record_success"):
        record(fine, handler)()
    assert handler.calls == ["name fine", "initialize", "success"]
    handler.calls.clear()
    with pytest.raises(ValueError, match="boom"):
        record(fail, handler)(ValueError("boom"))
    assert handler.calls == ["name fail", "initialize", "record_exception boom"]


class Knowing(ErrorHandler):
    def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:
        return f"{message}, as {error_file} is what a signal leaves"


@pytest.mark.parametrize(("handler", "told"), [(Knowing, True), (OfOldTimes, False), (ErrorHandler, False)])
def test_a_handler_may_add_to_what_is_told_of_a_signal(
    handler: Callable[[], Any], told: bool, error_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where the signal is all that is known; and one that does not know how breaks nothing."""
    monkeypatch.setattr(error_files, "get_error_handler", handler)
    killed, failed = ProcessFailure(0, 9, -9, ""), ProcessFailure(0, 9, 1, "")
    assert ("as <N/A> is what" in str(ChildFailedError("x", {0: killed}))) == told
    assert "what a signal leaves" not in str(ChildFailedError("x", {0: failed}))
    assert killed.message == "Signal 9 (SIGKILL) received by PID 9"


def test_a_child_error_without_failures_is_recorded_as_any_other(error_file: Path) -> None:
    with pytest.raises(ChildFailedError):
        record(fail, Quiet())(ChildFailedError("train.py", {}))
    assert read_error_file(str(error_file))["message"]["message"].startswith("ChildFailedError: ")


def test_a_copy_without_a_code_is_the_same_file(error_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ErrorHandler().record_exception(ValueError("boom"))
    copy = tmp_path / "copy.json"
    copy.write_text("an older one")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(copy))
    ErrorHandler().dump_error_file(str(error_file))
    assert copy.read_bytes() == error_file.read_bytes()


def test_the_short_form_has_no_place_for_a_code(tmp_path: Path, error_file: Path) -> None:
    short = tmp_path / "short.json"
    short.write_text('{"message": "text", "timestamp": 10}')
    ErrorHandler().dump_error_file(str(short), error_code=3)
    assert read_error_file(str(error_file)) == {"message": "text", "timestamp": 10}


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"message": 3}', "\xff", '{"message": null}', "[" * 100_000])
def test_what_is_no_error_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "error.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r".+"):
        read_error_file(str(path))


def test_initialize_shows_stacks_when_the_worker_crashes() -> None:
    worker = run_worker(
        """
        import os, signal
        from rallypoint.failures.error_files import record
        @record
        def main():
            os.kill(os.getpid(), signal.SIGSEGV)
        main()
        """
    )
    assert worker.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in worker.stderr
    assert "in main" in worker.stderr


def test_initialize_never_raises() -> None:
    worker = run_worker(
        """
        import os, sys
        from rallypoint.failures.error_files import ErrorHandler
        sys.stderr = None
        ErrorHandler().initialize()
        sys.stderr = object()
        ErrorHandler().initialize()
        print("fine")
        """
    )
    assert worker.stdout == "fine\n"


def test_workers_pay_little_for_the_import() -> None:
    """The decorator must not pull the launcher, nor anything slow, into every worker."""
    worker = run_worker(
        """
        import sys
        import rallypoint
        before = set(sys.modules)
        import rallypoint.failures.error_files
        print(*sorted(set(sys.modules) - before))
        """
    )
    imported = set(worker.stdout.split())
    ours = {name for name in imported if name.startswith("rallypoint")}
    folders = {"rallypoint.base", "rallypoint.failures"}  # empty but for their docstrings
    assert ours == folders | {"rallypoint.base.defaults", "rallypoint.base.environment", "rallypoint.failures.error_files"}
    assert not imported & {"json", "traceback", "dataclasses", "logging", "inspect", "signal", "socket"}
