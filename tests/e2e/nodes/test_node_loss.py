"""A node is lost, goes silent or leaves, and the others go on."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from statistics import median
from typing import Any

QUICK = "last_call_timeout=0.2,keep_alive_interval=0.4"
LEASE_S = 1.2  # three such intervals
SLOW = "last_call_timeout=0.2,keep_alive_interval=5"  # silence is not noticed before what the test is about


def all_gone(alive: Callable[[int], bool], starts: list[Any]) -> Callable[[], bool]:
    return lambda: not any(alive(start.pid) for start in starts)


def latest(*groups: list[Any]) -> float:
    return float(max(start.at for group in groups for start in group))


def test_a_killed_agent_makes_a_smaller_world(job: Any, within: Any, wait_until: Any, alive: Any):
    """P02, F09: kill -9 of an agent, whose workers die with it; the survivor's workers run in the smaller world within a second.

    What tells their generation from the one before is its number, not the count of restarts. F24: it is told which node of the
    job that was, and with which ranks.
    """
    host = job.start_host(conf=SLOW)
    other = job.start(conf=SLOW)
    before = host.wait_for_world(4) + other.wait_for_world(4)
    killed_at = other.kill()
    after = host.wait_for_world(2, since=killed_at)
    within("from kill -9 to the smaller world", latest(after) - killed_at, 1.0)
    wait_until(all_gone(alive, before), 5.0)
    assert [start.rank for start in after] == [0, 1]
    assert {start.restarts for start in before + after} == {0}  # nobody's fault, so no restart was spent
    (generation,) = {start.generation for start in before}  # the same on both nodes
    assert {start.generation for start in after} == {generation + 1}
    assert f"generation {generation + 1} started: 1 node" in host.stderr
    assert re.search(r"node 1 \(\S+, ranks 2-3\) was lost: its agent was killed", host.stderr)
    job.finish()
    assert host.wait() == 0


def test_a_silent_node_is_given_up_after_its_lease(job: Any, within: Any, wait_until: Any, alive: Any):
    """P02, V5: an agent that is paused says nothing; its workers are dead before others start, and on waking it joins again."""
    host = job.start_host(conf=QUICK)
    other = job.start(conf=QUICK)
    host.wait_for_world(4)
    paused_workers = other.wait_for_world(4)
    other.send_signal(signal.SIGSTOP)
    paused_at = time.monotonic()
    alone = host.wait_for_world(2, since=paused_at)
    within("from silence to the smaller world, after the lease", latest(alone) - paused_at - LEASE_S, 1.0)
    assert min(start.at for start in alone) - paused_at >= LEASE_S / 2  # it had until its fence, at least
    assert "was lost: not heard of in time" in host.stderr

    assert all_gone(alive, paused_workers)()
    other.send_signal(signal.SIGCONT)
    woken_at = time.monotonic()
    together = other.wait_for_world(4, since=woken_at), host.wait_for_world(4, since=woken_at)
    within("from waking to the larger world", latest(*together) - woken_at, 2.0)
    told = "this node's workers were killed: the coordination store had not confirmed this node", "lost the coordination store"
    assert any(words in other.stderr for words in told)  # whichever of its threads was first
    job.finish()
    assert (host.wait(), other.wait()) == (0, 0)


def test_a_node_that_is_stopped_may_come_back_any_number_of_times(job: Any, within: Any):
    """P03: SIGTERM on one agent of 1:3 twenty times; the two others go on, and it gets its old ranks back each time. P27."""
    host = job.start_host(nnodes="1:3", workers=1)
    second = job.start(nnodes="1:3", workers=1)
    stays = [second, host]
    leaves_s, returns_s = [], []
    for _ in range(20):
        began_at = time.monotonic()
        guest = job.start(nnodes="1:3", workers=1)
        guests = guest.wait_for_world(3)
        groups = [node.wait_for_world(3, since=began_at) for node in stays]
        returns_s.append(latest(guests, *groups) - began_at)
        assert sorted(start.rank for group in (guests, *groups) for start in group) == [0, 1, 2]
        stopped_at = time.monotonic()
        assert guest.end(signal.SIGTERM) == 143
        groups = [node.wait_for_world(2, since=stopped_at) for node in stays]
        leaves_s.append(latest(*groups) - stopped_at)
        assert sorted(start.rank for group in groups for start in group) == [0, 1]
        assert all(start.restarts == 0 for group in groups for start in group)
    within("the median of 20 departures", median(leaves_s), 1.0)
    within("the median of 20 returns", median(returns_s), 1.0)
    job.finish()
    assert [node.wait() for node in stays] == [0, 0]


def test_ranks_stay_where_the_node_stays(job: Any):
    """P27: the node of rank 0 leaves; the others keep theirs as far as there are such ranks, and who comes fills the gap."""
    host = job.start_host("--node-rank", "2", nnodes="2:3", workers=1)
    first = job.start("--node-rank", "0", nnodes="2:3", workers=1)
    middle = job.start("--node-rank", "1", nnodes="2:3", workers=1)
    nodes = [first, middle, host]
    assert [node.wait_for_world(3)[0].node for node in nodes] == [0, 1, 2]
    stopped_at = time.monotonic()
    assert first.end() == 143
    assert [node.wait_for_world(2, since=stopped_at)[0].node for node in (middle, host)] == [1, 0]
    back_at = time.monotonic()
    first = job.start("--node-rank", "0", nnodes="2:3", workers=1)
    assert [node.wait_for_world(3, since=back_at)[0].node for node in (first, middle, host)] == [0, 1, 2]
    job.finish()
    assert [node.wait() for node in (first, middle, host)] == [0, 0, 0]


def test_too_few_nodes_wait_for_more(job: Any, within: Any):
    """P02: with fewer than the least number of nodes the rest stop their workers, wait, and go on when somebody comes."""
    host = job.start_host(nnodes="2:2", workers=1)
    other = job.start(nnodes="2:2", workers=1)
    old = host.wait_for_world(2)[0]
    other.wait_for_world(2)
    other.kill()
    host.wait_for_line("was lost")
    began_at = time.monotonic()
    newcomer = job.start(nnodes="2:2", workers=1)
    groups = newcomer.wait_for_world(2), host.wait_for_world(2, since=began_at)
    within("from its start to the new world", latest(*groups) - began_at, 1.0)
    assert not os.path.exists(f"/proc/{old.pid}")
    job.finish()
    assert (host.wait(), newcomer.wait()) == (0, 0)
