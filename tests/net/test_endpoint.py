"""Endpoints as users write them, and ports that are free."""

from __future__ import annotations

import socket

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
addresses = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)


@given(st.one_of(names, addresses), st.integers(0, 65535))
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
    bind = endpoint._bind

    def no_ipv6(family: int, host: str) -> object:
        if family == socket.AF_INET6:
            raise OSError("address family not supported")
        return bind(family, host)

    monkeypatch.setattr(endpoint, "_bind", no_ipv6)
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

    monkeypatch.setattr(endpoint, "_bind", refuse)
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
