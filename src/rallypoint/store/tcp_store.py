"""A store over the network by the protocol of torch's TCPStore: a client of our server or of torch's, and the server's host.

It is called like ``torch.distributed.TCPStore``. All threads of a process share one connection, and whoever waits for a key keeps
it meanwhile: a `clone` has its own. A forked process connects anew.

The protocol knows no authentication, so a server listens at the addresses of the name that it was given, and at no others.

The server half of a TCPStore: a process that is its master hosts it, alone or together with other masters at the same port.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence

from rallypoint.net.listening import open_listeners, tune
from rallypoint.store import tcp_protocol as wire
from rallypoint.store.interface import QueueEmptyError, Store, StoreError, StoreTimeoutError, as_bytes, as_keys, as_seconds
from rallypoint.store.tcp_client import ANSWER_S, TcpClient, connect, network_error
from rallypoint.store.tcp_server import TcpStoreServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from typing import Any, TypeVar

    T = TypeVar("T")

__all__ = ["Hosting", "TCPStore", "host_store"]


# --- tcp hosting -----------------------------------------------------------------------------------------------------------


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


# --- tcp store -------------------------------------------------------------------------------------------------------------


JOINED = b"init/"  # counts those who have come; it is no user's key, for those begin with a slash
LOOK_AGAIN_S = 0.02
LAST_PORT = 65_535


class TCPStore(Store):
    """The store at `host_name` and `port`; with `is_master` it is served by this process, until this object is closed or gone.

    With a `world_size`, the master's construction waits until so many stores, its own among them, are connected. Masters in one
    process that are all `multi_tenant` share one server where they name the same port. `use_libuv` has no effect.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta | float | None = None,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        self._clients: dict[int, TcpClient] = {}  # by the process that made it
        self._hosting: Hosting | None = None
        if timeout is not None:
            self.set_timeout(timeout)
        self._is_closed = False
        self.host, self.port, self.libuvBackend = host_name, port, use_libuv
        if world_size == 0:
            raise ValueError("a store for a world of size 0 serves nobody")
        if not 0 <= port <= LAST_PORT:  # the system would take what is left of it beyond 16 bits
            raise ValueError(f"there is no port {port}")
        self._address = (host_name, port)  # where this process, at least, reaches it
        try:
            if is_master:
                self._hosting = host_store(host_name, port, multi_tenant, master_listen_fd)
                self._address = self._hosting.address
                self.port = self._address[1]
            self._connect(self._timeout_s)
            if wait_for_workers and world_size is not None and world_size > 0:
                self._join(world_size, is_master)
        except BaseException:  # whatever it was, nothing half done may stay; it is raised again
            self.close()
            raise

    def __reduce__(self) -> tuple[type[TCPStore], tuple[object, ...]]:
        return type(self), (self.host, self.port, None, False, self.timeout_s)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # when the server's thread stands still already, and could not be waited for
            self.close()

    def close(self) -> None:
        """End the connection, and the server if this is its last master."""
        self._is_closed = True
        for client in list(self._clients.values()):
            client.close()
        hosting, self._hosting = self._hosting, None
        if hosting is not None:
            hosting.release()

    def set(self, key: str, value: bytes | str) -> None:
        self._ask(TcpClient.nothing, wire.SET, [_name(key), as_bytes(value)])

    def get(self, key: str) -> bytes:
        name = [_name(key)]
        value = self._talk(TcpClient.get, _request(wire.GET, name), name, self._timeout_s)
        if value is None:
            raise StoreTimeoutError.of_keys([key], [key], self._timeout_s)
        return value

    def add(self, key: str, amount: int) -> int:
        return self._ask(TcpClient.number, wire.ADD, [_name(key)], amount)

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        return self._ask(TcpClient.text, wire.COMPARE_SET, [_name(key), as_bytes(expected_value), as_bytes(desired_value)])

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(TcpClient.is_ready, wire.CHECK, _names(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        wanted = as_keys(keys)
        timeout_s = self._timeout_s if timeout is None else as_seconds(timeout)
        is_over = self._talk(TcpClient.wait, _request(wire.WAIT, _names(wanted)), timeout_s)
        if not is_over and (missing := self._missing(wanted)):
            raise StoreTimeoutError.of_keys(wanted, missing, timeout_s)

    def delete_key(self, key: str) -> bool:
        return self._ask(TcpClient.number, wire.DELETE_KEY, [_name(key)]) > 0

    def num_keys(self) -> int:
        return self._ask(TcpClient.number, wire.GETNUMKEYS)

    def list_keys(self) -> list[str]:
        return [name[1:].decode(errors="replace") for name in self._ask(TcpClient.texts, wire.LIST_KEYS) if name[:1] == b"/"]

    def append(self, key: str, value: bytes | str) -> None:
        self._ask(TcpClient.nothing, wire.APPEND, [_name(key), as_bytes(value)])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        wanted = as_keys(keys)
        self.wait(wanted)
        return self._ask(lambda client: [client.text() for _ in wanted], wire.MULTI_GET, _names(wanted))

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        if len(keys) != len(values):
            raise ValueError(f"multi_set got {len(keys)} keys and {len(values)} values")
        pairs = zip(as_keys(keys), values, strict=True)
        self._ask(TcpClient.nothing, wire.MULTI_SET, [part for key, value in pairs for part in (_name(key), as_bytes(value))])

    def queue_push(self, key: str, value: bytes | str) -> None:
        self._ask(TcpClient.nothing, wire.QUEUE_PUSH, [_name(key), as_bytes(value)])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        name = [_name(key)]
        deadline = time.monotonic() + self._timeout_s
        pause_s = 0.0
        while (value := self._ask(TcpClient.text_if_any, wire.QUEUE_POP, name)) is None:
            if not block:
                raise QueueEmptyError(f"the queue {key!r} is empty")
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._talk(TcpClient.wait, _request(wire.WAIT, name), left_s):
                raise StoreTimeoutError.of_keys([key], [key], self._timeout_s)
            time.sleep(pause_s)  # for a key that has a value too is there at once, and its queue would be asked for without rest
            pause_s = LOOK_AGAIN_S
        return value

    def queue_len(self, key: str) -> int:
        return self._ask(TcpClient.number, wire.QUEUE_LEN, [_name(key)])

    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        name = [_name(key)]
        timeout_s = self._timeout_s if timeout is None else as_seconds(timeout)
        if not self._talk(TcpClient.wait, _request(wire.BARRIER, name, world_size), timeout_s):
            came = self._ask(TcpClient.text, wire.GET, name).decode(errors="replace")
            raise StoreTimeoutError(f"waited {timeout_s:g} s at the barrier {key!r} in vain: {came} of {world_size} came")

    def clone(self) -> TCPStore:
        """The same store by a connection of its own; a server ends with its master nevertheless."""
        twin = TCPStore(*self._address, timeout=max(self._timeout_s, ANSWER_S), use_libuv=self.libuvBackend)
        twin.host, twin._timeout_s = self.host, self._timeout_s
        return twin

    def has_extended_api(self) -> bool:
        return True

    # --- what all operations are made of -----------------------------------------------------------------------------------

    def _ask(self, read: Callable[[TcpClient], T], operation: int, strings: Sequence[bytes] = (), number: int = 0) -> T:
        answer: T = self._talk(TcpClient.ask, _request(operation, strings, number), read)
        return answer

    def _talk(self, conversation: Callable[..., T], *arguments: Any) -> T:
        answer_s = max(self._timeout_s, ANSWER_S)
        client = self._clients.get(os.getpid()) or self._connect(answer_s)
        return client.talk(answer_s, conversation, *arguments)

    def _connect(self, timeout_s: float) -> TcpClient:
        """The connection of this process."""
        if self._is_closed:
            raise StoreError(f"the store at {self.host}, port {self.port}, was closed before this process was forked")
        ours = connect(*self._address, timeout_s)
        kept = self._clients.setdefault(os.getpid(), ours)  # another thread may have been quicker
        others = {ours, *self._clients.values()} - {kept}
        self._clients = {os.getpid(): kept}
        for client in others:
            client.close()
        return kept

    def _missing(self, keys: list[str]) -> list[str]:
        """Those of `keys` that are not there; all of them are asked for at once."""
        checks = b"".join([_request(wire.CHECK, [_name(key)]) for key in keys])
        return self._talk(TcpClient.ask, checks, lambda client: [key for key in keys if not client.is_ready()])

    def _join(self, world_size: int, is_master: bool) -> None:
        """Be counted; a master waits for the others."""
        joined = self._ask(TcpClient.number, wire.ADD, [JOINED], 1)
        deadline = time.monotonic() + self._timeout_s
        while is_master and joined < world_size:
            if time.monotonic() >= deadline:
                raise StoreTimeoutError(f"waited {self._timeout_s:g} s in vain: {joined} of {world_size} clients joined")
            time.sleep(LOOK_AGAIN_S)
            joined = self._ask(TcpClient.number, wire.ADD, [JOINED], 0)


def _name(key: str) -> bytes:
    return b"/" + as_bytes(key)


def _names(keys: Sequence[str]) -> list[bytes]:
    return [_name(key) for key in as_keys(keys)]


def _request(operation: int, strings: Sequence[bytes] = (), number: int = 0) -> bytes:
    try:
        return wire.request(operation, strings, number)
    except wire.ProtocolError as error:  # before anything was sent
        raise StoreError(f"more than a store takes: {error}") from None
    except struct.error:
        if not isinstance(number, int):
            raise TypeError(f"expected a whole number, not {number!r}") from None
        raise StoreError(f"more than a store takes: {number} does not fit into 64 bits") from None
