"""Ports of this machine, for tests: which are free, and where somebody listens."""

from __future__ import annotations

import random
import socket
from pathlib import Path

BLOCK = 150
BLOCKS = range(10_000, 19_000, BLOCK)  # below all ports that we choose by ourselves, and those that the kernel gives away
LISTENS = "0A"


def _claim_block() -> tuple[range, socket.socket]:
    """A block of ports for this process alone: no other test asks there, in whatever run, until this process has ended.

    Claimed by an address that only one socket of the machine can have, and that ends with it: nothing is left in the file system.
    """
    for first in random.sample(BLOCKS, len(BLOCKS)):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0rallypoint tests: ports from {first}")
        except OSError:
            claim.close()
        else:
            return range(first, first + BLOCK), claim
    raise RuntimeError(f"all {len(BLOCKS)} blocks of ports are claimed by other test processes of this machine")


_ports, _claim = _claim_block()  # at import: a descriptor that came up during a test would be taken for a leftover of it
_next = _ports.start


def is_free(port: int, address: str = "127.0.0.1") -> bool:
    try:
        with socket.create_server((address, port)):
            return True
    except OSError:
        return False


def is_free_everywhere(port: int) -> bool:
    if not socket.has_dualstack_ipv6():
        return is_free(port, "")
    try:
        with socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True):
            return True
    except OSError:
        return False


def free_ports(count: int) -> range:
    """So many ports in a row that nobody has, on any address, that no outgoing connection and no other test will take."""
    global _next
    for _ in _ports:
        first = _next if _next + count <= _ports.stop else _ports.start
        _next = first + count
        if all(map(is_free_everywhere, range(first, first + count))):
            return range(first, first + count)
    raise RuntimeError(f"no {count} ports in a row are free among {_ports}")


def free_port_pairs(count: int) -> list[int]:
    """The first ports of so many such pairs."""
    return [free_ports(2)[0] for _ in range(count)]


def free_port() -> int:
    """One such port."""
    return free_ports(1)[0]


def bound_at(port: int) -> list[str]:
    """The addresses at which somebody listens on this port; those of IPv6 as the kernel writes them."""
    found = []
    for name in ("tcp", "tcp6"):
        rows = [line.split() for line in Path("/proc/net", name).read_text().splitlines()[1:]]
        places = [row[1].split(":") for row in rows if row[3] == LISTENS]
        found += [address for address, number in places if int(number, 16) == port]
    return [socket.inet_ntoa(bytes.fromhex(address)[::-1]) if len(address) == 8 else address for address in sorted(found)]
