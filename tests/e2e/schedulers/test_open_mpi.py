"""A real Open MPI that takes loopback addresses for hosts: it logs in there by a shell on this machine. F29."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.root

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
import os
rank, size, node = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "GROUP_RANK"))
os.write(1, f"rank {rank} of {size} node {node}\\n".encode())  # mpirun gives a terminal, where pieces of lines may mix
"""


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_f29_mpirun_needs_no_flags_but_one_launcher_per_node(tmp_path: Path, script: Any) -> None:
    """F29: the nodes meet where mpirun runs; more launchers than one on a node are refused with the line to use."""
    login = tmp_path / "login"
    login.write_text(LOGIN)
    login.chmod(0o755)
    hosts = ",".join(f"127.0.0.{number + 2}:2" for number in range(HOSTS))
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def mpirun(*flags: object) -> tuple[int, str]:
        command = ["mpirun", *FLAGS, "--mca", "plm_rsh_agent", login, "--host", hosts, *flags]
        done = subprocess.run([*map(str, command)], env=environ, capture_output=True, text=True, timeout=100, cwd=tmp_path)
        return done.returncode, done.stdout + done.stderr

    worker = script(WORKER)
    code, out = mpirun("--map-by", "ppr:1:node", "rallyrun", "--nproc-per-node", 2, worker)
    assert code == 0, out
    found = sorted(re.findall(r"rank (\d+) of (\d+) node (\d+)", out))
    assert found == [(str(rank), str(2 * HOSTS), str(rank // 2)) for rank in range(2 * HOSTS)]
    code, out = mpirun("-n", 2 * HOSTS, "rallyrun", worker)
    assert code == 2, out
    assert "use `mpirun --map-by ppr:1:node rallyrun --nproc-per-node 2 ...`" in out
