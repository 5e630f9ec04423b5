"""A real Slurm of three nodes on this machine, with a munge of its own; each node has a loopback address of its own."""

from __future__ import annotations

import os
import pwd
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests import ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "squeue", "sinfo")
KEPT = ("TMPDIR", "RALLYPOINT_RUNTIME_DIR", "XDG_STATE_HOME", "HOME")
NODES = 3
CONF = """
ClusterName=test
FirstJobId={job}
SlurmctldHost=localhost
SlurmUser=root
SlurmctldPort={control}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/control.pid
SlurmdPidFile={folder}/node.%n.pid
SlurmctldLogFile={folder}/control.log
SlurmdLogFile={folder}/node.%n.log
KillWait=5
MinJobAge=300
SlurmdTimeout=300
NodeName=127.0.0.[1-{nodes}] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=16 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""
WORKER = """
import os, sys, time
rank, size, node = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "GROUP_RANK"))
print("rank", rank, "of", size, "node", node, "pid", os.getpid(), flush=True)
while sys.argv[1:] and not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""


class Slurm:
    """Commands of this cluster; what runs in it finds `rallyrun` of the code under test."""

    def __init__(self, folder: Path, worker: Path) -> None:
        self.folder, self.worker = folder, worker
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        path = f"{Path(sys.executable).parent}:/usr/sbin:{os.environ['PATH']}"
        self.environ = {**kept, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
        self.nodes: list[subprocess.Popen[str]] = []  # their daemons

    def start(self, *command: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*map(str, command)], env=self.environ, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, cwd=self.folder,
        )  # fmt: skip

    def serve(self, *command: str) -> subprocess.Popen[str]:
        with (self.folder / f"{command[0]}.out").open("a") as out:
            return subprocess.Popen(command, env=self.environ, text=True, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def run(self, *command: object) -> tuple[int, str]:
        with self.start(*command) as process:
            out, _ = process.communicate(timeout=100)
        return process.returncode, out

    def batch(self, script: str, *flags: object) -> str:
        """The number of a job with this script."""
        path = self.folder / "job.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        code, out = self.run("sbatch", "--parsable", "--output", self.folder / "out.%j", *flags, path)
        assert code == 0, out
        return out.strip()

    def out(self, job: str) -> str:
        path = self.folder / f"out.{job}"
        return path.read_text() if path.exists() else ""

    def state(self, job: str) -> str:
        return self._fields(job).get("JobState", "")

    def restarts(self, job: str) -> int:
        return int(self._fields(job).get("Restarts", 0))

    def _fields(self, job: str) -> dict[str, str]:
        return dict(piece.split("=", 1) for piece in self.run("scontrol", "show", "job", job)[1].split() if "=" in piece)

    def end_jobs(self, wait_until: Callable[..., Any]) -> None:
        """Of what runs under them, nothing writes to the folder any more then."""
        self.run("scancel", f"--user={pwd.getpwuid(os.geteuid()).pw_name}")
        wait_until(lambda: self.run("squeue", "-h")[1] == "")
        wait_until(lambda: not any(map(self._is_step, filter(str.isdigit, os.listdir("/proc")))))

    def _is_step(self, pid: str) -> bool:
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            around = Path(f"/proc/{pid}/environ").read_bytes()  # nothing once it has ended
        except OSError:
            return False
        return name == "slurmstepd" and f"SLURM_CONF={self.folder}/".encode() in around


@contextmanager
def start_slurm(folder: Path, wait_until: Callable[..., Any]) -> Iterator[Slurm]:
    """Every user can enter the folder, or munge does not serve there."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    (folder / "state").mkdir()
    worker = folder / "worker.py"
    worker.write_text(WORKER)
    slurm = Slurm(folder, worker)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    free = ports.free_ports(NODES + 1)
    job = random.randrange(1, 1_000_000)  # jobs of a cluster beside this one are to meet at other ports
    conf = CONF.format(folder=folder, job=job, control=free[0], first=free[1], last=free[-1], nodes=NODES)
    (folder / "slurm.conf").write_text(conf)
    own = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "seed"}
    daemons = [slurm.serve("munged", "--foreground", *(f"--{flag}={folder}/{name}" for flag, name in own.items()))]
    try:
        wait_until((folder / "munge.sock").exists)
        daemons.append(slurm.serve("slurmctld", "-D"))
        slurm.nodes = [slurm.serve("slurmd", "-D", "-N", f"127.0.0.{node + 1}") for node in range(NODES)]
        daemons += slurm.nodes
        wait_until(lambda: slurm.run("sinfo", "-h", "-o", "%T %D")[1].strip() == f"idle {NODES}")
        try:
            yield slurm
        finally:
            slurm.end_jobs(wait_until)
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(60)
