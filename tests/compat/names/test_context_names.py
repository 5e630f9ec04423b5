"""What callers read of a group of processes besides its methods."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.output.log_specs import DefaultLogsSpecs, Std
from rallypoint.processes.context import PContext, RunProcsResult
from rallypoint.processes.subprocesses import start_processes

LINES = 20_000


@pytest.fixture
def opened() -> Iterator[list[PContext]]:
    """Contexts that are closed after the test."""
    contexts: list[PContext] = []
    yield contexts
    for context in contexts:
        context.close(signal.SIGKILL)


def start(tmp_path: Path, opened: list[PContext], script: str, tee: Std = Std.NONE, **settings: Any) -> PContext:
    specs = DefaultLogsSpecs(str(tmp_path / "logs"), tee=tee)
    context = start_processes("n", "/bin/sh", {0: ("-c", script)}, {0: {}}, specs, **settings)
    opened.append(context)
    return context


def test_tails_run_until_there_is_a_result(tmp_path: Path, opened: list[PContext]) -> None:
    context = start(tmp_path, opened, "read line", Std.ALL, duplicate_stdout_filters=["x"])
    tails = context._tail_logs
    assert len(tails) == 3
    context.close()
    assert all(tail.stopped() for tail in tails)


def test_tails_are_not_stopped_while_processes_run(tmp_path: Path, opened: list[PContext]) -> None:
    context = start(tmp_path, opened, "exec sleep 60")
    assert context.wait(0) is None
    assert [tail.stopped() for tail in context._tail_logs] == [False, False]


def test_when_there_is_a_result_all_output_has_arrived(
    tmp_path: Path, opened: list[PContext], capfd: pytest.CaptureFixture[str]
) -> None:
    """P34: before anything is closed, in the file and on the console."""
    context = start(tmp_path, opened, f"seq {LINES}", Std.OUT, log_line_prefixes={0: ""})
    result = context.wait(20)
    assert result is not None
    assert [tail.stopped() for tail in context._tail_logs] == [True, True]
    expected = "".join(f"{number}\n" for number in range(1, LINES + 1))
    assert Path(result.stdouts[0]).read_text() == expected
    assert capfd.readouterr().out == expected


def test_files_are_known_by_rank(tmp_path: Path, opened: list[PContext]) -> None:
    context = start(tmp_path, opened, "true", Std.ALL)
    folder = Path(context.stdouts[0]).parent
    assert (context.stdouts, context.stderrs) == ({0: str(folder / "stdout.log")}, {0: str(folder / "stderr.log")})
    assert context.error_files == {0: str(folder / "error.json")}
    assert Path(context.filtered_stdout).parent == Path(context.filtered_stderr).parent == folder.parent
    assert len(list((tmp_path / "logs").glob("*/attempt_*"))) == 1


def test_a_context_of_somebody_else_has_them_too(tmp_path: Path) -> None:
    class Pretended(PContext):
        def pids(self) -> dict[int, int]:
            return {0: 1}

        def _start(self) -> None:
            Path(self.stdouts[0]).write_text("started")

        def _poll(self) -> RunProcsResult | None:
            return RunProcsResult({0: "done"})

        def _close(self, death_sig: signal.Signals, timeout: float) -> None:
            return

    context = Pretended("n", "x", {0: ()}, {0: {}}, DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.OUT))
    context.start()
    assert not context._tail_logs[0].stopped()
    assert context.wait(0) == RunProcsResult({0: "done"})
    assert context._tail_logs[0].stopped()
    context.close()
    assert Path(context.stdouts[0]).read_text() == "started"
