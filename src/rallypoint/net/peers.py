"""Whether the other end of a connection is on this machine too, and whose it is then: the kernel is asked about that very socket.

*Rejected:* to compare addresses (a process may go out from any address of its machine); ``/proc/net/tcp`` (who opens and closes
many connections can make a reader miss one, and it takes the longer the more there are).
"""

from __future__ import annotations

import errno
import os
import socket
import struct

from rallypoint.base.records import Value

__all__ = ["stranger_from_here", "user_of"]

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY = 4, 20
NLMSG_ERROR, NLM_F_REQUEST = 2, 1
HEADER = struct.Struct("=IHHII")
ASKED = struct.Struct("=BBBBI")  # family, protocol, nothing, nothing, states
ENDS = struct.Struct("=2s2s16s16sI8s")  # ports, addresses, interface, any socket
TOLD = struct.Struct("=BBBB48sIIIII")  # family, state, timers, ends, queues, user, inode
ALL_STATES, ANY_SOCKET = 0xFFFFFFFF, b"\xff" * 8
ESTABLISHED, LISTENS = 1, 10
ANSWER_BYTES = 8192


class _Socket(Value):
    state: int
    user: int
    inode: int  # 0 if no process has it any more: whose it was cannot be told


def user_of(sock: socket.socket) -> int | None:
    """Which user of this machine has the other end; None if it is of another machine. -1: nobody has it any more.

    OSError: there is no connection any more; NotImplementedError: the kernel does not tell.
    """
    ours, theirs = sock.getsockname(), sock.getpeername()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        if _ask(kernel, sock.family, ours, theirs) is None:
            raise NotImplementedError
        other = _ask(kernel, sock.family, theirs, ours)
    if other is not None:
        return other.user if other.state == ESTABLISHED and other.inode else -1
    if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
    return None


def stranger_from_here(sock: socket.socket) -> str:
    """In words, who it is that connects, if it may be a process of this machine that is not the same user's; else nothing.

    Who has gone already may have left words behind, so that of those too it has to be known.
    """
    try:
        user = user_of(sock)
    except NotImplementedError:
        return ""
    except OSError:
        return "somebody who has gone already"
    if user in (None, os.geteuid()):
        return ""
    return f"user {user} of the same machine" if user != -1 else "somebody who has gone already"


def _ask(kernel: socket.socket, family: int, here: tuple[object, ...], there: tuple[object, ...]) -> _Socket | None:
    """The socket of this machine that is connected from `here` to `there`."""
    ports = (struct.pack(">H", end[1]) for end in (here, there))
    addresses = (socket.inet_pton(family, str(end[0]).partition("%")[0]).ljust(16, b"\0") for end in (here, there))
    interface = here[3] if family == socket.AF_INET6 else 0
    wanted = ASKED.pack(family, socket.IPPROTO_TCP, 0, 0, ALL_STATES) + ENDS.pack(*ports, *addresses, interface, ANY_SOCKET)
    kernel.send(HEADER.pack(HEADER.size + len(wanted), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0) + wanted)
    answer = kernel.recv(ANSWER_BYTES)
    _, kind, *_ = HEADER.unpack_from(answer)
    if kind == NLMSG_ERROR:
        return None
    _, state, _, _, _, _, _, _, user, inode = TOLD.unpack_from(answer, HEADER.size)
    return None if state == LISTENS else _Socket(state, user, inode)
