"""Bad input through the real command: one line that names the culprit, exit code 2, and nothing is started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

TELLTALE = "import os; open(f'started.{os.getpid()}', 'w').close()"


@pytest.mark.parametrize(
    ("argv", "culprits"),
    [
        pytest.param([], ["script"], id="nothing at all"),
        pytest.param(["--standalone", "--nproc-per-node", "2"], ["script"], id="no script"),
        pytest.param(["missing.py"], ["'missing.py'"], id="missing script"),
        pytest.param(["-m", "missing_module"], ["'missing_module'"], id="missing module"),
        pytest.param(["--no-python", "missing-program"], ["'missing-program'"], id="missing program"),
        pytest.param(["--nproc-per-node", "0", "job.py"], ["--nproc-per-node", "0"], id="no workers"),
        pytest.param(["--nproc-per-node", "many", "job.py"], ["--nproc-per-node", "'many'"], id="many workers"),
        pytest.param(["--nnodes", "2:1", "job.py"], ["--nnodes", "'2:1'"], id="nodes in the wrong order"),
        pytest.param(["--tee", "9", "job.py"], ["--tee", "'9'"], id="tee"),
        pytest.param(["--redirects", "x:1", "job.py"], ["--redirects", "'x'"], id="redirects"),
        pytest.param(["--rdzv-backend", "pigeon", "job.py"], ["--rdzv-backend", "'pigeon'"], id="unknown backend"),
        pytest.param(["--log-dir", "/proc/logs", "job.py"], ["--log-dir", "/proc/logs"], id="unwritable folder"),
        pytest.param(["--log-dir", "job.py", "job.py"], ["--log-dir", "job.py"], id="folder that is a file"),
        pytest.param(["--role", "train\ner", "job.py"], ["role", "train"], id="role with a newline"),
        pytest.param(["--max-restarts", "-1", "job.py"], ["--max-restarts", "-1"], id="negative restarts"),
        pytest.param(["--max-restarts", "few", "job.py"], ["--max-restarts", "'few'"], id="few restarts"),
        pytest.param(["--shutdown-timeout", "-3", "job.py"], ["--shutdown-timeout", "-3"], id="negative time"),
        pytest.param(["--nnodes", "2", "--node-rank", "2", "job.py"], ["--node-rank", "2"], id="a rank beyond the last"),
        pytest.param(["--signals-to-handle", "SIGKILL", "job.py"], ["SIGKILL"], id="SIGKILL"),
        pytest.param(["--event-log-handler", "nowhere", "job.py"], ["'nowhere'"], id="unknown event sink"),
        pytest.param(["--local-ranks-filter", "a", "job.py"], ["--local-ranks-filter", "'a'"], id="filter"),
        pytest.param(["--log-max-size", "big", "job.py"], ["--log-max-size", "'big'"], id="size"),
        pytest.param(["--omp-num-threads", "0", "job.py"], ["--omp-num-threads", "'0'"], id="threads"),
        pytest.param(["--no-such-flag", "job.py"], ["--no-such-flag"], id="unknown flag"),
        pytest.param(["--nproc-per-node"], ["--nproc-per-node"], id="flag without its value"),
    ],
)
def test_one_line_and_nothing_started(
    rallyrun: Any, script: Any, tmp_path: Path, private_tmpdir: Path, marked: Any, argv: list[str], culprits: list[str]
):
    """P37: code 2 tells a scheduler not to try again; the line tells a person what to change."""
    script(TELLTALE, "job.py")
    before = set(tmp_path.rglob("*"))
    ended = rallyrun(argv)
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    assert ended.stderr.startswith("rallyrun: error: ")
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.endswith("\n")
    assert all(culprit in ended.stderr for culprit in culprits), ended.stderr
    assert set(tmp_path.rglob("*")) == before, "something was started, or a file was made"
    assert marked() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PET_NPROC_PER_NODE", "many"),
        ("PET_MAX_RESTARTS", "some"),
        ("PET_NNODES", "2:1"),
        ("PET_TEE", "9"),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon"),
        ("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "soon"),
        ("PYTHON_EXEC", "/no/such/python"),
        ("TMPDIR", "/proc/no/such/folder"),
    ],
)
def test_a_bad_variable_is_named(rallyrun: Any, script: Any, tmp_path: Path, name: str, value: str):
    """P37: what comes from the environment is hard to find, so the line names the variable."""
    worker = script(TELLTALE)
    ended = rallyrun(["--standalone", worker] if not name.startswith("PET_NNODES") else [worker], env={name: value})
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert ended.stderr.startswith("rallyrun: error: ")
    assert ended.stderr.count("\n") == 1
    assert name in ended.stderr
    assert not list(tmp_path.glob("started.*"))


def test_all_three_commands_are_there(start_command: Any, script: Any, tmp_path: Path):
    """P37: `rallyrun`, `rallypoint run` and `python -m rallypoint run` are one command."""
    script(TELLTALE, "job.py")
    commands = Path(sys.executable).parent
    for command in ([commands / "rallyrun"], [commands / "rallypoint", "run"], [sys.executable, "-m", "rallypoint", "run"]):
        job = start_command([*map(str, command), "--standalone", "job.py"])
        assert job.wait() == 0, job.stderr
        job = start_command([*map(str, command), "--standalone", "missing.py"])
        assert (job.wait(), job.stderr.count("\n")) == (2, 1)
    assert len(list(tmp_path.glob("started.*"))) == 3
