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

NODES, WORKERS = 2, 2
STEPS_BETWEEN = 5

# It trains until the test says that it is enough, to a step that all ranks learn from rank 0.
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

    torch.manual_seed(7)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
    for _ in range(2):  # so that DDP sums in the same order whenever a step is done
        model(batch(0)).sum().backward()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
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
        inputs = batch(step)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.square().sum(1, keepdim=True).sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpoint.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loss": loss.detach()})
        print(f"DONE {os.environ['RALLYPOINT_GENERATION']} {rank} {step}", flush=True)
    dist.all_reduce(loss)
    print(f"END {rank} {step} {loss.item().hex()}", flush=True)
    dist.destroy_process_group()
"""


class Told:
    """What the workers of all agents have said so far."""

    def __init__(self, agents: list[Any]) -> None:
        text = "".join(agent.stdout for agent in agents)
        self.begins = [tuple(map(int, one)) for one in re.findall(r"^BEGIN (\d+) (\d+) (\d+) (\d+)\n", text, re.MULTILINE)]
        self.done = [tuple(map(int, one)) for one in re.findall(r"^DONE (\d+) (\d+) (\d+)\n", text, re.MULTILINE)]
        self.ends = re.findall(r"^END (\d+) (\d+) (\S+)\n", text, re.MULTILINE)

    @property
    def generation(self) -> int:
        return max((one[0] for one in self.begins), default=0)

    def steps_of(self, generation: int) -> int:
        """How many steps all ranks have done in it."""
        return min(sum(one[:2] == (generation, rank) for one in self.done) for rank in range(NODES * WORKERS))

    def first_of(self, generation: int) -> int:
        (first,) = {one[2] for one in self.begins if one[0] == generation}
        return first

    def pids(self) -> list[int]:
        return [one[3] for one in self.begins if one[0] == self.generation]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with start_cluster(tmp_path / "etcd") as cluster:
        yield cluster


Run = Callable[[random.Random | None, int, int], Told]


@pytest.fixture
def run(cluster: Cluster, start_rallyrun: StartRallyrun, script: Callable[..., Path], tmp_path: Path) -> Run:
    program = script(TRAINING)

    def train(chance: random.Random | None, kills: int, last_step: int) -> Told:
        """To the last step, or, where it is disturbed, a little farther than the last kill; the end's step is in what is told."""
        last = tmp_path / f"last step {kills}"
        where = ["--rdzv-backend", "etcd", "--rdzv-endpoint", cluster.endpoint, "--rdzv-id", f"training-{kills}"]
        conf = ["--rdzv-conf", "last_call_timeout=0.3,keep_alive_interval=0.5,fence=3", "--local-addr", "127.0.0.1"]
        memory = ["--checkpoint-memory", "64M", "--checkpoint-copies", "1", "--preload", "torch"]
        flags = ["--nnodes", str(NODES), "--nproc-per-node", str(WORKERS), "--max-restarts", str(kills), "--restart-backoff", "0"]
        command = [*flags, *where, *conf, *memory, program, last]
        env = {"GLOO_SOCKET_IFNAME": "lo"}
        agents = [start_rallyrun(command, env) for _ in range(NODES)]
        running = list(agents)
        if chance is None:
            last.write_text(str(last_step))
        for _ in range(kills):
            assert chance is not None
            running[0].wait_for(lambda: _has_gone_on(agents), 120)
            if chance.random() < 0.5:
                os.kill(chance.choice(Told(agents).pids()), 9)
            else:
                victim = running.pop(chance.randrange(NODES))
                victim.process.kill()
                running.append(start_rallyrun(command, env))
                agents.append(running[-1])
            before = Told(agents).generation
            running[0].wait_for(lambda before=before: Told(agents).generation > before, 120)
        if chance is not None:
            running[0].wait_for(lambda: _has_gone_on(agents), 120)
            last.write_text(str(Told(agents).first_of(Told(agents).generation) + 4 * STEPS_BETWEEN))
        assert [agent.wait(120) for agent in running] == [0, 0], running[0].stderr
        written = [path for path in tmp_path.rglob("*") if path.is_file() and "rank" in path.name]
        assert written == [], "nothing was written to a file"
        return Told(agents)

    return train


def _has_gone_on(agents: list[Any]) -> bool:
    """Every rank of the newest generation has begun, and all have done some steps."""
    told = Told(agents)
    begun = {one[1] for one in told.begins if one[0] == told.generation}
    return len(begun) == NODES * WORKERS and told.steps_of(told.generation) >= STEPS_BETWEEN


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.soak)])
def test_the_loss_is_that_of_a_training_that_nobody_disturbed(run: Run, kills: int) -> None:
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    disturbed = run(random.Random(seed), kills, 0)
    generations = sorted({one[0] for one in disturbed.begins})
    assert len(generations) >= kills + 1
    for before, after in itertools.pairwise(generations):
        by_all = disturbed.first_of(before) + disturbed.steps_of(before) - 1
        assert disturbed.first_of(after) >= by_all, f"of those that all had done, at most one is done again; seed {seed}"
    assert len(disturbed.ends) == NODES * WORKERS
    ((step, loss),) = {(step, loss) for _, step, loss in disturbed.ends}
    undisturbed = run(None, 0, int(step))
    assert {loss for _, _, loss in undisturbed.ends} == {loss}, f"seed {seed}"
