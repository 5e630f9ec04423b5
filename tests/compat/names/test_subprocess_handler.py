"""A program under a handler of its own."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from rallypoint.affinity import AffinityMode, NumaOptions
from rallypoint.processes.subprocess_handler import SubprocessHandler, get_subprocess_handler


def test_a_program_with_its_environment_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "yes")
    out, err = tmp_path / "out", tmp_path / "err"
    handler = get_subprocess_handler(
        "sh", ("-c", "echo $INHERITED $GIVEN $0; echo e >&2", 5), {"GIVEN": "1"}, str(out), str(err), 3
    )
    assert handler.proc.wait(10) == 0
    handler.close()
    assert handler.local_rank_id == 3
    assert (out.read_text(), err.read_text()) == ("yes 1 5\n", "e\n")


def test_close_ends_the_whole_group() -> None:
    handler = SubprocessHandler("sh", ("-c", "sleep 60 & wait"), {}, None, None, 0, None)
    assert os.getsid(handler.proc.pid) == handler.proc.pid
    handler.close()
    assert handler.proc.wait(10) == -signal.SIGTERM
    handler.close()


def test_another_signal() -> None:
    handler = get_subprocess_handler("sleep", ("60",), {}, "", "", 0)
    handler.close(signal.SIGKILL)
    assert handler.proc.wait(10) == -signal.SIGKILL


def test_a_program_that_is_not_there_leaves_no_file_open(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        get_subprocess_handler("/no/such/program", (), {}, str(tmp_path / "out"), str(tmp_path / "err"), 0)


def test_a_subclass_may_start_it_in_another_way() -> None:
    class Wrapped(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> object:  # type: ignore[override]
            return super()._popen(("env", *args), env)

    handler = Wrapped(sys.executable, ("-c", "pass"), {}, None, None, 0, None)
    assert handler.proc.args[0] == "env"  # type: ignore[index]
    assert handler.proc.wait(10) == 0
    handler.close()


def test_it_can_be_bound_to_cpus() -> None:
    options = NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)
    handler = get_subprocess_handler("sleep", ("60",), {}, "", "", 1, options)
    assert os.sched_getaffinity(handler.proc.pid) <= os.sched_getaffinity(0)
    handler.close()
    handler.proc.wait(10)
