"""``rallypoint chaos`` on the command line: what is wrong is said before a job is looked for, and what it does is printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rallypoint.chaos.schedule import read_schedule
from rallypoint.cli.chaos import USAGE, chaos_main
from rallypoint.errors import ExitCode


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--evry", "3s"], "unknown flag --evry; did you mean --every?"),
        (["--every"], "--every needs a value"),
        (["--every", "3"], "--every: '3' is no length of time, as 8s"),
        (["--every", "0s"], "--every 0s: at least 0.1s"),
        (["--for=ever"], "--for: 'ever' is no length of time"),
        (["--seed", "-1"], "--seed '-1' is not a whole number"),
        (["--seed", "9" * 19], "is not a whole number from 0 to 9223372036854775807"),
        (["--only", "kill,explode"], "--only: 'explode' is no fault; there are kill, stop, slow, cut, fill, preempt"),
        (["--schedule", "/nonexistent"], "--schedule /nonexistent: No such file or directory"),
        (["--schedule", "x", "--seed", "3"], "--schedule says all that --seed would; use one of them"),
        (["one", "two"], "usage: rallypoint chaos [JOB]"),
        (["--patience", "soon"], "--patience: 'soon' is no length of time"),
        ([], "no job of this user runs on this machine"),
    ],
)
def test_what_is_wrong_is_said(
    argv: list[str], told: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RALLYPOINT_RUNTIME_DIR", str(tmp_path / "nobody"))
    assert chaos_main(argv) == ExitCode.USAGE
    seen = capfd.readouterr()
    assert seen.err.startswith(f"rallypoint chaos: error: {told}") or told in seen.err
    assert seen.out == ""


def test_every_wrong_line_of_a_schedule_is_named(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "drill.txt"
    path.write_text("+1s kill rank x\n+2s kill rank 1\n+1s kill rank 1\n")
    assert chaos_main(["--schedule", str(path)]) == ExitCode.USAGE
    error = capfd.readouterr().err
    assert f"{path}, line 1: 'x' is no rank" in error
    assert f"{path}, line 3: +1s is before line 2" in error


def test_help_names_the_codes(capfd: pytest.CaptureFixture[str]) -> None:
    assert chaos_main(["--help"]) == ExitCode.SUCCESS
    assert capfd.readouterr().out == USAGE + "\n"
    assert "Exit codes: 0 " in USAGE


def test_a_job_without_restarts_is_hurt_only_where_it_can_stand_it(
    start_rallyrun: Callable[..., Any], capfd: pytest.CaptureFixture[str], tmp_path: Path, wait_until: Any
) -> None:
    """What is printed without doing it is a schedule, the same each time."""
    job = start_rallyrun(["--nproc-per-node", "2", "--rdzv-id", "frail", "--no-python", "sleep", "600"])

    def dry_run(*flags: str) -> str:
        return capfd.readouterr().out if chaos_main(["frail", "--dry-run", "--seed", "3", *flags]) == 0 else ""

    text = str(wait_until(dry_run))
    assert text.startswith("# frail: 1 of 1 node and ranks 0-1 on this machine, generation 1, 0 of 0 restarts spent\n")
    assert "\n# seed 3: stop, slow;" in text
    assert "# no kill: frail would end: it is the only node of its job\n" in text
    assert dry_run() == text
    assert {entry.fault.kind for entry in read_schedule(text, "drill")} == {"stop", "slow"}
    capfd.readouterr()
    assert chaos_main(["frail", "--only", "kill,cut"]) == ExitCode.USAGE
    assert "nothing can be done to frail: kill: frail would end: " in capfd.readouterr().err
    path = tmp_path / "drill.txt"
    path.write_text("+0s stop rank 0 for 0.2s\n")
    assert chaos_main(["frail", "--schedule", str(path)]) == ExitCode.SUCCESS
    printed = capfd.readouterr().out
    assert "stop rank 0 for 0.2s: unharmed: generation 1 runs on\n" in printed
    assert printed.endswith("frail: running, generation 1, 0 of 0 restarts spent; faults: 1 given\n")
    assert job.process.poll() is None
    path.write_text("+0s kill rank 0\n")
    assert chaos_main(["frail", "--schedule", str(path), "--force"]) == ExitCode.WORKER_FAILED
    assert "frail: the job has ended" in capfd.readouterr().out
    assert job.wait() == 1
