"""Endpoints as users write them, ports that are free, and who is the store's host: whoever has all of its addresses, first."""

from __future__ import annotations

import _socket
import contextlib
import errno
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.errors import UsageError
from rallypoint.net import endpoint
from rallypoint.net.endpoint import get_free_port, get_local_address, get_socket_with_port, parse_rendezvous_endpoint


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        (None, "localhost", 29400),
        ("", "localhost", 29400),
        ("   ", "localhost", 29400),
        ("node-1.example.com", "node-1.example.com", 29400),
        ("node-1.example.com:0", "node-1.example.com", 0),
        (" node_1:123 ", "node_1", 123),
        ("10.0.0.1:65535", "10.0.0.1", 65535),
        ("[::1]", "::1", 29400),
        ("[::1]:29500", "::1", 29500),
        ("[2001:db8::1]:0", "2001:db8::1", 0),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("::1", "::1", 29400),
        ("2001:db8::1", "2001:db8::1", 29400),
        ("1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7:8", 29400),
        ("2001:db8::1:29500", "2001:db8::1", 29500),  # five digits are no part of an address
        ("1:2:3:4:5:6:7:8:90", "1:2:3:4:5:6:7:8", 90),  # nor is a ninth group
    ],
)
def test_endpoints(text: str | None, host: str, port: int) -> None:
    assert parse_rendezvous_endpoint(text, 29400) == (host, port)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("~", "not a host"),
        ("~:123", "not a host"),
        (":123", "not a host"),
        ("dummy.com :123", "not a host"),
        ("host name", "not a host"),
        ("host\0", "not a host"),
        ("host:", "port ''"),
        ("host:abc", "port 'abc'"),
        ("host:-1", "port '-1'"),
        ("host:65536", "port '65536'"),
        ("host:1 2", "port '1 2'"),
        ("host:٣", "port"),
        ("[::1]:", "port ''"),
        ("[::1", r"\[::1\]:29400"),
        ("[::1]29400", r"\[::1\]:29400"),
        ("[host]:1", r"\[::1\]:29400"),
        ("[::1%]:1", r"\[::1\]:29400"),
        ("[::\0]:1", r"\[::1\]:29400"),
        ("a:b:c", "neither"),
        ("::1:8080", r"\[::1\]:8080 or \[::1:8080\]"),
    ],
)
def test_bad_endpoints_are_named(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as caught:
        parse_rendezvous_endpoint(text, 29400)
    assert repr(text) in str(caught.value)
    assert isinstance(caught.value, ValueError)


names = st.from_regex(r"[a-z0-9]([a-z0-9_-]{0,10}[a-z0-9])?(\.[a-z0-9]{1,10}){0,3}", fullmatch=True)
ip_addresses = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)


@given(st.one_of(names, ip_addresses), st.integers(0, 65535))
def test_what_is_written_is_read_again(host: str, port: int) -> None:
    written = f"[{host}]" if ":" in host else host
    assert parse_rendezvous_endpoint(f"{written}:{port}", 1) == (host, port)
    assert parse_rendezvous_endpoint(written, 1) == (host, 1)


@given(st.text(max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    complaint = ""
    try:
        host, port = parse_rendezvous_endpoint(text, 1)
    except UsageError as error:
        complaint = str(error)
    assert repr(text.strip()) in complaint or (host and 0 <= port <= 65535)


def test_a_free_port_can_be_opened_on_every_address() -> None:
    with socket.create_server(("", get_free_port())):
        pass


def test_a_free_port_is_found_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = endpoint._bind_free

    def no_ipv6(family: int, host: str) -> object:
        if family == socket.AF_INET6:
            raise OSError("address family not supported")
        return bind(family, host)

    monkeypatch.setattr(endpoint, "_bind_free", no_ipv6)
    assert 0 < get_free_port() < 65536
    with get_socket_with_port() as sock:
        assert sock.family == socket.AF_INET


def test_the_socket_keeps_its_port() -> None:
    with get_socket_with_port() as sock:
        host, port = sock.getsockname()[:2]
        assert host in {"127.0.0.1", "::1"}
        with pytest.raises(OSError, match="in use"):
            socket.create_server((host, port), family=sock.family, backlog=1)


def test_no_port_at_all_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> object:
        raise OSError("too many open files")

    monkeypatch.setattr(endpoint, "_bind_free", refuse)
    with pytest.raises(RuntimeError, match="too many open files"):
        get_socket_with_port()


@pytest.mark.parametrize("network", [True, False])
def test_a_machine_whose_name_does_not_resolve_gives_an_address(monkeypatch: pytest.MonkeyPatch, network: bool) -> None:
    def unknown(*args: object) -> list[object]:
        raise socket.gaierror("name or service not known")

    monkeypatch.setattr(endpoint._socket, "getaddrinfo", unknown)
    if not network:
        monkeypatch.setattr(endpoint, "SOMEWHERE_ELSE", ("255.255.255.255", 9))  # broadcast, which a plain socket may not use
    socket.inet_aton(get_local_address())


def test_a_machine_whose_name_resolves_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint._socket, "getaddrinfo", lambda *args: [])
    assert get_local_address() == socket.gethostname()


Open = Callable[..., "list[socket.socket] | None"]
NOT_OURS = "192.0.2.1"  # reserved for documentation


@pytest.fixture
def listen() -> Iterator[Open]:
    """``listen(host, port)`` is open_listeners; what it opens is closed after the test."""
    with contextlib.ExitStack() as sockets:

        def listen(
            host: str, port: int = 0, is_host: bool | None = None, wildcard_allowed: bool = False
        ) -> list[socket.socket] | None:
            opened = endpoint.open_listeners(host, port, is_host=is_host, wildcard_allowed=wildcard_allowed)
            for sock in opened or []:
                sockets.enter_context(sock)
            return opened

        yield listen


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """The name "store" stands for these."""

    def resolve(host: bytes, port: int, **_: object) -> list[tuple[Any, ...]]:
        assert host == b"store"
        return [
            (socket.AF_INET6, 1, 6, "", (one, port, 0, 0)) if ":" in one else (socket.AF_INET, 1, 6, "", (one, port))
            for one in addresses
        ]

    monkeypatch.setattr(_socket, "getaddrinfo", resolve)


def addresses(sockets: list[socket.socket] | None) -> list[str]:
    return [endpoint.address_of(sock)[0] for sock in sockets or []]


def port_of(sockets: list[socket.socket] | None) -> int:
    assert sockets
    return endpoint.address_of(sockets[0])[1]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.10", socket.gethostname()])
def test_p05_any_name_or_address_of_this_machine_can_be_listened_at(listen: Open, host: str) -> None:
    sockets = listen(host)
    with socket.create_connection((host, port_of(sockets)), timeout=5):
        pass


def test_p43_ipv6(listen: Open) -> None:
    sockets = listen("::1")
    assert addresses(sockets) == ["::1"]
    with socket.create_connection(("::1", port_of(sockets)), timeout=5):
        pass


def test_p05_whoever_comes_second_is_a_client(listen: Open) -> None:
    port = port_of(listen("127.0.0.1"))
    assert listen("127.0.0.1", port) is None
    with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1:{port}: Address already in use") as error:
        listen("127.0.0.1", port, is_host=True)
    assert error.value.errno == errno.EADDRINUSE


def test_p05_another_machine_is_the_host(listen: Open) -> None:
    assert listen(NOT_OURS, 29400) is None


def test_p05_who_is_told_not_to_be_the_host_is_not(listen: Open) -> None:
    assert listen("127.0.0.1", is_host=False) is None


def test_p05_a_named_host_behind_another_address_listens_everywhere_if_it_may(listen: Open) -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.1 is no address of this machine, and without a secret"):
        listen(NOT_OURS, is_host=True)
    everywhere = listen(NOT_OURS, is_host=True, wildcard_allowed=True)
    assert addresses(everywhere) == ["0.0.0.0", "::"]
    for host in ("127.0.0.1", "::1"):
        with socket.create_connection((host, port_of(everywhere)), timeout=5):
            pass


def test_all_local_addresses_of_a_name_or_none(listen: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = port_of(listen("127.0.0.3"))
    resolving(monkeypatch, NOT_OURS, "127.0.0.3", "::1", "127.0.0.2")
    assert listen("store", taken) is None
    free = listen("store")
    assert addresses(free) == ["127.0.0.2", "127.0.0.3", "::1"]
    assert len({endpoint.address_of(sock)[1] for sock in free or []}) == 1
    # What could be bound the first time was given back.
    resolving(monkeypatch, "127.0.0.2")
    assert addresses(listen("store", taken)) == ["127.0.0.2"]


def test_an_address_of_a_family_that_is_switched_off_is_not_ours(listen: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _socket.socket

    def without_ipv6(family: int, kind: int) -> _socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, kind)

    resolving(monkeypatch, "::1", "127.0.0.1")
    monkeypatch.setattr(endpoint, "_socket", SimpleNamespace(**{**vars(_socket), "socket": without_ipv6}))
    assert addresses(listen("store")) == ["127.0.0.1"]


def test_p06_a_name_that_does_not_resolve_is_for_the_caller_to_try_again(listen: Open) -> None:
    with pytest.raises(OSError, match=r"."):
        listen("no-such-host.invalid", 29400)


def test_a_port_can_be_used_again_at_once_and_is_never_shared(listen: Open) -> None:
    sockets = listen("127.0.0.1")
    port = port_of(sockets)
    assert sockets
    assert sockets[0].getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) == 0
    client = socket.create_connection(("127.0.0.1", port), timeout=5)
    accepted, _ = sockets[0].accept()
    accepted.close()  # first, so that it waits in TIME_WAIT
    client.close()
    sockets[0].close()
    assert listen("127.0.0.1", port) is not None


def test_what_is_accepted_sends_at_once_and_notices_a_peer_that_is_gone(listen: Open) -> None:
    (sock,) = listen("127.0.0.1") or []
    with socket.create_connection(endpoint.address_of(sock), timeout=5):
        accepted, _ = sock.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == endpoint.UNANSWERED_MS
