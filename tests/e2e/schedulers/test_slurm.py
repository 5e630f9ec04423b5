"""Real jobs under a real Slurm, without a flag that Slurm could have said. F29."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.schedulers.slurm_cluster import NODES, Slurm, start_slurm

pytestmark = [pytest.mark.root, pytest.mark.xdist_group("slurm"), pytest.mark.timeout(600)]


@pytest.fixture
def slurm(open_folder: Path, wait_until: Any) -> Iterator[Slurm]:
    with start_slurm(open_folder, wait_until) as cluster:
        yield cluster


def worlds(text: str) -> list[tuple[int, int, int]]:
    """Rank, size and node of each worker that has started, by rank."""
    return sorted((int(rank), int(size), int(node)) for rank, size, node in re.findall(r"rank (\d+) of (\d+) node (\d+)", text))


def pids(text: str) -> list[int]:
    return [int(pid) for pid in re.findall(r" pid (\d+)", text)]


def test_f29_srun_needs_no_flags(slurm: Slurm):
    """F29: on one node and on several; ranks follow Slurm's numbers of the nodes, and a launcher too many is refused."""
    for nodes in (1, NODES):
        code, out = slurm.run("srun", f"-N{nodes}", "rallyrun", "--nproc-per-node", "2", slurm.worker)
        assert code == 0, out
        assert worlds(out) == [(rank, 2 * nodes, rank // 2) for rank in range(2 * nodes)]
    code, out = slurm.run("srun", "-N2", "--ntasks-per-node=2", "rallyrun", slurm.worker)
    assert code == 2, out
    assert "use `srun --ntasks-per-node=1 rallyrun --nproc-per-node 2 ...`" in out
    assert worlds(out) == []


def test_jobs_side_by_side_and_an_array_meet_each_its_own(slurm: Slurm, wait_until: Any):
    """Two jobs at once on the same nodes, and an array of eight: ports and run IDs are those of the job."""
    script = f"srun rallyrun --nproc-per-node 1 {slurm.worker}"
    jobs = [slurm.batch(f"{script} {slurm.folder}/over", f"-N{NODES}", "-n", NODES) for _ in range(2)]
    array = slurm.batch(script, "-N2", "-n2", "--array=1-8", "--output", slurm.folder / "out.%A.%a")
    names = [*jobs, *(f"{array}.{index}" for index in range(1, 9))]
    sizes = [NODES] * 2 + [2] * 8
    wait_until(lambda: all(len(worlds(slurm.out(name))) == size for name, size in zip(names, sizes, strict=True)), 100)
    for name, size in zip(names, sizes, strict=True):
        assert worlds(slurm.out(name)) == [(rank, size, rank) for rank in range(size)], slurm.out(name)
    assert [slurm.state(job) for job in jobs] == ["RUNNING"] * 2
    (slurm.folder / "over").touch()
    wait_until(lambda: slurm.run("squeue", "-h")[1] == "")
    endpoints = {re.findall(r"meeting at (\S+)", slurm.out(name))[0] for name in names}
    assert len(endpoints) == len(names)


def test_f29_components_and_a_range_of_nodes(slurm: Slurm, wait_until: Any):
    """F29: a step over all components of a heterogeneous job is one job; of `--nodes=2-4`, all that Slurm gave take part."""
    step = f"rallyrun --nproc-per-node 1 {slurm.worker}"
    components = slurm.batch(f"srun --het-group=0,1 {step}", "-N1", "-n1", ":", "-N2", "-n2")
    some = slurm.batch(f'echo "given $SLURM_JOB_NUM_NODES"; srun {step}', "--nodes=2-4", "--ntasks-per-node=1")
    wait_until(lambda: slurm.run("squeue", "-h")[1] == "", 100)
    assert worlds(slurm.out(components)) == [(rank, 3, rank) for rank in range(3)], slurm.out(components)
    given = int(re.findall(r"given (\d+)", slurm.out(some))[0])
    assert given in (2, 3)
    assert worlds(slurm.out(some)) == [(rank, given, rank) for rank in range(given)], slurm.out(some)


SAVES = """
import os, sys, time
from rallypoint import worker
folder, rank = sys.argv[1], os.environ["RANK"]
done = int(open(f"{folder}/saved.{rank}").read()) if os.path.exists(f"{folder}/saved.{rank}") else 0
os.write(1, f"rank {rank} of {os.environ['WORLD_SIZE']} node {os.environ['GROUP_RANK']} from step {done}\\n".encode())
for step in range(done, 1_000_000):
    if done and step == done + 10:
        break
    time.sleep(0.01)
    if worker.save_point(step):
        open(f"{folder}/saved.{rank}", "w").write(str(step + 1))
        worker.saved()
"""


def test_p17_a_job_that_is_preempted_is_requeued_and_goes_on_where_it_saved(slurm: Slurm, wait_until: Any):
    """P17: Slurm signals every process of all nodes; all ranks save at one step, and the job ends with the code for a requeue."""
    (slurm.folder / "saves.py").write_text(SAVES)
    done = slurm.run("rallypoint", "init", "slurm", "--nodes", 2, "--gpus", 0, slurm.folder / "saves.py", slurm.folder)
    script = done[1].replace("srun rallyrun", "srun rallyrun --nproc-per-node 2")
    job = slurm.batch(script.replace("code=$?", "code=$?; echo srun ended with $code"))
    wait_until(lambda: slurm.out(job).count("from step 0") == 4)
    assert slurm.run("scancel", "--signal=USR1", job)[0] == 0
    wait_until(lambda: "srun ended with 75" in slurm.out(job))
    saved = {(slurm.folder / f"saved.{rank}").read_text() for rank in range(4)}
    assert len(saved) == 1, saved
    (step,) = saved

    # Slurm lets two minutes pass before it starts it again. Nodes remember for a second or so that they are to refuse this job.
    wait_until(lambda: slurm.state(job) == "PENDING")
    assert slurm.run("scontrol", "update", f"jobid={job}", "starttime=now+3")[0] == 0
    wait_until(lambda: slurm.out(job).count("srun ended with") == 2 or slurm.state(job) == "FAILED", 100)
    assert "srun ended with 0" in slurm.out(job), f"{slurm.state(job)}: {slurm.out(job)}"
    assert slurm.out(job).count(f"from step {step}\n") == 4
    assert f"run ID slurm-{job}.0-r1" in slurm.out(job)


def test_p17_the_launcher_of_the_first_node_requeues_the_job(slurm: Slurm, wait_until: Any, clear_after_kill: Callable[[], None]):
    """P17: with `--requeue` the script needs to do nothing; the others have left by then. Slurm kills who still clears away."""
    clear_after_kill()
    (slurm.folder / "saves.py").write_text(SAVES)
    flags = "--nproc-per-node 1 --drain-signals USR1 --drain-grace 80 --requeue"
    job = slurm.batch(f"srun rallyrun {flags} {slurm.folder}/saves.py {slurm.folder}", f"-N{NODES}", "-n", NODES, "--requeue")
    wait_until(lambda: slurm.out(job).count("from step 0") == NODES)
    assert slurm.run("scancel", "--signal=USR1", job)[0] == 0
    wait_until(lambda: slurm.restarts(job) == 1)
    assert len({(slurm.folder / f"saved.{rank}").read_text() for rank in range(NODES)}) == 1
    slurm.end_jobs(wait_until)


def test_a_node_that_dies_is_gone_on_without(
    slurm: Slurm, wait_until: Any, alive: Callable[[int], bool], clear_after_kill: Callable[[], None]
):
    """Without its slurmd nothing happens to a node's workers; with all that runs there, the others go on. scancel ends those."""
    clear_after_kill()
    job = start_elastic_job(slurm, wait_until)
    slurm.nodes[-1].kill()
    slurm.nodes[-1].wait()
    there = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_of_node(pid, NODES, job)]
    assert {*pids(slurm.out(job))} & {*there}
    assert len(worlds(slurm.out(job))) == NODES
    (launcher,) = (pid for pid in there if name_of(parent(pid)) == "slurmstepd")
    for pid in (launcher, parent(launcher), *there):  # the launcher first: it is not to tell of its worker's end
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: [world for world in worlds(slurm.out(job)) if world[1] < NODES] == [(0, 2, 0), (1, 2, 1)])
    assert slurm.state(job) == "RUNNING"
    slurm.run("scontrol", "update", f"nodename=127.0.0.{NODES}", "state=down", "reason=test")  # as Slurm finds minutes later
    assert slurm.state(job) == "RUNNING"
    slurm.run("scancel", job)
    wait_until(lambda: not any(map(alive, pids(slurm.out(job)))))
    wait_until(lambda: not any(str(slurm.worker) in command for command in commands()))


def test_scancel_leaves_nothing_and_a_lost_node_is_gone_on_without(
    slurm: Slurm, wait_until: Any, alive: Callable[[int], bool], clear_after_kill: Callable[[], None]
):
    """A node that Slurm takes away is a node that is lost; the others go on, and scancel ends them all."""
    clear_after_kill()
    job = start_elastic_job(slurm, wait_until)
    code, out = slurm.run("scontrol", "update", f"nodename=127.0.0.{NODES}", "state=down", "reason=test")
    assert code == 0, out
    wait_until(lambda: [world for world in worlds(slurm.out(job)) if world[1] < NODES] == [(0, 2, 0), (1, 2, 1)])
    assert slurm.state(job) == "RUNNING"
    slurm.run("scancel", job)
    wait_until(lambda: not any(map(alive, pids(slurm.out(job)))))
    wait_until(lambda: not any(str(slurm.worker) in command for command in commands()))


def start_elastic_job(slurm: Slurm, wait_until: Any) -> str:
    """A job of a worker on each node, which never ends by itself, for which two of the three are enough."""
    launcher = slurm.folder / "launcher"  # the address of the first node is one of all three here
    launcher.write_text('#!/bin/sh\n[ $SLURM_NODEID = 0 ] || export RALLYPOINT_IS_HOST=no\nexec rallyrun "$@"\n')
    launcher.chmod(0o755)
    flags = f"--no-kill --kill-on-bad-exit=0 {launcher} --nnodes 2:3 --nproc-per-node 1"
    job = slurm.batch(f"srun {flags} {slurm.worker} {slurm.folder}/never", f"-N{NODES}", "-n", NODES, "--no-kill", "--no-requeue")
    wait_until(lambda: {(rank, NODES, rank) for rank in range(NODES)} <= {*worlds(slurm.out(job))})
    return job


def is_of_node(pid: int, node: int, job: str) -> bool:
    try:
        around = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return {f"SLURMD_NODENAME=127.0.0.{node}".encode(), f"SLURM_JOB_ID={job}".encode()} <= {*around}


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def commands() -> Iterator[str]:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            yield Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
