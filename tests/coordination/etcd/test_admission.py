"""Who is let in by a real etcd and who is not, and what whoever is not is told: one line that says what to do."""

from __future__ import annotations

import contextlib
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Certificates, make_certificates
from tests.coordination.etcd.peers import PREFIX, Clients, Visitor, fake_endpoint
from tests.etcd_cluster import Cluster, any_binary, find_binaries, start_cluster

from rallypoint.coordination import testimony as testimonies
from rallypoint.coordination.engine import CoordinationError, RefusedError, UnreachableError
from rallypoint.coordination.etcd.engine import EtcdCoordination
from rallypoint.coordination.etcd.gateway import EtcdAccess
from rallypoint.coordination.model import Event, Put, Transaction
from rallypoint.testing.coordination_contract import do, events_until, put, read, soon

USER, PASSWORD, ROOT_PASSWORD = "trainer", "a password", "root's password"


def trouble_of(access: EtcdAccess, timeout_s: float = 5.0) -> CoordinationError:
    """What somebody is told who cannot come in; at once, if it is a refusal."""
    with contextlib.closing(EtcdCoordination(access, PREFIX)) as client:
        began = time.monotonic()
        with pytest.raises(CoordinationError) as found:
            client.connect(began + timeout_s)
        assert isinstance(found.value, UnreachableError) or time.monotonic() < began + timeout_s / 2
    assert "\n" not in str(found.value)
    return found.value


def refusal_of(access: EtcdAccess) -> str:
    error = trouble_of(access)
    assert isinstance(error, RefusedError), error
    return str(error)


# --- user and password -----------------------------------------------------------------------------------------------------


def encoded(text: str) -> str:
    return b64encode(text.encode()).decode()


def ask(cluster: Cluster, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = cluster.members[0].post(path, body)
    assert "error" not in answer, answer
    return answer


@pytest.fixture(scope="module", params=list(find_binaries()) or ["none"])
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An etcd that asks for a password."""
    binary = find_binaries().get(request.param) or any_binary()
    with start_cluster(tmp_path_factory.mktemp("guarded"), 1, binary) as cluster:
        may = {"permType": "READWRITE", "key": encoded(PREFIX), "range_end": encoded(PREFIX[:-1] + "0")}
        ask(cluster, "/v3/auth/user/add", {"name": "root", "password": ROOT_PASSWORD})
        ask(cluster, "/v3/auth/user/grant", {"user": "root", "role": "root"})
        ask(cluster, "/v3/auth/role/add", {"name": "jobs"})
        ask(cluster, "/v3/auth/role/grant", {"name": "jobs", "perm": may})
        for name in (USER, "stranger"):
            ask(cluster, "/v3/auth/user/add", {"name": name, "password": PASSWORD})
        ask(cluster, "/v3/auth/user/grant", {"user": USER, "role": "jobs"})
        ask(cluster, "/v3/auth/enable", {})
        yield cluster


def test_a_user_does_what_an_engine_has_to_do(guarded: Cluster) -> None:
    with Clients(guarded) as clients:
        client = clients.connect(user=USER, password=PASSWORD)
        client.watch("n/", read(client, "n/").revision + 1, soon())
        put(client, "n/a", b"1", client.grant(30, soon()))
        assert [event.key for event in events_until(client, bool)] == ["n/a"]
        client.revoke(soon())
        assert [event.cause for event in events_until(client, bool)] == ["deleted"]


def test_a_warden_shows_the_password_too(guarded: Cluster) -> None:
    with Clients(guarded) as clients:
        node, other = (clients.connect(user=USER, password=PASSWORD) for _ in range(2))
        check_testimony(node, other)


def check_testimony(node: EtcdCoordination, other: EtcdCoordination) -> None:
    """What a warden says for `node` is heard: its last will, and that its lease is over."""
    put(node, "n/alive", b"", node.grant(60, soon()))
    testimony = node.testimony(Transaction((), (Put("n/gone", b""),)))
    assert testimony is not None
    testimonies.testify(*testimony.fields())
    assert [item.key for item in read(other, "n/").items if item.key in ("n/alive", "n/gone")] == ["n/gone"]


def test_a_token_that_is_refused_is_replaced(guarded: Cluster) -> None:
    """It may have run out, or be unknown to the member that is asked now."""
    with Clients(guarded) as clients:
        client = clients.connect(user=USER, password=PASSWORD)
        for call in (
            lambda: put(client, "n/a"),
            lambda: read(client, "n/"),
            lambda: client.grant(30, soon()),
            lambda: client.watch("n/", 1, soon()),
        ):
            client._cluster.token = "long forgotten.1"
            call()
            assert client._cluster.token != "long forgotten.1"
        put(client, "n/b")
        assert events_until(client, lambda events: events[-1:] and events[-1].key == "n/b")


def test_who_is_refused_for_a_password(guarded: Cluster) -> None:
    with Clients(guarded) as clients:
        endpoints = clients.endpoints
    assert "password is wrong" in refusal_of(EtcdAccess(endpoints, user=USER, password="guessed"))
    assert "'nobody'" in refusal_of(EtcdAccess(endpoints, user="nobody", password=PASSWORD))
    assert "asks for a user and a password" in refusal_of(EtcdAccess(endpoints))
    assert "grant a role" in refusal_of(EtcdAccess(endpoints, user="stranger", password=PASSWORD))


def test_a_watch_that_is_denied_is_refused(guarded: Cluster) -> None:
    """The one answer that does not come as an error."""
    with Clients(guarded) as clients:
        client = clients.connect(user=USER, password=PASSWORD)
        elsewhere = EtcdCoordination(client._cluster.access, "/elsewhere/")
        clients.callback(elsewhere.close)
        elsewhere._is_connected = True
        with pytest.raises(RefusedError, match="grant a role"):
            elsewhere.watch("n/", 1, soon())


def test_a_password_where_none_is_asked_for_does_no_harm(plain: Cluster) -> None:
    with Clients(plain) as clients:
        put(clients.connect(user=USER, password=PASSWORD), "n/a")


# --- TLS -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secured(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An etcd that shows a certificate, and asks for one."""
    with start_cluster(tmp_path_factory.mktemp("secured"), 1, tls=certificates, flags=["--client-cert-auth"]) as cluster:
        yield cluster


def secured_access(cluster: Cluster, **more: object) -> EtcdAccess:
    assert cluster.tls is not None
    paths = {"ca_cert": str(cluster.tls.ca), "cert": str(cluster.tls.client_cert), "key": str(cluster.tls.client_key)}
    with Clients(cluster) as clients:
        return EtcdAccess(**{"endpoints": clients.endpoints, "protocol": "https", **paths, **more})  # type: ignore[arg-type]


def test_tls_with_everything_that_it_asks_for(secured: Cluster) -> None:
    with contextlib.closing(EtcdCoordination(secured_access(secured), PREFIX)) as client:
        client.connect(soon())
        client.watch("n/", read(client, "n/").revision + 1, soon())
        client.grant(30, soon())
        put(client, "n/large", bytes(1_000_000))
        told: list[Event] = events_until(client, bool)
        assert [len(event.item.value) for event in told if event.item] == [1_000_000]


def test_a_warden_shows_the_certificate_too(secured: Cluster) -> None:
    with (
        contextlib.closing(EtcdCoordination(secured_access(secured), PREFIX)) as node,
        contextlib.closing(EtcdCoordination(secured_access(secured), PREFIX)) as other,
    ):
        check_testimony(node, other)


def test_a_certificate_of_an_unknown_authority_is_not_trusted(secured: Cluster) -> None:
    assert secured.tls is not None
    assert "see cacert" in refusal_of(secured_access(secured, ca_cert=str(secured.tls.other_ca)))
    assert "see cacert" in refusal_of(secured_access(secured, ca_cert=None))


def test_a_certificate_for_another_name_is_not_trusted(secured: Cluster) -> None:
    """127.1 is another name for 127.0.0.1."""
    port = secured.members[0].client_port
    assert "names in the certificate" in refusal_of(secured_access(secured, endpoints=(("127.1", port),)))


def test_who_comes_without_tls_is_told_so(secured: Cluster) -> None:
    assert "see protocol" in refusal_of(secured_access(secured, protocol="http"))


def test_who_comes_with_tls_where_none_is_spoken(plain: Cluster, certificates: Certificates) -> None:
    with Clients(plain) as clients:
        access = EtcdAccess(clients.endpoints, "https", str(certificates.ca))
    assert "see protocol" in refusal_of(access)


def test_who_comes_without_the_certificate_that_is_asked_for(secured: Cluster) -> None:
    assert secured.tls is not None
    assert "see cert and key" in refusal_of(secured_access(secured, cert=None, key=None))
    stranger = {"cert": str(secured.tls.stranger_cert), "key": str(secured.tls.stranger_key)}
    assert "see cert and key" in refusal_of(secured_access(secured, **stranger))


def test_files_that_cannot_be_used(secured: Cluster, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name, told in (("ca_cert", "see cacert"), ("cert", "see cert and key"), ("key", "see cert and key")):
        for path in ("missing", "empty"):
            with pytest.raises(RefusedError, match=told):
                EtcdCoordination(secured_access(secured, **{name: str(tmp_path / path)}), PREFIX)


# --- what is not etcd ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with start_cluster(tmp_path_factory.mktemp("plain")) as cluster:
        yield cluster


def say(text: bytes) -> Callable[[Visitor], None]:
    def handle(visitor: Visitor) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                visitor.request()
                visitor.send(text)

    return handle


PAGE = b"<html>not found</html>"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n%s" % (len(PAGE), PAGE)
OLD_ETCD = b'HTTP/1.1 404 Not Found\r\nContent-Length: 23\r\n\r\n{"etcdserver":"3.3.27"}'


def greet_as_ssh(visitor: Visitor) -> None:
    visitor.send(b"SSH-2.0-OpenSSH_9.2\r\n")
    visitor.wait_for_end()


@pytest.mark.parametrize(
    ("handle", "told"),
    [
        (say(NOT_FOUND), "is not etcd"),
        (say(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"), "is not etcd"),
        (say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"), "is not etcd"),
        (say(b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"header": 1}'), "is not etcd"),
        (greet_as_ssh, "is not etcd"),
    ],
    ids=["a web server", "one that always has an answer", "a JSON service", "nearly etcd", "ssh"],
)
def test_what_is_not_etcd_is_refused(handle: Callable[[Visitor], None], told: str) -> None:
    with fake_endpoint(handle) as endpoint:
        assert told in refusal_of(EtcdAccess((endpoint.address,)))


@pytest.mark.parametrize("version", list(find_binaries()) or ["none"])
def test_an_etcd_without_its_gateway_is_told_so(version: str, tmp_path: Path) -> None:
    binary = find_binaries().get(version) or any_binary()
    with (
        start_cluster(tmp_path / "etcd", 1, binary, flags=["--enable-grpc-gateway=false"]) as cluster,
        Clients(cluster) as clients,
    ):
        assert "--enable-grpc-gateway=false" in refusal_of(EtcdAccess(clients.endpoints))


def test_an_etcd_that_is_too_old_is_told_so() -> None:
    def handle(visitor: Visitor) -> None:
        path, _ = visitor.request()
        visitor.send(NOT_FOUND)
        path, _ = visitor.request()
        assert path == "/version"
        visitor.send(OLD_ETCD)

    with fake_endpoint(handle) as endpoint:
        assert "3.4 is the oldest" in refusal_of(EtcdAccess((endpoint.address,)))


def test_nobody_there_may_still_come() -> None:
    with fake_endpoint(lambda visitor: None) as endpoint:
        address = endpoint.address
    error = trouble_of(EtcdAccess((address,)), 0.5)
    assert isinstance(error, UnreachableError)
    assert "connection refused" in str(error)


def test_a_name_that_nobody_knows_may_still_be_known() -> None:
    error = trouble_of(EtcdAccess((("no-such-host.invalid", 2379),)), 0.5)
    assert isinstance(error, UnreachableError)
    assert "no-such-host.invalid:2379: its name is not known" in str(error)


def test_one_wrong_endpoint_among_right_ones_does_no_harm(plain: Cluster) -> None:
    with fake_endpoint(say(NOT_FOUND)) as wrong, fake_endpoint(greet_as_ssh) as wronger, Clients(plain) as clients:
        client = clients.connect(endpoints=(wrong.address, wronger.address, *clients.endpoints))
        do(client)
        assert client._cluster.home == 2


def test_a_wrong_endpoint_beside_one_that_is_down_is_no_refusal() -> None:
    """The other one may come."""
    with fake_endpoint(lambda visitor: None) as endpoint:
        address = endpoint.address
    with fake_endpoint(say(NOT_FOUND)) as wrong:
        error = trouble_of(EtcdAccess((wrong.address, address)), 3.0)
    assert isinstance(error, UnreachableError)
    assert "is not etcd" in str(error)
    assert "connection refused" in str(error)
