"""Many workers that come to a store at the same moment: ``store_burst.py PORT COUNT``.

It opens so many connections at once, says on each what a client of torch's TCPStore says first, and prints how many seconds it
took until all were answered. They stay open until its stdin ends.
"""

from __future__ import annotations

import resource
import select
import socket
import sys
import time

from rallypoint.store import tcp_protocol as wire

NUMBER = 4711  # which a server gives back
PATIENCE_S = 60.0


def greet_all(port: int, count: int) -> list[socket.socket]:
    """Connections on which the server has answered."""
    poll = select.epoll()
    sockets = [connecting(port) for _ in range(count)]
    for sock in sockets:
        poll.register(sock, select.EPOLLOUT)
    by_fd = {sock.fileno(): sock for sock in sockets}
    while by_fd:
        ready = poll.poll(PATIENCE_S)
        if not ready:
            raise SystemExit(f"{len(by_fd)} of {count} connections had no answer for {PATIENCE_S:g} s")
        for fd, events in ready:
            if events & select.EPOLLOUT:
                by_fd[fd].send(wire.GREETING + wire.request(wire.PING, number=NUMBER))
                poll.modify(fd, select.EPOLLIN)
            else:
                check_answer(by_fd.pop(fd))
                poll.unregister(fd)
    return sockets


def connecting(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex(("127.0.0.1", port))
    return sock


def check_answer(sock: socket.socket) -> None:
    answer = sock.recv(16)
    if answer != wire.U32.pack(NUMBER):
        raise SystemExit(f"the server answered {answer!r}")


def main() -> None:
    port, count = map(int, sys.argv[1:])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    began = time.monotonic()
    sockets = greet_all(port, count)
    print(time.monotonic() - began, flush=True)
    sys.stdin.read()
    for sock in sockets:
        sock.close()


if __name__ == "__main__":
    main()
