"""Jobs of several nodes, all of them on this machine: real agents with real workers, which meet over the loopback.

Workers tell what they found when they started, and then do what the test orders, by files.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import ports
from tests.conftest import PATIENCE_S

MEMBER = """
import json, os, sys, time
folder, rank = sys.argv[1], os.environ["RANK"]
fds = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")}
words = ("RANK", "WORLD", "MASTER", "ROLE", "TORCHELASTIC", "RALLYPOINT", "SECRET")
env = {name: value for name, value in os.environ.items() if any(word in name for word in words)}
told = {"pid": os.getpid(), "at": time.monotonic(), "env": env, "fds": fds}
os.write(1, f"START {json.dumps(told)}\\n".encode())
while not os.path.exists(f"{folder}/finish") and not os.path.exists(f"{folder}/finish.{rank}"):
    try:
        os.rename(f"{folder}/order.{rank}", f"{folder}/taken.{rank}")
    except FileNotFoundError:
        time.sleep(0.005)
    else:
        exec(open(f"{folder}/taken.{rank}").read())
"""


class Start:
    """One worker, as it was when it started; `at` is on the clock of time.monotonic, which this whole machine shares."""

    def __init__(self, line: str) -> None:
        told = json.loads(line)
        self.pid, self.at, self.env, self.fds = int(told["pid"]), float(told["at"]), told["env"], told["fds"]
        self.rank, self.world, self.node = (int(self.env[name]) for name in ("RANK", "WORLD_SIZE", "GROUP_RANK"))
        self.master = self.env["MASTER_ADDR"], self.env["MASTER_PORT"]
        self.restarts = int(self.env["TORCHELASTIC_RESTART_COUNT"])
        self.generation = int(self.env["RALLYPOINT_GENERATION"])


class Node:
    """An agent beside the test, and what its workers told when they started."""

    def __init__(self, agent: Any, workers: int) -> None:
        self.agent, self.workers, self.began_at = agent, workers, time.monotonic()
        self.wait, self.wait_for_line, self.send_signal = agent.wait, agent.wait_for_line, agent.send_signal

    @property
    def stderr(self) -> str:
        return str(self.agent.stderr)

    def starts(self) -> list[Start]:
        return [Start(line) for line in re.findall(r"^START (.*)\n", self.agent.stdout, re.MULTILINE)]

    def wait_for_world(self, size: int, since: float = 0.0, timeout_s: float = PATIENCE_S) -> list[Start]:
        """This node's workers in the first world of this size that all of them began in after `since`, by rank."""
        found: list[Start] = []

        def all_there() -> bool:
            worlds: dict[tuple[str, str], list[Start]] = {}
            for start in self.starts():
                if start.world == size and start.at >= since:
                    worlds.setdefault(start.master, []).append(start)
            found[:] = next((starts for starts in worlds.values() if len(starts) == self.workers), [])
            return bool(found)

        self.agent.wait_for(all_there, timeout_s)
        return sorted(found, key=lambda start: start.rank)

    def kill(self) -> float:
        """When it was killed."""
        self.agent.process.kill()
        killed_at = time.monotonic()
        self.agent.process.wait()
        return killed_at

    def end(self, number: int = signal.SIGTERM) -> int:
        self.send_signal(number)
        return int(self.wait())


class Job:
    """Several agents that meet at one port; their workers do what they are ordered to."""

    def __init__(self, start: Callable[..., Any], member: Path, folder: Path, port: int) -> None:
        self._start, self._member, self.folder, self.port = start, member, folder, port

    def start(
        self, *flags: str, nnodes: str = "1:2", workers: int = 2, conf: str = "last_call_timeout=0.2", host: str = "localhost",
        run_id: str = "a-job", env: dict[str, str] | None = None, port: int | None = None, **how: Any,
    ) -> Node:  # fmt: skip
        endpoint = f"{host}:{port or self.port}"
        size = ["--nnodes", nnodes, "--nproc-per-node", str(workers)]
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", run_id, "--rdzv-conf", conf]
        return Node(self._start([*size, *meeting, *flags, self._member, self.folder], env, **how), workers)

    def start_host(self, *flags: str, **options: Any) -> Node:
        """The same, for the agent that is to be the host of the store."""
        node = self.start(*flags, **options)
        node.wait_for_line("this node hosts the coordination store")
        return node

    def order(self, rank: int, text: str) -> None:
        """Let the worker that has this rank, now or next, run this, once."""
        draft = self.folder / "draft"
        draft.write_text(text)
        draft.rename(self.folder / f"order.{rank}")

    def finish(self, rank: int | None = None) -> None:
        (self.folder / ("finish" if rank is None else f"finish.{rank}")).touch()


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """``free_port()``: one that nobody listens on, on any address, and that no outgoing connection will take."""
    return ports.free_port


@pytest.fixture
def job(start_rallyrun: Callable[..., Any], script: Callable[..., Path], tmp_path: Path, free_port: Callable[[], int]) -> Job:
    """``job.start(…)`` starts one agent of a job of several nodes; ``job.order(rank, code)`` and ``job.finish()`` steer it."""
    folder = tmp_path / "orders"
    folder.mkdir()
    return Job(start_rallyrun, script(MEMBER, "member.py"), folder, free_port())
