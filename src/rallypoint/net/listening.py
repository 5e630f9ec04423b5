"""Where the store listens: at the addresses that its name stands for on this machine, all of them or none.

Whoever can bind them is the store's host, and whoever comes second is a client: the kernel decides, so there is one host. That
is why SO_REUSEPORT, with which two could listen at one address, is never set, and why a name with several local
addresses is bound as a whole, in the same order by everybody.
"""

from __future__ import annotations

import _socket  # socket takes 4 ms to import, and every job holds a port before its first worker starts
import errno
from collections.abc import Sequence

from rallypoint.base.text import host_port

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any

    Address = tuple[int, tuple[Any, ...]]  # family, and what bind takes

__all__ = [
    "address_as_such",
    "address_of",
    "hold_port",
    "is_loopback_here_only",
    "look_up",
    "open_listeners",
    "resolve",
    "tune",
]

BACKLOG = 4096
TRIES = 16  # to find a port that is free at all addresses of a name
NOT_LOCAL = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
# A connection over which nothing comes back is given up, so that half of one does not stay for ever.
UNANSWERED_MS = 15_000
IDLE_S, PROBE_EVERY_S, PROBES = 10, 3, 3
LOOPBACK_NAMES = {"localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"}


def open_listeners(
    host: str, port: int, *, is_host: bool | None, wildcard_allowed: bool, addresses: Sequence[Address] | None = None
) -> list[socket.socket] | None:
    """Sockets that listen on every local address of `host`, or None where this machine is not the store's host.

    `is_host` is True or False where the user has said so, and None to find out by whether `host` is an address of this machine
    that nobody listens on yet. A host that was named as such, but whose address is none of this machine's, as behind
    NAT or a service name, listens on every address of the machine, if that is allowed; so does one whose name means the loopback
    on this machine alone. OSError: the name does not resolve, or a host that was named as such cannot listen. `addresses` are
    those of the name, where they are known already.
    """
    if is_host is False:
        return None
    found = resolve(host, port) if addresses is None else sorted(addresses)
    try:
        is_everywhere = wildcard_allowed and is_loopback_here_only(host, found)
        sockets = _listen(_bind_wildcard(host, port, True) if is_everywhere else _bind_all(found))
    except OSError as error:
        if error.errno != errno.EADDRINUSE or is_host:
            raise
        return None
    if is_host and not sockets:
        sockets = _listen(_bind_wildcard(host, port, wildcard_allowed))
    return [_with_methods(sock) for sock in sockets] or None


def is_loopback_here_only(host: str, addresses: Sequence[Address]) -> bool:
    """Whether a name that others know by another address is the loopback's here, as Debian's /etc/hosts says of its own name."""
    first_label = host.lower().partition(".")[0]
    is_loopback_everywhere = first_label in LOOPBACK_NAMES or host.lower().rstrip(".").endswith(".localhost")
    if is_loopback_everywhere or address_as_such(host, 0) is not None:
        return False
    return bool(addresses) and all(address[0].startswith("127.") or address[0] == "::1" for _, address in addresses)


def hold_port(host: str, ports: Sequence[int]) -> list[_socket.socket]:
    """Sockets that listen on every local address of `host`, at the first of `ports` that is free; 0 is any that is free.

    OSError: none is, or the address is none of this machine's.
    """
    addresses = resolve(host, 0)
    trouble = OSError(errno.EADDRNOTAVAIL, f"{host} is no address of this machine")
    for port in ports if any(ports) else (0,) * TRIES:  # what is free at one address of a name may be taken at another
        try:
            sockets = _listen(_bind_all([(family, (address[0], port, *address[2:])) for family, address in addresses]))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            trouble = error
        else:
            if sockets:
                return sockets
            break
    raise trouble


def _listen(sockets: list[_socket.socket]) -> list[_socket.socket]:
    """All or none: whoever has bound the same address at the same time, but listens first, has it."""
    try:
        for sock in sockets:
            sock.listen(BACKLOG)
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _with_methods(sock: _socket.socket) -> socket.socket:
    import socket

    return socket.socket(fileno=sock.detach())


def resolve(host: str, port: int) -> list[Address]:
    """The addresses of `host`, in the same order for everybody."""
    return sorted(look_up(host, port))


def look_up(host: str, port: int) -> list[Address]:
    """The addresses of `host`, as the system prefers them on this machine. OSError: there are none."""
    # As bytes, unless it cannot be: for a text the rules of international names are loaded, which takes longer than all else.
    name = host.encode() if host.isascii() else host
    found = _socket.getaddrinfo(name, port, type=_socket.SOCK_STREAM, proto=_socket.IPPROTO_TCP)
    return list(dict.fromkeys((int(family), address) for family, _, _, _, address in found))


def address_as_such(host: str, port: int) -> Address | None:
    """What `host` stands for, if it is an address and no name: nobody has to be asked for it."""
    if not host.isascii():
        return None
    as_such = _socket.AI_NUMERICHOST
    try:
        found = _socket.getaddrinfo(host.encode(), port, type=_socket.SOCK_STREAM, proto=_socket.IPPROTO_TCP, flags=as_such)
    except OSError:
        return None
    family, _, _, _, address = found[0]
    return int(family), address


def _bind_all(addresses: list[Address]) -> list[_socket.socket]:
    """All that are local; if one is taken, none."""
    sockets: list[_socket.socket] = []
    try:
        for family, address in addresses:
            # Port 0 lets the kernel choose, once: the other addresses of the name get the same.
            chosen = (address[0], sockets[0].getsockname()[1], *address[2:]) if sockets else address
            if (sock := _bind(family, chosen)) is not None:
                sockets.append(sock)
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _bind(family: int, address: tuple[Any, ...]) -> _socket.socket | None:
    """A socket bound to the address, or None if that is not one of this machine's."""
    try:
        sock = _socket.socket(family, _socket.SOCK_STREAM)
    except OSError as error:
        if error.errno in NOT_LOCAL:
            return None
        raise
    try:
        sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        if family == _socket.AF_INET6:
            sock.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 1)
        tune(sock)
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno in NOT_LOCAL:
            return None
        raise OSError(error.errno, f"cannot listen at {host_port(*address[:2])}: {error.strerror}") from error
    return sock


def _bind_wildcard(host: str, port: int, allowed: bool) -> list[_socket.socket]:
    if not allowed:
        raise OSError(
            errno.EADDRNOTAVAIL,
            f"this node is to host the store, but {host} is no address of this machine, and without a secret, or with workers at"
            " the same port (static), the store does not listen on all of them; name a local address, or use c10d and a secret",
        )
    return _bind_all([(int(_socket.AF_INET), ("0.0.0.0", port)), (int(_socket.AF_INET6), ("::", port, 0, 0))])


def tune(sock: _socket.socket) -> None:
    """Small messages go at once, and a peer that has silently gone is noticed; what a listener accepts inherits it."""
    sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
    sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_USER_TIMEOUT, UNANSWERED_MS)
    sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_KEEPALIVE, 1)
    sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_KEEPIDLE, IDLE_S)
    sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_KEEPCNT, PROBES)


def address_of(sock: _socket.socket) -> tuple[str, int]:
    host, port, *_ = sock.getsockname()
    return host, port
