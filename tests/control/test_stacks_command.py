"""``rallypoint stacks``: from a process or a socket to the stacks of its threads."""

from __future__ import annotations

import signal
import socket
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import AT_ONCE_S
from tests.control.workers import VARIABLE, finish, first_line, running

from rallypoint.cli.stacks import stacks_main
from rallypoint.errors import ExitCode
from rallypoint.inspection import stacks as stacks_command

WORKER = """
    import sys
    from rallypoint.control_plane import worker_main

    def train_a_little():
        print("ready", flush=True)
        sys.stdin.readline()

    with worker_main():
        train_a_little()
"""

# As the launcher does it: one value for all, of which each worker gets its own.
LAUNCHER = f"""
    import os, subprocess, sys
    program = sys.argv[1]
    path = os.environ["{VARIABLE}"]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", program], env={{**os.environ, "{VARIABLE}": f"{{path}}.{{rank}}"}},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for rank in range(3)
    ]
    for worker in workers:
        worker.stdout.readline()
    print(*(worker.pid for worker in workers), flush=True)
    sys.stdin.readline()
    for worker in workers:
        worker.communicate(b"")
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control.sock"


def test_by_the_socket_and_by_the_process(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(WORKER, {VARIABLE: str(path)}) as worker:
        assert first_line(worker) == "ready"
        for word in (str(path), str(worker.pid)):
            assert stacks_main([word]) == ExitCode.SUCCESS
            out, err = capsys.readouterr()
            assert out.startswith(f"=== process {worker.pid} at {path}\nThread 0x")
            assert "in train_a_little\n" in out
            assert err == ""
        assert finish(worker)[0] == 0


def test_a_relative_path_in_the_environment_is_of_the_workers_folder(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(path.parent)
    with running(WORKER, {VARIABLE: path.name}) as worker:
        assert first_line(worker) == "ready"
        monkeypatch.chdir("/")
        assert stacks_main([str(worker.pid)]) == ExitCode.SUCCESS
        assert "in train_a_little\n" in capsys.readouterr().out
        assert finish(worker)[0] == 0


def test_all_workers_below_a_launcher(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(LAUNCHER.replace("sys.argv[1]", repr(textwrap.dedent(WORKER))), {VARIABLE: str(path)}) as launcher:
        pids = first_line(launcher).split()
        assert stacks_main([str(launcher.pid)]) == ExitCode.SUCCESS
        out = capsys.readouterr().out
        shown = [line.split() for line in out.splitlines() if line.startswith("===")]
        assert [(line[2], line[4]) for line in shown] == [(pid, f"{path}.{rank}") for rank, pid in enumerate(pids)]
        assert stacks_main([pids[1]]) == ExitCode.SUCCESS
        assert capsys.readouterr().out.count("===") == 1
        assert finish(launcher)[0] == 0


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_stopped_worker_is_told_apart(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wait_until: Callable[..., object]
) -> None:
    monkeypatch.setattr(stacks_command, "ANSWER_S", 0.3)
    with running(WORKER, {VARIABLE: str(path)}) as worker:
        assert first_line(worker) == "ready"
        worker.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(worker.pid))
        assert stacks_main([str(path)]) == ExitCode.WORKER_FAILED
        assert f"process {worker.pid} at '{path}' does not answer within 0.3 s: it is stopped, or" in capsys.readouterr().err


def test_f06_a_job_with_a_hang_timeout_shows_its_stacks(
    start_rallyrun: Callable[..., Any], script: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """F06: by the signal that its agent would use."""
    worker = script("""
        import os, time
        def wait_for_godot():
            os.write(1, b"ready\\n")
            time.sleep(600)
        wait_for_godot()
        """)
    job = start_rallyrun(["--standalone", "--nproc-per-node", "2", "--hang-timeout", "600", worker])
    job.wait_for(lambda: job.stdout.count("ready") == 2, AT_ONCE_S)
    assert stacks_main([str(job.pid)]) == ExitCode.SUCCESS
    assert capsys.readouterr().out.count("in wait_for_godot\n") == 2
    job.send_signal(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM


def test_a_process_without_a_socket(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """F06: the refusal says what to do next."""
    program = "import sys; print('ready', flush=True); sys.stdin.readline()"
    with running(program, {}) as worker:
        assert first_line(worker) == "ready"
        assert stacks_main([str(worker.pid)]) == ExitCode.USAGE
        refusal = capsys.readouterr().err
        assert "was prepared to show its stacks: start the job with --hang-timeout SECONDS, or run its work inside" in refusal
        assert "py-spy dump --pid" in refusal
    with running(program, {VARIABLE: str(path)}) as worker:
        assert first_line(worker) == "ready"
        assert stacks_main([str(worker.pid)]) == ExitCode.USAGE
        assert f"nothing listens at {path}; is the work inside worker_main()?" in capsys.readouterr().err


def test_nobody_there(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stacks_main([str(path)]) == ExitCode.USAGE
    assert f"there is no worker at '{path}': No such file or directory" in capsys.readouterr().err
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
    assert stacks_main([str(path)]) == ExitCode.USAGE
    assert "Connection refused" in capsys.readouterr().err
    assert stacks_main(["/" + "x" * 200]) == ExitCode.USAGE
    assert "too long" in capsys.readouterr().err
    assert stacks_main([str(2**22 + 1)]) == ExitCode.USAGE
    assert f"there is no process {2**22 + 1}" in capsys.readouterr().err


def test_one_that_does_not_answer_does_not_hide_the_others(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(WORKER, {VARIABLE: str(path)}) as worker:
        assert first_line(worker) == "ready"
        assert stacks_main(["nowhere", str(path)]) == ExitCode.USAGE
        assert "in train_a_little\n" in capsys.readouterr().out
        assert finish(worker)[0] == 0


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert stacks_main(["--help"]) == ExitCode.SUCCESS
    assert capsys.readouterr().out.startswith("usage: rallypoint stacks")
    assert stacks_main([]) == ExitCode.USAGE
    assert capsys.readouterr().err == "rallypoint stacks: error: no job of this user runs on this machine\n"
