"""Workers fail or finish: what the nodes of a job make of it together."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from typing import Any

import pytest

BOOM = "raise ValueError('boom')"
# However slow the machine, each comes to its error: none can be stopped before.
ALL_RAISE = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"{folder}/deaf.{rank}", "w").close()
while sum(name.startswith("deaf.") for name in os.listdir(folder)) < 6:
    time.sleep(0.01)
raise ModuleNotFoundError(f"no module for rank {rank}")
"""
KNOWN_BEGINNINGS = ("Cause: ", "  ", "Also: ", "Victims: ", "Stopped by the launcher: ")


def verdict(node: Any) -> list[str]:
    """The lines from the cause on, as far as they are for all nodes alike."""
    lines = [line.removeprefix("rallyrun: ") for line in node.stderr.splitlines()]
    begins = next(number for number, line in enumerate(lines) if line.startswith("Cause: "))
    ends = next(number for number, line in enumerate(lines) if number > begins and not line.startswith(KNOWN_BEGINNINGS))
    return lines[begins:ends]


def meet(job: Any, *flags: str, conf: str = "restart_backoff=0.2", workers: int = 2) -> list[Any]:
    """Two nodes whose workers run, the store's host first."""
    options = {"nnodes": "2", "workers": workers, "conf": conf}
    nodes = [job.start_host("--node-rank", "0", *flags, **options), job.start("--node-rank", "1", *flags, **options)]
    for node in nodes:
        node.wait_for_world(2 * workers)
    return nodes


def next_world(nodes: list[Any], since: float, size: int = 4) -> list[Any]:
    return [start for node in nodes for start in node.wait_for_world(size, since)]


# --- failures --------------------------------------------------------------------------------------------------------------


def test_a_failure_stops_all_workers_at_once(job: Any, within: Any, wait_until: Any, alive: Any):
    """P28: those of other nodes within two seconds; then all begin again, together, with one restart spent."""
    nodes = meet(job, "--max-restarts", "1")
    before = nodes[0].wait_for_world(4)
    failed_at = time.monotonic()
    job.order(2, BOOM)
    wait_until(lambda: not any(alive(start.pid) for start in before), 10.0)
    within("from a failure to the end of the workers elsewhere", time.monotonic() - failed_at, 2.0)
    again = next_world(nodes, failed_at)
    assert [start.rank for start in again] == [0, 1, 2, 3]
    assert {start.restarts for start in again} == {1}
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]
    assert "rank 2 on rank1 failed: " in nodes[0].stderr
    assert "ValueError: boom" in nodes[0].stderr


def test_one_verdict_on_all_nodes(job: Any, wait_until: Any):
    """P12: a cause, a victim that only lost its peer, and one that was stopped. The victim's agent is held up until both are."""
    options = {"nnodes": "3", "workers": 1}
    nodes = [job.start_host("--node-rank", "0", **options), *(job.start("--node-rank", str(r), **options) for r in (1, 2))]
    starts = [node.wait_for_world(3)[0] for node in nodes]
    host, cause, victim = nodes
    victim.send_signal(signal.SIGSTOP)
    job.order(1, BOOM)
    cause.wait_for_line("failed: ValueError: boom")
    job.order(2, "raise ConnectionResetError(104, 'Connection reset by peer')")
    wait_until(lambda: not os.path.exists(f"/proc/{starts[2].pid}"))  # its warden, which is not paused, has seen it end
    victim.send_signal(signal.SIGCONT)
    assert [node.wait() for node in nodes] == [1, 1, 1]
    told = verdict(host)
    assert told == verdict(cause) == verdict(victim)
    assert told[0].startswith("Cause: rank 1 (host ")
    assert told[0].endswith(f"pid {starts[1].pid}): ValueError: boom")
    assert "  node: rank1   local rank: 0   role: default   exit code: 1" in told
    assert "Victims: 1 of 3 workers" in told
    assert any(line.startswith("  rank 2 (host ") and "Connection reset by peer" in line for line in told)
    assert told[-1] == "Stopped by the launcher: 1 of 3 workers"


def test_f01_the_same_error_everywhere_is_one_cause_without_victims(job: Any):
    """F01: told once, the same on every node; whoever was already told to stop has raised it too."""
    options = {"nnodes": "3", "workers": 2}
    nodes = [job.start_host("--node-rank", "0", **options), *(job.start("--node-rank", str(r), **options) for r in (1, 2))]
    for node in nodes:
        node.wait_for_world(6)
    for rank in range(6):
        job.order(rank, ALL_RAISE)
    assert [node.wait() for node in nodes] == [1, 1, 1]
    told = verdict(nodes[0])
    assert told == verdict(nodes[1]) == verdict(nodes[2])
    assert re.fullmatch(r"Cause: all 6 workers raised the same error: ModuleNotFoundError: no module for rank \d", told[0])
    assert not [line for line in told if line.startswith(("Victims: ", "Stopped "))]
    headlines = {line for node in nodes for line in node.stderr.splitlines() if " FAILED: " in line}
    assert len(headlines) == 1
    assert headlines.pop().endswith(told[0].removeprefix("Cause: "))


def test_a_node_that_did_not_fail_names_the_cause(job: Any):
    """P12, P37: its last line says what ended the job, and its exit code is the cause's where that was asked for."""
    nodes = meet(job, "--pass-exit-code")
    job.order(3, "raise SystemExit(7)")
    assert [node.wait() for node in reversed(nodes)] == [7, 7]
    assert "rallyrun: error: the job has failed: rank 3 " in nodes[0].stderr
    assert "exited with code 7" in nodes[0].stderr


@pytest.mark.root
def test_p21_a_worker_that_the_kernel_killed_for_memory_is_told_so_on_all_nodes(job: Any, cgroup: Any):
    """P12, P21: also where nobody can look at that machine's kernel; those that were stopped for it are no cause."""
    folder = cgroup("memory")
    (folder / "memory.limit_in_bytes").write_text(str(200 << 20))
    join = f'echo $$ > "{folder}/cgroup.procs" && exec {sys.executable} -m rallypoint run "$@"'
    options = {"nnodes": "2"}
    nodes = [job.start_host("--node-rank", "0", **options)]
    nodes.append(job.start("--node-rank", "1", launcher=["sh", "-c", join, "sh"], **options))
    for node in nodes:
        node.wait_for_world(4)
    job.order(2, "eaten = []\nwhile True:\n    eaten.append(b'x' * (1 << 20))")
    assert [node.wait() for node in nodes] == [1, 1]
    for node in nodes:
        told = verdict(node)
        assert re.match(r"Cause: rank 2 \(.*\): Signal 9 \(SIGKILL\) .*: the out-of-memory killer ended pid \d+ ", told[0]), told
        assert "passed its limit of 200 MiB" in told[0]
        assert told[-1] == "Stopped by the launcher: 3 of 4 workers"


# --- budgets ---------------------------------------------------------------------------------------------------------------


def test_one_budget_for_the_whole_job(job: Any):
    """P14: two nodes fail in turn; a node that is lost and comes back costs nothing and gives nothing back; the third ends it."""
    nodes = meet(job, "--max-restarts", "2")
    for number, rank in enumerate((0, 2), 1):
        failed_at = time.monotonic()
        job.order(rank, BOOM)
        assert {start.restarts for start in next_world(nodes, failed_at)} == {number}
    killed_at = nodes[1].kill()
    nodes[1] = job.start("--node-rank", "1", "--max-restarts", "2", nnodes="2", conf="restart_backoff=0.2")
    assert {start.restarts for start in next_world(nodes, killed_at)} == {2}
    job.order(1, BOOM)
    assert [node.wait() for node in nodes] == [1, 1]
    assert all("all 2 restarts are used up" in node.stderr for node in nodes)
    assert verdict(nodes[0]) == verdict(nodes[1])


def test_what_no_restart_can_help_is_not_retried(job: Any, within: Any):
    """P15: an exit code that was named ends the job on all nodes at once, whatever the budget."""
    nodes = meet(job, "--max-restarts", "5", "--no-retry-exit-codes", "2")
    failed_at = time.monotonic()
    job.order(3, "raise SystemExit(2)")
    assert [node.wait() for node in nodes] == [65, 65]
    within("from the failure to the end of the job", time.monotonic() - failed_at, 2.0)
    assert "a worker exited with code 2, which no restart can help" in nodes[0].stderr
    assert [len(node.starts()) for node in nodes] == [2, 2]


def test_the_back_off_grows(job: Any):
    """P15: none before the first restart, then 0.3 s, then twice that."""
    nodes = meet(job, "--max-restarts", "3", conf="restart_backoff=0.3", workers=1)
    pauses_s = []
    for _ in range(3):
        failed_at = time.monotonic()
        job.order(1, BOOM)
        pauses_s.append(min(start.at for start in next_world(nodes, failed_at, size=2)) - failed_at)
    print("pauses before the restarts:", [f"{pause_s:.3f} s" for pause_s in pauses_s])
    assert pauses_s[1] >= 0.3
    assert pauses_s[2] >= 0.6
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]


def test_old_failures_are_forgiven(job: Any, wait_until: Any):
    """P15: one restart in any 12 s; a failure after that time is paid again, a second one within it is the end."""
    nodes = meet(job, "--max-restarts", "1", "--restart-window", "12", workers=1)
    failed_at = time.monotonic()
    job.order(1, BOOM)
    assert {start.restarts for start in next_world(nodes, failed_at, size=2)} == {1}
    over_at = time.monotonic() + 12.2
    wait_until(lambda: time.monotonic() > over_at)
    job.order(1, BOOM)
    wait_until(lambda: not (job.folder / "order.1").exists())
    job.order(1, BOOM)  # for the next worker, as it starts
    assert [node.wait() for node in nodes] == [1, 1]
    assert "the one restart within 12 s is used up" in nodes[0].stderr
    assert max(start.restarts for node in nodes for start in node.starts()) == 2


# --- the exit barrier ------------------------------------------------------------------------------------------------------


def test_a_failure_elsewhere_ends_the_wait_of_a_node_that_is_done(job: Any, within: Any):
    """P11: it is not waited for at the exit barrier, which is 300 s long; the job has failed on all nodes."""
    nodes = meet(job, workers=1)
    job.finish(rank=1)
    nodes[0].agent.wait_for(lambda: is_draining(nodes[1]))
    failed_at = time.monotonic()
    job.order(0, BOOM)
    assert [node.wait() for node in nodes] == [1, 1]
    within("from the failure to the end of the node that was done", time.monotonic() - failed_at, 1.0)
    assert verdict(nodes[0]) == verdict(nodes[1])


def is_draining(node: Any) -> bool:
    """Whether its workers are gone, but not their agent."""
    return all(not os.path.exists(f"/proc/{start.pid}") for start in node.starts()) and node.agent.process.poll() is None


def test_who_is_done_waits_for_the_others(job: Any):
    """P11: and starts anew with them when one of them fails and a restart is left."""
    nodes = meet(job, "--max-restarts", "1", workers=1)
    job.finish(rank=1)
    nodes[0].agent.wait_for(lambda: is_draining(nodes[1]))
    (job.folder / "finish.1").unlink()
    failed_at = time.monotonic()
    job.order(0, BOOM)
    assert [start.rank for start in next_world(nodes, failed_at, size=2)] == [0, 1]
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]


def test_the_exit_barrier_has_the_length_that_was_asked_for(job: Any, within: Any):
    """P11: who is done leaves after it, with 0; those who are busy go on as if nothing had happened."""
    nodes = meet(job, "--exit-barrier-timeout", "0.5", workers=1)
    done_at = time.monotonic()
    job.finish(rank=1)
    assert nodes[1].wait() == 0
    took_s = time.monotonic() - done_at
    assert took_s >= 0.5
    within("at the exit barrier", took_s, 0.5 + 0.5)
    assert "after 0.5 s the other nodes were not seen to finish" in nodes[1].stderr
    job.finish()
    assert nodes[0].wait() == 0
    assert len(nodes[0].starts()) == 1


@pytest.mark.parametrize("first", [0, 1])
def test_all_nodes_end_together(job: Any, within: Any, first: int):
    """P11: whoever is done first, the store's host or another, the wait ends when the last one is done."""
    nodes = meet(job, workers=1)
    job.finish(rank=first)
    nodes[1 - first].agent.wait_for(lambda: is_draining(nodes[first]))
    done_at = time.monotonic()
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]
    within("from the last worker's end to that of all agents", time.monotonic() - done_at, 1.0)
