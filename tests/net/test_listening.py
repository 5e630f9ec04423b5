"""Who becomes the store's host: whoever has all of its addresses, first."""

from __future__ import annotations

import _socket
import contextlib
import errno
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rallypoint.net import listening

Open = Callable[..., "list[socket.socket] | None"]
NOT_OURS = "192.0.2.1"  # reserved for documentation


@pytest.fixture
def listen() -> Iterator[Open]:
    """``listen(host, port)`` is open_listeners; what it opens is closed after the test."""
    with contextlib.ExitStack() as sockets:

        def listen(
            host: str, port: int = 0, is_host: bool | None = None, wildcard_allowed: bool = False
        ) -> list[socket.socket] | None:
            opened = listening.open_listeners(host, port, is_host=is_host, wildcard_allowed=wildcard_allowed)
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
    return [listening.address_of(sock)[0] for sock in sockets or []]


def port_of(sockets: list[socket.socket] | None) -> int:
    assert sockets
    return listening.address_of(sockets[0])[1]


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
    assert len({listening.address_of(sock)[1] for sock in free or []}) == 1
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
    monkeypatch.setattr(listening, "_socket", SimpleNamespace(**{**vars(_socket), "socket": without_ipv6}))
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
    with socket.create_connection(listening.address_of(sock), timeout=5):
        accepted, _ = sock.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == listening.UNANSWERED_MS
