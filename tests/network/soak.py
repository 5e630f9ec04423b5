"""A job of five machines, and everything that may happen to one of them: a schedule of faults, drawn from a seed.

A fault hits one machine and, if it lasts, is healed later; meanwhile others happen, on the same machine too. Three things are not
done: the host of the store is not killed nor cut off, because the job would end; a worker itself is not stopped, because nobody
could tell that from a frozen machine; and an agent and its warden do not stand still together, because that is one.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
from tests.network.machines import Agent, Network, Node, clock, send
from tests.network.outputs import Console, Disk
from tests.network.switch import CUT, Line

__all__ = ["KINDS", "Happened", "Soak", "prepare"]

STEP_S = 0.02
SEEN_S = 0.5
LONGEST_ABSENCE_S = 1.5  # of a machine whose agent has ended
ROUND_TRIP_S = 0.3
SHUTDOWN_S = 1.0
NO_WORLD_S = 150.0  # a node that was lost, or whose workers failed, several times in a row is left out for a minute or two
LEAVING_S = 25.0
RESTARTS = 1_000_000
TOO_FEW_FILES = range(14, 31)  # an agent of two workers that has no more fails here or there, or just gets by
FAIL = "raise SystemExit(7)"
TURN_DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


# --- what a machine has ----------------------------------------------------------------------------------------------------


class Slot:
    """A machine, and the agent that runs there at present, each under a name of its own."""

    def __init__(self, node: Node, disk: Disk | None) -> None:
        self.node, self.disk = node, disk
        self.console: Console | None = None
        self.name = ""
        self.log_dir = node.network.folder / "none"
        self.is_ending = True  # nothing has been started yet
        self.starts_at = 0.0
        self.next_files = self.files = 0  # that its next agent, and this one, may open at most; 0: as many as it likes
        self.stopped: dict[str, int] = {}  # agent or warden -> process
        self.has_bad_line = self.is_frozen = False

    @property
    def agent(self) -> Agent:
        return self.node.agent

    @property
    def is_host(self) -> bool:
        return self.node.index == 0

    @property
    def is_sick(self) -> bool:
        return self.files > 0

    @property
    def is_up(self) -> bool:
        return bool(self.node.agents) and not self.is_ending and self.agent.is_up

    def start(self) -> None:
        self.leave_console()
        self.console = Console()
        serial = len(self.node.agents)
        self.name = f"{self.node.name}-{serial}"
        self.log_dir = (self.disk.folder if self.disk else self.node.network.folder) / f"logs_{self.name}"
        self.files, self.next_files, self.is_ending = self.next_files, 0, False
        flags = ["--nnodes", "2:5", "--max-restarts", str(RESTARTS), "--log-dir", str(self.log_dir)]
        before = ["prlimit", f"--nofile={self.files}"] if self.files else []
        env = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{SHUTDOWN_S:g}"}
        conf = f"is_host={'true' if self.is_host else 'false'}"
        self.node.start(*flags, conf=conf, env=env, before=before, stderr=self.console.write, name=self.name)
        os.close(self.console.write)

    def drain(self) -> None:
        if self.console is not None:
            self.console.drain(self.agent.output)

    def leave_console(self) -> None:
        if self.console is not None:
            self.console.is_blocked = False
            self.drain()
            self.console.close()
            self.console = None

    def stop(self, who: str, pid: int) -> None:
        self.stopped[who] = pid
        send(pid, signal.SIGSTOP)

    def heal(self) -> None:
        """As if nothing had happened."""
        for who in list(self.stopped):
            send(self.stopped.pop(who), signal.SIGCONT)
        self.node.heal()
        self.has_bad_line = self.is_frozen = False
        if self.disk is not None:
            self.disk.thaw()
        if self.console is not None:
            self.console.is_blocked = False


def prepare(net: Network) -> list[Slot]:
    """The machines with a disk each, where disks can be made."""
    tools = all(shutil.which(tool) for tool in ("mkfs.ext4", "mount", "umount"))
    slots = []
    for node in net.nodes:
        disk = None
        with contextlib.suppress(subprocess.CalledProcessError):  # no loop devices here
            disk = Disk(net.folder / f"disk{node.index}") if tools else None
        slots.append(Slot(node, disk))
    return slots


# --- faults ----------------------------------------------------------------------------------------------------------------


class Happened(NamedTuple):
    at: float
    kind: str
    who: str
    length_s: float

    def __str__(self) -> str:
        return f"{self.kind} on {self.who}" + (f" for {self.length_s:.1f} s" if self.length_s else "")


class Kind(NamedTuple):
    """`act` does it and says how it is healed; `may` says to whom it can be done."""

    act: Callable[[Slot, float, random.Random], Callable[[], None] | None]
    may: Callable[[Slot], bool]
    longest_s: float = 0.0  # of faults that last


def _end(slot: Slot) -> None:
    slot.is_ending = True


def kill_agent(slot: Slot, _length_s: float, _chance: random.Random) -> None:
    _end(slot)
    send(slot.agent.pid, signal.SIGKILL)


def kill_agent_and_warden(slot: Slot, _length_s: float, _chance: random.Random) -> None:
    _end(slot)
    warden = slot.agent.warden
    for pid in (slot.agent.pid, warden):
        if pid is not None:
            send(pid, signal.SIGKILL)


def two_signals(slot: Slot, _length_s: float, chance: random.Random) -> None:
    _end(slot)
    for number in (chance.choice([signal.SIGHUP, signal.SIGINT]), signal.SIGTERM):
        send(slot.agent.pid, number)


def leave(slot: Slot, _length_s: float, _chance: random.Random) -> None:
    _end(slot)
    send(slot.agent.pid, signal.SIGTERM)


def sick_newcomer(slot: Slot, length_s: float, chance: random.Random) -> Callable[[], None]:
    leave(slot, length_s, chance)
    slot.next_files = chance.choice(TOO_FEW_FILES)

    def replace() -> None:
        slot.next_files = 0
        if slot.is_sick and slot.is_up:
            leave(slot, length_s, chance)

    return replace


def stop_agent(slot: Slot, _length_s: float, _chance: random.Random) -> Callable[[], None]:
    return _stop(slot, "agent", slot.agent.pid)


def stop_host(slot: Slot, _length_s: float, _chance: random.Random) -> Callable[[], None]:
    return _stop(slot, "agent", slot.agent.pid)


def stop_warden(slot: Slot, _length_s: float, _chance: random.Random) -> Callable[[], None] | None:
    warden = slot.agent.warden
    return _stop(slot, "warden", warden) if warden is not None else None


def _stop(slot: Slot, who: str, pid: int) -> Callable[[], None]:
    slot.stop(who, pid)

    def resume() -> None:
        send(pid, signal.SIGCONT)
        if slot.stopped.get(who) == pid:
            del slot.stopped[who]

    return resume


def cut(slot: Slot, _length_s: float, _chance: random.Random) -> Callable[[], None]:
    return _line(slot, CUT, CUT)


def cut_one_way(slot: Slot, _length_s: float, chance: random.Random) -> Callable[[], None]:
    return _line(slot, *chance.choice([(CUT, None), (None, CUT)]))


def reset_towards_the_store(slot: Slot, _length_s: float, _chance: random.Random) -> Callable[[], None]:
    return _line(slot, None, Line(rejects=True))


def slow_line(slot: Slot, _length_s: float, _chance: random.Random) -> Callable[[], None]:
    way = Line(delay_s=ROUND_TRIP_S / 2)
    return _line(slot, way, way)


def poor_line(slot: Slot, _length_s: float, _chance: random.Random) -> Callable[[], None]:
    way = Line(loss=0.1, jitter_s=0.05)
    return _line(slot, way, way)


def _line(slot: Slot, sent: Line | None, received: Line | None) -> Callable[[], None]:
    slot.node.line(sent, received)
    slot.has_bad_line = True

    def heal() -> None:
        slot.node.heal()
        slot.has_bad_line = False

    return heal


def block_console(slot: Slot, _length_s: float, _chance: random.Random) -> Callable[[], None]:
    console = slot.console
    assert console is not None
    console.block()
    return lambda: setattr(console, "is_blocked", False)


def hang_disk(slot: Slot, _length_s: float, _chance: random.Random) -> Callable[[], None]:
    disk = slot.disk
    assert disk is not None
    disk.freeze()
    slot.is_frozen = True

    def thaw() -> None:
        disk.thaw()
        slot.is_frozen = False

    return thaw


def lose_logs(slot: Slot, _length_s: float, _chance: random.Random) -> None:
    """The folder is gone, and the next failure finds that out."""
    with contextlib.suppress(OSError):  # not made yet
        slot.log_dir.rename(slot.log_dir.with_suffix(".gone"))
    slot.node.network.journal.order(slot.name, FAIL)


def fail_worker(slot: Slot, _length_s: float, _chance: random.Random) -> None:
    slot.node.network.journal.order(slot.name, FAIL)


def deafen_worker(slot: Slot, _length_s: float, _chance: random.Random) -> None:
    """It ignores SIGTERM from now on."""
    slot.node.network.journal.order(slot.name, TURN_DEAF)


def kill_worker(slot: Slot, _length_s: float, chance: random.Random) -> None:
    workers = slot.agent.workers
    if workers:
        send(chance.choice(sorted(workers)), signal.SIGKILL)


def _anybody(slot: Slot) -> bool:
    return slot.is_up


def _guest(slot: Slot) -> bool:
    return slot.is_up and not slot.is_host


def _guarded(slot: Slot) -> bool:
    """Whose warden is awake: the agent may fall."""
    return _guest(slot) and not slot.stopped


def _healthy_line(slot: Slot) -> bool:
    return _guest(slot) and not slot.has_bad_line


KINDS: dict[str, Kind] = {
    "kill agent": Kind(kill_agent, lambda slot: _guest(slot) and "warden" not in slot.stopped),
    "kill agent and warden": Kind(kill_agent_and_warden, _guest),
    "stop agent": Kind(stop_agent, _guarded, 8.0),
    "stop the host's agent": Kind(stop_host, lambda slot: slot.is_up and slot.is_host and not slot.stopped, 1.0),
    "stop warden": Kind(stop_warden, lambda slot: slot.is_up and not slot.stopped, 8.0),
    "cut": Kind(cut, _healthy_line, 6.0),
    "cut one way": Kind(cut_one_way, _healthy_line, 6.0),
    "reset towards the store": Kind(reset_towards_the_store, _healthy_line, 6.0),
    "slow line": Kind(slow_line, _healthy_line, 6.0),
    "lossy line": Kind(poor_line, _healthy_line, 6.0),
    "blocked console": Kind(block_console, lambda slot: slot.is_up and not _console_is_blocked(slot), 8.0),
    "hung disk": Kind(hang_disk, lambda slot: slot.is_up and slot.disk is not None and not slot.is_frozen, 6.0),
    "lost log folder": Kind(lose_logs, lambda slot: _guest(slot) and not slot.is_frozen),
    "two signals": Kind(two_signals, _guarded),
    "leave": Kind(leave, _guarded),
    "sick newcomer": Kind(sick_newcomer, lambda slot: _guarded(slot) and not slot.is_sick, 5.0),
    "failing worker": Kind(fail_worker, _anybody),
    "deaf worker": Kind(deafen_worker, _anybody),
    "killed worker": Kind(kill_worker, _anybody),
}


def _console_is_blocked(slot: Slot) -> bool:
    return slot.console is None or slot.console.is_blocked


# --- the schedule ----------------------------------------------------------------------------------------------------------


class Soak:
    """Random faults, what has to follow on them later, and a look at everybody in between."""

    def __init__(self, net: Network, slots: list[Slot], seed: int, kinds: list[str]) -> None:
        self.net, self.slots = net, slots
        self.kinds = [kind for kind in kinds if kind != "hung disk" or slots[0].disk is not None]
        self._chance = random.Random(seed)
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._serials = itertools.count()
        self._began = clock()
        self.happened: list[Happened] = []

    def start(self) -> None:
        """The host first, then the others."""
        self.slots[0].start()
        self.until(lambda: "hosts the coordination store" in self.slots[0].agent.text, 30, "a host")
        for slot in self.slots[1:]:
            slot.start()
        self.until(lambda: self.net.journal.whole_world(len(self.slots)), 60, "the first whole world")

    def run(self, faults: int) -> None:
        """Each kind as often as any other, in random order."""
        kinds: list[str] = []
        while len(self.happened) < faults:
            if not kinds:
                kinds = list(self.kinds)
                self._chance.shuffle(kinds)
            self._pause()
            self._fault(kinds.pop())

    def heal(self) -> None:
        """All faults are over, and all machines are there."""
        while self._later:
            heapq.heappop(self._later)[2]()
        for slot in self.slots:
            slot.heal()
        healed_at = clock()
        self.until(lambda: all(slot.is_up and not slot.is_sick for slot in self.slots), LEAVING_S + 5, "an agent everywhere")
        self.until(self._are_together, NO_WORLD_S, "a world of all machines")
        print(f"all machines were together {max(0.0, self._completed_at() - healed_at):.1f} s after the last fault was healed")

    def finish(self) -> list[int | None]:
        """How each agent ended."""
        for slot in self.slots:
            slot.is_ending = True
            slot.starts_at = float("inf")
        self.net.journal.finish()
        self.until(lambda: not any(slot.agent.is_up for slot in self.slots), 60, "the end of all agents")
        return [slot.agent.process.returncode for slot in self.slots]

    def until(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        deadline = clock() + timeout_s
        while not condition():
            if clock() > deadline:
                pytest.fail(f"waited {timeout_s:g} s for {what}; {self._where_all_are()}")
            self._look()
            time.sleep(STEP_S)

    def close(self) -> None:
        """Whatever happened, nobody stays asleep and no disk frozen; and the consoles are read to their ends."""
        for slot in self.slots:
            slot.heal()
        for agent in self.net.agents():
            agent.end()
        for slot in self.slots:
            slot.leave_console()

    def _pause(self) -> None:
        """Two of three times the next fault finds a world that is whole and runs, and else it comes when it comes."""
        if self._chance.random() < 2 / 3:
            self.until(self._is_whole, NO_WORLD_S, "any whole world")
            self._pass(self._chance.uniform(0.0, 1.5))
        else:
            self._pass(self._chance.uniform(0.1, 3.0))

    def _is_whole(self) -> bool:
        """Whether all workers of the latest generation were seen running just now."""
        journal = self.net.journal
        latest = journal.generations()[-1]
        return len(latest) == latest[0]["world_size"] and min(map(journal.last_beat, latest)) > clock() - SEEN_S

    def _are_together(self) -> bool:
        """Whether the latest world is whole, and one of the agents that run now: not of one that has just left for another."""
        world = self.net.journal.whole_world(len(self.slots)) or []
        return {worker["node"] for worker in world} == {slot.name for slot in self.slots}

    def _completed_at(self) -> float:
        return float(max(worker["began"] for worker in self.net.journal.generations()[-1]))

    def _pass(self, wait_s: float) -> None:
        until = clock() + wait_s
        self.until(lambda: clock() >= until, wait_s + 10, "time to pass")

    def _fault(self, name: str) -> None:
        kind = KINDS[name]
        where, share, again_s = (self._chance.random() for _ in range(3))
        own = random.Random(self._chance.random())  # whatever it draws, the schedule goes on as the seed has it
        self.until(lambda: any(map(kind.may, self.slots)), LEAVING_S + NO_WORLD_S, f"somebody for {name!r}")
        able = [slot for slot in self.slots if kind.may(slot)]
        slot = able[int(where * len(able))]
        length_s = min(0.5, kind.longest_s) + share * max(0.0, kind.longest_s - 0.5) if kind.longest_s else 0.0
        self.happened.append(Happened(clock(), name, slot.name, length_s))
        print(f"{self.happened[-1].at - self._began:7.1f} s: {self.happened[-1]}")
        heal = kind.act(slot, length_s, own)
        if heal is not None:
            heapq.heappush(self._later, (clock() + length_s, next(self._serials), heal))
        slot.starts_at = max(slot.starts_at, clock() + LONGEST_ABSENCE_S * again_s)

    def _look(self) -> None:
        """Do what is due, read what was printed, start whoever has ended, and see that nobody did who was not made to."""
        while self._later and self._later[0][0] <= clock():
            heapq.heappop(self._later)[2]()
        for slot in self.slots:
            slot.drain()
            if not slot.node.agents or slot.agent.is_up:
                continue
            if not slot.is_ending and not slot.is_sick:
                slot.leave_console()
                code = slot.agent.process.returncode
                pytest.fail(f"{slot.name} ended by itself, with {code}, after {self.happened[-3:]}\n{slot.agent.text}")
            slot.is_ending = True
            if clock() >= slot.starts_at:
                slot.start()

    def _where_all_are(self) -> str:
        latest = self.net.journal.generations()[-1:]
        world = f"the latest world has {len(latest[0])} of {latest[0][0]['world_size']} workers" if latest else "no world"
        up = [slot.name for slot in self.slots if slot.is_up]
        return f"{world}; up: {up}; last: {[str(one) for one in self.happened[-5:]]}"
