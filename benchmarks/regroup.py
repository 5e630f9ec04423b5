"""Two agents on one machine, 1:2 nodes: a node that joins, and one that is lost, in three ways.

Torchrun is not measured beside it: with torch 2.13 a joining node ends both agents after a minute, and a killed one is never
noticed. Here a machine falls silent when all of its processes stand still; tests/network cuts real ones off.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.contestants import Contestant, in_turn, launchers
from benchmarks.figures import Figure, at_most
from benchmarks.jobs import launcher_processes
from benchmarks.nodes import node_command, running_agent, wait_for_world
from benchmarks.predecessor import predecessor
from benchmarks.rendezvous import free_port

__all__ = ["measure"]

ROUNDS = 5
WARDEN = "rally-warden"
JOIN = "second agent's exec to the larger world running"

Samples = dict[str, list[float]]


def measure() -> list[Figure]:
    contestants = [*launchers()[:1], *predecessor()]
    samples: dict[str, Samples] = {name: {one.name: [] for one in contestants} for name in (JOIN, *LOSSES)}
    for turn in range(ROUNDS):
        for name, (lose, _) in LOSSES.items():
            for contestant in in_turn(contestants, turn):
                join_s, loss_s = _round(contestant, lose)
                samples[JOIN][contestant.name].append(join_s)
                samples[name][contestant.name].append(loss_s)
    limits = {JOIN: 1.0, **{name: limit_s for name, (_, limit_s) in LOSSES.items()}}
    return [Figure(f"regroup: {name}", "s", values, (at_most(limits[name], "s"),)) for name, values in samples.items()]


def _round(contestant: Contestant, lose: Callable[[int], None]) -> tuple[float, float]:
    """From the second agent's start to the larger world, and from its loss to the smaller one.

    Each is a job of its own: a node that dies again and again is held back.
    """
    with tempfile.TemporaryDirectory() as folder:
        starts = Path(folder)
        command = node_command(contestant, free_port(), starts)
        with running_agent(command):
            wait_for_world(starts, 1, 0.0)
            began = time.monotonic()
            with running_agent(command) as second:
                larger_at = wait_for_world(starts, 2, began)
                lost_at = time.monotonic()
                lose(second.pid)
                return larger_at - began, wait_for_world(starts, 1, lost_at) - lost_at


# --- how a node is lost ----------------------------------------------------------------------------------------------------


def _kill_agent(agent: int) -> None:
    os.kill(agent, signal.SIGKILL)


def _kill_agent_and_warden(agent: int) -> None:
    warden = next(pid for pid in launcher_processes(agent, set()) if Path(f"/proc/{pid}/comm").read_text().strip() == WARDEN)
    for pid in (agent, warden):
        os.kill(pid, signal.SIGKILL)


def _freeze(agent: int) -> None:
    for pid in launcher_processes(agent, set()):
        os.kill(pid, signal.SIGSTOP)


LOSSES = {
    "kill -9 of an agent to the smaller world running": (_kill_agent, 0.5),
    "kill -9 of an agent and its warden to the smaller world running": (_kill_agent_and_warden, 3.5),
    "a machine's last sign of life to the smaller world running": (_freeze, 3.5),
}
