"""The server half of a TCPStore: a process that is its master hosts it, alone or together with other masters at the same port."""

from __future__ import annotations

import errno
import os
import socket
import threading

from rallypoint.store.listening import open_listeners, tune
from rallypoint.store.tcp_client import network_error
from rallypoint.store.tcp_server import TcpStoreServer

__all__ = ["Hosting", "host_store"]


class Hosting:
    """A server in this process, and how many masters it has."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self._server = TcpStoreServer(sockets)
        self._server.start()
        self._process = os.getpid()
        self.address = self._server.addresses[0]
        self.masters = 0

    def release(self) -> None:
        """One master less; a forked process is none."""
        if os.getpid() != self._process:
            return
        with _hosting_lock:
            self.masters -= 1
            if self.masters > 0:
                return
            if _tenants.get((self._process, self.address[1])) is self:
                del _tenants[self._process, self.address[1]]
        self._server.close()


_tenants: dict[tuple[int, int], Hosting] = {}  # those that may have several masters, by process and port
_hosting_lock = threading.RLock()  # for a store may be collected, and closed, in the midst of this


def host_store(host: str, port: int, multi_tenant: bool, listen_fd: int | None) -> Hosting:
    with _hosting_lock:
        hosting = _tenants.get((os.getpid(), port)) if multi_tenant and listen_fd is None else None
        if hosting is None:
            hosting = Hosting(_listeners(host, port, listen_fd))
            if multi_tenant:
                _tenants[os.getpid(), hosting.address[1]] = hosting
        hosting.masters += 1
        return hosting


def _listeners(host: str, port: int, listen_fd: int | None) -> list[socket.socket]:
    try:
        if listen_fd is not None:
            return [_take_over(listen_fd)]
        return open_listeners(host, port, is_host=True, wildcard_allowed=False) or []
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            error = OSError(f"{host} is no address of this machine")
        raise network_error(f"this process cannot host a store at {host}, port {port}", error) from error


def _take_over(listen_fd: int) -> socket.socket:
    sock = socket.socket(fileno=listen_fd)
    try:
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise OSError(errno.EINVAL, f"the socket {listen_fd} does not listen")
        tune(sock)
        sock.set_inheritable(False)
    except OSError:
        sock.detach()
        raise
    return sock
