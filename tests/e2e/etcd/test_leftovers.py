"""What a job has left in etcd is cleared by whoever comes next, or leaves last; and nothing of a job that lives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.etcd_cluster import Cluster

from rallypoint.coordination.etcd.engine import EtcdCoordination
from rallypoint.coordination.etcd.gateway import EtcdAccess
from rallypoint.coordination.model import Put, Snapshot, Transaction
from rallypoint.protocol import job_records as job
from rallypoint.rendezvous.etcd import parse_endpoints
from rallypoint.rendezvous.place import clear_if_over

LEFT = (job.SETTINGS, job.STATUS, job.GENERATION, job.CLOSED, job.signal_key(7), job.seat_key(7, 3, "a"), job.done_key(7, "a"))
TIMEOUT_S = 10.0


class Node(EtcdCoordination):
    """`meanwhile` is what another node writes just after this one has looked."""

    meanwhile: tuple[Put, ...] = ()

    def read(self, prefix: str, deadline: float) -> Snapshot:
        found = super().read(prefix, deadline)
        if self.meanwhile:
            self.transact(Transaction((), self.meanwhile), deadline)
        return found

    def write(self, *keys: str, lease: int = 0) -> None:
        self.transact(Transaction((), tuple(Put(key, b"1", lease) for key in keys)), time.monotonic() + TIMEOUT_S)

    def keys(self) -> set[str]:
        return {item.key for item in super().read("", time.monotonic() + TIMEOUT_S).items}


@pytest.fixture
def node(shared_cluster: Cluster, tmp_path: Path) -> Iterator[Node]:
    node = Node(EtcdAccess(parse_endpoints(shared_cluster.endpoint)), f"/rallypoint/{tmp_path.name}/")
    node.connect(time.monotonic() + TIMEOUT_S)
    yield node
    node.close()


def test_a_job_without_a_living_node_is_cleared(node: Node):
    node.write(*LEFT)
    clear_if_over(node)
    assert node.keys() == set()


def test_a_job_with_a_living_node_is_not(node: Node):
    lease = node.grant(10, time.monotonic() + TIMEOUT_S)
    node.write(*LEFT)
    node.write(job.node_key("b"), lease=lease)
    clear_if_over(node)
    assert node.keys() == {*LEFT, job.node_key("b")}


def test_settings_alone_may_be_those_of_a_node_that_has_just_come(node: Node):
    node.write(job.SETTINGS)
    clear_if_over(node)
    assert node.keys() == {job.SETTINGS}


def test_whoever_has_written_a_record_since_keeps_it(node: Node):
    node.write(*LEFT)
    node.meanwhile = (Put(job.node_key("b"), b"1", node.grant(10, time.monotonic() + TIMEOUT_S)),)
    clear_if_over(node)
    assert node.keys() == {job.node_key("b")}


@pytest.mark.parametrize("key", [job.SETTINGS, job.LEADER])
def test_a_job_that_has_begun_anew_since_is_not_cleared(node: Node, key: str):
    node.write(*LEFT)
    node.meanwhile = (Put(key, b"2"),)
    clear_if_over(node)
    assert node.keys() == {*LEFT, key}
