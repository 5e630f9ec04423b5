"""Jobs whose workers are real programs with torch: they meet in the store that their agents serve, and sum by gloo.

Workers tell what they are and what they found as soon as they have met, and stay until the test lets them finish.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_port

PROGRAMS = Path(__file__).parent / "programs"
MEETING_S = 50.0  # two cores load torch for four workers in 4 s when nobody else needs them
WITHOUT_TORCH = "count_workers.py"
LISTENS = "0A"  # in the kernel's table of sockets


class Told:
    """One worker, as it was when it had met the others; `at` is on the clock of time.monotonic, which this machine shares."""

    def __init__(self, line: str) -> None:
        told = json.loads(line)
        self.pid, self.at, self.env = int(told["pid"]), float(told["at"]), told["env"]
        self.sum, self.found, self.left = told.get("sum"), told.get("found"), told.get("left")
        self.rank, self.world, self.node = (int(self.env[name]) for name in ("RANK", "WORLD_SIZE", "GROUP_RANK"))
        self.master = self.env["MASTER_ADDR"], int(self.env["MASTER_PORT"])
        self.generation = int(self.env["TORCHELASTIC_RESTART_COUNT"])


class TorchJob:
    """The agents of one job, and what their workers told."""

    def __init__(self, start: Callable[..., Any], start_command: Callable[..., Any], wait_until: Any, folder: Path) -> None:
        self._start, self._start_command, self._wait_until = start, start_command, wait_until
        self.folder, self.port = folder, free_port()
        self.agents: list[Any] = []

    def start(self, *flags: str, program: str = "rank_sum.py", argument: object = None) -> Any:
        """One agent, by the command. It loads torch for all of its workers, which takes longer than all else that they do."""
        env = {"GLOO_SOCKET_IFNAME": "lo", "PET_PRELOAD": "" if program == WITHOUT_TORCH else "torch.distributed"}
        self.agents.append(self._start([*flags, PROGRAMS / program, self.folder if argument is None else argument], env))
        return self.agents[-1]

    def start_c10d(self, *flags: str, **program: Any) -> Any:
        """One agent of two, with ranks as they come."""
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "a-job"]
        return self.start("--nnodes", "2", *meeting, "--local-addr", "127.0.0.1", *flags, **program)

    def start_call(self, nodes: int, node_rank: int, workers: int) -> Any:
        """One agent with a rank that is given, by a call of elastic_launch."""
        return self.start_program("launch_rank_sum.py", self.folder, f"127.0.0.1:{self.port}", nodes, node_rank, workers)

    def start_program(self, name: str, *arguments: object) -> Any:
        command = [sys.executable, PROGRAMS / name, *arguments]
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        self.agents.append(self._start_command([str(part) for part in command], env=env))
        return self.agents[-1]

    def told(self, generation: int) -> list[Told]:
        """The workers of this generation that have told, by rank."""
        lines = (line for agent in self.agents for line in re.findall(r"^TOLD (.*)\n", agent.stdout, re.MULTILINE))
        return sorted((told for told in map(Told, lines) if told.generation == generation), key=lambda told: told.rank)

    def wait_for_generation(self, number: int, world: int, timeout_s: float = MEETING_S) -> list[Told]:
        """All workers of this generation, by rank; they agree on the world and on its master."""
        self._wait_until(lambda: len(self.told(number)) >= world or self._is_over(), timeout_s)
        told = self.told(number)
        assert [one.rank for one in told] == list(range(world))
        assert {(one.world, one.master) for one in told} == {(world, told[0].master)}
        return told

    def wait_for_sum(self, generation: int, world: int, timeout_s: float = MEETING_S) -> list[Told]:
        told = self.wait_for_generation(generation, world, timeout_s)
        assert [one.sum for one in told] == [sum(range(world))] * world
        return told

    def kill(self, worker: Told) -> float:
        """When it was killed."""
        os.kill(worker.pid, signal.SIGKILL)
        return time.monotonic()

    def finish(self) -> None:
        (self.folder / "finish").touch()

    def _is_over(self) -> bool:
        return any(agent.process.poll() is not None for agent in self.agents)


@pytest.fixture
def make_job(
    start_rallyrun: Callable[..., Any], start_command: Callable[..., Any], wait_until: Any, tmp_path: Path
) -> Iterator[Callable[[], TorchJob]]:
    """``make_job()`` is one more job; what its agents printed shows up beside the failure of a test."""
    jobs: list[TorchJob] = []

    def make() -> TorchJob:
        folder = tmp_path / f"job_{len(jobs)}"
        folder.mkdir()
        jobs.append(TorchJob(start_rallyrun, start_command, wait_until, folder))
        return jobs[-1]

    yield make
    for agent in (agent for job in jobs for agent in job.agents):
        print(f"--- agent {agent.pid}: stdout\n{agent.stdout}\n--- agent {agent.pid}: stderr\n{agent.stderr}")


@pytest.fixture
def job(make_job: Callable[[], TorchJob]) -> TorchJob:
    """``job.start(…)`` starts an agent; ``job.wait_for_sum(generation, world)``, ``job.kill(worker)`` and ``job.finish()``."""
    return make_job()


@pytest.fixture(scope="session")
def listening_ports() -> Callable[[int], set[int]]:
    """``listening_ports(pid)``: the TCP ports that this process listens at."""

    def sockets(pid: int) -> Iterator[str]:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                yield os.readlink(entry.path)

    def ports(pid: int) -> set[int]:
        own = set(sockets(pid))
        lines = "".join(Path(f"/proc/{pid}/net/{table}").read_text() for table in ("tcp", "tcp6")).splitlines()
        rows = [(fields[1], fields[9]) for line in lines if (fields := line.split())[3] == LISTENS]
        return {int(address.rpartition(":")[2], 16) for address, inode in rows if f"socket:[{inode}]" in own}

    return ports
