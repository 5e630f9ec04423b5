"""The cluster, or a node, is silent for a while: within the fence nothing happens, after it the others go on. M12."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.etcd.conftest import EtcdJob, MakeJob
from tests.etcd_cluster import Cluster, Member, start_cluster

DEFAULTS = "last_call_timeout=0.3"  # with the lease of 3 s and the fence of 30 s that users have
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
    return nodes, [node.wait_for_world(count, timeout_s=30.0)[0].pid for node in nodes]


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
