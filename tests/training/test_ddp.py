"""Training that is killed, again and again, ends where undisturbed training ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_port

pytestmark = pytest.mark.torch

STEPS_PER_KILL = 40
FIRST_STEPS = 10  # of those, before the kill
PRELOADED = "torch.distributed,torch._dynamo"  # the second is imported by the first optimizer, and takes as long as torch


class Job:
    """Two nodes; the first hosts the coordination store, and lives."""

    def __init__(self, launch: Any, program: Path, kills: int, workers: int) -> None:
        self._launch, self._program, self.workers = launch, program, workers
        self.steps, self._worker_kills = STEPS_PER_KILL * (2 * kills + 1), kills
        self._port = free_port()
        self.folder = launch.folder / "disturbed"
        self.folder.mkdir()
        self.host = self.start_node()
        self.host.wait_for(lambda: "hosts the coordination store" in self.host.printed)
        self.other = self.start_node()

    def start_node(self) -> Any:
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--local-addr", "127.0.0.1"]
        size = ["--nnodes", "2", "--nproc-per-node", str(self.workers)]
        restarts = ["--max-restarts", str(self._worker_kills), "--restart-backoff", "0", "--preload", PRELOADED]
        return self._launch.rallyrun(*meeting, *size, *restarts, self._program, self.folder, str(self.steps))

    def wait_for_steps(self, generation: int) -> None:
        """Until this generation, counted from 0, has done some steps, or found them done."""
        step = STEPS_PER_KILL * generation + FIRST_STEPS

        def has_done() -> bool:
            told = [one for one in self.host.told() if one["rank"] == 0]
            pids = list(dict.fromkeys(one["pid"] for one in told))
            of_generation = [one for one in told if pids[generation:] and one["pid"] == pids[generation]]
            return any(one.get("step", one.get("resumed")) >= step for one in of_generation)

        self.host.wait_for(has_done)

    def kill_worker(self) -> None:
        """That which was the last to say anything on the other node."""
        os.kill(self.other.told()[-1]["pid"], signal.SIGKILL)

    def replace_node(self) -> None:
        self.other.kill_node()
        self.other = self.start_node()

    def finish(self) -> list[int]:
        (self.folder / "finish").touch()
        return [self.host.wait(), self.other.wait()]

    def resumed(self) -> list[int]:
        """From which steps training went on, by generation."""
        return [told["resumed"] for told in self.host.told() if told["rank"] == 0 and "resumed" in told]


def result_of_own_run(launch: Any, programs: Path, job: Job) -> str:
    """That of the same ranks on one node, which nobody kills."""
    folder = launch.folder / "undisturbed"
    folder.mkdir()
    (folder / "finish").touch()
    ranks = str(2 * job.workers)
    own = launch.rallyrun("--standalone", "--nproc-per-node", ranks, programs / "ddp_train.py", folder, str(job.steps))
    assert own.wait() == 0
    return (folder / "result.killed").read_text()


@pytest.mark.parametrize(
    ("kills", "workers", "has_own_run"),
    [
        pytest.param(1, 1, False, marks=pytest.mark.timeout(180)),
        pytest.param(10, 2, True, marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def test_killed_training_ends_with_the_loss_of_undisturbed_training(
    launch: Any, programs: Path, kills: int, workers: int, has_own_run: bool
):
    """Workers and whole nodes are killed in the midst of steps; the loss and all parameters are the same, bit for bit.

    Loading torch for more workers takes longer than all training, so it is the last generation that trains undisturbed too.
    """
    job = Job(launch, programs / "ddp_train.py", kills, workers)
    for turn in range(2 * kills):
        job.wait_for_steps(turn)
        if turn % 2 == 0:
            job.kill_worker()
        else:
            job.replace_node()
    job.wait_for_steps(2 * kills)
    assert job.finish() == [0, 0]
    print(f"training went on from the steps {job.resumed()}")
    assert len(job.resumed()) == 2 * kills + 1
    killed, undisturbed = ((job.folder / f"result.{name}").read_text() for name in ("killed", "undisturbed"))
    assert killed == undisturbed
    assert not has_own_run or killed == result_of_own_run(launch, programs, job)
