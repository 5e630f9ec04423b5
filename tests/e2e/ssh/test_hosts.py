"""Real jobs on hosts to which ssh logs in: how they start, what is told, and that nothing is left there, however they end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import RALLYRUN, RunningRallyrun, process_state
from tests.e2e.ssh.sshd import ADDRESSES, NAMES, Sshd, start_sshd
from tests.relay import relay

pytestmark = [pytest.mark.root, pytest.mark.xdist_group("ssh")]

WORKER = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
rank, size, node = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "GROUP_RANK"))
daemon = ""
if sys.argv[2:] == ["daemon"]:
    daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid
print("rank", rank, "of", size, "node", node, "in", os.getcwd(), "pid", os.getpid(), daemon, flush=True)
while sys.argv[1:] and not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""
GONE_AFTER_S = 60.0  # what takes a second and a half, or five, where the machine has nothing else to do


@pytest.fixture
def sshd(tmp_path: Path, wait_until: Any) -> Iterator[Sshd]:
    folder = tmp_path / "sshd"
    folder.mkdir()
    with start_sshd(folder, wait_until) as server:
        yield server


@pytest.fixture
def environ(private_tmpdir: Path) -> dict[str, str]:
    """A login has none of this, and the hosts are this machine."""
    return {"PET_SSH_ENV": "TMPDIR,XDG_STATE_HOME,RALLYPOINT_RUNTIME_DIR", "PET_SSH_TIMEOUT": "60"}


def flags(sshd: Sshd, hosts: str = ",".join(NAMES)) -> list[str]:
    return ["--hosts", hosts, "--ssh-command", sshd.command]


def ranks(text: str) -> list[tuple[str, ...]]:
    return sorted(re.findall(r"\[(\w+)\] rank (\d+) of (\d+) node (\d+)", text))


def test_ranks_follow_the_list_of_hosts(rallyrun: Any, sshd: Sshd, environ: dict[str, str], script: Any, tmp_path: Path):
    """Each host has its own number of workers, here from a file; lines have its name, and the folder is this one."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("gamma slots=2\nalpha slots=1\nbeta:1\n")
    done = rallyrun(["--hostfile", hostfile, "--ssh-command", sshd.command, script(WORKER)], environ)
    assert done.returncode == 0, done.stderr
    assert ranks(done.stdout) == [
        ("alpha", "2", "4", "1"), ("beta", "3", "4", "2"), ("gamma", "0", "4", "0"), ("gamma", "1", "4", "0"),
    ]  # fmt: skip
    assert done.stdout.count(f" in {tmp_path} ") == 4
    assert f"3 hosts, meeting at {ADDRESSES[2]}:" in done.stderr


def test_the_exit_code_is_the_jobs(rallyrun: Any, start_rallyrun: Any, sshd: Sshd, environ: dict[str, str], script: Any):
    fails = script("import os, sys; sys.exit(7 * (os.environ['RANK'] == '1'))")
    done = rallyrun([*flags(sshd), "--pass-exit-code", fails], environ)
    assert done.returncode == 7, done.stderr
    assert "[beta] " in done.stderr
    as_process_1 = ["unshare", "--fork", "--pid", "--mount-proc", *RALLYRUN]  # there, a thread of ours reaps whatever ends
    running = start_rallyrun([*flags(sshd), "--log-format", "json", fails], environ, as_process_1)
    assert running.wait() == 1, running.stderr
    assert {json.loads(line)["source"] for line in running.stderr.splitlines()} == {"rallyrun"}
    done = rallyrun([*flags(sshd), "--", "nothing.py"], environ)
    assert done.returncode == 2, done.stderr
    assert "script 'nothing.py' is not there" in done.stderr


def test_what_is_wrong_with_hosts_is_told_before_any_is_started(
    rallyrun: Any, sshd: Sshd, environ: dict[str, str], script: Any, tmp_path: Path
):
    worker = script(WORKER)
    done = rallyrun([*flags(sshd, "alpha,deaf,absent"), worker], environ)
    assert done.returncode == 4
    assert "2 of 3 hosts cannot run the job:\n" in done.stderr
    assert re.search(r"\n  deaf    ssh was refused: no key of yours is accepted there", done.stderr)
    assert re.search(r"\n  absent  nothing answers at ssh's port", done.stderr)
    assert ranks(done.stdout) == []
    done = rallyrun([*flags(sshd, "alpha,absent"), "--nnodes=1:2", worker], environ)
    assert done.returncode == 0, done.stderr
    assert "the job does without absent: nothing answers at ssh's port" in done.stderr
    assert ranks(done.stdout) == [("alpha", "0", "1", "0")]

    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    for python, problem in ((bare, "rallypoint is not installed there for"), (tmp_path / "none", "there is no Python at")):
        done = rallyrun([*flags(sshd, "alpha"), "--ssh-python", python, worker], environ)
        assert done.returncode == 4
        assert f"  alpha  {problem} {python}" in done.stderr


def start(start_rallyrun: Any, sshd: Sshd, environ: dict[str, str], worker: Path, *more: str) -> RunningRallyrun:
    """A job of one worker on each host, each with a process in a session of its own, which never ends by itself."""
    running: RunningRallyrun = start_rallyrun([*flags(sshd), *more, worker, worker.parent / "over", "daemon"], environ)
    running.wait_for(lambda: len(ranks(running.stdout)) == len(NAMES))
    return running


def pids(text: str) -> list[int]:
    return [int(pid) for line in re.findall(r" pid (\d+ \d+)", text) for pid in line.split()]


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)],
    ids=["Ctrl-C", "SIGTERM", "terminal closed", "kill -9"],
)
def test_nothing_is_left_on_any_host(
    start_rallyrun: Any, sshd: Sshd, environ: dict[str, str], script: Any, wait_until: Any, alive: Callable[[int], bool],
    number: signal.Signals, code: int, clear_after_kill: Callable[[], None],
):  # fmt: skip
    clear_after_kill()
    running = start(start_rallyrun, sshd, environ | {"RALLYPOINT_SECRET": "seen by nobody at all"}, script(WORKER))
    far = {*sshd.far(), *pids(running.stdout)}
    assert len(far) >= 5 * len(NAMES)  # a guard, an agent, a warden, a worker and its child
    assert not any("seen by nobody" in command for command in commands())
    running.send_signal(number)
    assert running.wait() == code
    wait_until(lambda: not any(map(alive, far)), GONE_AFTER_S)
    wait_until(lambda: sshd.far() == [])


def commands() -> Iterator[str]:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it is gone
            yield Path(f"/proc/{pid}/cmdline").read_text(errors="replace")


def test_nothing_is_left_here_of_a_host_that_does_not_answer(
    start_rallyrun: Any, script: Any, wait_until: Any, tmp_path: Path
):  # fmt: skip
    """Nor of what ssh itself has started to reach it."""
    slow = tmp_path / "slow"
    slow.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nsleep 600\n")
    slow.chmod(0o755)
    running = start_rallyrun(["--hosts", "alpha", "--ssh-command", slow, script(WORKER)])
    running.wait_for((tmp_path / "pid").exists)
    running.send_signal(signal.SIGINT)
    assert running.wait() == 130
    wait_until(lambda: not any(str(slow) in command for command in commands()))


def test_nothing_is_left_where_the_network_is_cut(
    start_rallyrun: Any, sshd: Sshd, environ: dict[str, str], script: Any, wait_until: Any, alive: Callable[[int], bool],
    clear_after_kill: Callable[[], None],
):  # fmt: skip
    """Nobody is told that the connection is no more: both sides find out by the silence."""
    clear_after_kill()
    is_cut = threading.Event()
    with contextlib.ExitStack() as relays:
        cut = [relays.enter_context(relay(sshd.port, host=one, is_cut=is_cut.is_set)) for one in ADDRESSES]
        sshd.lead_through(cut)
        running = start(start_rallyrun, sshd, environ | {"PET_SSH_TIMEOUT": "4"}, script(WORKER))
        far = {*sshd.far(), *pids(running.stdout)}
        is_cut.set()
        wait_until(lambda: not any(map(alive, far)), GONE_AFTER_S)
        assert running.wait() == 4
        assert all(f"the connection to {name} is lost" in running.stderr for name in NAMES)


def test_a_killed_guard_takes_its_agent_along_and_the_others_go_on(
    start_rallyrun: Any, sshd: Sshd, environ: dict[str, str], script: Any, wait_until: Any, alive: Callable[[int], bool],
    clear_after_kill: Callable[[], None],
):  # fmt: skip
    """A host that is lost is a node that is lost; what the rest of an elastic job makes of it is the job's end."""
    clear_after_kill()
    running = start(start_rallyrun, sshd, environ, script(WORKER), "--nnodes=2:3", "--signals-to-forward=USR1")
    lost = next(int(pid) for pid in re.findall(r"\[gamma\] .* pid (\d+)", running.stdout))
    agent = parent_of(parent_of(lost))
    os.kill(parent_of(agent), signal.SIGKILL)
    wait_until(lambda: not alive(agent) and not alive(lost))
    running.wait_for(lambda: {rank[:3] for rank in ranks(running.stdout)} >= {("alpha", "0", "2"), ("beta", "1", "2")})
    running.send_signal(signal.SIGUSR1)
    assert running.wait() == 0


def parent_of(pid: int) -> int:
    state = process_state(pid)
    assert state is not None
    return state[1]
