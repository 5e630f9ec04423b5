"""Jobs of several nodes are seen and steered while they run: each command asks real agents, through real sockets and stores."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rallypoint import inspect
from rallypoint.errors import RallypointError
from rallypoint.inspection import client
from rallypoint.inspection.log_ends import LogWish

STOPPED = 79
RALLYPOINT = (sys.executable, "-m", "rallypoint")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RALLYPOINT, *words], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def two(job: Any, wait_until: Any) -> tuple[Any, Any]:
    """Two nodes of two workers each, the first of which hosts the store, and of which both can be asked."""
    host = job.start_host("--max-restarts", "2")
    other = job.start("--max-restarts", "2")
    for node in (host, other):
        node.wait_for_world(4)
    wait_until(lambda: len(inspect.jobs()[:1]) == 1 and len(inspect.jobs()[0].nodes) == 2)
    return host, other


def test_a_job_is_seen_with_all_its_nodes_and_workers(two: tuple[Any, Any]) -> None:
    (job,) = inspect.jobs()
    assert (job.job, len(job.nodes)) == ("a-job", 2)
    seen = inspect.status()
    pids = {start.rank: start.pid for node in two for start in node.starts()}
    assert {worker.rank: worker.pid for node in seen.nodes for worker in node.workers} == pids
    assert {node.pid for node in seen.nodes} == {node.agent.pid for node in two}
    assert (seen.phase, seen.generation, seen.restarts, seen.silent) == ("running", seen.generation, 0, ())
    told = json.loads(command("status", "--json").stdout)
    assert {node["pid"] for node in told["nodes"]} == {node.agent.pid for node in two}
    assert (told["phase"], told["generation"], told["restarts"], told["stragglers"]) == ("running", seen.generation, 0, [])
    text = command("status", "a-").stdout
    assert text.startswith("a-job: running, 2 nodes, 4 workers, generation ")
    assert all(str(pid) in text for pid in pids.values())
    listed = command("ps").stdout.splitlines()
    assert listed[1].split()[:5] == ["a-job", "running", "2", "4", str(seen.generation)]


def test_a_restart_is_for_all_nodes_and_costs_none(two: tuple[Any, Any], wait_until: Any) -> None:
    before = {start.pid for node in two for start in node.starts()}
    generation = inspect.status().generation
    assert json.loads(command("restart", "--json").stdout) == {
        "format": 1, "job": "a-job", "done": "all nodes restart their workers",
    }  # fmt: skip
    wait_until(lambda: (now := inspect.status()).generation == generation + 1 and now.phase == "running" and not now.silent)
    seen = inspect.status()
    assert seen.restarts == 0
    assert not before & {worker.pid for node in seen.nodes for worker in node.workers}
    assert all("a restart was asked for by" in node.history[-1].why for node in seen.nodes)
    assert "a restart was asked for by" in command("status").stdout


def test_one_node_is_drained_and_the_other_goes_on(two: tuple[Any, Any]) -> None:
    host, other = two
    drained = next(node for node in inspect.status().nodes if node.pid == other.agent.pid)
    told = json.loads(command("drain", str(drained.node_rank), "--json").stdout)
    assert (told["format"], told["job"]) == (1, "a-job")
    assert "was told to" in told["done"]
    assert other.wait() == 143
    host.wait_for_world(2)
    assert "asked this node to stop its workers and leave" in other.stderr


def test_the_host_of_the_store_is_drained_only_by_force(two: tuple[Any, Any]) -> None:
    host, _ = two
    named = next(node for node in inspect.status().nodes if node.pid == host.agent.pid)
    assert named.hosts_store
    refused = command("drain", str(named.node_rank))
    assert refused.returncode == 1
    assert "hosts the coordination store, and the job would end with it" in refused.stderr
    inspect.drain(str(named.node_rank), force=True)
    assert host.wait() == 143


def test_stacks_and_logs_come_from_all_nodes(job: Any, wait_until: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the other node's workers, which are on another machine for all that this one can see, through the store of the job."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    flags = ("--hang-timeout", "600", "--redirects", "2")
    host = job.start_host(*flags)
    other = job.start(*flags, env={"RALLYPOINT_RUNTIME_DIR": os.path.relpath(elsewhere, tmp_path)})
    here, there = (node.wait_for_world(4, timeout_s=60) for node in (host, other))
    wait_until(lambda: len(inspect.jobs()) == 1)
    pids = {start.rank: start.pid for start in (*here, *there)}
    seen = inspect.stacks("a-job")
    assert ({one.rank: one.pid for one in seen.workers}, seen.silent, seen.note) == (pids, (), "")
    for one in seen.workers:
        assert "member.py" in one.processes[0].text, one
    far = there[0].rank
    text = command("stacks", "--rank", str(far)).stdout
    assert text.startswith(f"--- rank {far}\n=== process {pids[far]} ")
    told = json.loads(command("stacks", "--json").stdout)
    assert (told["format"], {one["rank"]: one["pid"] for one in told["workers"]}) == (1, pids)
    node = next(one for one in inspect.status().nodes if one.pid == other.agent.pid)
    (agent,) = client.list_agents()[0]
    job.order(far, "os.write(2, b'far away\\n')")
    wait_until(lambda: client.LocalJob([agent]).log_end(node.id, LogWish(far)).text == "far away\n")
    assert client.LocalJob([agent]).log_end(node.id, LogWish(9)).error == "rank 9 is none of this node's any more"
    assert command("stacks", "--rank", "3-4").stderr == "rallypoint stacks: error: a-job has no rank 4; there are ranks 0-3\n"


def test_a_job_with_a_secret_tells_its_name_to_who_knows_it(job: Any, tmp_path: Path) -> None:
    secret, wrong = tmp_path / "secret", tmp_path / "wrong"
    secret.write_text("of this job alone")
    wrong.write_text("of another job's")
    job.start_host("--secret-file", str(secret), nnodes="2")
    endpoint = f"localhost:{job.port}"
    listed = command("ps", "--endpoint", endpoint, "--conf", f"secret_file={secret}")
    assert listed.stdout.splitlines()[1].split()[:2] == ["a-job", "waiting"]
    for conf, why in (
        ((), "asks for a secret, and the node has none"),
        (("--conf", f"secret_file={wrong}"), "the secret is not"),
    ):
        refused = command("ps", "--endpoint", endpoint, *conf)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert why in refused.stderr
    assert command("stop", "a-job", "--endpoint", endpoint, "--conf", f"secret_file={secret}", "--json").returncode == 0


def test_a_job_is_stopped_on_all_nodes(two: tuple[Any, Any]) -> None:
    done = command("stop")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "a-job: it has ended on this machine"
    assert [node.wait() for node in two] == [STOPPED, STOPPED]
    assert all(f"stopped the job; exit code {STOPPED}: " in node.stderr for node in two)
    assert "Traceback" not in "".join(node.stderr for node in two)
    assert command("ps").stdout == "no job of this user runs on this machine\n"


def test_p17_a_job_that_is_stopped_asks_nobody_to_start_it_again(job: Any, wait_until: Any) -> None:
    """P17: its nodes take a request to stop for a notice, and let workers save first; after a notice they would ask for that."""
    nodes = [start("--drain-grace", "60", nnodes="2") for start in (job.start_host, job.start)]
    for node in nodes:
        node.wait_for_world(4, timeout_s=60)
    for rank in range(4):
        job.order(rank, "from rallypoint import worker\nwhile worker.draining() is None: time.sleep(0.01)\nworker.saved()")
        nodes[0].agent.wait_for(lambda rank=rank: not (job.folder / f"order.{rank}").exists(), 60.0)
    wait_until(lambda: len(inspect.jobs()[:1]) == 1 and len(inspect.jobs()[0].nodes) == 2)
    assert command("stop").returncode == 0
    assert [node.wait() for node in nodes] == [STOPPED, STOPPED]
    assert all("all workers have saved" in node.stderr for node in nodes)


def test_a_job_that_waits_for_nodes_says_who_is_missing(job: Any, wait_until: Any) -> None:
    waits = job.start_host(nnodes="2")
    wait_until(inspect.jobs)
    seen = inspect.status()
    assert seen.phase == "waiting"
    wait_until(lambda: "1 of 2 nodes" in inspect.status().note)
    with pytest.raises(RallypointError, match="still meeting"):
        inspect.restart()
    assert command("stop").returncode == 0
    assert waits.wait() == STOPPED


def test_a_job_is_asked_at_its_endpoint_from_elsewhere(
    two: tuple[Any, Any], job: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From a machine on which none of its launchers runs, which is what another runtime folder looks like."""
    monkeypatch.setenv("RALLYPOINT_RUNTIME_DIR", str(tmp_path / "elsewhere"))
    assert command("status").stderr == "rallypoint status: error: no job of this user runs on this machine\n"
    endpoint = f"localhost:{job.port}"
    seen = json.loads(command("status", "a-job", "--json", "--endpoint", endpoint).stdout)
    assert {node["pid"] for node in seen["nodes"]} == {node.agent.pid for node in two}
    assert "needs a value" in command("status", "a-job", "--endpoint").stderr
    assert "name the job" in command("status", "--endpoint", endpoint).stderr
    listed = command("ps", "--endpoint", endpoint).stdout.splitlines()
    assert [line.split()[:4] for line in listed[1:]] == [["a-job", "running", "2", "4"]]
    (found,) = json.loads(command("ps", "--json", f"--endpoint={endpoint}").stdout)["jobs"]
    assert (found["job"], found["phase"], len(found["nodes"])) == ("a-job", "running", 2)
    assert [len(one.nodes) for one in inspect.jobs(endpoint)] == [2]
    with inspect.connect(endpoint, "a-job") as remote:
        assert remote.status().phase == "running"
    shown = command("stacks", "a-job", "--rank", "1-2", "--endpoint", endpoint)
    assert shown.returncode == 0, shown.stderr
    assert re.findall(r"^--- rank (\d)", shown.stdout, re.MULTILINE) == ["1", "2"]
    wrong = command("status", "another-job", "--endpoint", endpoint)
    assert wrong.returncode == 1
    assert "another-job" in wrong.stderr
    assert command("stop", "a-job", f"--endpoint={endpoint}").returncode == 0
    assert [node.wait() for node in two] == [STOPPED, STOPPED]
