"""A job in a real etcd does what one on the embedded store does: nodes come, fail, leave and are lost. P32."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

LEASE_AND_FENCE_S = 3.0  # the fence of these jobs, which counts from the last that was heard of a node
LONG_FENCE = "last_call_timeout=0.3,keep_alive_interval=5,fence=40"
FIRST_LEASE_S = 2.0  # a killed agent's newest keepalive may be answered for later, by so much at most


def latest(*groups: list[Any]) -> float:
    return float(max(start.at for group in groups for start in group))


def test_a_worker_that_fails_restarts_all(job: Any, within: Any, check_worlds: Any):
    """P32: the purse of restarts is the job's, and all nodes restart together."""
    nodes = [job.start("--max-restarts", "1", nnodes="2") for _ in range(2)]
    for node in nodes:
        node.wait_for_world(4)
    failed_at = time.monotonic()
    job.order(1, "sys.exit(7)")
    groups = [node.wait_for_world(4, since=failed_at) for node in nodes]
    within("from a failure to the next generation", latest(*groups) - failed_at, 1.0)
    assert {start.restarts for group in groups for start in group} == {1}
    job.order(2, "sys.exit(7)")
    assert 0 not in [node.wait() for node in nodes]
    assert all("exit code" in node.stderr or "exitcode" in node.stderr for node in nodes)
    assert check_worlds(*nodes) == 2
    assert job.left_keys() == []


def test_a_joiner_makes_a_larger_world(job: Any, within: Any, check_worlds: Any):
    """P32, P45: nobody's restart is spent."""
    first = job.start()
    first.wait_for_world(2)
    second = job.start()
    groups = first.wait_for_world(4), second.wait_for_world(4)
    within("from a second agent's start to the larger world", latest(*groups) - second.began_at, 1.0)
    assert sorted(start.rank for group in groups for start in group) == [0, 1, 2, 3]
    assert {start.restarts for group in groups for start in group} == {0}
    assert check_worlds(first, second) == 2
    job.finish()
    assert (first.wait(), second.wait()) == (0, 0)
    assert job.left_keys() == []


@pytest.mark.parametrize("who", [0, 1], ids=["the leader", "another"])
def test_a_node_that_is_stopped_leaves_at_once(job: Any, within: Any, who: int):
    """P04: whichever it is, for none of them hosts anything; nobody waits for its lease, nor for the fence."""
    nodes = [job.start(workers=1, conf=LONG_FENCE)]
    nodes[0].wait_for_world(1)
    nodes.append(job.start(workers=1, conf=LONG_FENCE))
    for node in nodes:
        node.wait_for_world(2)
    leaver = nodes.pop(who)
    stopped_at = time.monotonic()
    assert leaver.end(signal.SIGTERM) == 143
    after = nodes[0].wait_for_world(1, since=stopped_at)
    within("from SIGTERM to the smaller world", latest(after) - stopped_at, 1.0)
    job.finish()
    assert nodes[0].wait() == 0
    assert job.left_keys() == []


@pytest.mark.parametrize("who", [0, 1], ids=["the leader", "another"])
def test_a_killed_agent_makes_a_smaller_world(job: Any, within: Any, wait_until: Any, alive: Callable[[int], bool], who: int):
    """P02, P04: kill -9 of any agent, the first one too; its warden tells etcd, and nobody waits for its lease, nor the fence."""
    nodes = [job.start(workers=1, conf=LONG_FENCE)]
    nodes[0].wait_for_world(1)
    nodes.append(job.start(workers=1, conf=LONG_FENCE))
    before = [node.wait_for_world(2)[0] for node in nodes]
    victim = nodes.pop(who)
    killed_at = victim.kill()
    wait_until(lambda: not alive(before[who].pid))
    after = nodes[0].wait_for_world(1, since=killed_at)
    within("from kill -9 to the smaller world", latest(after) - killed_at, 1.0)
    assert "was lost: its agent was killed" in nodes[0].stderr
    job.finish()
    assert nodes[0].wait() == 0
    assert job.left_keys() == []


def test_an_agent_killed_with_its_warden_makes_a_smaller_world(job: Any, within: Any, processes: Any):
    """P02: nobody is left to tell; the others go on after its lease and the fence."""
    nodes = [job.start(workers=1)]
    nodes[0].wait_for_world(1)
    nodes.append(job.start(workers=1))
    for node in nodes:
        node.wait_for_world(2)
    victim = nodes.pop()
    warden = processes.warden(victim.agent.pid)
    os.kill(warden, signal.SIGSTOP)
    killed_at = victim.kill()
    os.kill(warden, signal.SIGKILL)
    after = nodes[0].wait_for_world(1, since=killed_at)
    took_s = latest(after) - killed_at
    within("from kill -9 to the smaller world, after lease and fence", took_s - LEASE_AND_FENCE_S - FIRST_LEASE_S, 1.0)
    assert "was lost: not heard of in time" in nodes[0].stderr
    job.finish()
    assert nodes[0].wait() == 0
    assert job.left_keys() == []


# --- under the same name ---------------------------------------------------------------------------------------------------


def test_a_job_begins_anew_after_its_end(job: Any):
    """P32: finished, failed, then well again, under one name; at each end nothing is left in etcd."""
    for is_to_fail in (False, True, False):
        nodes = [job.start("--max-restarts", "0", nnodes="2", workers=1) for _ in range(2)]
        assert [node.wait_for_world(2)[0].restarts for node in nodes] == [0, 0]
        if is_to_fail:
            job.order(0, "sys.exit(3)")
        else:
            job.finish()
        assert [node.wait() == 0 for node in nodes] == [not is_to_fail] * 2
        assert job.left_keys() == []
        job.begin_anew()


def test_a_job_begins_anew_after_all_of_it_was_killed(job: Any, wait_until: Any):
    """P32: kill -9 of every agent; its keys are of no job once its leases are over."""
    nodes = [job.start("--max-restarts", "1", nnodes="2", workers=1) for _ in range(2)]
    for node in nodes:
        node.wait_for_world(2)
    failed_at = time.monotonic()
    job.order(0, "sys.exit(1)")
    for node in nodes:
        node.wait_for_world(2, since=failed_at)
    for node in nodes:
        node.kill()
    wait_until(lambda: not any(b"/up/nodes/" in key for key in job.left_keys()))
    assert job.left_keys() != []
    nodes = [job.start("--max-restarts", "1", nnodes="2", workers=1) for _ in range(2)]
    assert [node.wait_for_world(2)[0].restarts for node in nodes] == [0, 0]
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]
    assert job.left_keys() == []


@pytest.mark.parametrize("run_id", ["none", "a/b"])
def test_a_job_needs_a_name_of_its_own(job: Any, run_id: str):
    """P32: a cluster serves many jobs, and two without a name would meet."""
    node = job.start(run_id=run_id)
    assert node.wait() != 0
    assert node.starts() == []
    assert f"--rdzv-id is {run_id!r}" in node.stderr.splitlines()[-1]
