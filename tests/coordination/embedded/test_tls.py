"""TLS before the agents' store: both sides look at each other's certificate, and nothing of it is loaded where none was given."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.certificates import Certificates, make_certificates

from rallypoint.coordination.embedded.client import EmbeddedCoordination
from rallypoint.coordination.embedded.inquiring import job_at
from rallypoint.coordination.embedded.server import CoordinationServer
from rallypoint.coordination.embedded.tls import Tls
from rallypoint.coordination.engine import CoordinationError, RefusedError
from rallypoint.coordination.model import Get, Put, Transaction
from rallypoint.coordination.testimony import testify as say_that_nothing_is_left
from rallypoint.net.endpoint import open_listeners

LARGE = b"x" * 100_000


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def tls(cert: object, key: object, ca: object) -> Tls:
    return Tls(str(cert), str(key), str(ca))


@pytest.fixture
def server(files: Certificates) -> Iterator[CoordinationServer]:
    sockets = open_listeners("127.0.0.1", 0, is_host=True, wildcard_allowed=False)
    assert sockets is not None
    store = CoordinationServer(sockets, "the-job", None, tls=tls(files.server_cert, files.server_key, files.ca))
    store.start()
    yield store
    store.stop()


@pytest.fixture
def join(server: CoordinationServer, soon: Any) -> Iterator[Callable[..., EmbeddedCoordination]]:
    """``join(tls)``: a client that is connected."""
    clients = []

    def connect(how: Tls | None, port: int = server.addresses[0][1], secret: bytes | None = None, **more: Any) -> Any:
        clients.append(EmbeddedCoordination("127.0.0.1", port, "the-job", secret, tls=how, **more))
        clients[-1].connect(soon())
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def node(files: Certificates) -> Tls:
    return tls(files.client_cert, files.client_key, files.ca)


def test_who_has_a_certificate_of_the_authority_is_let_in(join: Any, node: Tls, soon: Any) -> None:
    one, other = join(node), join(node)
    for index in range(8):  # more than one record of TLS, and than one reading
        one.transact(Transaction((), (Put(f"key/{index}", LARGE),)), soon())
    assert [item.value for item in other.read("key/", soon()).items] == [LARGE] * 8


def test_a_change_comes_without_being_asked_for(join: Any, node: Tls, soon: Any, wait_until: Any) -> None:
    one, other = join(node), join(node)
    other.watch("key", 1, soon())
    one.transact(Transaction((), (Put("key", LARGE),)), soon())
    wait_until(other.take_events)


@pytest.mark.parametrize("secret", [None, b"a secret of some length"])
def test_who_speaks_no_tls_is_told_so(join: Any, server: CoordinationServer, secret: bytes | None, soon: Any) -> None:
    with pytest.raises(RefusedError, match="this store speaks TLS, and the node does not: --tls-cert, --tls-key and --tls-ca"):
        join(None, secret=secret)
    with pytest.raises(RefusedError, match="this store speaks TLS"):
        job_at(*server.addresses[0], secret, soon())


def test_a_store_that_speaks_none_is_not_taken(start_server: Any, join: Any, node: Tls, soon: Any) -> None:
    """Nobody between a node and its store can talk it out of TLS."""
    plain = start_server("the-job")
    with pytest.raises(RefusedError, match="TLS has failed"):
        join(node, port=plain.addresses[0][1])
    with pytest.raises(RefusedError, match="TLS has failed"):
        job_at(*plain.addresses[0], None, soon(), node)


def test_a_certificate_of_another_authority_opens_nothing(
    join: Any, files: Certificates, warnings: list[str], wait_until: Any
) -> None:
    with pytest.raises(RefusedError, match=r"TLS has failed: .*unknown ca"):
        join(tls(files.stranger_cert, files.stranger_key, files.ca))
    wait_until(lambda: any("its certificate is not trusted: unable to get local issuer certificate" in line for line in warnings))


def test_a_store_of_another_authority_is_not_taken(join: Any, files: Certificates, server: CoordinationServer, soon: Any) -> None:
    other = tls(files.client_cert, files.client_key, files.other_ca)
    with pytest.raises(RefusedError, match="its certificate is not trusted"):
        join(other)
    with pytest.raises(RefusedError, match="its certificate is not trusted"):
        job_at(*server.addresses[0], None, soon(), other)


def test_a_store_that_does_not_name_the_endpoint_is_not_taken(join: Any, node: Tls) -> None:
    """A node's certificate does not make it the store's host. The host itself goes by an address, and means the name."""
    assert join(node, tls_name="localhost")
    with pytest.raises(RefusedError, match=r"Hostname mismatch, certificate is not valid for 'node0\.example'"):
        join(node, tls_name="node0.example")


def test_a_node_without_a_certificate_is_not_let_in(server: CoordinationServer, files: Certificates) -> None:
    context = ssl.create_default_context(cafile=str(files.ca))
    with (
        socket.create_connection(server.addresses[0], timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as line,
    ):
        line.sendall(b"hello")
        with pytest.raises(OSError, match=r"certificate required|reset"):
            line.recv(100)


def test_an_older_tls_is_refused(server: CoordinationServer, files: Certificates) -> None:
    context = ssl.create_default_context(cafile=str(files.ca))
    context.load_cert_chain(files.client_cert, files.client_key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(server.addresses[0], timeout=30) as plain, pytest.raises(OSError, match=r"version|reset|EOF"):
        context.wrap_socket(plain, server_hostname="127.0.0.1").close()


def test_the_name_of_the_job_is_told_to_who_may_know_it(server: CoordinationServer, node: Tls, soon: Any) -> None:
    assert job_at(*server.addresses[0], None, soon(), node) == "the-job"


def test_a_warden_is_heard_without(join: Any, node: Tls, soon: Any, wait_until: Any) -> None:
    """It proves that it is one; to do that with TLS it would have to load it."""
    owner, onlooker = join(node), join(node)
    owner.transact(Transaction((), (Put("node", b"", owner.grant(60.0, soon())),)), soon())
    testimony = owner.testimony()
    assert testimony is not None
    owner.close()
    say_that_nothing_is_left(*testimony.fields())
    wait_until(lambda: onlooker.transact(Transaction((), (Get("node"),)), soon()).items == (None,))


def test_nothing_of_it_can_be_read_on_the_way(join: Any, server: CoordinationServer, node: Tls, soon: Any) -> None:
    said: list[bytes] = []

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # either side ends as it likes
            while data := source.recv(65536):
                said.append(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def carry() -> None:
        with between.accept()[0] as client, socket.create_connection(server.addresses[0]) as store:
            back = threading.Thread(target=pump, args=(store, client))
            back.start()
            pump(client, store)
            with contextlib.suppress(OSError):
                store.shutdown(socket.SHUT_RDWR)
            back.join()

    with socket.create_server(("127.0.0.1", 0)) as between:
        carrier = threading.Thread(target=carry)
        carrier.start()
        client = join(node, port=between.getsockname()[1])
        client.transact(Transaction((), (Put("a-key-that-stands-out", b"a value that stands out"),)), soon())
        client.close()
        carrier.join()
    text = b"".join(said)
    assert len(text) > 1000
    assert not [word for word in (b"the-job", b"stands-out", b"stands out", b"transact", b"incarnation") if word in text]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16",
        b"\x16\x03\x01\xff\xff" + b"\0" * 70_000,
        b"\x16\x03\x01\x00\x05hello",
        b"\x16" * 5000,
        b"\x15\x03\x01\x00\x02\x02\x28",
    ],
)
def test_what_is_no_tls_harms_nobody(server: CoordinationServer, join: Any, node: Tls, soon: Any, garbage: bytes) -> None:
    with socket.create_connection(server.addresses[0], timeout=30) as rude:
        rude.sendall(garbage)
        rude.shutdown(socket.SHUT_WR)
        try:
            while rude.recv(65536):
                pass
        except ConnectionResetError:
            pass
        assert join(node).read("", soon()).items == ()


def test_what_is_changed_on_the_way_breaks_the_connection(join: Any, node: Tls, soon: Any, wait_until: Any) -> None:
    client = join(node)
    link = client._line._link
    socket.socket.send(link._socket, b"\x17\x03\x03\x00\x20" + b"\0" * 32)  # a record that was made up

    def is_broken() -> bool:
        with contextlib.suppress(CoordinationError):
            client.read("", soon())
        return client._line._link is not link

    wait_until(is_broken)
    assert client.read("", soon()).items == (), "it goes on by a new one"


def test_it_is_not_loaded_where_it_is_not_wanted() -> None:
    code = """
import sys
import rallypoint.rendezvous.embedded
from rallypoint.rendezvous.secrets import secret_of, tls_of
from rallypoint.rendezvous.settings import Settings
assert tls_of(Settings()) is None
secret_of(Settings())
print([name for name in ("ssl", "_ssl", "subprocess", "rallypoint.coordination.embedded.tls", "rallypoint.rendezvous.munge")
       if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
