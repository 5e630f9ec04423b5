"""Machines on one machine: a network namespace for each, with a name and, if asked for, a clock of its own, and no names.

The namespaces hang on a switch of our own (`switch.py`), so that nothing of the real machine's network is touched, and what
happens to packets is decided for each machine and direction:

    node 0: eth0 ──(TUN)── switch process ──(TUN)── eth0: node 1
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.network.journal import BEAT_WORKER, Journal
from tests.network.switch import CLEAR, CUT, Line, Switch, open_cable

__all__ = ["PORT", "TOOLS", "Agent", "Network", "Node", "clock"]

TOOLS = ("ip", "unshare", "getent")
NAMES = Path("/etc/netns")  # what stands here under a namespace's name covers the files of /etc for whoever runs in it
NAMESPACES = Path("/run/netns")
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
SECOND_ADDRESS = "10.78.0.1"
NOBODY = "10.77.0.250"  # who asks there for a name waits for long
PORT = 29400
WARDEN = "rally-warden"
ENTER = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
SKEWED_WALL_CLOCK = """
import time
_time, _time_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: _time() + 900.0, lambda: _time_ns() + 900 * 10**9
"""

_serials = count()


def clock() -> float:
    """The one clock that all processes of the machine read alike: no time namespace shifts it."""
    return time.clock_gettime(time.CLOCK_TAI)


def sh(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)


def children(parent: int) -> list[int]:
    with contextlib.suppress(OSError):  # it is gone
        return [int(pid) for path in Path(f"/proc/{parent}/task").glob("*/children") for pid in path.read_text().split()]
    return []


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Agent:
    """A launcher in its namespace; what it and its workers print is in one file, unless its stderr goes elsewhere."""

    def __init__(self, command: Sequence[str], env: dict[str, str], output: Path, stderr: int | None = None) -> None:
        self.output = output
        with output.open("ab") as file:
            errors = file if stderr is None else stderr
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=errors)
        self.pid = self.process.pid

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def is_up(self) -> bool:
        return self.process.poll() is None

    @property
    def warden(self) -> int | None:
        """Its warden, once that has taken its name."""
        return next((pid for pid in children(self.pid) if name_of(pid) == WARDEN), None)

    @property
    def workers(self) -> list[int]:
        return children(warden) if (warden := self.warden) else []

    def wait(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the agent still ran after {timeout_s:g} s\n{self.text}")

    def kill(self, with_warden: bool = False) -> float:
        """When it was killed, and with it, if asked for, its warden."""
        warden = self.warden if with_warden else None
        killed_at = clock()
        self.process.kill()
        if warden is not None:
            send(warden, signal.SIGKILL)
        self.process.wait()
        return killed_at

    def end(self) -> None:
        for pid in (self.warden, self.pid):
            if pid is not None and self.is_up:
                send(pid, signal.SIGCONT)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.is_up:
                self.process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(3.0)


class Node:
    """A machine of its own, as far as its network, its name and, if asked for, its clocks go."""

    def __init__(self, network: Network, index: int) -> None:
        self.network, self.index = network, index
        self.name = f"node{index}"
        self.namespace = f"{network.prefix}n{index}"
        self.address, self.address6 = f"10.77.0.{index + 1}", f"fd00:77::{index + 1}"
        self.agents: list[Agent] = []

    @property
    def addresses(self) -> list[str]:
        return [self.address, self.address6, *([SECOND_ADDRESS] if self.index == 0 else [])]

    @property
    def agent(self) -> Agent:
        return self.agents[-1]

    def build(self) -> int:
        """Make it; gives the far end of its cable."""
        me = self.namespace
        self.network.add_namespace(me)
        with self.inside():
            cable = open_cable("eth0")
        sh("ip", "-n", me, "link", "set", "lo", "up")
        sh("ip", "-n", me, "link", "set", "eth0", "up")
        sh("ip", "-n", me, "address", "add", f"{self.address}/24", "dev", "eth0")
        sh("ip", "-n", me, "address", "add", f"{self.address6}/64", "dev", "eth0", "nodad")
        if self.index == 0:
            sh("ip", "-n", me, "address", "add", f"{SECOND_ADDRESS}/32", "dev", "lo")
        else:
            sh("ip", "-n", me, "route", "add", f"{SECOND_ADDRESS}/32", "via", self.network.nodes[0].address)
        return cable

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets and devices that this thread opens meanwhile are those of the node."""
        home = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        there = os.open(NAMESPACES / self.namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            enter(there)
            yield
        finally:
            enter(home)
            os.close(home)
            os.close(there)

    def start(
        self, *args: str, conf: str = "", endpoint: str = "", skewed: bool = False, env: dict[str, str] | None = None,
        before: Sequence[str] = (), stderr: int | None = None, name: str = "",
    ) -> Agent:  # fmt: skip
        """Start an agent here, as an argument of the command `before`; its host's name may be another than the node's.

        One that is `skewed` has a wall clock 15 minutes and a monotonic clock a day ahead.
        """
        network = self.network
        conf = ",".join(filter(None, ("last_call_timeout=0,restart_backoff=0", conf)))
        command = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        command += ["--time", "--monotonic", "86400"] if skewed else []
        command += ["sh", "-c", ENTER, name or self.name, *before, sys.executable, "-m", "rallypoint", "run"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint or f"{network.nodes[0].address}:{PORT}"]
        command += ["--rdzv-id", "job", "--rdzv-conf", conf, "--nproc-per-node", "2", "--max-restarts", "100", *args]
        command += [str(network.worker), str(network.journal.folder)]
        path = [str(network.skewed)] * skewed + [os.environ[name] for name in ("PYTHONPATH",) if name in os.environ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **(env or {})}
        output = network.folder / f"{self.name}_{len(self.agents)}.txt"
        self.agents.append(Agent(command, environment, output, stderr))
        return self.agents[-1]

    def knows(self, name: str) -> bool:
        """Whether a name is found here, in a second."""
        with contextlib.suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
            subprocess.run(["ip", "netns", "exec", self.namespace, "getent", "hosts", name], check=True, timeout=1)
            return True
        return False

    def cut(self, sent: bool = True, received: bool = True) -> float:
        """Let what this node sends, or what is sent to it, or both vanish; gives the time of the cut."""
        return self.line(CUT if sent else None, CUT if received else None)

    def reject(self) -> float:
        """Whoever sends anything to this node gets a reset for an answer, and the node hears nothing of all that."""
        return self.line(received=Line(rejects=True))

    def slow(self, round_trip_s: float) -> float:
        """From now on each packet needs half of that, either way."""
        return self.line(Line(delay_s=round_trip_s / 2), Line(delay_s=round_trip_s / 2))

    def heal(self) -> float:
        return self.line(CLEAR, CLEAR)

    def line(self, sent: Line | None = None, received: Line | None = None) -> float:
        """Change what happens to what this node sends, or receives; gives the time since when it holds."""
        assert self.network.switch is not None
        self.network.switch.set(self.index, sent, received)
        return clock()


def enter(namespace: int) -> None:
    """Move this thread, and no other, into the network behind this file."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "setns")


class Network:
    """Nodes on a switch."""

    def __init__(self, nodes: int, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.prefix = f"rally{os.getpid()}x{next(_serials)}"
        self.journal = Journal()
        self.worker = folder / "worker.py"
        self.worker.write_text(BEAT_WORKER)
        self.skewed = folder / "skewed"
        self.skewed.mkdir()
        (self.skewed / "sitecustomize.py").write_text(SKEWED_WALL_CLOCK)
        self.nodes = [Node(self, index) for index in range(nodes)]
        self.switch: Switch | None = None
        self._namespaces: list[str] = []

    def build(self) -> None:
        cables: list[int] = []
        try:
            for node in self.nodes:
                cables.append(node.build())
        except BaseException:
            for cable in cables:
                os.close(cable)
            raise
        self.switch = Switch(cables, [node.addresses for node in self.nodes])

    def add_namespace(self, name: str) -> None:
        self._namespaces.append(name)
        (NAMES / name).mkdir(parents=True)
        (NAMES / name / "hosts").touch()
        (NAMES / name / "resolv.conf").write_text(f"nameserver {NOBODY}\n")
        sh("ip", "netns", "add", name)

    def remove(self) -> None:
        for node in self.nodes:
            for agent in node.agents:
                agent.end()
        if self.switch is not None:
            self.switch.close()
        for name in self._namespaces:
            shutil.rmtree(NAMES / name, ignore_errors=True)
            with contextlib.suppress(subprocess.CalledProcessError):  # it was never made
                sh("ip", "netns", "delete", name)
        with contextlib.suppress(OSError):  # somebody else uses it too
            NAMES.rmdir()
        self.journal.remove()

    def said(self) -> str:
        """All that the agents printed, for a test that fails."""
        return "\n".join(f"--- {agent.output.name} ---\n{agent.text}" for node in self.nodes for agent in node.agents)

    def agents(self) -> list[Any]:
        return [agent for node in self.nodes for agent in node.agents]
