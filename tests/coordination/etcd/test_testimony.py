"""What a warden tells a real etcd of a node that is gone; with a password and over TLS, see test_admission."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import AT_ONCE_S
from tests.coordination.etcd.peers import Clients, Visitor, fake_endpoint, prefix_of
from tests.etcd_cluster import Cluster, start_cluster

from rallypoint.coordination import testimony as testimonies
from rallypoint.coordination.etcd.engine import EtcdCoordination
from rallypoint.coordination.model import Compare, Delete, Put, Transaction
from rallypoint.testing.coordination_contract import do, events_until, keys, put, read, soon

TTL_S = 60.0  # far more than any test takes: what ends before was ended
WILL = Transaction((Compare("nodes/a", "create", 0),), (), (Put("left/a", b"lost"),))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with start_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
def clients(cluster: Cluster, tmp_path: Path) -> Iterator[Clients]:
    with Clients(cluster, prefix_of(tmp_path)) as clients:
        yield clients


def fields(client: EtcdCoordination, will: Transaction | None = WILL) -> tuple[Any, ...]:
    testimony = client.testimony(will)
    assert testimony is not None
    return testimony.fields()


def joined(client: EtcdCoordination) -> EtcdCoordination:
    put(client, "nodes/a", b"here", client.grant(TTL_S, soon()))
    return client


def test_the_will_is_written_and_the_lease_is_over(clients: Clients) -> None:
    """In this order: whoever sees that the node is gone knows already that nobody need wait for it."""
    node, other = joined(clients.connect()), clients.connect()
    other.watch("", read(other, "").revision + 1, soon())
    testimonies.testify(*fields(node))
    told = events_until(other, lambda events: any(event.item is None for event in events))
    assert [(event.key, event.item is None) for event in told] == [("left/a", False), ("nodes/a", True)]


def test_a_node_without_workers_only_ends_its_lease(clients: Clients) -> None:
    node, other = joined(clients.connect()), clients.connect()
    testimonies.testify(*fields(node, None))
    assert keys(read(other, "")) == []


def test_nothing_is_written_into_a_job_that_was_cleared(clients: Clients) -> None:
    """Nor is it a fault if the lease is over already."""
    node, other = joined(clients.connect()), clients.connect()
    given = fields(node)
    do(other, Delete("nodes/", is_prefix=True))
    testimonies.testify(*given)
    testimonies.testify(*given)
    assert keys(read(other, "")) == []


def test_who_has_no_lease_has_nothing_to_say(clients: Clients) -> None:
    node = clients.connect()
    assert node.testimony(WILL) is None
    joined(node)
    assert node.testimony(WILL) is not None
    node.revoke(soon())
    assert node.testimony(WILL) is None


def test_what_does_not_fit_the_page_is_left_out(clients: Clients) -> None:
    """Then the fence is waited for, as without a warden."""
    assert joined(clients.connect()).testimony(Transaction((), (Put("left/a", b"x" * 4096),))) is None


def test_the_token_is_sent_along() -> None:
    heads: list[bytes] = []

    def handle(visitor: Visitor) -> None:
        while b"\r\n\r\n" not in (head := visitor.socket.recv(65536)):
            """It comes in one piece."""
        heads.append(head)
        visitor.answer({"token": "t0ken.7"})
        visitor.socket.close()

    with fake_endpoint(handle) as endpoint:
        login = "/v3/auth/authenticate", b"{}"
        testimonies.testify("etcd", (endpoint.address,), None, login, (("/v3/kv/txn", b"{}"), ("/v3/lease/revoke", b"{}")))
    assert [head.split()[1] for head in heads] == [b"/v3/auth/authenticate", b"/v3/kv/txn", b"/v3/lease/revoke"]
    assert [b"Authorization: t0ken.7" in head for head in heads] == [False, True, True]


def test_a_member_that_cannot_just_now_is_not_the_last_to_be_told(clients: Clients) -> None:
    """One that refuses connections, one that says that it has no leader, and then one that does it."""
    node, other = joined(clients.connect()), clients.connect()

    def has_no_leader(visitor: Visitor) -> None:
        visitor.request()
        visitor.answer({"error": "etcdserver: no leader"}, "503 Service Unavailable")
        visitor.socket.close()

    with fake_endpoint(has_no_leader) as leaderless:
        kind, addresses, *rest = fields(node)
        testimonies.testify(kind, (("127.0.0.1", 1), leaderless.address, *addresses), *rest)
    assert keys(read(other, "")) == ["left/a"]


def test_who_answers_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.coordination.testimony.TRY_FOR_S", 0.5)
    with fake_endpoint(Visitor.wait_for_end) as silent:
        began_at = time.monotonic()
        testimonies.testify("etcd", (silent.address,), None, None, (("/v3/kv/txn", b"{}"),))
        assert time.monotonic() - began_at < 0.5 + AT_ONCE_S
