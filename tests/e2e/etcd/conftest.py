"""Jobs whose nodes meet in a real etcd, all of them on this machine; see tests/e2e/nodes for what their workers do."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.nodes.conftest import MEMBER, Job, Node, Start
from tests.etcd_cluster import Cluster, start_cluster

LEASE_S = 2.0  # the shortest that etcd gives with its usual time-outs
FENCE_S = 3.0
QUICK = f"last_call_timeout=0.3,keep_alive_interval=0.5,fence={FENCE_S:g}"


class EtcdJob(Job):
    """Several agents that meet under one name in a cluster; their workers do what they are ordered to."""

    def __init__(self, start: Callable[..., Any], member: Path, folder: Path, cluster: Cluster, run_id: str) -> None:
        super().__init__(start, member, folder, port=0)
        self.cluster, self.run_id = cluster, run_id

    def start(
        self, *flags: str, nnodes: str = "1:2", workers: int = 2, conf: str = QUICK, host: str = "", run_id: str = "",
        env: dict[str, str] | None = None,
    ) -> Node:  # fmt: skip
        """`host`: the endpoint, if it is not that of the whole cluster."""
        size = ["--nnodes", nnodes, "--nproc-per-node", str(workers)]
        meeting = ["--rdzv-backend", "etcd", "--rdzv-endpoint", host or self.cluster.endpoint, "--rdzv-conf", conf]
        name = ["--rdzv-id", run_id or self.run_id]
        return Node(self._start([*size, *meeting, *name, *flags, self._member, self.folder], env), workers)

    def begin_anew(self) -> None:
        """Take back the order to finish, for a job that is to come."""
        for order in self.folder.glob("finish*"):
            order.unlink()

    def left_keys(self) -> list[bytes]:
        """What is left in etcd of all jobs that tests of this name ran, but for the keys that only say how a lease ended."""
        return [key for key in all_keys(self.cluster) if f"/{self.run_id}/".encode() in key and b"\xff" not in key]


def all_keys(cluster: Cluster) -> list[bytes]:
    everything = base64.b64encode(b"\0").decode()
    answer = cluster.witness().post("/v3/kv/range", {"key": everything, "range_end": everything, "keys_only": True})
    assert "header" in answer, answer
    return [base64.b64decode(item["key"]) for item in answer.get("kvs", [])]


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One member, which no test may harm."""
    with start_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
def mortal_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three members, to be killed and started again."""
    with start_cluster(tmp_path / "etcd", members=3) as cluster:
        yield cluster


MakeJob = Callable[[Cluster], EtcdJob]


@pytest.fixture
def make_job(start_rallyrun: Callable[..., Any], script: Callable[..., Path], tmp_path: Path) -> MakeJob:
    """``make_job(cluster)``: a job in that cluster, under a name of its own; for the rest see tests/e2e/nodes."""
    folder = tmp_path / "orders"

    def make(cluster: Cluster) -> EtcdJob:
        folder.mkdir()
        return EtcdJob(start_rallyrun, script(MEMBER, "member.py"), folder, cluster, f"job-{tmp_path.name}")

    return make


@pytest.fixture
def job(make_job: MakeJob, shared_cluster: Cluster) -> EtcdJob:
    return make_job(shared_cluster)


@pytest.fixture
def mortal_job(mortal_cluster: Cluster, make_job: MakeJob) -> EtcdJob:
    return make_job(mortal_cluster)


@pytest.fixture(scope="session")
def check_worlds() -> Callable[..., int]:
    """``check_worlds(*nodes)``: all who say that they have met have met in the same world; how many worlds there were."""

    def check(*nodes: Node) -> int:
        worlds: dict[tuple[str, str], list[Start]] = {}
        for node in nodes:
            for start in node.starts():
                worlds.setdefault(start.master, []).append(start)
        for starts in worlds.values():
            assert len({(start.world, start.restarts) for start in starts}) == 1
            ranks = [start.rank for start in starts]
            assert len(set(ranks)) == len(ranks), "no rank was given twice"
            assert set(ranks) <= set(range(starts[0].world))
        return len(worlds)

    return check
