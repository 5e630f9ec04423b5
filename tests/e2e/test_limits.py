"""Limits of the machine: they are raised where they may be, kept from strangers, and told in one line where they are reached."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import ports

STRANGERS = 1_500
HELLO = """
import os
os.write(1, b"started\\n")
"""


@pytest.fixture
def limited(tmp_path: Path) -> Any:
    """``limited("ulimit -n 24", args)`` runs the real command to its end in such a shell; or with another `prefix`."""

    def run(limit: str, args: list[Any], timeout: float = 60.0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rallypoint", "run", *map(str, args)]
        return subprocess.run(
            ["sh", "-c", f'{limit} && exec "$0" "$@"', *command], cwd=cwd or tmp_path, timeout=timeout,
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip

    return run


def last_line(ended: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in ended.stderr
    return [line for line in ended.stderr.splitlines() if "OMP_NUM_THREADS" not in line][-1]


# --- files -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [8, 16, 24, 33])
def test_m1_too_few_files_are_told_in_one_line(limited: Any, script: Any, files: int) -> None:
    """m1: how many it takes and how many there are, with the code for bad input; not "a bug"."""
    ended = limited(f"ulimit -n {files}", ["--nproc-per-node", "4", "--tee", "3", script(HELLO)])
    assert ended.returncode == 2, ended.stderr
    needed = "rallyrun: error: 4 workers need at least 34 open files"
    assert last_line(ended).startswith(f"{needed}, and {files} are allowed here: raise the limit (ulimit -n 34;")
    assert ended.stdout == ""


def test_m1_a_node_of_several_with_too_few_files_does_not_join(limited: Any, script: Any) -> None:
    """m1: before it meets anybody who would have to do without it again."""
    meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{ports.free_port()}"]
    ended = limited("ulimit -n 30", [*meeting, script(HELLO)])
    assert ended.returncode == 2
    assert "1 worker needs at least 36 open files, and 30 are allowed here" in last_line(ended)


def test_m1_the_least_number_is_enough(limited: Any, script: Any) -> None:
    """m1: what the line asks for will do, also where the workers fail and are started anew."""
    args = ["--nproc-per-node", "4", "--tee", "3", "--max-restarts", "1", script("raise ConnectionError('nobody there')")]
    ended = limited("ulimit -n 34", args)
    assert ended.returncode == 1, ended.stderr
    assert "ConnectionError" in ended.stderr
    assert "restart 1 of 1" in ended.stderr
    assert "a bug" not in ended.stderr


def test_m1_256_workers_with_tee_at_the_usual_limit(limited: Any, script: Any) -> None:
    """m1: the launcher raises its own limit, and each worker has the one that the user has."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2_500:
        pytest.skip("the hard limit of this machine is lower than that")
    worker = script("import os, resource; os.write(1, b'%d\\n' % resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    ended = limited("ulimit -Sn 1024", ["--nproc-per-node", "256", "--tee", "3", worker], timeout=110)
    assert ended.returncode == 0, ended.stderr[-2000:]
    told = [line.rpartition(":")[2] for line in ended.stdout.splitlines()]
    assert told == ["1024"] * 256


@pytest.mark.parametrize("limit", ["ulimit -Sn 1024", "ulimit -n 1024"], ids=["soft", "hard"])
def test_m11_idle_strangers_do_not_keep_workers_from_being_started_anew(
    script: Any, tmp_path: Path, wait_until: Any, limit: str
) -> None:
    """M11: with a secret in use, a stranger holds 1,500 connections; then a worker fails."""
    secret, told = tmp_path / "secret", tmp_path / "told"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    worker = script(
        """
        import os, sys, time
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        os.write(1, b"attempt %d\\n" % attempt)
        while not attempt and not os.path.exists("fail"):
            time.sleep(0.01)
        sys.exit(0 if attempt else 3)
        """
    )
    port = ports.free_port()
    args = ["--nnodes", "1:2", "--nproc-per-node", "8", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    args += ["--rdzv-conf", "last_call_timeout=0", "--secret-file", str(secret), "--max-restarts", "1", "--tee", "3", str(worker)]
    with contextlib.ExitStack() as open_things:
        out = open_things.enter_context(told.open("wb"))
        command = ["sh", "-c", f'{limit} && exec "$0" "$@"', sys.executable, "-m", "rallypoint", "run", *args]
        agent = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        open_things.callback(end, agent)
        wait_until(lambda: told.read_text().count("attempt 0") == 8, 30)
        for _ in range(STRANGERS):
            sock = open_things.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
        wait_until(lambda: accepted(agent.pid) >= 1_000 or "the store has turned away" in told.read_text(), 30)
        (tmp_path / "fail").touch()
        assert agent.wait(60) == 0, told.read_text()[-3000:]
    assert told.read_text().count("attempt 1") == 8


def accepted(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)


# --- processes -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def commoner(private_tmpdir: Path) -> str:
    """A shell command before which another user runs what follows, who may read as root does: root has no limit of processes."""
    if missing := [tool for tool in ("setpriv", "prlimit") if shutil.which(tool) is None]:
        pytest.skip(f"{', '.join(missing)} not found: util-linux is needed")
    uid = 60_000 + os.getpid() % 5_000
    private_tmpdir.chmod(0o777)
    rights = "+dac_override,+dac_read_search"
    return f"exec setpriv --reuid={uid} --clear-groups --inh-caps={rights} --ambient-caps={rights} prlimit"


@pytest.mark.root
@pytest.mark.parametrize("processes", [1, 2, 3, 5, 6])
def test_m2_no_more_processes_is_told_in_one_line(limited: Any, commoner: str, processes: int) -> None:
    """m2: whichever fork or thread it is that fails first."""
    args = ["--nproc-per-node", "4", "--no-python", "sleep", "60"]
    ended = limited(f'set -- "$0" "$@"; {commoner} --nproc={processes} "$@"', args)
    assert ended.returncode == 4, ended.stderr
    line = last_line(ended)
    assert line.startswith("rallyrun: error: ")
    assert f"no more processes or threads may be started here (ulimit -u {processes}, for all processes of this user" in line


# --- folders ---------------------------------------------------------------------------------------------------------------


def test_m3_a_working_folder_that_was_deleted(limited: Any, script: Any, tmp_path: Path) -> None:
    """m3: workers start in what is left of it, as those of any other program do; a relative name is told as not there."""
    gone = tmp_path / "gone"
    delete = f"rmdir {gone}"
    gone.mkdir()
    ended = limited(delete, ["--nproc-per-node", "2", script(HELLO)], cwd=gone)
    assert (ended.returncode, ended.stdout) == (0, "started\n" * 2), ended.stderr
    assert "the working folder was deleted: workers start in what is left of it" in last_line(ended)
    for args, told in ((["worker.py"], "script 'worker.py' is not there"), (["-m", "worker"], "module 'worker' is not there")):
        gone.mkdir()
        ended = limited(delete, args, cwd=gone)
        assert ended.returncode == 2
        assert told in last_line(ended)


def test_m3_a_working_folder_that_is_deleted_while_the_job_runs(script: Any, tmp_path: Path) -> None:
    """m3: the next attempt is made all the same."""
    gone = tmp_path / "gone"
    gone.mkdir()
    worker = script(
        f"""
        import os, sys, time
        os.write(1, b"attempt %s\\n" % os.environ["TORCHELASTIC_RESTART_COUNT"].encode())
        while os.path.exists({str(gone)!r}):
            time.sleep(0.01)
        sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
        """
    )
    agent = start_rallyrun_in(gone, ["--max-restarts", "1", str(worker)])
    try:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "attempt 0\n"
        gone.rmdir()
        out, err = agent.communicate(timeout=30)
        assert (agent.returncode, out) == (0, "attempt 1\n"), err
    finally:
        agent.kill()
        agent.wait()


def start_rallyrun_in(folder: Path, args: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rallypoint", "run", *args],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.root
def test_m3_no_proc_is_told_in_one_line(script: Any, tmp_path: Path) -> None:
    """m3: as in a chroot that somebody has forgotten to complete."""
    command = [sys.executable, "-m", "rallypoint", "run", str(script(HELLO))]
    hide = 'mount -t tmpfs nothing /proc && exec "$0" "$@"'
    ended = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", hide, *command],
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "rallyrun: error: /proc is not mounted here, and no worker can be watched without it\n"
