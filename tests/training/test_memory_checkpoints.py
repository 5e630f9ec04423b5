"""Training whose only checkpoints are in the agents' memory, while workers and whole agents are killed at random."""

from __future__ import annotations

import itertools
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import StartRallyrun
from tests.etcd_cluster import Cluster, start_cluster

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

NODES = 2
STEPS_BETWEEN = 5
PRELOADED = "torch.distributed,torch._dynamo"  # the second is imported by the first optimizer, and takes as long as torch

# It trains until the test says that it is enough, to a step that all ranks learn from rank 0; and then once more, undisturbed.
TRAINING = """
    import os, pathlib, sys
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from rallypoint.worker import checkpoint

    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), pathlib.Path(sys.argv[1])

    def batch(step):
        return torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + rank))

    def prepare():
        torch.manual_seed(7)
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
        for _ in range(2):  # so that DDP sums in the same order whenever a step is done
            model(batch(0)).sum().backward()
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def train(model, optimizer, step):
        inputs = batch(step)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.square().sum(1, keepdim=True).sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def total(loss):
        dist.all_reduce(loss)
        return loss.item().hex()

    model, optimizer = prepare()
    found = checkpoint.load()
    step, loss = -1, torch.zeros(())
    if found is not None:
        model.load_state_dict(found.state["model"])
        optimizer.load_state_dict(found.state["optimizer"])
        step, loss = found.step, found.state["loss"]
    print(f"BEGIN {os.environ['RALLYPOINT_GENERATION']} {rank} {step + 1} {os.getpid()}", flush=True)
    while True:
        limit = torch.tensor([int(last.read_text()) if rank == 0 and last.exists() else 10**9])
        dist.broadcast(limit, 0)
        if step >= limit.item():
            break
        step += 1
        loss = train(model, optimizer, step)
        checkpoint.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loss": loss})
        print(f"DONE {os.environ['RALLYPOINT_GENERATION']} {rank} {step}", flush=True)
    disturbed = total(loss)
    model, optimizer = prepare()
    for one in range(step + 1):
        loss = train(model, optimizer, one)
    print(f"END {rank} {step} {disturbed} {total(loss)}", flush=True)
    dist.destroy_process_group()
"""


class Told:
    """What the workers of all agents have said so far."""

    def __init__(self, agents: list[Any], world: int) -> None:
        self._world = world
        text = "".join(agent.stdout for agent in agents)
        self.begins = [tuple(map(int, one)) for one in re.findall(r"^BEGIN (\d+) (\d+) (\d+) (\d+)\n", text, re.MULTILINE)]
        self.done = [tuple(map(int, one)) for one in re.findall(r"^DONE (\d+) (\d+) (\d+)\n", text, re.MULTILINE)]
        self.ends = re.findall(r"^END (\d+) (\d+) (\S+) (\S+)\n", text, re.MULTILINE)

    @property
    def generation(self) -> int:
        return max((one[0] for one in self.begins), default=0)

    def steps_of(self, generation: int) -> int:
        """How many steps all ranks have done in it."""
        return min(sum(one[:2] == (generation, rank) for one in self.done) for rank in range(self._world))

    def first_of(self, generation: int) -> int:
        (first,) = {one[2] for one in self.begins if one[0] == generation}
        return first

    def pids(self) -> list[int]:
        return [one[3] for one in self.begins if one[0] == self.generation]

    @property
    def has_gone_on(self) -> bool:
        """Every rank of the newest generation has begun, and all have done some steps."""
        begun = {one[1] for one in self.begins if one[0] == self.generation}
        return len(begun) == self._world and self.steps_of(self.generation) >= STEPS_BETWEEN


class Job:
    """Agents that meet in etcd, so that any of them can be killed."""

    def __init__(self, start: StartRallyrun, cluster: Cluster, program: Path, folder: Path, kills: int, workers: int) -> None:
        self._start, self._world, self._last = start, NODES * workers, folder / "last step"
        where = ["--rdzv-backend", "etcd", "--rdzv-endpoint", cluster.endpoint, "--rdzv-id", "training"]
        conf = ["--rdzv-conf", "last_call_timeout=0.3,keep_alive_interval=0.5,fence=3", "--local-addr", "127.0.0.1"]
        memory = ["--checkpoint-memory", "64M", "--checkpoint-copies", "1", "--preload", PRELOADED]
        flags = ["--nnodes", str(NODES), "--nproc-per-node", str(workers), "--max-restarts", str(kills), "--restart-backoff", "0"]
        self._command = [*flags, *where, *conf, *memory, program, self._last]
        self.agents: list[Any] = []
        self.running = [self._add() for _ in range(NODES)]

    def _add(self) -> Any:
        self.agents.append(self._start(self._command, {"GLOO_SOCKET_IFNAME": "lo"}))
        return self.agents[-1]

    def told(self) -> Told:
        return Told(self.agents, self._world)

    def wait_for(self, condition: Callable[[Told], bool]) -> None:
        self.running[0].wait_for(lambda: condition(self.told()), 120)

    def kill(self, chance: random.Random, an_agent: bool) -> None:
        self.wait_for(lambda told: told.has_gone_on)
        before = self.told().generation
        if an_agent:
            victim = self.running.pop(chance.randrange(NODES))
            victim.process.kill()
            self.running.append(self._add())
        else:
            os.kill(chance.choice(self.told().pids()), 9)
        self.wait_for(lambda told: told.generation > before)

    def finish(self) -> Told:
        self.wait_for(lambda told: told.has_gone_on)
        self._last.write_text(str(self.told().first_of(self.told().generation) + 4 * STEPS_BETWEEN))
        assert [agent.wait(120) for agent in self.running] == [0] * NODES, self.running[0].stderr
        return self.told()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with start_cluster(tmp_path / "etcd") as cluster:
        yield cluster


@pytest.mark.parametrize(("kills", "workers"), [(2, 1), pytest.param(20, 2, marks=pytest.mark.soak)])
def test_the_loss_is_that_of_a_training_that_nobody_disturbed(
    cluster: Cluster, start_rallyrun: StartRallyrun, script: Callable[..., Path], tmp_path: Path, kills: int, workers: int
) -> None:
    """At most one step that all had done is done again each time, and nothing is written to a file."""
    chance = random.Random(seed := random.randrange(10**9))
    print(f"seed {seed}")
    job = Job(start_rallyrun, cluster, script(TRAINING), tmp_path, kills, workers)
    for turn in range(kills):
        job.kill(chance, an_agent=turn % 2 == 1)
    told = job.finish()
    generations = sorted({one[0] for one in told.begins})
    assert len(generations) >= kills + 1
    for before, after in itertools.pairwise(generations):
        by_all = told.first_of(before) + told.steps_of(before) - 1
        assert told.first_of(after) >= by_all, f"more than one is done again; seed {seed}"
    assert len(told.ends) == NODES * workers
    for _, _, disturbed, undisturbed in told.ends:
        assert disturbed == undisturbed, f"seed {seed}"
    written = {path.name for path in tmp_path.rglob("*") if path.is_file() and tmp_path / "etcd" not in path.parents}
    told_by_launchers = {"events.jsonl", "stderr_tail.log"}
    assert written - told_by_launchers == {"worker.py", "last step", "stdout.txt", "stderr.txt"}
