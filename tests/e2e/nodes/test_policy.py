"""What becomes of a job after a failure, by its cause: given up at once, tried again, or tried again without the node."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.nodes.conftest import MEMBER, Job

from rallypoint import inspect

HOPELESS = 65
SEAT = re.compile(r"^rallyrun: generation \d+ started: (\d+) nodes?", re.MULTILINE)

# An agent whose clock is an hour behind those of the others.
AN_HOUR_BEHIND = """
import sys, time
now_s, now_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: now_s() - 3600, lambda: now_ns() - 3600 * 10**9
from rallypoint.cli import main as cli
sys.exit(cli.main(sys.argv[1:]))
"""
# However slow the machine, each comes to its error: none can be stopped before.
NO_MODULE = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"{sys.argv[1]}/deaf.{os.environ['RANK']}.{os.environ['RALLYPOINT_GENERATION']}", "w").close()
while sum(name.startswith("deaf.") for name in os.listdir(sys.argv[1])) < 4:
    time.sleep(0.01)
import a_module_that_nobody_has
"""
# At first nobody can be reached; then rank 1 fails alone; the third attempt succeeds.
FLAKY = """
import os, socket, sys
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0:
    socket.create_connection(("127.0.0.1", int(os.environ["CLOSED_PORT"])))
if attempt == 1 and os.environ["RANK"] == "1":
    raise ValueError("once in a while")
"""
# One rank of four fails in every third attempt or so, at another step each time.
ONE_IN_THREE = """
import os, random, sys
from rallypoint import worker
dice = random.Random(int(os.environ["RALLYPOINT_GENERATION"]) * 7919 + SEED)
fails, step = dice.random() < 1 / 3, dice.randrange(3)
for number in range(3):
    worker.progress(number)
    if fails and number == step and os.environ["RANK"] == "2":
        raise ValueError(f"not a number in step {number}")
"""


def world_sizes(node: Any) -> list[int]:
    return [int(size) for size in SEAT.findall(node.stderr)]


def test_p15_an_error_of_the_program_in_all_workers_ends_the_job_without_a_restart(
    start_rallyrun: Any, script: Any, tmp_path: Path, free_port: Callable[[], int]
):
    """P15, P48: on all nodes with the code that says so, though three restarts are left, and one clock is an hour behind."""
    job = Job(start_rallyrun, script(NO_MODULE, "train.py"), tmp_path, free_port())
    launcher = [sys.executable, script(AN_HOUR_BEHIND, "behind.py")]
    nodes = [job.start_host("--max-restarts", "3", nnodes="2"), job.start("--max-restarts", "3", nnodes="2", launcher=launcher)]
    assert [node.wait() for node in nodes] == [HOPELESS, HOPELESS]
    assert [world_sizes(node) for node in nodes] == [[2], [2]]
    for node in nodes:
        assert "all 4 workers raised the same error: ModuleNotFoundError" in node.stderr
        assert re.search(r"all workers failed so, [0-9.]+ s after their start: no restart can help", node.stderr)
    assert len(os.listdir(tmp_path)) >= 4


def test_p15_what_may_pass_is_tried_again(start_rallyrun: Any, script: Any, tmp_path: Path, free_port: Callable[[], int]):
    """P15: all workers fail alike, as nobody can be reached; then one does, alone; and the job succeeds."""
    job = Job(start_rallyrun, script(FLAKY, "train.py"), tmp_path, free_port())
    env = {"CLOSED_PORT": str(free_port())}
    nodes = [start("--max-restarts", "3", nnodes="2", env=env) for start in (job.start_host, job.start)]
    assert [node.wait() for node in nodes] == [0, 0]
    assert [world_sizes(node) for node in nodes] == [[2, 2, 2], [2, 2, 2]]


@pytest.mark.parametrize("seed", [13, 10])  # it fails once, and three times in a row
def test_p15_a_rank_that_fails_one_time_in_three_does_not_keep_the_job_from_its_end(
    start_rallyrun: Any, script: Any, tmp_path: Path, free_port: Callable[[], int], seed: int
):
    """P15: the same error at the same place, but of one rank only, which has made progress: it is tried again."""
    job = Job(start_rallyrun, script(ONE_IN_THREE.replace("SEED", str(seed)), "train.py"), tmp_path, free_port())
    flags = ("--max-restarts", "9")
    nodes = [start(*flags, nnodes="2", conf="restart_backoff=0") for start in (job.start_host, job.start)]
    assert [node.wait() for node in nodes] == [0, 0]
    assert len(world_sizes(nodes[0])) > 1, nodes[0].stderr
    for node in nodes:
        assert "ValueError: not a number in step" in nodes[0].stderr
        assert "no restart can help" not in node.stderr


def test_p15_a_worker_ends_the_job_for_good(job: Job):
    """P15: it knows that no restart will help, and its words are told on all nodes."""
    nodes = [start("--max-restarts", "3", nnodes="2") for start in (job.start_host, job.start)]
    for node in nodes:
        node.wait_for_world(4)
    job.order(3, "from rallypoint import worker; worker.fail('no data set at /data', retry=False)")
    assert [node.wait() for node in nodes] == [HOPELESS, HOPELESS]
    for node in nodes:
        assert "rank 3: no data set at /data: no restart can help" in node.stderr


def test_p15_attempts_without_progress_are_counted(job: Job):
    """P15: the second attempt fails at an earlier step than the first, and the third does not come."""
    flags = ("--max-restarts", "9", "--max-no-progress", "1")
    nodes = [start(*flags, nnodes="2", workers=1, conf="restart_backoff=0") for start in (job.start_host, job.start)]
    for step in (7, 6):
        for node in nodes:
            node.wait_for_world(2)
        job.order(0, f"from rallypoint import worker; worker.progress({step}); raise OSError('disk')")
        if step == 7:
            nodes[0].agent.wait_for(lambda: world_sizes(nodes[0]) == [2, 2])
    assert [node.wait() for node in nodes] == [HOPELESS, HOPELESS]
    assert "the last attempt has not come past step 7 (--max-no-progress 1)" in nodes[1].stderr


# --- bad nodes -------------------------------------------------------------------------------------------------------------


def start_with_spare(job: Job, *flags: str, env: dict[str, str]) -> list[Any]:
    """Two nodes, of which the second is bad, and a spare that is there from the beginning."""
    options = {"nnodes": "2", "conf": "last_call_timeout=0,close_timeout=1"}
    nodes = [job.start_host("--node-rank", "0", *flags, **options), job.start("--node-rank", "1", *flags, env=env, **options)]
    nodes[0].wait_for_line("generation 1 started: ")
    return [*nodes, job.start("--node-rank", "2", *flags, **options)]


def test_m13_a_spare_takes_the_seat_of_a_node_that_always_fails(
    start_rallyrun: Any, script: Any, tmp_path: Path, free_port: Callable[[], int]
):
    """M13, P29: after its second failure, and the job succeeds; the one that was left out is not needed any more."""
    member = "import os\nif os.environ.get('FAILS'):\n    os._exit(7)\n" + MEMBER
    job = Job(start_rallyrun, script(member, "member.py"), tmp_path, free_port())
    good, bad, spare = start_with_spare(job, "--max-restarts", "9", env={"FAILS": "1"})
    for node in (good, spare):
        node.agent.wait_for(lambda node=node: "left out, because their workers keep failing: rank1 for " in node.stderr)
        node.wait_for_world(4, since=spare.began_at)
    job.finish()
    assert [node.wait() for node in (good, spare, bad)] == [0, 0, 0]


def test_p29_a_worker_has_its_node_left_out(job: Job):
    """P29: at once, for as long as can be, without a restart being spent; a spare takes the seat."""
    good, bad, spare = start_with_spare(job, "--max-restarts", "0", env={})
    spare.agent.wait_for(lambda: len(inspect.status().nodes) == 3)  # they answer through the store
    for node in (good, bad):
        node.wait_for_world(4)
    ordered_at = time.monotonic()
    job.order(2, "from rallypoint import worker; worker.exclude_node('gpu 3 has bad memory')")
    for node in (good, spare):
        starts = node.wait_for_world(4, since=ordered_at)
        assert {start.restarts for start in starts} == {0}
        assert "node rank1 is left out: gpu 3 has bad memory; membership change 1" in node.stderr
    job.finish()
    assert [node.wait() for node in (good, spare, bad)] == [0, 0, 0]


# --- preflight -------------------------------------------------------------------------------------------------------------

SMI = '#!/bin/sh\ncat "$0.says"\nexit $(cat "$0.code")\n'
LOST = "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost."


class Machine:
    """One with a device of its own, as far as nvidia-smi tells."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.smi = folder / "nvidia-smi"
        self.smi.write_text(SMI)
        self.smi.chmod(0o755)
        self.env = {"PATH": f"{folder}:{os.environ['PATH']}"}
        self.be_well()

    def be_well(self) -> None:
        Path(f"{self.smi}.says").write_text("0, NVIDIA H200, 0, [N/A]\n")
        Path(f"{self.smi}.code").write_text("0")

    def lose_gpu(self) -> None:
        Path(f"{self.smi}.says").write_text(f"{LOST}\n")
        Path(f"{self.smi}.code").write_text("15")


CHECKED = {"nnodes": "2", "conf": "last_call_timeout=0,close_timeout=1"}


def test_p29_a_machine_with_a_bad_gpu_never_gets_a_seat(job: Job, tmp_path: Path):
    """P29: it says why and waits outside, and the job runs with the others."""
    machines = [Machine(tmp_path / f"machine{rank}") for rank in range(3)]
    machines[1].lose_gpu()
    good = job.start_host("--node-rank", "0", "--preflight", "gpu", env=machines[0].env, **CHECKED)
    bad = job.start("--node-rank", "1", "--preflight", "gpu,memory=1", env=machines[1].env, **CHECKED)
    bad.wait_for_line(f"this machine is not fit to run workers: gpu: {LOST}")
    other = job.start("--node-rank", "2", "--preflight", "gpu", env=machines[2].env, **CHECKED)
    for node in (good, other):
        node.wait_for_world(4)
    bad.wait_for_line(f"; not fit: rank1 (gpu: {LOST})")
    (seen,) = (node for node in inspect.status().nodes if node.pid == bad.agent.pid)
    assert seen.why == f"this machine is not fit: gpu: {LOST}"
    job.finish()
    assert [node.wait() for node in (good, other, bad)] == [0, 0, 0]
    assert [world_sizes(node) for node in (good, other, bad)] == [[2], [2], []]


def test_p29_a_machine_that_went_bad_loses_its_seat_to_a_spare_and_gets_one_again_when_it_is_well(job: Job, tmp_path: Path):
    """P29: it is checked again when its worker has failed; after a pause it passes, and takes the seat of one that is lost."""
    machines = [Machine(tmp_path / f"machine{rank}") for rank in range(3)]
    flags = ("--preflight", "gpu", "--max-restarts", "1")
    nodes = [job.start_host("--node-rank", "0", *flags, env=machines[0].env, **CHECKED)]
    nodes.append(job.start("--node-rank", "1", *flags, env=machines[1].env, **CHECKED))
    good, bad = nodes
    bad.wait_for_world(4)
    spare = job.start("--node-rank", "2", *flags, env=machines[2].env, **CHECKED)
    spare.agent.wait_for(lambda: len(inspect.status().nodes) == 3)
    good.wait_for_world(4)
    machines[1].lose_gpu()
    ordered_at = time.monotonic()
    job.order(2, "raise RuntimeError('CUDA error: unspecified launch failure')")
    for node in (good, spare):
        node.wait_for_world(4, since=ordered_at)
    bad.wait_for_line("not fit to run workers: gpu: ")
    assert world_sizes(bad) == [2]
    machines[1].be_well()
    bad.wait_for_line("this machine is fit to run workers")
    killed_at = spare.kill()
    for node in (good, bad):
        node.wait_for_world(4, since=killed_at)
    job.finish()
    assert [node.wait() for node in (good, bad)] == [0, 0]


def test_p29_a_node_whose_ways_are_too_slow_waits_outside_and_a_spare_takes_its_seat(job: Job, script: Any):
    """P29, P48: they are measured between real nodes. No way is as quick as this one wants its own to be; the others want little.
    The spare's clock is an hour behind, which is told, and keeps it from nothing.
    """
    options = {"nnodes": "3", "conf": "last_call_timeout=0,close_timeout=1"}
    little, much = ("--preflight", "network=10Kbit"), ("--preflight", "network=1000000Gbit")
    nodes = [job.start_host("--node-rank", "0", *little, **options), job.start("--node-rank", "1", *little, **options)]
    nodes[0].wait_for_line("waiting: 2 of 3 nodes; here: rank0, rank1")
    slow = job.start("--node-rank", "2", *much, **options)
    slow.wait_for_line("this machine is not fit to run workers: network: ")
    assert re.search(r"rank[01]: [0-9.]+ [KMGT]bit/s there, [0-9.]+ [KMGT]bit/s back, less than 1000 Tbit/s", slow.stderr)
    assert world_sizes(nodes[0]) == []
    launcher = [sys.executable, script(AN_HOUR_BEHIND, "behind.py")]
    nodes.append(job.start("--node-rank", "3", *little, launcher=launcher, **options))
    for node in nodes:
        node.wait_for_world(6)
    assert re.search(r"clocks: this node's is 3[56]\d\d\.\d s behind rank", nodes[2].stderr), nodes[2].stderr
    job.finish()
    assert [node.wait() for node in [*nodes, slow]] == [0, 0, 0, 0]
    assert world_sizes(slow) == []
