"""Addresses and ports: reading them as users write them, finding free ones, and listening there.

Where a store listens: at the addresses that its name stands for on this machine, all of them or none. Whoever can bind them is
the store's host, and whoever comes second is a client: the kernel decides, so there is one host. That is why SO_REUSEPORT, with
which two could listen at one address, is never set, and why a name with several local addresses is bound as a whole, in the same
order by everybody.
"""

from __future__ import annotations

import _socket  # all that the start of a job needs of socket, which takes 4 ms to import
import errno
from collections.abc import Iterator, Sequence

from rallypoint.base.text import host_port
from rallypoint.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any

    Address = tuple[int, tuple[Any, ...]]  # family, and what bind takes

__all__ = [
    "address_as_such", "address_of", "address_of_default_route", "get_free_port", "get_local_address", "get_socket_with_port",
    "hold_port", "is_loopback_here_only", "look_up", "open_listeners", "parse_rendezvous_endpoint", "resolve", "tune",
]  # fmt: skip

LOOPBACK = "127.0.0.1"
# Reserved for documentation (RFC 5737): nobody is there, and asking for the route to it sends nothing.
SOMEWHERE_ELSE = ("192.0.2.1", 9)
SIOCGIFADDR = 0x8915  # an interface's IPv4 address
BACKLOG = 4096
TRIES = 16  # to find a port that is free at all addresses of a name
NOT_LOCAL = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
# A connection over which nothing comes back is given up, so that half of one does not stay for ever.
UNANSWERED_MS = 15_000
IDLE_S, PROBE_EVERY_S, PROBES = 10, 3, 3
LOOPBACK_NAMES = {"localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"}


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Host and port of ``host``, ``host:port``, ``[IPv6]:port`` or an IPv6 address; of nothing, ``localhost``."""
    endpoint = (endpoint or "").strip()
    if not endpoint:
        return "localhost", default_port
    host, port = _split(endpoint)
    return host, default_port if port is None else _parse_port(endpoint, port)


def _split(endpoint: str) -> tuple[str, str | None]:
    """The host, checked, and the text of the port if there is one."""
    if endpoint.startswith("["):
        return _split_bracketed(endpoint)
    if endpoint.count(":") > 1:
        return _split_bare_ipv6(endpoint)
    host, colon, port = endpoint.partition(":")
    if not _is_name(host):
        raise UsageError(
            f"rendezvous endpoint {endpoint!r}: {host!r} is not a host; write a name, an IPv4 address, or an IPv6 address in []"
        )
    return host, port if colon else None


def _split_bracketed(endpoint: str) -> tuple[str, str | None]:
    host, bracket, rest = endpoint[1:].partition("]")
    if not bracket or not _is_ipv6(host) or (rest and not rest.startswith(":")):
        raise UsageError(f"rendezvous endpoint {endpoint!r}: what begins with '[' must be an IPv6 address, like [::1]:29400")
    return host, rest[1:] if rest else None


def _split_bare_ipv6(endpoint: str) -> tuple[str, str | None]:
    """An IPv6 address without brackets, if it is clear whether its last part is a port."""
    host, _, port = endpoint.rpartition(":")
    whole_is_address, host_is_address = _is_ipv6(endpoint), _is_ipv6(host) and port.isdecimal()
    if whole_is_address and host_is_address:
        raise UsageError(f"rendezvous endpoint {endpoint!r} can be read in two ways; write [{host}]:{port} or [{endpoint}]")
    if whole_is_address:
        return endpoint, None
    if host_is_address:
        return host, port
    raise UsageError(f"rendezvous endpoint {endpoint!r}: neither host:port nor an IPv6 address, like [::1]:29400")


def _parse_port(endpoint: str, port: str) -> int:
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise UsageError(f"rendezvous endpoint {endpoint!r}: the port {port!r} is not a number from 0 to 65535")
    return int(port)


def _is_name(text: str) -> bool:
    """Letters, digits and ``._-``, at least one of them."""
    return bool(text) and all(one.isalnum() or one in "._-" for one in text)


def _is_ipv6(text: str) -> bool:
    address, percent, zone = text.partition("%")
    if percent and not _is_name(zone):
        return False
    try:
        _socket.inet_pton(_socket.AF_INET6, address)
    except (OSError, ValueError):  # ValueError: a null character
        return False
    return True


def get_free_port() -> int:
    """A TCP port that nobody uses on any address of this machine, at least for now: it is not kept."""
    try:
        probe = _bind_free(_socket.AF_INET6, "::")  # and at every address of IPv4 too
    except OSError:  # no IPv6 here
        probe = _bind_free(_socket.AF_INET, "")
    port: int = probe.getsockname()[1]
    probe.close()
    return port


def _bind_free(family: int, host: str) -> _socket.socket:
    """A socket bound to a free port of `host`."""
    sock = _socket.socket(family, _socket.SOCK_STREAM)
    try:
        if host == "::":
            sock.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
        sock.bind((host, 0))
    except OSError:
        sock.close()
        raise
    return sock


def get_socket_with_port() -> socket.socket:
    """A socket that listens on a free port of localhost; the port is kept until the caller closes it."""
    import socket

    failures = []
    for family, *_ in socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM):
        try:
            sock = _with_methods(_bind_free(family, "localhost"))
            _listen([sock], 0)
            return sock
        except OSError as error:  # localhost may stand for ::1 too where IPv6 is switched off
            failures.append(error)
    raise RuntimeError(f"no port could be opened on localhost: {', '.join(map(str, failures))}")


def get_local_address() -> str:
    """How others may reach this machine: by its name if that resolves, else by the address of its default route.

    ``socket.getfqdn`` is not asked: it looks names up backwards, which takes many seconds where no DNS server answers.
    """
    name = _socket.gethostname()
    try:
        _socket.getaddrinfo(name, None)
    except OSError:
        return address_of_default_route()
    return name


def address_of_default_route() -> str:
    """The address from which this machine reaches others: of its default route, or of any interface; else the loopback's."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(SOMEWHERE_ELSE)
        except OSError:  # there is no such route, as in a cluster of its own
            return next(_addresses_of_interfaces(probe), LOOPBACK)
        address: str = probe.getsockname()[0]
    return address


def _addresses_of_interfaces(probe: socket.socket) -> Iterator[str]:
    import fcntl
    import socket

    for _, name in socket.if_nameindex():
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, name.encode().ljust(40, b"\0"))
        except OSError:  # it has none
            continue
        address = socket.inet_ntoa(answer[20:24])
        if not address.startswith("127."):
            yield address


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


def _listen(sockets: list[_socket.socket], backlog: int = BACKLOG) -> list[_socket.socket]:
    """All or none: whoever has bound the same address at the same time, but listens first, has it."""
    try:
        for sock in sockets:
            sock.listen(backlog)
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
