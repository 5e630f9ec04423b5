"""From which addresses the nodes of a job come, and who comes from elsewhere to what is for their workers.

Torch's protocol has nothing by which a worker could be told from a stranger, so that it has to be the address. A worker comes
from the one from which its agent has come before, as long as both went to the same address of this machine: that is known of all
nodes, or nobody is turned away. What comes from this machine itself is never turned away: its processes may have addresses that
no node has.

*Rejected:* the addresses that nodes say they have (behind a NAT, or with two networks, their workers come from others); a word of
each agent at the workers' port before its workers come (a round trip in each start).
"""

from __future__ import annotations

import socket

from rallypoint.net.peers import user_of

__all__ = ["Visitors"]

MOST_ADDRESSES = 65_536  # more, and it is not known who belongs to the job


class Visitors:
    """The addresses from which nodes have come, by that of this machine to which they went. One thread adds, others ask."""

    def __init__(self) -> None:
        self._from: dict[str, set[str]] = {}

    def add(self, sock: socket.socket) -> None:
        """A node has come."""
        try:
            here, there = sock.getsockname()[0], sock.getpeername()[0]
        except OSError:  # it has gone
            return
        known = self._from.setdefault(here, set())
        if len(known) < MOST_ADDRESSES and not _is_from_here(sock):
            known.add(there)

    def objection(self, sock: socket.socket) -> str:
        """Why who has come now is no worker of the job; nothing where it may be one."""
        here, there = sock.getsockname()[0], sock.getpeername()[0]
        others = {at: known for at, known in list(self._from.items()) if known}
        if list(others) != [here] or there in others[here] or len(others[here]) >= MOST_ADDRESSES or _is_from_here(sock):
            return ""
        return "no node of this job has come from that address; --rdzv-conf worker_store_from=any lets everybody in"


def _is_from_here(sock: socket.socket) -> bool:
    if sock.getsockname()[0] == sock.getpeername()[0]:
        return True
    try:
        return user_of(sock) is not None
    except NotImplementedError:
        return True
