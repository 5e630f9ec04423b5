"""Ports of this machine, for tests: which are free, and where somebody listens."""

from __future__ import annotations

import random
import socket
from pathlib import Path

PORTS = range(20_000, 32_000)  # below those that the kernel gives to outgoing connections
LISTENS = "0A"


def is_free(port: int, address: str = "127.0.0.1") -> bool:
    try:
        with socket.create_server((address, port)):
            return True
    except OSError:
        return False


def is_free_everywhere(port: int) -> bool:
    try:
        with socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True):
            return True
    except OSError:
        return False


def free_ports(count: int) -> range:
    """So many ports in a row that nobody has."""
    starts = random.sample(PORTS, 100)
    return next(range(first, first + count) for first in starts if all(map(is_free, range(first, first + count))))


def free_port_pairs(count: int) -> list[int]:
    """The first ports of so many pairs that nobody has, none of them twice."""
    free = (first for first in random.sample(PORTS[::2], 200) if is_free(first) and is_free(first + 1))
    return [next(free) for _ in range(count)]


def free_port() -> int:
    """One that nobody listens on, on any address, and that no outgoing connection will take."""
    return next(port for port in random.sample(PORTS, 100) if is_free_everywhere(port))


def bound_at(port: int) -> list[str]:
    """The addresses at which somebody listens on this port; those of IPv6 as the kernel writes them."""
    found = []
    for name in ("tcp", "tcp6"):
        rows = [line.split() for line in Path("/proc/net", name).read_text().splitlines()[1:]]
        places = [row[1].split(":") for row in rows if row[3] == LISTENS]
        found += [address for address, number in places if int(number, 16) == port]
    return [socket.inet_ntoa(bytes.fromhex(address)[::-1]) if len(address) == 8 else address for address in sorted(found)]
