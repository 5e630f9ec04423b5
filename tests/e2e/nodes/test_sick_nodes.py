"""A node that cannot run its workers, or whose workers always fail: it is left out, and the others go on if they are enough."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import RALLYRUN
from tests.e2e.nodes.conftest import MEMBER, Job

WORKER_FAILED, USAGE, HOST_UNUSABLE = 1, 2, 4
SEAT = re.compile(r"^rallyrun: generation \d+ started: (\d+) nodes?", re.MULTILINE)
ALL_TOGETHER = "last_call_timeout=60,close_timeout=1"  # nobody begins before the last is there

# An agent that joins as any other does, and to which something happens when it is to start its workers.
SICK = """
import os, resource, sys, threading
from rallypoint.cli import main as cli; from rallypoint.agent import launch
from rallypoint.agent.local_agent import LocalElasticAgent

def files(agent):
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, lowest_free))

def memory(agent):  # there is some, but not for another thread
    threading.stack_size(2**28)
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**27,) * 2)

def program(agent):
    agent.get_worker_group().spec.entrypoint = "/nowhere/program"

def package(agent):
    class Nowhere:
        def find_spec(self, name, path=None, target=None):
            if name.startswith("rallypoint."):
                raise ModuleNotFoundError(f"No module named {name!r}")
    sys.meta_path.insert(0, Nowhere())
    for name in ("rallypoint.output.pump", "rallypoint.failures.memory_kills"):
        sys.modules.pop(name, None)

class Sick(LocalElasticAgent):
    def _start_workers(self, group):
        globals()[os.environ["FAULT"]](self)
        return super()._start_workers(group)

launch.LocalElasticAgent = Sick
sys.exit(cli.main(sys.argv[1:]))
"""
FAULTS = {
    "files": "Too many open files|no more files may be opened",
    "memory": "can't start new thread|no more processes or threads|no memory|out of memory",
    "program": r"rank \d could not be started: .*/nowhere/program",
    "package": "No module named 'rallypoint",
}


def code_of(fault: str) -> int:
    """A program that is not there fails as a worker does."""
    return WORKER_FAILED if fault == "program" else HOST_UNUSABLE


def world_sizes(node: Any) -> list[int]:
    """How many nodes there were in each generation that this one had a seat in."""
    return [int(size) for size in SEAT.findall(node.stderr)]


def last_words(node: Any) -> str:
    """The one line by which a launcher says why it ended."""
    (line,) = (line for line in node.stderr.splitlines() if line.startswith("rallyrun: error: "))
    assert "Traceback" not in node.stderr
    return str(line)


@pytest.mark.parametrize("fault", FAULTS)
def test_m4_a_newcomer_that_cannot_run_its_workers_leaves_and_the_others_go_on(job: Job, script: Any, fault: str):
    """M4: a healthy job of 2:3, and a third node with too few files, no memory, no program, or half a package."""
    nodes = [job.start_host(nnodes="2:3"), job.start(nnodes="2:3")]
    for node in nodes:
        node.wait_for_world(4)
    launcher = [sys.executable, script(SICK, "sick.py")]
    sick = job.start(nnodes="2:3", launcher=launcher, env={"FAULT": fault})
    assert sick.wait() == code_of(fault), sick.stderr
    assert re.search(FAULTS[fault], last_words(sick))
    for node in nodes:
        node.wait_for_line("cannot run workers: ")
        node.agent.wait_for(lambda node=node: world_sizes(node) == [2, 3, 2])
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]
    for node in nodes:
        assert re.search(f"cannot run workers: .*({FAULTS[fault]})", node.stderr)
        assert world_sizes(node) == [2, 3, 2]
        assert max(start.restarts for start in node.starts()) == 0


@pytest.mark.parametrize("files", [12, 18, 24, 30])
def test_m4_a_newcomer_that_may_open_too_few_files(job: Job, files: int):
    """M4: wherever it is that they run out, in the rendezvous or later, that is a matter of this node."""
    nodes = [job.start_host(nnodes="2:3"), job.start(nnodes="2:3")]
    for node in nodes:
        node.wait_for_world(4)
    launcher = ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh", *RALLYRUN]
    sick = job.start(nnodes="2:3", workers=16, launcher=launcher)
    assert sick.wait() in (USAGE, HOST_UNUSABLE)  # before it has joined, or after
    assert last_words(sick)
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]
    for node in nodes:
        assert world_sizes(node) in ([2], [2, 3, 2])


@pytest.mark.parametrize("flags", [(), ("--preload", "decimal")], ids=["fresh", "warm"])
@pytest.mark.parametrize("sick_one", ["the host of the store", "the other node"])
def test_m4_a_job_that_cannot_do_without_the_sick_node_ends_at_once(
    job: Job, script: Any, within: Any, sick_one: str, flags: tuple[str, ...]
):
    """M4: both nodes of 2:2 tell the reason; so they do if it is the host's, for nobody can go on without the store."""
    sick_options = {"launcher": [sys.executable, script(SICK, "sick.py")], "env": {"FAULT": "files"}}
    is_host = sick_one == "the host of the store"
    host = job.start_host(*flags, nnodes="2", **(sick_options if is_host else {}))
    second = job.start(*flags, nnodes="2", **({} if is_host else sick_options))
    sick, well = (host, second) if is_host else (second, host)
    assert sick.wait() == HOST_UNUSABLE, sick.stderr
    left_at = time.monotonic()
    assert well.wait() == WORKER_FAILED
    within("from the end of the sick node to the end of the job", time.monotonic() - left_at, 1.0)
    assert re.search(FAULTS["files"], last_words(sick))
    assert re.search(f"cannot run workers: .*({FAULTS['files']})", last_words(well))
    assert is_host or "1 of 2 nodes are left, too few to go on" in last_words(well)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_job_of_one_node_that_cannot_run_its_workers(start_rallyrun: Any, script: Any, fault: str):
    """m1, m2, m3: one line, and the code that tells a scheduler to try another host."""
    launcher = [sys.executable, script(SICK, "sick.py")]
    alone = start_rallyrun(["--standalone", "--nproc-per-node", "2", script("pass")], {"FAULT": fault}, launcher)
    assert alone.wait() == code_of(fault), alone.stderr
    assert re.search(FAULTS[fault], last_words(alone))


def test_m4_m5_a_node_whose_log_folder_vanishes_goes_on(job: Job, tmp_path: Path):
    """M4, M5: its workers are restarted with all the others, when one fails."""
    logs, flags = tmp_path / "logs", ("--max-restarts", "1")
    nodes = [job.start_host(*flags, nnodes="2:3"), job.start(*flags, nnodes="2:3")]
    nodes.append(job.start(*flags, "--log-dir", str(logs), "--tee", "3", nnodes="2:3"))
    for node in nodes[:2]:
        node.wait_for_world(6)
    nodes[2].wait_for_line("START")
    shutil.rmtree(logs)
    failed_at = time.monotonic()
    job.order(0, "os._exit(9)")
    for node in nodes[:2]:
        node.wait_for_world(6, since=failed_at)
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0, 0]


# --- workers that always fail ----------------------------------------------------------------------------------------------

FAILING = "import os\nif os.environ.get('FAILS'):\n    os._exit(7)\n"


@pytest.fixture
def failing_job(start_rallyrun: Any, script: Any, orders: Path, free_port: Callable[[], int]) -> Job:
    """A job with nodes of distinct names, on some of which each worker fails at once."""
    return Job(start_rallyrun, script(FAILING + MEMBER, "member.py"), orders, free_port())


def start_one_that_fails(job: Job, *flags: str, nnodes: str) -> list[Any]:
    """Three nodes, of which the last cannot but fail."""
    host = job.start_host("--node-rank", "0", *flags, nnodes=nnodes, conf=ALL_TOGETHER)
    second = job.start("--node-rank", "1", *flags, nnodes=nnodes, conf=ALL_TOGETHER)
    return [host, second, job.start("--node-rank", "2", *flags, nnodes=nnodes, conf=ALL_TOGETHER, env={"FAILS": "1"})]


def test_m13_a_node_whose_workers_always_fail_is_left_out(failing_job: Job):
    """M13: after its second failure the others go on without it, for a minute at first, and no restart is spent meanwhile."""
    *others, failing = start_one_that_fails(failing_job, "--max-restarts", "10", nnodes="2:3")
    for node in others:
        starts = node.wait_for_world(4)
        assert {start.restarts for start in starts} == {2}
        left_out = re.search(r"left out, because their workers keep failing: rank2 for (\d+) s", node.stderr)
        assert left_out is not None
        assert int(left_out[1]) >= 30
        assert world_sizes(node)[-1] == 2
    failing.wait_for_line("left out for now, because their workers keep failing: rank2", timeout_s=20.0)
    failing_job.finish()
    assert [node.wait() for node in others] == [0, 0]
    assert failing.wait() == 0  # it was not needed
    assert [world_sizes(node) for node in (*others, failing)] == [[3, 3, 2], [3, 3, 2], [3, 3]]


def test_m13_a_node_whose_workers_always_fail_is_taken_where_it_is_needed(failing_job: Job):
    """M13: of three nodes at least, none can be left out; so all restarts are spent, and the job fails."""
    flags = ("--max-restarts", "3", "--restart-backoff", "0.1")
    nodes = start_one_that_fails(failing_job, *flags, nnodes="3")
    assert [node.wait() for node in nodes] == [WORKER_FAILED] * 3
    for node in nodes:
        assert world_sizes(node) == [3, 3, 3, 3]
        assert "all 3 restarts are used up" in node.stderr


def test_m8_nodes_that_wait_for_the_end_of_a_back_off_say_so(failing_job: Job):
    """m8: every 10 s they say why they wait; they used to say that no node was here."""
    flags = ("--max-restarts", "2", "--restart-backoff", "11")
    nodes = start_one_that_fails(failing_job, *flags, nnodes="3")
    for node in nodes:
        node.wait_for_line("restart 2 of 2, after 11 s; here: rank0, rank1, rank2", timeout_s=20.0)
        waits = re.findall(r"^rallyrun: waiting: (.*)", node.stderr, re.MULTILINE)
        assert [line for line in waits if "nodes; here:" in line] == []
    assert [node.wait() for node in nodes] == [WORKER_FAILED] * 3
