"""Five agents under a random schedule of kills, pauses, cuts, departures and joins: the job must live through all of it.

The host of the store is spared, except for its workers. The others reach it through a proxy each, which can stall or reset what
it carries. With a store of its own, that no agent hosts, nobody is spared, and the leadership moves too. Every worker writes
down where it found itself, and then, again and again, that it still runs; all clocks are the same. The seed is printed;
RALLY_SEED repeats it, as far as a real machine can be made to repeat itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_port

NODES = 5
WORKERS = 2
LONGEST_S = 5.0  # of pauses and cuts
SAME_GENERATION_S = LONGEST_S + 2.0  # ports may come back later
PORT_AGAIN_S = 1.0  # and sometimes sooner
WAKING_S = 1.0  # a paused agent cannot stop its workers; awake, it does
FULL_WORLD_S = 75.0  # a node that was lost again and again is held back for up to a minute
KINDS = ["kill_agent", "kill_worker", "pause", "freeze", "leave", "stall", "reset"]
SEED = "RALLY_SEED"
NODE = "RALLY_TEST_NODE"

RENAMED = f"""
import os
_uname = os.uname()
os.uname = lambda: os.uname_result((_uname[0], os.environ["{NODE}"], *_uname[2:]))
"""
WORKER = f"""
import json, os, pathlib, struct, sys, time
folder, pid = pathlib.Path(sys.argv[1]), os.getpid()
beat = os.open(folder / f"beat_{{pid}}", os.O_CREAT | os.O_WRONLY)
journal = os.open(folder / "journal", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
said = {{name: int(os.environ[name]) for name in names}}
said |= {{"node": os.environ["{NODE}"], "pid": pid, "began": time.monotonic()}}
os.write(journal, (json.dumps(said) + "\\n").encode())
while not (folder / "finish").exists():
    os.pwrite(beat, struct.pack("d", time.monotonic()), 0)
    time.sleep(0.03)
"""
STORE = """
import signal, sys
from rallypoint.net.endpoint import open_listeners
from rallypoint.coordination.embedded.server import CoordinationServer
listeners = open_listeners("127.0.0.1", int(sys.argv[1]), is_host=True, wildcard_allowed=False)
CoordinationServer(listeners, "random", None).start()
print("the store is open", flush=True)
signal.pause()
"""


# --- the way to the store --------------------------------------------------------------------------------------------------


class Proxy:
    """Carries the connections of one node. While it is stalled nothing gets through; what was sent meanwhile comes later."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target: int) -> None:
        self._loop, self._target = loop, target
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        assert self._server is not None
        self._server.close()

    def stall(self) -> None:
        self._loop.call_soon_threadsafe(self._flows.clear)

    def heal(self) -> None:
        self._loop.call_soon_threadsafe(self._flows.set)

    def reset(self) -> None:
        self._loop.call_soon_threadsafe(self._reset)

    def _reset(self) -> None:
        for writer in [one for one in self._writers if not one.is_closing()]:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pair = {writer}
        try:
            await self._flows.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            pair.add(far_writer)
            self._writers |= pair
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        except OSError:  # a broken connection is what we are here for
            pass
        finally:
            self._writers -= pair
            for one in pair:
                one.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            await self._flows.wait()
            sink.write(data)
            await sink.drain()
        await self._flows.wait()
        sink.close()


@pytest.fixture
def open_proxy() -> Iterator[Callable[[int], Proxy]]:
    """``open_proxy(target)``: a proxy to this port, served by a thread of the test."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    opened: list[Proxy] = []

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(10)

    def make(target: int) -> Proxy:
        opened.append(Proxy(loop, target))
        run(opened[-1].open())
        return opened[-1]

    async def end_all() -> None:
        for proxy in opened:
            proxy.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    yield make
    run(end_all())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


# --- what the workers wrote ------------------------------------------------------------------------------------------------


class Life:
    """One worker, from its first line to its last sign of life."""

    def __init__(self, said: dict[str, Any], folder: Path) -> None:
        self.rank, self.world_size, self.nodes = said["RANK"], said["WORLD_SIZE"], said["GROUP_WORLD_SIZE"]
        self.node, self.began, self.pid = said["node"], said["began"], said["pid"]
        self.key = (said["MASTER_PORT"], said["WORLD_SIZE"], said["TORCHELASTIC_RESTART_COUNT"])
        beat = (folder / f"beat_{self.pid}").read_bytes()
        self.ended = struct.unpack("d", beat)[0] if beat else self.began

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.world_size}, {self.node}, pid {self.pid}, {self.began:.2f}..{self.ended:.2f}>"


def read_lives(folder: Path) -> list[Life]:
    with contextlib.suppress(FileNotFoundError):
        return [Life(json.loads(line), folder) for line in (folder / "journal").read_text().splitlines()]
    return []


def _has_ended(rank: int, known: list[Life], before: float) -> bool:
    """The kernel gives out a port again by chance: then the same rank of an earlier generation was gone long before.

    Two of one generation would be there at the same time.
    """
    return any(one.rank == rank and one.ended + PORT_AGAIN_S < before for one in known)


def generations(lives: list[Life]) -> list[list[Life]]:
    """The workers of each generation, in the order in which generations began."""
    found: list[list[Life]] = []
    latest: dict[object, list[Life]] = {}
    for life in sorted(lives, key=lambda life: life.began):
        known = latest.get(life.key)
        if known is None or life.began > known[0].began + SAME_GENERATION_S or _has_ended(life.rank, known, life.began):
            known = latest[life.key] = []
            found.append(known)
        known.append(life)
    return found


def check_generations(found: list[list[Life]]) -> None:
    """Each rank is there once, and all agree on how many there are; whoever was hit at its start has not come to write."""
    for members in found:
        ranks = [life.rank for life in members]
        assert len(set(ranks)) == len(ranks), members
        assert set(ranks) <= set(range(members[0].world_size)), members
        assert members[0].world_size == WORKERS * members[0].nodes, members
        assert len({life.node for life in members}) <= members[0].nodes, members


def overlaps(found: list[list[Life]], pauses: list[tuple[str, float, float]]) -> list[tuple[Life, Life]]:
    """Workers of two generations that ran at once, though the agent of the older one was not paused."""

    def was_paused(node: str, begin: float, end: float) -> bool:
        return any(one == node and start <= begin and end <= stop + WAKING_S for one, start, stop in pauses)

    clashes = []
    for index, older in enumerate(found):
        for newer in found[index + 1 :]:
            begin = min(life.began for life in newer)
            late = [life for life in older if life.ended > begin]
            clashes += [(life, newer[0]) for life in late if not was_paused(life.node, max(begin, life.began), life.ended)]
    return clashes


# --- the schedule ----------------------------------------------------------------------------------------------------------


class Slot:
    """A place for a node: agents come and go in it, each under a name of its own; one way to the store serves all of them."""

    def __init__(self, index: int, proxy: Proxy | None) -> None:
        self.index, self.proxy = index, proxy
        self.agent: Any = None
        self.name = ""
        self.starts = 0
        self.is_ending = False

    @property
    def is_up(self) -> bool:
        return self.agent is not None and self.agent.process.poll() is None


class Schedule:
    """Random events, and what has to follow on them later: waking, healing."""

    def __init__(self, chance: random.Random, slots: list[Slot], start: Callable[[Slot], None], processes: Any) -> None:
        self._chance, self._slots, self._start, self._processes = chance, slots, start, processes
        self._later: list[tuple[float, Callable[[], None]]] = []
        self.pauses: list[tuple[str, float, float]] = []
        self.happened: Counter[str] = Counter()

    def run(self, events: int) -> None:
        try:
            for _ in range(events):
                self._pass(self._chance.uniform(0.2, 1.6))
                self._check()
                self._one_event()
            self._pass(LONGEST_S)
        finally:
            for _, act in self._later:  # nobody stays asleep because a test failed
                act()
        self._complete()

    def _complete(self) -> None:
        """All nodes are to be there in the end."""
        for slot in self._slots:
            if slot.is_ending:
                slot.agent.wait(20)
                self._start(slot)

    def _pass(self, wait_s: float) -> None:
        """Let time go by, which is what a schedule is made of, and do what comes due."""
        until = time.monotonic() + wait_s
        while self._later and min(self._later, key=lambda one: one[0])[0] <= until:
            due = min(self._later, key=lambda one: one[0])
            self._later.remove(due)
            time.sleep(max(0.0, due[0] - time.monotonic()))
            due[1]()
        time.sleep(max(0.0, until - time.monotonic()))

    def _check(self) -> None:
        """Nobody ends who was not made to."""
        for slot in self._slots:
            if slot.agent is not None and not slot.is_up and not slot.is_ending:
                pytest.fail(f"{slot.name} ended by itself, with {slot.agent.process.returncode}\n{slot.agent.stderr}")

    def _one_event(self) -> None:
        slot = self._chance.choice(self._slots)
        if not slot.is_up:
            self.happened["join"] += 1
            self._start(slot)
            return
        kind = self._chance.choice(KINDS if slot.proxy else ["kill_worker"])
        self.happened[kind] += 1
        getattr(self, f"_{kind}")(slot)

    def _kill_agent(self, slot: Slot) -> None:
        slot.is_ending = True
        slot.agent.process.kill()
        slot.agent.process.wait()

    def _leave(self, slot: Slot) -> None:
        slot.is_ending = True
        slot.agent.send_signal(signal.SIGTERM)

    def _kill_worker(self, slot: Slot) -> None:
        workers = self._family(slot)[2:]
        if workers:
            self._signal(self._chance.choice(workers), signal.SIGKILL)

    def _pause(self, slot: Slot) -> None:
        """The agent alone: its workers go on, and nobody is there to stop them."""
        self._stop(slot, [slot.agent.pid])

    def _freeze(self, slot: Slot) -> None:
        """As a virtual machine is."""
        self._stop(slot, self._family(slot))

    def _stop(self, slot: Slot, pids: list[int]) -> None:
        began, length_s = time.monotonic(), self._chance.uniform(0.2, LONGEST_S)
        self.pauses.append((slot.name, began, began + length_s))
        for pid in pids:
            self._signal(pid, signal.SIGSTOP)

        def wake() -> None:
            for pid in reversed(pids):
                self._signal(pid, signal.SIGCONT)

        self._later.append((began + length_s, wake))

    def _stall(self, slot: Slot) -> None:
        slot.proxy.stall()
        self._later.append((time.monotonic() + self._chance.uniform(0.2, LONGEST_S), slot.proxy.heal))

    def _reset(self, slot: Slot) -> None:
        slot.proxy.reset()

    def _family(self, slot: Slot) -> list[int]:
        """The agent, its warden, and its workers."""
        warden = self._processes.warden(slot.agent.pid)
        workers = [pid for pid, (_, state) in self._processes.children(warden).items() if state not in "ZX"] if warden else []
        return [slot.agent.pid, *([warden] if warden else []), *sorted(workers)]

    @staticmethod
    def _signal(pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kernel_objects(pid: int) -> tuple[int, int]:
    """How many descriptors and threads it has."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


class Cluster:
    """Five places for agents of one job, and the store in which they meet, hosted by the first of them or by nobody."""

    def __init__(self, folder: Path, port: int, start_rallyrun: Any) -> None:
        self.folder, self.port, self._start_rallyrun = folder, port, start_rallyrun
        self.slots: list[Slot] = []
        (folder / "renamed").mkdir(parents=True)
        (folder / "renamed" / "sitecustomize.py").write_text(RENAMED)
        (folder / "worker.py").write_text(WORKER)
        given = os.environ.get("PYTHONPATH")
        self._path = os.pathsep.join([str(folder / "renamed"), *([given] if given else [])])

    def start(self, slot: Slot) -> None:
        slot.starts, slot.is_ending = slot.starts + 1, False
        slot.name = f"node{slot.index}-{slot.starts}"
        port, is_host = (slot.proxy.port, "false") if slot.proxy else (self.port, "true")
        flags = [f"--nnodes=1:{NODES}", f"--nproc-per-node={WORKERS}", "--max-restarts=1000", "--rdzv-id=random"]
        flags += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
        flags += [f"--rdzv-conf=last_call_timeout=0,restart_backoff=0,is_host={is_host}"]
        env = {NODE: slot.name, "PYTHONPATH": self._path}
        slot.agent = self._start_rallyrun([*flags, self.folder / "worker.py", self.folder], env=env)

    def generations(self) -> list[list[Life]]:
        return generations(read_lives(self.folder))

    def is_whole(self) -> bool:
        return any(len(members) == NODES * WORKERS for members in self.generations()[-1:])

    def finish(self) -> list[int]:
        (self.folder / "finish").touch()
        return [slot.agent.wait(30) for slot in self.slots]

    def said(self) -> str:
        return "\n".join(f"--- {slot.name} ---\n{slot.agent.stderr}" for slot in self.slots)


@pytest.fixture
def cluster(tmp_path: Path, start_rallyrun: Any) -> Cluster:
    return Cluster(tmp_path / "cluster", free_port(), start_rallyrun)


@pytest.fixture
def start_store(cluster: Cluster, script: Any, start_command: Any, wait_until: Any) -> Callable[[], int]:
    """``start_store()``: the store in a process of its own, whose id is given."""

    def start() -> int:
        store = start_command([sys.executable, script(STORE, "store.py"), str(cluster.port)])
        wait_until(lambda: store.stdout)
        return int(store.pid)

    return start


@pytest.mark.parametrize("host", ["an agent", "nobody"])
@pytest.mark.parametrize(
    "events",
    [
        pytest.param(10, marks=pytest.mark.timeout(240)),
        pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(1200)]),
    ],
)
def test_five_agents_under_a_random_schedule_P02_P03(
    events: int, host: str, cluster: Cluster, start_store: Any, open_proxy: Any, processes: Any, marked: Any, wait_until: Any
) -> None:
    """P02, P03: whoever dies, sleeps, leaves or is cut off, the job goes on, with right ranks, one generation at a time."""
    seed = int(os.environ.get(SEED) or random.SystemRandom().randrange(10**9))
    print(f"{SEED}={seed}")
    store = start_store() if host == "nobody" else 0
    cluster.slots += [Slot(index, open_proxy(cluster.port) if store or index else None) for index in range(NODES)]
    for slot in cluster.slots:
        cluster.start(slot)
    wait_until(cluster.is_whole, 30)
    store = store or cluster.slots[0].agent.pid
    before = kernel_objects(store)
    schedule = Schedule(random.Random(seed), cluster.slots, cluster.start, processes)
    try:
        schedule.run(events)
        wait_until(cluster.is_whole, FULL_WORLD_S)
        # Descriptors and threads, no more than with the first five nodes; fewer where the workers' store is at another node now.
        wait_until(lambda: all(now <= then for now, then in zip(kernel_objects(store), before, strict=True)))
    finally:
        print(f"events: {dict(schedule.happened)}; {len(cluster.generations())} generations\n{cluster.said()}")
    assert cluster.finish() == [0] * NODES, cluster.said()
    wait_until(lambda: set(marked()) <= {store}, 5)
    found = cluster.generations()
    check_generations(found)
    assert overlaps(found, schedule.pauses) == []
