"""Addresses and ports: reading them as users write them, and finding free ones."""

from __future__ import annotations

import _socket  # all that the start of a job needs of socket, which takes 4 ms to import
from collections.abc import Iterator

from rallypoint.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

__all__ = ["address_of_default_route", "get_free_port", "get_local_address", "get_socket_with_port", "parse_rendezvous_endpoint"]

LOOPBACK = "127.0.0.1"
# Reserved for documentation (RFC 5737): nobody is there, and asking for the route to it sends nothing.
SOMEWHERE_ELSE = ("192.0.2.1", 9)
SIOCGIFADDR = 0x8915  # an interface's IPv4 address


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
    probe = _bound_anywhere()
    try:
        port: int = probe.getsockname()[1]
    finally:
        probe.close()
    return port


def _bound_anywhere() -> _socket.socket:
    """A socket bound to a free port on every address, of both families where the machine has both."""
    try:
        return _bind(_socket.AF_INET6, "::")
    except OSError:  # no IPv6 here
        return _bind(_socket.AF_INET, "")


def _bind(family: int, host: str) -> _socket.socket:
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
            return _listen(socket.socket(fileno=_bind(family, "localhost").detach()))
        except OSError as error:  # localhost may stand for ::1 too where IPv6 is switched off
            failures.append(error)
    raise RuntimeError(f"no port could be opened on localhost: {', '.join(map(str, failures))}")


def _listen(sock: socket.socket) -> socket.socket:
    try:
        sock.listen(0)
    except OSError:
        sock.close()
        raise
    return sock


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
