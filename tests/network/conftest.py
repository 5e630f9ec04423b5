"""Machines on one machine: a network namespace for each, with a name and, if asked for, a clock of its own, and no names.

The namespaces hang on a switch, in a namespace too, so that nothing of the real machine's network is touched:

    node 0: eth0 ── down0 ┐                                   ┌ down1 ── eth0: node 1
                      bridge own0 ── up0 ══ main ══ up1 ── bridge own1

A cut puts a queue with room for nothing on one end of a node's cable inside the switch, where packets vanish without a word to
either side: on `up` for what the node sends, on `down` for what it is to receive. That takes `ip` and `tc`, no firewall.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

TOOLS = ("ip", "tc", "unshare", "getent")
NAMES = Path("/etc/netns")  # what stands here under a namespace's name covers the files of /etc for whoever runs in it
SECOND_ADDRESS = "10.78.0.1"
NOBODY = "10.77.0.250"  # who asks there for a name waits for long
PORT = 29400
ENTER = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
SKEWED_WALL_CLOCK = """
import time
_time = time.time
time.time = lambda: _time() + 900.0
"""
WORKER = """
import json, os, pathlib, struct, sys, time
folder, pid = pathlib.Path(sys.argv[1]), os.getpid()
beat = os.open(folder / f"beat_{pid}", os.O_CREAT | os.O_WRONLY)
journal = os.open(folder / "journal", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
said = {name.lower(): int(os.environ[name]) for name in names}
said |= {"master_addr": os.environ["MASTER_ADDR"], "node": os.uname().nodename, "pid": pid}
said |= {"began": time.clock_gettime(time.CLOCK_TAI), "uptime": time.monotonic(), "wall": time.time()}
os.write(journal, (json.dumps(said) + "\\n").encode())
while not (folder / "finish").exists():
    os.pwrite(beat, struct.pack("d", time.clock_gettime(time.CLOCK_TAI)), 0)
    time.sleep(0.01)
"""

_serials = count()


def clock() -> float:
    """The one clock that all processes of the machine read alike: no time namespace shifts it."""
    return time.clock_gettime(time.CLOCK_TAI)


def sh(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)


class Journal:
    """What the workers wrote about themselves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def starts(self) -> list[dict[str, object]]:
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.folder / "journal").read_text().splitlines()]
        return []

    def last_beat(self, pid: object) -> float:
        """When a worker was last seen running, to a hundredth of a second."""
        data = (self.folder / f"beat_{pid}").read_bytes()
        return struct.unpack("d", data)[0] if data else 0.0

    def worlds(self) -> dict[tuple[object, object], list[dict[str, object]]]:
        """The workers of each generation, in the order of its first start."""
        found: dict[tuple[object, object], list[dict[str, object]]] = {}
        for start in self.starts():
            found.setdefault((start["master_port"], start["world_size"]), []).append(start)
        return found

    def whole_world(self, nodes: int, since: float = 0.0) -> list[dict[str, object]] | None:
        """The latest generation, if it has that many nodes, began after `since`, and all its workers have started."""
        for workers in list(self.worlds().values())[-1:]:
            first = workers[0]
            is_it = first["group_world_size"] == nodes and all(worker["began"] > since for worker in workers)  # type: ignore[operator]
            return workers if is_it and len(workers) == first["world_size"] else None
        return None

    def check_ranks(self) -> None:
        """In every generation each rank was there at most once, and each one in those that ran."""
        for (_, size), workers in self.worlds().items():
            ranks = sorted(worker["rank"] for worker in workers)  # type: ignore[type-var]
            assert len(set(ranks)) == len(ranks), workers
            assert set(ranks) <= set(range(size)), workers  # type: ignore[arg-type]

    def finish(self) -> None:
        (self.folder / "finish").touch()


class Agent:
    """A launcher in its namespace; what it and its workers print is in one file."""

    def __init__(self, command: Sequence[str], env: dict[str, str], output: Path) -> None:
        self.output = output
        with output.open("ab") as file:
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the agent still ran after {timeout_s:g} s\n{self.text}")

    def end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(3.0)


class Node:
    """A machine of its own, as far as its network, its name and, if asked for, its clocks go."""

    def __init__(self, network: Network, index: int) -> None:
        self.network, self.index = network, index
        self.name = f"node{index}"
        self.namespace = f"{network.prefix}n{index}"
        self.address = f"10.77.0.{index + 1}"
        self.agents: list[Agent] = []

    def build(self) -> None:
        hub, me, index = self.network.hub, self.namespace, str(self.index)
        self.network.add_namespace(me)
        down, up, main = f"down{index}", f"up{index}", f"main{index}"
        for link in (("link", "add", f"own{index}", "type", "bridge"),
                     ("link", "add", down, "type", "veth", "peer", "name", "eth0", "netns", me),
                     ("link", "add", up, "type", "veth", "peer", "name", main),
                     ("link", "set", down, "master", f"own{index}", "up"),
                     ("link", "set", up, "master", f"own{index}", "up"),
                     ("link", "set", main, "master", "main", "up"),
                     ("link", "set", f"own{index}", "up")):  # fmt: skip
            sh("ip", "-n", hub, *link)
        self._address()

    def _address(self) -> None:
        me = self.namespace
        sh("ip", "-n", me, "link", "set", "lo", "up")
        sh("ip", "-n", me, "link", "set", "eth0", "up")
        sh("ip", "-n", me, "address", "add", f"{self.address}/24", "dev", "eth0")
        sh("ip", "-n", me, "address", "add", f"fd00:77::{self.index + 1}/64", "dev", "eth0", "nodad")
        if self.index == 0:
            sh("ip", "-n", me, "address", "add", f"{SECOND_ADDRESS}/32", "dev", "lo")
        else:
            sh("ip", "-n", me, "route", "add", f"{SECOND_ADDRESS}/32", "via", self.network.nodes[0].address)

    def start(self, *args: str, conf: str = "", endpoint: str = "", skewed: bool = False) -> Agent:
        """Start an agent here. One that is `skewed` has a wall clock 15 minutes and a monotonic clock a day ahead."""
        network = self.network
        conf = ",".join(filter(None, ("last_call_timeout=0,restart_backoff=0", conf)))
        command = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        command += ["--time", "--monotonic", "86400"] if skewed else []
        command += ["sh", "-c", ENTER, self.name, sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", "2"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint or f"{network.nodes[0].address}:{PORT}"]
        command += ["--rdzv-id", "job", "--rdzv-conf", conf, "--max-restarts", "100", *args]
        command += [str(network.worker), str(network.journal.folder)]
        path = [str(network.skewed)] * skewed + [os.environ[name] for name in ("PYTHONPATH",) if name in os.environ]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        output = network.journal.folder / f"{self.name}_{len(self.agents)}.txt"
        self.agents.append(Agent(command, env, output))
        return self.agents[-1]

    def knows(self, name: str) -> bool:
        """Whether a name is found here, in a second."""
        with contextlib.suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
            subprocess.run(["ip", "netns", "exec", self.namespace, "getent", "hosts", name], check=True, timeout=1)
            return True
        return False

    def cut(self, sent: bool = True, received: bool = True) -> float:
        """Let what this node sends, or what is sent to it, or both vanish; gives the time of the cut."""
        for link, is_cut in ((f"up{self.index}", sent), (f"down{self.index}", received)):
            if is_cut:
                sh("tc", "-n", self.network.hub, "qdisc", "replace", "dev", link, "root", "pfifo", "limit", "0")
        return clock()

    def heal(self) -> float:
        for link in (f"up{self.index}", f"down{self.index}"):
            with contextlib.suppress(subprocess.CalledProcessError):  # this direction was not cut
                sh("tc", "-n", self.network.hub, "qdisc", "del", "dev", link, "root")
        return clock()


class Network:
    """Nodes on a switch."""

    def __init__(self, nodes: int, folder: Path) -> None:
        folder.mkdir()
        self.prefix = f"rally{os.getpid()}x{next(_serials)}"
        self.hub = f"{self.prefix}hub"
        self.journal = Journal(folder)
        self.worker = folder / "worker.py"
        self.worker.write_text(WORKER)
        self.skewed = folder / "skewed"
        self.skewed.mkdir()
        (self.skewed / "sitecustomize.py").write_text(SKEWED_WALL_CLOCK)
        self.nodes = [Node(self, index) for index in range(nodes)]
        self._namespaces: list[str] = []

    def build(self) -> None:
        self.add_namespace(self.hub)
        sh("ip", "-n", self.hub, "link", "add", "main", "type", "bridge")
        sh("ip", "-n", self.hub, "link", "set", "main", "up")
        for node in self.nodes:
            node.build()

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
        for name in self._namespaces:
            shutil.rmtree(NAMES / name, ignore_errors=True)
            with contextlib.suppress(subprocess.CalledProcessError):  # it was never made
                sh("ip", "netns", "delete", name)
        with contextlib.suppress(OSError):  # somebody else uses it too
            NAMES.rmdir()

    def said(self) -> str:
        """All that the agents printed, for a test that fails."""
        return "\n".join(f"--- {agent.output.name} ---\n{agent.text}" for node in self.nodes for agent in node.agents)


def network_state() -> tuple[set[str], set[str], set[str]]:
    """Namespaces, links and queues of the real machine, by what their tools print; links of others may come and go."""
    listed = [subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.splitlines()
              for command in (("ip", "netns", "list"), ("ip", "-o", "link"), ("tc", "qdisc", "show"))]  # fmt: skip
    namespaces, links, queues = listed
    return {line.split()[0] for line in namespaces}, {line.split(":")[1] for line in links}, set(queues)


@pytest.fixture
def network(tmp_path: Path, private_tmpdir: Path) -> Iterator[Callable[[int], Network]]:
    """``network(n)``: n nodes on a switch; removed after the test, which fails if anything of them is left."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: iproute2 and util-linux are needed")
    before = network_state()
    made: list[Network] = []

    def make(nodes: int) -> Network:
        made.append(Network(nodes, tmp_path / f"network_{len(made)}"))
        try:
            made[-1].build()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no namespaces here: {' '.join(error.cmd)}: {error.stderr.strip()}")
        return made[-1]

    yield make
    for one in made:
        one.remove()
        print(one.said())
    for folder in private_tmpdir.glob("rallypoint_*"):  # whoever is killed cannot clear up after itself
        if any(agent.process.returncode == -signal.SIGKILL for one in made for node in one.nodes for agent in node.agents):
            shutil.rmtree(folder)
    prefix = f"rally{os.getpid()}x"
    after = network_state()
    left = [name for now, then in zip(after, before, strict=True) for name in now - then if prefix in name]
    left += [str(path) for path in NAMES.glob(f"{prefix}*")]
    assert not left, f"left behind: {left}"
