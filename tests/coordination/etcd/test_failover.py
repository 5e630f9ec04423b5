"""Members of a cluster that die, hang or lie: calls, watches and leases go on at another one, and nothing is done twice."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.coordination.etcd.peers import HEADER, PREFIX, Clients, FakeEndpoint, Visitor, fake_endpoint, prefix_of
from tests.etcd_cluster import Cluster, start_cluster

from rallypoint.coordination.engine import Coordination, StoreGoneError, UnreachableError
from rallypoint.coordination.etcd import gateway, threads
from rallypoint.coordination.etcd.engine import EtcdCoordination
from rallypoint.coordination.etcd.errors import Failure
from rallypoint.coordination.etcd.gateway import EtcdAccess, EtcdCluster
from rallypoint.coordination.model import Event, Get, Put, Transaction
from rallypoint.testing.coordination_contract import do, events_until, keys, put, raises, read, soon, wait

QUICK_S = 4.0  # for what a hung member may delay: a second or two, where its own time-outs would take seven


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with start_cluster(tmp_path_factory.mktemp("etcd"), 3) as cluster:
        yield cluster


@pytest.fixture
def members(cluster: Cluster) -> Iterator[Cluster]:
    """Three, to be paused."""
    yield cluster
    for member in cluster.members:
        member.resume()
    for member in cluster.members:
        member.wait_healthy()


@pytest.fixture
def clients(members: Cluster, tmp_path: Path) -> Iterator[Clients]:
    with Clients(members, prefix_of(tmp_path)) as clients:
        yield clients


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Cluster]:
    """Three, to be killed and started again."""
    with start_cluster(tmp_path / "etcd", 3) as cluster:
        yield cluster


@pytest.fixture
def mourners(mortal: Cluster) -> Iterator[Clients]:
    """Clients of those."""
    with Clients(mortal) as clients:
        yield clients


def settled(client: Coordination, call: Callable[[], object], timeout_s: float = 20.0) -> object:
    """What `call` gives, once the cluster is back; repeated, as by a caller who knows that it may have been done already."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except UnreachableError:
            assert time.monotonic() < deadline


def until_back(client: Coordination, predicate: Callable[[list[Event]], object], timeout_s: float = 20.0) -> list[Event]:
    """As `events_until`, though the cluster cannot be reached for a while."""
    deadline = time.monotonic() + timeout_s
    events: list[Event] = []
    while not predicate(events):
        assert time.monotonic() < deadline, events
        wait([client], min(deadline, time.monotonic() + 0.2))
        with contextlib.suppress(UnreachableError):
            events += client.take_events()
    return events


# --- members that die ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["leader", "own"])
def test_a_member_that_is_killed_is_left(mortal: Cluster, mourners: Clients, victim: str) -> None:
    """P04: whichever of them dies, what a node has to do with the store goes on."""
    leader = mortal.leader()
    own = (leader + 1) % 3
    client = mourners.connect(own)
    lease = client.grant(6, soon())
    put(client, "n/a", b"", lease)
    client.watch("n/", read(client, "n/").revision + 1, soon())
    mortal.members[leader if victim == "leader" else own].kill()
    killed_at = time.monotonic()
    settled(client, lambda: put(client, "n/b", b"", lease))
    assert time.monotonic() < killed_at + 8
    told = until_back(client, lambda events: "n/b" in keys(events))
    assert {event.cause for event in told} == {"put"}, "the lease has outlived it"
    events_until(client, lambda _: client.valid_until() > killed_at + 6)


def test_watches_go_on_at_another_member_and_miss_nothing(mortal: Cluster, mourners: Clients) -> None:
    """However often they have to move."""
    writer, client = mourners.connect(), mourners.connect()
    client.watch("n/", read(client, "n/").revision + 1, soon())
    written: list[str] = []

    def write(name: str) -> None:
        settled(writer, lambda: put(writer, f"n/{name}"))
        written.append(f"n/{name}")

    told: list[Event] = []
    for number in range(3):
        write(f"{number}a")
        mortal.members[number].kill()
        write(f"{number}b")
        told += until_back(client, lambda events, number=number: f"n/{number}b" in keys(events))  # type: ignore[misc]
        mortal.replace(mortal.members[number])
    assert sorted(set(keys(told))) == written
    revisions = [event.revision for event in told]
    assert revisions == sorted(set(revisions)), "each once, in order"


# --- members that hang -----------------------------------------------------------------------------------------------------


def test_a_read_at_a_member_that_hangs_is_repeated_elsewhere(members: Cluster, clients: Clients) -> None:
    client = clients.connect(0)
    members.members[0].pause()
    began = time.monotonic()
    read(client, "n/")
    assert time.monotonic() < began + QUICK_S
    again_at = time.monotonic()
    read(client, "n/")
    assert time.monotonic() < again_at + 0.5, "what hangs is not asked first again"


def test_a_transaction_is_not_sent_to_a_member_that_hangs(members: Cluster, clients: Clients, wait_until: Any) -> None:
    """Who has not been heard of for a second is asked how it is first; so it is done once, and nothing is in doubt."""
    follower = (members.leader() + 1) % 3
    client = clients.connect(follower)
    talk = client._caller._talk
    assert talk is not None
    members.members[follower].pause()
    wait_until(lambda: time.monotonic() > talk._heard_at + 1.1)
    began = time.monotonic()
    created = do(client, Put("n/a", b""), Get("n/a")).items[0]
    assert time.monotonic() < began + QUICK_S
    assert created is not None
    assert created.create_revision == created.mod_revision


def test_a_transaction_that_a_hung_member_has_taken_is_in_doubt_soon(members: Cluster, clients: Clients) -> None:
    follower = (members.leader() + 1) % 3
    client = clients.connect(follower)
    members.members[follower].pause()
    began = time.monotonic()
    with pytest.raises(UnreachableError, match="may have been done"):
        put(client, "n/a")
    assert time.monotonic() < began + QUICK_S
    put(client, "n/b")
    assert time.monotonic() < began + QUICK_S, "the next one goes elsewhere at once"


def test_a_new_client_does_not_wait_for_a_member_that_hangs(members: Cluster, clients: Clients) -> None:
    members.members[1].pause()
    began = time.monotonic()
    clients.connect(1)
    assert time.monotonic() < began + QUICK_S


def test_a_watch_at_a_member_that_hangs_is_moved(members: Cluster, clients: Clients) -> None:
    """Nothing comes from there, and its kernel answers all the same: only its silence to keepalives tells."""
    follower = (members.leader() + 1) % 3
    client, other = clients.connect(follower), clients.connect((follower + 1) % 3)
    client.watch("n/", read(client, "n/").revision + 1, soon())
    client.grant(3, soon())
    members.members[follower].pause()
    put(other, "n/a")
    assert keys(events_until(client, bool)) == ["n/a"]


def test_a_watch_of_a_client_without_a_lease_is_moved_too(
    members: Cluster, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "CHECK_EVERY_S", 0.5)
    follower = (members.leader() + 1) % 3
    client, other = clients.connect(follower), clients.connect((follower + 1) % 3)
    client.watch("n/", read(client, "n/").revision + 1, soon())
    members.members[follower].pause()
    put(other, "n/a")
    assert keys(events_until(client, bool, 15)) == ["n/a"]


def test_a_lease_is_kept_while_a_call_hangs(members: Cluster, clients: Clients) -> None:
    """By itself: its owner is inside the call, and can do nothing."""
    client = clients.connect(0)
    lease = client.grant(2, soon())
    put(client, "n/a", b"", lease)

    def answer(visitor: Visitor) -> None:
        """As a member does that has a leader and is in no hurry."""
        while True:
            path, _ = visitor.request()
            if path == "/v3/kv/range":
                visitor.wait_for_end()
            visitor.answer({"header": {**HEADER, "cluster_id": str(client._cluster.id)}})

    with fake_endpoint(answer) as slow:
        access = client._cluster.access.replace(endpoints=(slow.address,))
        client._caller.hang_up()
        client._caller._cluster = EtcdCluster(access)
        began = time.monotonic()
        assert raises(UnreachableError, client.read, "n/", began + 4)
    assert time.monotonic() > began + 3.5
    assert client.valid_until() > time.monotonic()


def test_close_does_not_wait_for_a_member_that_hangs(members: Cluster, clients: Clients) -> None:
    client = clients.connect(2)
    client.watch("n/", read(client, "n/").revision + 1, soon())
    client.grant(3, soon())
    members.members[2].pause()
    began = time.monotonic()
    client.close()
    assert time.monotonic() < began + 1


# --- quorum ----------------------------------------------------------------------------------------------------------------


def test_without_a_quorum_it_is_said_so_and_all_goes_on_when_it_is_back(mortal: Cluster, mourners: Clients) -> None:
    leader = mortal.leader()
    client = mourners.connect((leader + 1) % 3)
    lease = client.grant(20, soon())
    put(client, "n/a", b"", lease)
    client.watch("n/", read(client, "n/").revision + 1, soon())
    for index in (leader, (leader + 2) % 3):
        mortal.members[index].kill()
    deadline = time.monotonic() + 15
    while not raises(UnreachableError, client.transact, Transaction((), (Put("n/b", b""),)), time.monotonic() + 3):
        assert time.monotonic() < deadline, "it goes on until the last member has noticed"
    with pytest.raises(UnreachableError, match="no leader"):
        client.read("n/", time.monotonic() + 1)
    while client.connection().unreachable_since is None:
        assert time.monotonic() < deadline
        wait([client], time.monotonic() + 0.1)
    with pytest.raises(UnreachableError, match="no leader"):
        client.take_events()
    assert "no leader" in client.connection().trouble
    with pytest.raises(UnreachableError, match="no leader"):
        mourners.make().connect(time.monotonic() + 0.5)
    mortal.members[leader].start(wait=False)
    settled(client, lambda: put(client, "n/c", b"", lease))
    told = until_back(client, lambda events: "n/c" in keys(events))
    assert {event.cause for event in told} == {"put"}, "the lease has outlived it"
    until_back(client, lambda _: client.connection().unreachable_since is None)


# --- what is not repeated --------------------------------------------------------------------------------------------------


def answering(asked: list[str], txn: Callable[[Visitor], None], **fields: object) -> Callable[[Visitor], None]:
    """A member that notes what it is asked, and to transactions does this."""

    def handle(visitor: Visitor) -> None:
        while True:
            path, _ = visitor.request()
            asked.append(path)
            if path == "/v3/kv/txn":
                txn(visitor)
            else:
                visitor.answer(fields)

    return handle


def hang_up(visitor: Visitor) -> None:
    raise ConnectionError


def client_of(*endpoints: FakeEndpoint) -> contextlib.closing[EtcdCoordination]:
    client = EtcdCoordination(EtcdAccess(tuple(endpoint.address for endpoint in endpoints)), PREFIX)
    client._cluster.home = 0
    return contextlib.closing(client)


def say(code: int, message: str) -> Callable[[Visitor], None]:
    return lambda visitor: visitor.answer({"error": message, "code": code, "message": message}, "503 X")


@pytest.mark.parametrize(
    "txn",
    [
        hang_up,
        say(14, "etcdserver: request timed out"),
        say(2, "context deadline exceeded"),
        say(14, "etcdserver: leader changed"),
    ],
    ids=["hangs up", "times out", "has no quorum", "has another leader"],
)
def test_a_change_whose_answer_is_lost_is_not_repeated(txn: Callable[[Visitor], None]) -> None:
    first: list[str] = []
    second: list[str] = []
    with (
        fake_endpoint(answering(first, txn)) as one,
        fake_endpoint(answering(second, txn)) as other,
        client_of(one, other) as client,
    ):
        client.connect(soon())
        with pytest.raises(UnreachableError, match="may have been done"):
            put(client, "n/a")
        assert [*first, *second].count("/v3/kv/txn") == 1


@pytest.mark.parametrize("txn", [hang_up, say(14, "etcdserver: request timed out")], ids=["hangs up", "times out"])
def test_what_only_reads_is_repeated_elsewhere(txn: Callable[[Visitor], None]) -> None:
    first: list[str] = []
    second: list[str] = []
    read_well = answering(second, lambda visitor: visitor.answer({"succeeded": True, "responses": [{"response_range": {}}]}))
    with fake_endpoint(answering(first, txn)) as one, fake_endpoint(read_well) as other, client_of(one, other) as client:
        client.connect(soon())
        assert do(client, Get("n/a")).items == (None,)
        assert client._cluster.home == 1


@pytest.mark.parametrize(
    "txn", [say(14, "etcdserver: no leader"), say(8, "etcdserver: too many requests")], ids=["no leader", "too many requests"]
)
def test_a_change_that_was_not_begun_is_made_elsewhere(txn: Callable[[Visitor], None]) -> None:
    second: list[str] = []
    done_well = answering(second, lambda visitor: visitor.answer({"succeeded": True}))
    with fake_endpoint(answering([], txn)) as one, fake_endpoint(done_well) as other, client_of(one, other) as client:
        client.connect(soon())
        put(client, "n/a")
        assert second.count("/v3/kv/txn") == 1


def test_a_question_that_a_new_leader_knows_nothing_of_is_given_up() -> None:
    """etcd itself would say so after seven seconds."""
    changed = threading.Event()

    def handle(visitor: Visitor) -> None:
        while True:
            path, _ = visitor.request()
            if path == "/v3/kv/txn":
                changed.set()
                visitor.wait_for_end()
            visitor.answer({"header": {**HEADER, "raft_term": "3" if changed.is_set() else "2"}})

    with fake_endpoint(handle) as endpoint, client_of(endpoint) as client:
        client.connect(soon())
        began = time.monotonic()
        with pytest.raises(UnreachableError, match="its leader has changed"):
            put(client, "n/a")
        assert time.monotonic() < began + QUICK_S


def test_a_change_is_not_repeated_because_nobody_may_know_how_its_endpoint_is() -> None:
    """A token that has run out meanwhile is not the change's."""
    asked: list[str] = []

    def handle(visitor: Visitor) -> None:
        while True:
            path, _ = visitor.request()
            asked.append(path)
            if path == "/v3/kv/txn":
                visitor.wait_for_end()
            elif path == "/v3/maintenance/status":
                say(16, "etcdserver: invalid auth token")(visitor)
            else:
                visitor.answer({})

    with fake_endpoint(handle) as endpoint, client_of(endpoint) as client:
        client.connect(soon())
        with pytest.raises(UnreachableError, match="may have been done"):
            client.transact(Transaction((), (Put("n/a", b""),)), time.monotonic() + 1)
        assert asked.count("/v3/kv/txn") == 1


def test_a_slow_answer_is_waited_for() -> None:
    """Its endpoint says that it is well."""

    def slowly(visitor: Visitor) -> None:
        time.sleep(1.5)
        visitor.answer({"succeeded": True})

    with fake_endpoint(answering([], slowly)) as one, client_of(one) as client:
        client.connect(soon())
        assert do(client, Put("n/a", b"")).succeeded


# --- another cluster -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("left_s", "told"), [(0.4, "no leader"), (5.0, "silence")])
def test_a_member_is_called_silent_only_if_it_had_the_time_to_answer(
    monkeypatch: pytest.MonkeyPatch, left_s: float, told: str
) -> None:
    """P04: the last moment before a deadline takes nothing back of what a member has said."""
    now, answers = [0.0], iter([Failure("no leader")])

    def talk(cluster: EtcdCluster, index: int, limit: float, interrupt: object) -> None:
        failure = next(answers, None)
        now[0] = now[0] if failure else limit
        raise failure or Failure("silence")

    monkeypatch.setattr(gateway, "Talk", talk)
    caller = gateway.Caller(EtcdCluster(EtcdAccess((("a", 1),)), clock=lambda: now[0]))
    with pytest.raises(UnreachableError, match=f"etcd at a:1: {told}"):
        caller.call(gateway.RANGE, {}, left_s)


def test_another_cluster_at_the_same_address_is_not_ours() -> None:
    ids = iter(["77", *["78"] * 10])

    def handle(visitor: Visitor) -> None:
        while True:
            visitor.request()
            visitor.answer({"header": {**HEADER, "cluster_id": next(ids)}})

    with fake_endpoint(handle) as endpoint, client_of(endpoint) as client:
        client.connect(soon())
        with pytest.raises(StoreGoneError, match="another etcd cluster"):
            put(client, "n/a")


def test_a_cluster_that_has_lost_what_it_knew_is_not_ours(tmp_path: Path) -> None:
    """It has the same name; but revisions only grow."""
    with start_cluster(tmp_path / "etcd") as cluster, Clients(cluster) as clients:
        client = clients.connect()
        put(client, "n/a")
        member = cluster.members[0]
        member.kill()
        for path in sorted(member.data.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        member.start()
        with pytest.raises(StoreGoneError, match="gone back from revision"):
            read(client, "n/")


def test_a_cluster_that_comes_back_with_what_it_knew_is_ours(tmp_path: Path) -> None:
    with start_cluster(tmp_path / "etcd") as cluster, Clients(cluster) as clients:
        client = clients.connect()
        lease = client.grant(30, soon())
        put(client, "n/a", b"", lease)
        client.watch("n/", read(client, "n/").revision + 1, soon())
        cluster.members[0].kill()
        with pytest.raises(UnreachableError):
            client.read("n/", time.monotonic() + 0.3)
        cluster.members[0].start()
        put(client, "n/b", b"", lease)
        assert keys(until_back(client, bool)) == ["n/b"]
        assert client.connection().unreachable_since is None
