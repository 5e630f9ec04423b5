"""What the engine on etcd does beyond what every engine has to do: causes, hidden keys, limits, and how it rests."""

from __future__ import annotations

import contextlib
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.coordination.etcd.peers import HEADER, PREFIX, Clients, Visitor, fake_endpoint, prefix_of
from tests.etcd_cluster import Cluster, start_cluster

from rallypoint.coordination.engine import CompactedError, LeaseLostError, UnreachableError
from rallypoint.coordination.etcd import threads
from rallypoint.coordination.etcd.codec import Change
from rallypoint.coordination.etcd.engine import EtcdCoordination
from rallypoint.coordination.etcd.gateway import EtcdAccess
from rallypoint.coordination.etcd.threads import events_of
from rallypoint.coordination.model import Compare, Delete, EndLease, Event, Put, Transaction
from rallypoint.testing.coordination_contract import do, events_until, keys, put, raises, read, soon, wait

SHORT_TTL_S = 1.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """With leases of one second, for which it has to elect its leader within two thirds of that."""
    flags = ["--heartbeat-interval=50", "--election-timeout=500"]
    with start_cluster(tmp_path_factory.mktemp("etcd"), flags=flags) as cluster:
        yield cluster


@pytest.fixture
def clients(cluster: Cluster, tmp_path: Path) -> Iterator[Clients]:
    with Clients(cluster, prefix_of(tmp_path)) as clients:
        yield clients


def watched(client: EtcdCoordination, prefix: str = "n/") -> EtcdCoordination:
    client.watch(prefix, read(client, prefix).revision + 1, soon())
    return client


def gone(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.key, event.cause) for event in events if event.item is None]


def keys_on_server(cluster: Cluster, prefix: str) -> list[dict[str, Any]]:
    first, last = (b64encode(text.encode()).decode() for text in (prefix, prefix[:-1] + "0"))
    found: list[dict[str, Any]] = cluster.members[0].post("/v3/kv/range", {"key": first, "range_end": last}).get("kvs", [])
    return found


def forget(cluster: Cluster, revision: int) -> None:
    assert "header" in cluster.members[0].post("/v3/kv/compaction", {"revision": str(revision), "physical": True})


# --- causes ----------------------------------------------------------------------------------------------------------------


def test_a_transaction_that_deletes_what_is_bound_to_a_lease(clients: Clients) -> None:
    owner, other = clients.connect(), watched(clients.connect())
    lease = owner.grant(30, soon())
    do(owner, Put("n/a", b"", lease), Put("n/b", b"", lease), Put("n/c", b"", lease))
    do(owner, Delete("n/a"))
    do(clients.connect(), Delete("n/b"))
    do(owner, Delete("n/", is_prefix=True))
    told = events_until(other, lambda events: len(gone(events)) == 3)
    assert gone(told) == [("n/a", "deleted"), ("n/b", "deleted"), ("n/c", "deleted")]


def test_deletions_and_ends_of_leases_that_are_told_at_once(clients: Clients) -> None:
    """As to a watch that begins in the past: each has its own cause."""
    silent, leaver, other = clients.connect(), clients.connect(), clients.connect()
    begin = read(other, "n/").revision + 1
    lease = silent.grant(SHORT_TTL_S, soon())
    do(silent, Put("n/deleted", b"", lease), Put("n/silent", b"", lease))
    put(leaver, "n/left", b"", leaver.grant(30, soon()))
    do(other, Delete("n/deleted"))
    leaver.revoke(soon())
    watched(other)
    assert gone(events_until(other, bool)) == [("n/silent", "expired")]
    other.watch("n/", begin, soon())
    told = events_until(other, lambda events: len(gone(events)) == 3)
    assert gone(told) == [("n/deleted", "deleted"), ("n/left", "deleted"), ("n/silent", "expired")]


def test_very_many_leave_at_once(clients: Clients) -> None:
    """More than fit into one question."""
    other = clients.connect()
    begin = read(other, "n/").revision + 1
    leaver = clients.connect()
    for number in range(150):
        put(leaver, f"n/{number:03}", b"", leaver.grant(30, soon()))
        leaver.revoke(soon())
    other.watch("n/", begin, soon())
    told = events_until(other, lambda events: len(gone(events)) == 150)
    assert gone(told) == [(f"n/{number:03}", "deleted") for number in range(150)]


def test_where_nobody_can_tell_any_more_a_lease_counts_as_run_out(cluster: Cluster, clients: Clients) -> None:
    """That makes the others wait, and does no harm."""
    owner = clients.connect()
    put(owner, "n/a", b"", lease := owner.grant(30, soon()))
    deleted_at = do(owner, Delete("n/a")).revision
    words, caller = owner._words, owner._caller

    def cause(lease: int | None) -> str:
        return events_of([Change(deleted_at, "n/a", None, lease)], words, caller, time.monotonic())[0].cause

    assert [cause(lease), cause(0), cause(None)] == ["deleted", "deleted", "expired"]
    forget(cluster, put(owner, "n/b"))
    assert [cause(lease), cause(0)] == ["expired", "deleted"]


def test_a_revocation_that_fails_ends_the_lease_all_the_same(clients: Clients) -> None:
    """Its owner may have been taken for one who left already, so it must not go on as if it had not."""
    owner = clients.connect()
    lease = owner.grant(30, soon())
    cut_off_client(owner)
    with pytest.raises(UnreachableError):
        owner.revoke(time.monotonic() + 0.2)
    reconnect_client(owner)
    assert raises(LeaseLostError, owner.take_events)
    assert raises(LeaseLostError, put, owner, "n/a", b"", lease)
    assert owner.valid_until() < time.monotonic()


# --- keys ------------------------------------------------------------------------------------------------------------------


def test_all_keys_stand_under_the_prefix_and_those_of_the_engine_are_hidden(
    cluster: Cluster, clients: Clients, tmp_path: Path
) -> None:
    client = watched(clients.connect(), "")
    put(client, "a", b"", client.grant(30, soon()))
    on_server = keys_on_server(cluster, prefix_of(tmp_path))
    assert len(on_server) == 2, "ours, and the one that goes with the lease"
    assert keys(read(client, "")) == ["a"]
    do(client, Delete("", is_prefix=True))
    assert len(keys_on_server(cluster, prefix_of(tmp_path))) == 1
    put(client, "b")
    assert keys(events_until(client, lambda events: "b" in keys(events))) == ["a", "a", "b"]


def test_nothing_is_left_of_leases(cluster: Cluster, clients: Clients, tmp_path: Path, wait_until: Any) -> None:
    client = clients.connect()
    put(client, "n/a", b"", client.grant(SHORT_TTL_S, soon()))
    wait_until(lambda: not keys_on_server(cluster, prefix_of(tmp_path)))


def test_two_prefixes_do_not_see_each_other(cluster: Cluster, clients: Clients) -> None:
    with Clients(cluster, "/elsewhere/") as others:
        one, other = clients.connect(), others.connect()
        put(one, "n/a")
        assert keys(read(other, "")) == []
        do(other, Delete("", is_prefix=True))
        assert keys(read(one, "")) == ["n/a"]
        assert one.identity() != other.identity()


# --- limits ----------------------------------------------------------------------------------------------------------------


def test_what_is_too_large_is_refused_before_it_is_sent(clients: Clients) -> None:
    client = clients.connect()
    with pytest.raises(ValueError, match="more than 128"):
        do(client, *(Put(f"n/{number}", b"") for number in range(129)))
    with pytest.raises(ValueError, match="etcd takes"):
        put(client, "n/a", bytes(1_600_000))
    do(client, *(Put(f"n/{number}", b"") for number in range(128)))
    put(client, "n/large", bytes(1_572_864 - 200))
    assert len(read(client, "n/").items) == 129


def test_a_key_twice_is_refused(clients: Clients) -> None:
    with pytest.raises(ValueError, match="duplicate key"):
        do(clients.connect(), Put("n/a", b"1"), Put("n/a", b"2"))


def test_a_store_with_a_smaller_limit_says_so(tmp_path: Path) -> None:
    with start_cluster(tmp_path / "etcd", flags=["--max-request-bytes=10000"]) as small, Clients(small) as clients:
        client = clients.connect()
        with pytest.raises(ValueError, match="too large"):
            put(client, "n/a", bytes(20_000))


def test_there_are_not_too_many_watches(clients: Clients) -> None:
    client = clients.connect()
    begin = read(client, "").revision
    for number in range(16):
        client.watch(f"{number}/", begin + 1, soon())
    client.watch("3/", begin + 1, soon())
    with pytest.raises(ValueError, match="more than 16"):
        client.watch("another/", begin + 1, soon())


# --- watches ---------------------------------------------------------------------------------------------------------------


def test_a_watch_that_was_broken_while_etcd_forgot_says_so(tmp_path: Path) -> None:
    with start_cluster(tmp_path / "etcd") as cluster, Clients(cluster) as clients:
        client, other = watched(clients.connect()), clients.connect()
        cut_off_client(client)
        last = [put(other, f"n/{number}") for number in range(5)][-1]
        forget(cluster, last)
        reconnect_client(client)
        deadline = soon()
        while not raises(CompactedError, client.take_events):
            assert time.monotonic() < deadline
            wait([client], deadline)
        client.watch("n/", read(client, "n/").revision + 1, soon())
        put(other, "n/new")
        assert keys(events_until(client, bool)) == ["n/new"]


def cut_off_client(client: EtcdCoordination) -> None:
    """So that none of its connections lives, and none can be made."""
    client._cluster.open = refuse  # type: ignore[method-assign]
    client._caller.hang_up()
    for watch in client._watches.values():
        assert watch._talk is not None
        watch._talk.connection._socket.shutdown(2)


def refuse(*_: object) -> Any:
    raise ConnectionRefusedError(111, "connection refused")


def reconnect_client(client: EtcdCoordination) -> None:
    del client._cluster.open


def test_a_watch_that_goes_on_after_a_break_tells_what_it_has_missed_once(clients: Clients) -> None:
    client, other = watched(clients.connect()), clients.connect()
    put(other, "n/before")
    assert keys(events_until(client, bool)) == ["n/before"]
    cut_off_client(client)
    put(other, "n/meanwhile")
    deadline = soon()
    while client.connection().unreachable_since is None:
        assert time.monotonic() < deadline
    assert "connection refused" in client.connection().trouble
    assert raises(UnreachableError, client.take_events)
    reconnect_client(client)
    while raises(UnreachableError, client.read, "n/", soon()):
        assert time.monotonic() < deadline
    put(other, "n/after")
    told: list[Event] = []
    while len(told) < 2:
        assert time.monotonic() < deadline
        with contextlib.suppress(UnreachableError):
            told += client.take_events()
    assert keys(told) == ["n/meanwhile", "n/after"]


def test_what_is_told_of_progress_counts_when_a_watch_goes_on(clients: Clients, cluster: Cluster) -> None:
    """A watch of what never changes must not need a revision that etcd has long forgotten."""
    client = watched(clients.connect(), "quiet/")
    watch = client._watches["quiet/"]
    now = put(client, "n/a")
    watch._take({"header": {**HEADER, "revision": str(now)}})
    assert watch._next_revision == now + 1


# --- the lease -------------------------------------------------------------------------------------------------------------


def test_an_owner_that_hangs_is_taken_for_dead(clients: Clients) -> None:
    """It calls nothing, so its lease is not kept, though its process has a thread that could."""
    owner, other = clients.connect(), watched(clients.connect())
    put(owner, "n/a", b"", owner.grant(SHORT_TTL_S, soon()))
    assert gone(events_until(other, gone)) == [("n/a", "expired")]


def test_a_new_leader_that_does_not_know_the_lease_yet_does_not_end_it(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    """A keepalive without a time to live is believed only if the key that goes with the lease is gone too."""
    owner = clients.connect()
    lease = owner.grant(3, soon())
    put(owner, "n/a", b"", lease)
    was = threads.KEEP_ALIVE
    asked = threading.Event()

    def forgetful(path: str, question: dict[str, Any], *args: object, **kwargs: object) -> Any:
        if path == was and not asked.is_set():
            asked.set()
            question = {"ID": "1"}  # which nobody knows
        return call(path, question, *args, **kwargs)  # type: ignore[arg-type]

    call = owner._keeper._caller.call
    monkeypatch.setattr(owner._keeper._caller, "call", forgetful)
    before = owner.valid_until()
    deadline = soon()
    while not (asked.is_set() and owner.valid_until() > before):
        assert time.monotonic() < deadline
        wait([owner], min(deadline, time.monotonic() + 0.1))
        with contextlib.suppress(UnreachableError):  # it says that something is odd, until it is answered
            owner.take_events()
    put(owner, "n/a", b"2", lease)


def test_a_fence_that_is_longer_than_the_lease_counts(clients: Clients) -> None:
    client = EtcdCoordination(EtcdAccess(clients.endpoints), PREFIX, fence_s=30)
    clients.callback(client.close)
    client.grant(5, soon())
    assert 29 < client.valid_until() - time.monotonic() <= 30
    assert client.wake_at() < time.monotonic() + 2, "keepalives are not delayed by it"
    client.revoke(soon())


def test_m12_a_lease_that_was_ended_is_good_for_the_fence_and_no_longer(clients: Clients) -> None:
    """M12: to be told that it is over, however late, is no sign of life that others have seen."""
    owner, other = EtcdCoordination(EtcdAccess(clients.endpoints), PREFIX, fence_s=30), clients.connect()
    clients.callback(owner.close)
    lease = owner.grant(3, soon())
    ended_at = time.monotonic()
    do(other, EndLease(lease))
    with pytest.raises(LeaseLostError):
        events_until(owner, lambda _: False)
    assert time.monotonic() - ended_at > 0.5, "a keepalive was due, and was answered"
    assert owner.valid_until() - time.monotonic() > 25
    assert owner.valid_until() == owner.may_return_until() <= ended_at + 30
    owner.grant(3, soon())
    assert owner.valid_until() > ended_at + 30
    owner.revoke(soon())


def test_m12_a_grant_that_is_not_answered_leaves_the_fence_where_it_was(clients: Clients) -> None:
    """M12: without a lease there would be none at all."""
    owner = EtcdCoordination(EtcdAccess(clients.endpoints), PREFIX, fence_s=30)
    clients.callback(owner.close)
    owner.grant(30, soon())
    cut_off_client(owner)
    before = owner.valid_until()
    with pytest.raises(UnreachableError):
        owner.grant(3, time.monotonic() + 0.2)
    assert owner.valid_until() == before
    reconnect_client(owner)
    owner.revoke(soon())


# --- at rest ---------------------------------------------------------------------------------------------------------------


def test_a_client_at_rest_sends_keepalives_and_nothing_else() -> None:
    asked: list[str] = []

    def handle(visitor: Visitor) -> None:
        while True:
            path, _ = visitor.request()
            asked.append(path)
            if path == "/v3/watch":
                line = b'{"result":{"header":{"cluster_id":"77","revision":"5","raft_term":"2"},"created":true}}\n'
                visitor.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(line), line))
                visitor.wait_for_end()
            visitor.answer({"ID": "9", "TTL": "1"})

    with (
        fake_endpoint(handle) as endpoint,
        contextlib.closing(EtcdCoordination(EtcdAccess((endpoint.address,)), PREFIX)) as client,
    ):
        client.connect(soon())
        client.grant(1, soon())
        client.watch("n/", 6, soon())
        before, until, calls = len(asked), time.monotonic() + 2, 0
        while time.monotonic() < until:
            wait([client], until)
            client.take_events()
            calls += 1
    assert set(asked[before:]) == {"/v3/lease/keepalive"}
    assert 3 <= len(asked[before:]) <= 8
    assert calls < 30, "nor does it wake its owner for nothing"


def test_close_leaves_nothing_and_revokes_nothing(clients: Clients) -> None:
    owner, other = clients.connect(), watched(clients.connect())
    put(owner, "n/a", b"", owner.grant(30, soon()))
    watched(watched(owner), "m/").unwatch("m/")
    owner.close()
    owner.close()
    assert keys(read(other, "n/")) == ["n/a"]
    assert gone(other.take_events()) == []


def test_a_client_that_never_connected_is_closed_too() -> None:
    client = EtcdCoordination(EtcdAccess((("127.0.0.1", 1),)), PREFIX)
    assert client.identity() == ""
    assert client.connection().unreachable_since is not None
    assert raises(UnreachableError, client.take_events)
    client.close()


def test_calls_connect_by_themselves(clients: Clients) -> None:
    client = clients.make()
    create = Transaction((Compare("n/a", "create", 0),), (Put("n/a", b""),))
    assert client.transact(create, soon()).succeeded
    assert client.identity()
    assert client.connection().unreachable_since is None
