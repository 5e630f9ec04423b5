"""The engine on etcd does what every engine has to do: on real servers, of each version that there is, alone and as three."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.etcd_cluster import Cluster, binary_of, start_cluster

from rallypoint.coordination.engine import Coordination
from rallypoint.coordination.etcd.engine import EtcdCoordination
from rallypoint.coordination.etcd.gateway import EtcdAccess
from rallypoint.testing.coordination_contract import CoordinationContract, read

VERSIONS_AND_SIZES = [("3.5", 1), ("3.5", 3), ("3.4", 1), pytest.param(("3.4", 3), marks=pytest.mark.soak)]


def end_all_leases(cluster: Cluster) -> None:
    """A lease that runs out later would change the store in the midst of another test."""
    member = cluster.members[0]
    for lease in member.post("/v3/lease/leases", {}).get("leases", []):
        member.post("/v3/lease/revoke", {"ID": lease["ID"]})


@pytest.fixture(scope="module", params=VERSIONS_AND_SIZES, ids="etcd-{0[0]}-members-{0[1]}".format)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    version, members = request.param
    with start_cluster(tmp_path_factory.mktemp("etcd"), members, binary_of(version)) as cluster:
        yield cluster


class TestEtcdEngine(CoordinationContract):
    """P32: etcd is spoken to through its v3 API."""

    least_ttl_s = 2.0  # one and a half times the time that its members take to elect a leader, rounded up
    can_compact = True

    @pytest.fixture
    def connect(self, cluster: Cluster, tmp_path: Path) -> Iterator[Callable[[], EtcdCoordination]]:
        self.cluster_of_test = cluster
        endpoints = tuple(("127.0.0.1", member.client_port) for member in cluster.members)
        with contextlib.ExitStack() as clients:

            def connect() -> EtcdCoordination:
                client = EtcdCoordination(EtcdAccess(endpoints), f"/rallypoint/{tmp_path.name}/")
                clients.callback(client.close)
                client.connect(time.monotonic() + 10)
                return client

            yield connect
        end_all_leases(cluster)

    def compact(self, client: Coordination) -> None:
        revision = read(client, "").revision
        for member in self.cluster_of_test.members[:1]:
            assert "header" in member.post("/v3/kv/compaction", {"revision": str(revision), "physical": True})
