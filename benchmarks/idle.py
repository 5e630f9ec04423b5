"""What the launcher costs while nothing happens: processor time of the launcher and its helpers, per second.

One node has nobody to talk to. Of two nodes one hosts the store, and both keep their leases.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.contestants import TORCHRUN, Contestant, in_turn, launchers
from benchmarks.figures import Figure, at_most
from benchmarks.jobs import cpu_time_ms, launcher_processes, sleepers
from benchmarks.nodes import node_command, running_agent, wait_for_world
from benchmarks.predecessor import launchers_and_predecessor, predecessor
from benchmarks.rendezvous import free_port

__all__ = ["measure"]

WORKERS = 4
ROUNDS = 3
SETTLE_S = 1.0
WINDOW_S = 10.0

Samples = dict[str, list[float]]


def measure() -> list[Figure]:
    one, two = _samples(launchers_and_predecessor(), _one_node), _samples([*launchers()[:1], *predecessor()], _two_nodes)
    return [
        Figure("idle: processor time of launcher and helpers", "ms/s", one, (at_most(0.3, "ms/s"),)),
        Figure("idle: processor time of two nodes' launchers and helpers", "ms/s", two),
    ]


def _samples(contestants: list[Contestant], sample: Callable[[Contestant], float]) -> Samples:
    samples: Samples = {contestant.name: [] for contestant in contestants}
    for turn in range(ROUNDS):
        for contestant in in_turn(contestants, turn):
            if contestant.name != TORCHRUN or turn == 0:  # it looks ten times a second, each time alike
                samples[contestant.name].append(sample(contestant))
    return samples


def _one_node(contestant: Contestant) -> float:
    with sleepers(contestant, WORKERS) as job:
        workers = {report.pid for report in job.reports(WORKERS)}
        return _cost([job.process.pid], workers)


def _two_nodes(contestant: Contestant) -> float:
    with tempfile.TemporaryDirectory() as folder:
        starts = Path(folder)
        command = node_command(contestant, free_port(), starts)
        with running_agent(command) as host:
            wait_for_world(starts, 1, 0.0)
            with running_agent(command) as other:
                wait_for_world(starts, 2, 0.0)
                workers = {int(path.suffix[1:]) for path in starts.iterdir()}
                return _cost([host.pid, other.pid], workers)


def _cost(agents: list[int], workers: set[int]) -> float:
    time.sleep(SETTLE_S)
    pids = [pid for agent in agents for pid in launcher_processes(agent, workers)]
    before, began = cpu_time_ms(pids), time.monotonic()
    time.sleep(WINDOW_S)
    return (cpu_time_ms(pids) - before) / (time.monotonic() - began)
