"""A real Open MPI that takes loopback addresses for hosts: it logs in there by a shell on this machine. F29."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.root, pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")]

HOSTS = 3
FLAGS = ["--allow-run-as-root", "--mca", "orte_keep_fqdn_hostnames", "1", "--mca", "oob_tcp_if_include", "lo"]
LOGIN = """#!/bin/sh
TMPDIR="$TMPDIR/$1"  # as hosts have a folder each
export TMPDIR
mkdir -p "$TMPDIR"
shift
exec sh -c "$*"
"""
WORKER = """
import os, sys, time
rank, size, node = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "GROUP_RANK"))
os.write(1, f"rank {rank} of {size} node {node} pid {os.getpid()}\\n".encode())  # a terminal, where pieces of lines may mix
if rank in sys.argv[1:]:
    sys.exit(7)
while sys.argv[1:]:
    time.sleep(0.1)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def mpirun(tmp_path: Path) -> Iterator[Start]:
    """``mpirun(flags…)`` starts it for three hosts with room for two launchers each; stdout and stderr are one."""
    login = tmp_path / "login"
    login.write_text(LOGIN)
    login.chmod(0o755)
    hosts = ",".join(f"127.0.0.{number + 2}:2" for number in range(HOSTS))
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    started: list[subprocess.Popen[str]] = []

    def start(*flags: object) -> subprocess.Popen[str]:
        command = ["mpirun", *FLAGS, "--mca", "plm_rsh_agent", login, "--host", hosts, *flags]
        started.append(
            subprocess.Popen(
                [*map(str, command)], env=environ, cwd=tmp_path, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
        return started[-1]

    yield start
    for one in started:
        if one.poll() is None:
            one.terminate()
        one.communicate(timeout=100)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=100)
    return process.returncode, out


def test_f29_mpirun_needs_no_flags_but_one_launcher_per_node(mpirun: Start, script: Any) -> None:
    """F29: the nodes meet where mpirun runs; more launchers than one on a node are refused with the line to use."""
    worker = script(WORKER)
    code, out = ended(mpirun("-pernode", "rallyrun", "--nproc-per-node", 2, worker))
    assert code == 0, out
    found = sorted(re.findall(r"rank (\d+) of (\d+) node (\d+)", out))
    assert found == [(str(rank), str(2 * HOSTS), str(rank // 2)) for rank in range(2 * HOSTS)]
    code, out = ended(mpirun("-n", 2 * HOSTS, "rallyrun", worker))
    assert code == 2, out
    assert "use `mpirun --map-by ppr:1:node rallyrun --nproc-per-node 2 ...`" in out


def test_a_failure_is_mpiruns_and_nothing_is_left_when_mpirun_is_ended(
    mpirun: Start, script: Any, wait_until: Any, alive: Callable[[int], bool]
) -> None:
    """What the launchers end with, mpirun ends with; a signal to it ends all workers on all hosts."""
    worker = script(WORKER)
    code, out = ended(mpirun("--map-by", "ppr:1:node", "rallyrun", "--pass-exit-code", worker, 1))
    assert code == 7, out
    running = mpirun("-pernode", "rallyrun", worker, "none")
    assert running.stdout is not None
    pids: list[int] = []
    while len(pids) < HOSTS:
        line = running.stdout.readline()
        assert line, running.wait()
        pids += [int(pid) for pid in re.findall(r" pid (\d+)", line)]
    running.send_signal(signal.SIGTERM)
    assert ended(running)[0] != 0
    wait_until(lambda: not any(map(alive, pids)))
