"""Torch's names for etcd, over a real server: the back end that is one key, and the handlers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.etcd_cluster import Cluster, start_cluster

from rallypoint.compat.etcd_backend import (
    EtcdRendezvous,
    EtcdRendezvousBackend,
    EtcdRendezvousHandler,
    EtcdStore,
    cas_delay,
    create_backend,
    create_rdzv_handler,
)
from rallypoint.coordination.etcd.engine import EtcdCell
from rallypoint.coordination.etcd.gateway import access_of
from rallypoint.errors import RendezvousConnectionError, RendezvousStateError
from rallypoint.rendezvous.dynamic_handler import DynamicRendezvousHandler
from rallypoint.rendezvous.handler import RendezvousParameters

KEEP_ALIVE_S = 1


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with start_cluster(Path(tmp_path_factory.mktemp("etcd"))) as cluster:
        yield cluster


class ForeignClient:
    """As much of a client of python-etcd as is looked at."""

    protocol = "http"

    def __init__(self, endpoint: str) -> None:
        self.host, _, port = endpoint.partition(":")
        self.port = int(port)


@pytest.fixture(params=[str, ForeignClient], ids=["endpoint", "python-etcd"])
def client(cluster: Cluster, request: pytest.FixtureRequest) -> Any:
    return request.param(cluster.endpoints[0])


def test_a_state_is_written_only_by_who_has_seen_the_latest(client: Any, request: pytest.FixtureRequest) -> None:
    backend = EtcdRendezvousBackend(client, request.node.name, ttl=60)
    assert (backend.name, backend.get_state()) == ("etcd-v2", None)
    assert backend.set_state(b"late", token=7) is None
    first = backend.set_state(b"one")
    assert first is not None
    assert (first[0], first[2]) == (b"one", True)
    second = backend.set_state(b"\0two", first[1])
    assert second is not None
    assert backend.get_state() == second[:2] == (b"\0two", second[1])
    for token in (None, first[1], "never given"):
        assert backend.set_state(b"three", token) == (b"\0two", second[1], False)


def test_what_is_not_base64_is_corrupt(client: Any, request: pytest.FixtureRequest) -> None:
    backend = EtcdRendezvousBackend(client, request.node.name, "/elsewhere/")
    EtcdCell(access_of(client), "/elsewhere", request.node.name, 60).put(b"a", 0)
    with pytest.raises(RendezvousStateError, match="corrupt"):
        backend.get_state()


def test_nobody_there(unused_port: int) -> None:
    params = RendezvousParameters("etcd-v2", f"127.0.0.1:{unused_port}", "job", 1, 1, read_timeout=1)
    with pytest.raises(RendezvousConnectionError, match="etcd"):
        create_backend(params)
    with pytest.raises(ValueError, match="run id"):
        EtcdRendezvousBackend("127.0.0.1:1", "")


@pytest.fixture
def unused_port() -> Iterator[int]:
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_a_job_meets_in_the_key(cluster: Cluster, request: pytest.FixtureRequest) -> None:
    params = RendezvousParameters("etcd-v2", cluster.endpoint, request.node.name, 1, 1)
    backend, store = create_backend(params)
    handler = DynamicRendezvousHandler.from_backend(params.run_id, store, backend, 1, 1, keep_alive_interval=KEEP_ALIVE_S)
    try:
        info = handler.next_rendezvous()
        assert (handler.get_backend(), info.rank, info.world_size) == ("etcd-v2", 0, 1)
        info.store.set("key", "value")
        assert info.store.get("key") == b"value"
    finally:
        handler.shutdown()
        store.close()


def test_the_older_handler_is_ours(cluster: Cluster, request: pytest.FixtureRequest) -> None:
    conf = {"last_call_timeout": 0.2, "etcd_prefix": "/jobs"}
    params = RendezvousParameters("etcd", cluster.endpoint, request.node.name, 1, 2, None, **conf)
    handler = create_rdzv_handler(params)
    described = EtcdRendezvous(cluster.endpoints[0], "/jobs/", f"{request.node.name}2", 1, 2, 60, 0.2)
    for one in (handler, EtcdRendezvousHandler(described, "127.0.0.1")):
        try:
            info = one.next_rendezvous()
            assert (one.get_backend(), info.world_size, one.is_closed()) == ("etcd", 1, False)
        finally:
            one.shutdown()


def test_a_store_takes_what_stands_for_a_client(client: Any, request: pytest.FixtureRequest) -> None:
    store = EtcdStore(client, f"/tests/{request.node.name}")
    store.set("a", "1")
    cas_delay()
    assert store.add("a", 2) == 3
    store.close()
    with pytest.raises(TypeError, match="python-etcd"):
        EtcdStore(object(), "/x")
