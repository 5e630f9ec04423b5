"""The cluster, or a node, is silent for a while: within the fence nothing happens, after it the others go on. M12."""

from __future__ import annotations

import base64
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.etcd.conftest import EtcdJob, MakeJob
from tests.etcd_cluster import Cluster, Member, start_cluster

# The lease of 3 s and the fence of 30 s that users have; nobody begins without those who are slow to start.
DEFAULTS = "last_call_timeout=30"
BRIEFLY_S = 5.0
BACK_S = 25.0


@pytest.fixture
def lone_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """One member, which is the whole cluster."""
    with start_cluster(tmp_path / "etcd") as cluster:
        yield cluster


def leases(job: EtcdJob, member: Member) -> dict[bytes, str]:
    """The lease of each node that has a record."""
    prefix = f"/rallypoint/{job.run_id}/up/nodes/".encode()
    begin, end = (base64.b64encode(key).decode() for key in (prefix, prefix[:-1] + b"0"))
    answer = member.post("/v3/kv/range", {"key": begin, "range_end": end})
    assert "header" in answer, answer
    return {base64.b64decode(item["key"]): item["lease"] for item in answer.get("kvs", [])}


def start_nodes(job: EtcdJob, count: int, conf: str) -> tuple[list[Any], list[int]]:
    """Agents with a worker each, that have met; the workers' process ids."""
    nodes = [job.start("--max-restarts", "3", nnodes=f"2:{count}", workers=1, conf=conf) for _ in range(count)]
    return nodes, [node.wait_for_world(count)[0].pid for node in nodes]


def pause(member: Member, pause_s: float, wait_until: Callable[..., None]) -> None:
    member.pause()
    paused_at = time.monotonic()
    wait_until(lambda: time.monotonic() >= paused_at + pause_s, pause_s + 5.0)
    member.resume()
    print(f"{member.name} was away for {time.monotonic() - paused_at:.1f} s")


def test_m12_the_only_member_is_paused_within_the_fence(
    make_job: MakeJob, lone_cluster: Cluster, check_worlds: Any, wait_until: Any, alive: Any
):
    """M12: every lease runs out, and every node goes on under a new one; no worker notices, and later failures are seen to."""
    job, (member,) = make_job(lone_cluster), lone_cluster.members
    nodes, workers = start_nodes(job, 3, DEFAULTS)
    before = leases(job, member)
    pause(member, BRIEFLY_S, wait_until)

    def is_back() -> bool:
        after = leases(job, member)
        return after.keys() == before.keys() and not set(after.values()) & set(before.values())

    wait_until(is_back, BACK_S)
    assert all(alive(worker) for worker in workers)
    assert check_worlds(*nodes) == 1
    failed_at = time.monotonic()
    job.order(0, "sys.exit(1)")
    for node in nodes:
        node.wait_for_world(3, since=failed_at)
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0, 0]
    assert check_worlds(*nodes) == 2, "one for the failure, none for the silence"
    assert job.left_keys() == []


def test_m12_one_member_of_three_is_paused_within_the_fence(mortal_job: Any, check_worlds: Any, wait_until: Any, alive: Any):
    """M12: also if it is the leader, to which all nodes talk."""
    job, cluster = mortal_job, mortal_job.cluster
    member = cluster.members[cluster.leader()]
    nodes, workers = start_nodes(job, 2, DEFAULTS)
    ids = leases(job, member).keys()
    pause(member, BRIEFLY_S, wait_until)
    member.wait_healthy()
    wait_until(lambda: leases(job, member).keys() == ids, BACK_S)
    assert all(alive(worker) for worker in workers)
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]
    assert check_worlds(*nodes) == 1


def test_m12_a_newcomer_does_not_clear_a_job_whose_nodes_come_back(
    make_job: MakeJob, lone_cluster: Cluster, check_worlds: Any, wait_until: Any, alive: Any
):
    """M12: no lease is left, but fences are: who comes then waits, and joins the job when that is back."""
    job, (member,) = make_job(lone_cluster), lone_cluster.members
    nodes, workers = start_nodes(job, 2, DEFAULTS)
    for node in nodes:
        node.send_signal(signal.SIGSTOP)
    wait_until(lambda: leases(job, member) == {}, BACK_S)
    late = job.start("--max-restarts", "3", nnodes="2:2", workers=1, conf=DEFAULTS)
    late.wait_for_line("2 nodes of a job of this id are silent")
    for node in nodes:
        node.send_signal(signal.SIGCONT)
    wait_until(lambda: len(leases(job, member)) == 3, BACK_S)
    assert all(alive(worker) for worker in workers)
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]
    late.wait()
    assert check_worlds(*nodes) == 1
    assert late.starts() == []


# --- longer than the fence -------------------------------------------------------------------------------------------------

FENCE_S = 15.0  # who waits for a node that nobody vouches for waits for 12.5 s of it, after the lease
AGAIN_S = 9.0  # takes one or two, and on a busy machine some more
SHORT_S = 5.0
KEEPALIVE_S = 1.0


def test_who_was_away_for_longer_than_the_fence_goes_on_as_soon_as_the_cluster_is_back(
    make_job: MakeJob, lone_cluster: Cluster, check_worlds: Any, wait_until: Any, alive: Any, within: Any
):
    """M12: workers are dead at the fence; then nobody waits for another one, since each node vouches for what it was."""
    job, (member,) = make_job(lone_cluster), lone_cluster.members
    nodes, workers = start_nodes(job, 2, f"{DEFAULTS},fence={FENCE_S:g}")
    member.pause()
    paused_at = time.monotonic()
    wait_until(lambda: not any(alive(worker) for worker in workers), FENCE_S + 10.0)
    died_s = time.monotonic() - paused_at
    within("from the silence to the workers' end", died_s, FENCE_S)
    assert died_s > FENCE_S - 2 * KEEPALIVE_S
    member.resume()
    back_at = time.monotonic()
    again = [node.wait_for_world(2, since=back_at)[0].at for node in nodes]
    print(f"from the cluster's return to the next world: {max(again) - back_at:.1f} s")
    assert max(again) - back_at < AGAIN_S
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]
    assert check_worlds(*nodes) == 2


def test_an_agent_killed_with_its_warden_is_waited_for_as_long_as_the_fence(
    make_job: MakeJob, lone_cluster: Cluster, alive: Any, within: Any, processes: Any
):
    """Nobody is left to vouch for it: the others go on when its fence, and a margin, are over, and no sooner."""
    job = make_job(lone_cluster)
    nodes, workers = start_nodes(job, 3, f"{DEFAULTS},fence={SHORT_S:g}")
    warden = processes.warden(nodes[2].agent.pid)
    os.kill(warden, signal.SIGSTOP)  # so that it does not see what comes
    lost_at = nodes[2].kill()
    os.kill(warden, signal.SIGKILL)
    after = [node.wait_for_world(2, since=lost_at)[0].at - lost_at for node in nodes[:2]]
    assert not alive(workers[2])
    within("from the agent's death to the smaller world", max(after), SHORT_S + 2.0)  # etcd looks for old leases twice a second
    assert min(after) > SHORT_S - 2 * KEEPALIVE_S
    job.finish()
    assert [node.wait() for node in nodes[:2]] == [0, 0]


# --- a node that does not stop ---------------------------------------------------------------------------------------------

STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(f"{folder}/journal", "w") as journal:
    while True:
        journal.write(f"{time.monotonic()}\\n")
        journal.flush()
        time.sleep(0.01)
"""


def test_a_node_that_does_not_stop_is_expelled(
    make_job: MakeJob, lone_cluster: Cluster, wait_until: Any, alive: Any, check_worlds: Any
):
    """Its lease is revoked; its workers, which ignore SIGTERM, are gone before any of the next generation runs."""
    job, (member,) = make_job(lone_cluster), lone_cluster.members
    conf, flags = f"{DEFAULTS},fence={SHORT_S:g}", ("--max-restarts", "3", "--shutdown-timeout")
    first = job.start(*flags, "1", nnodes="2", workers=1, conf=conf)
    wait_until(lambda: leases(job, member) and any(key.endswith(b"/down/leader") for key in job.left_keys()), 15.0)
    (first_key,) = leases(job, member)
    stubborn = job.start(*flags, "120", nnodes="2", workers=1, conf=conf)
    (worker,), (quick,) = stubborn.wait_for_world(2), first.wait_for_world(2)
    ((old_key, old_lease),) = [one for one in leases(job, member).items() if one[0] != first_key]
    job.order(worker.rank, STUBBORN)
    journal = job.folder / "journal"
    wait_until(lambda: journal.exists() and journal.stat().st_size > 0, 15.0)
    failed_at = time.monotonic()
    job.order(quick.rank, "sys.exit(1)")
    wait_until(lambda: not alive(worker.pid), 40.0)
    print(f"the stubborn worker was gone after {time.monotonic() - failed_at:.1f} s")
    again = [node.wait_for_world(2, since=failed_at)[0].at for node in (first, stubborn)]
    last_beat = float(journal.read_text().split("\n")[-2])
    assert last_beat < min(again)
    assert old_key not in leases(job, member)
    assert "grantedTTL" not in member.post("/v3/lease/timetolive", {"ID": old_lease}), "it was revoked"
    assert "which did not stop in time" in first.stderr
    job.finish()
    assert [first.wait(), stubborn.wait()] == [0, 0]
    assert check_worlds(first, stubborn) == 2
