"""A store over the network by the protocol of torch's TCPStore: a client of our server or of torch's, and the server's host.

It is called like ``torch.distributed.TCPStore``. All threads of a process share one connection, and whoever waits for a key keeps
it meanwhile: a `clone` has its own. A forked process connects anew. A process that is a store's master hosts its server, alone or
together with other masters at the same port.

The protocol knows no authentication, so a server listens at the addresses of the name that it was given, and at no others.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from rallypoint.base.backoff import Backoff
from rallypoint.base.text import host_port
from rallypoint.net.endpoint import open_listeners, resolve, tune
from rallypoint.store import tcp_protocol as wire
from rallypoint.store.interface import (
    QueueEmptyError,
    Store,
    StoreError,
    StoreNetworkError,
    StoreTimeoutError,
    as_bytes,
    as_keys,
    as_pairs,
    as_seconds,
)
from rallypoint.store.tcp_protocol import I64, U32, U64, ProtocolError, request
from rallypoint.store.tcp_server import TcpStoreServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from typing import Any, TypeVar

    from rallypoint.net.endpoint import Address

    T = TypeVar("T")

__all__ = ["TCPStore"]

ANSWER_S = 5.0  # a server at work has at least so long to answer, however short the timeout for missing keys
CONNECT_S = 5.0  # for one address, before the next is tried
GREETING_S = 30.0  # a thousand others may be greeted before us
LAST_ATTEMPT_S = 0.1  # what begins just before the deadline still gets its chance
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0
CLOSE_S = 1.0
LONGEST_POLL_S = 1e6  # the kernel counts milliseconds in 32 bits
RECEIVE_BYTES, LARGE_RECEIVE_BYTES = 16 * 1024, 1024 * 1024
MAX_ANSWER_BYTES = 1 << 30  # values can be made longer than what fits into one request
CANCEL = request(wire.CANCEL_WAIT)
JOINED = b"init/"  # counts those who have come; it is no user's key, for those begin with a slash
LOOK_AGAIN_S = 0.02
LAST_PORT = 65_535


class TcpClient:
    """A connection to a server: one conversation at a time, and never out of step. The socket is its own from now on.

    Everything goes through `talk`; the rest is for conversations. An answer bears no mark of what it is the answer to, so a
    connection whose conversation stops in the middle is of no use any more: an error ends it, and whoever comes later is told
    why. Only waiting can be given up: the server is asked to cancel it and says that it has, perhaps just after it has said that
    the waiting is over.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        sock.setblocking(False)
        self.name = name
        self._socket = sock
        self._incoming = select.poll()
        self._incoming.register(sock, select.POLLIN)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._end = ""  # why it is of no use any more
        self._data = b""  # what has come, read as far as _place
        self._place = 0
        self._answer_s = ANSWER_S
        self._deadline = 0.0  # of the answer that is being waited for
        self._allowed_bytes = 0  # which that answer may still have

    def talk(self, answer_s: float, conversation: Callable[..., T], *arguments: Any) -> T:
        """Do the `conversation` of this client and the `arguments`, each answer of which may take `answer_s`.

        StoreNetworkError: the connection has ended. An error within the conversation ends it.
        """
        with self._lock:
            if self._end:
                raise self._ended()
            self._answer_s = answer_s
            try:
                return conversation(self, *arguments)
            except (OSError, ProtocolError) as error:
                self._give_up(_cause_of(error))
                raise self._ended() from error
            except BaseException:  # whatever it was, nothing half done may stay; it is raised again
                self._give_up("an operation was interrupted before its answer had come")
                raise

    def close(self) -> None:
        """End it, also for a thread that waits; but a forked process only lets go of its copy."""
        if os.getpid() != self._process:
            self._socket.close()
            return
        self._end = self._end or "it was closed on this side"
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        is_unused = self._lock.acquire(timeout=CLOSE_S)  # whoever uses it has noticed by now
        self._socket.close()
        if is_unused:
            self._lock.release()

    def _give_up(self, why: str) -> None:
        self._end = self._end or why
        self._socket.close()
        self._data = b""

    def _ended(self) -> StoreNetworkError:
        return StoreNetworkError(f"the connection to the store at {self.name} has ended: {self._end}")

    # --- conversations -----------------------------------------------------------------------------------------------------

    def greet(self, greeting_s: float) -> None:
        """What comes first, within `greeting_s`."""
        self._answer_s = greeting_s
        token = os.getpid()
        self.send(wire.GREETING + request(wire.PING, (), token))
        if self.take(U32.size) != U32.pack(token):
            raise ProtocolError("what answers there is not a TCPStore")

    def ask(self, data: bytes, read: Callable[[TcpClient], T]) -> T:
        """Send requests, and read the answer."""
        self.send(data)
        return read(self)

    def wait(self, waiting: bytes, timeout_s: float) -> bool:
        """Send a WAIT or a BARRIER; whether that was over within `timeout_s`."""
        self.send(waiting)
        if _is_ready(self._incoming, time.monotonic() + timeout_s):
            if not self.is_ready():
                raise ProtocolError("a wait was cancelled that nobody had cancelled")
            return True
        self.send(CANCEL)
        self._deadline = time.monotonic() + ANSWER_S
        is_over = self.is_ready()  # it may have been just then
        if is_over and self.is_ready():
            raise ProtocolError("a wait was over twice")
        return is_over

    def get(self, asking: bytes, name: list[bytes], timeout_s: float) -> bytes | None:
        """The value of one key, in a single exchange if it is there already. None: it did not come within `timeout_s`."""
        self.send(request(wire.CHECK, name) + asking)
        is_there, value = self.is_ready(), self.text()
        if is_there or value:
            return value
        return self.ask(asking, TcpClient.text) if self.wait(request(wire.WAIT, name), timeout_s) else None

    # --- requests and answers ----------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Begin an exchange. OSError: it has failed, or takes too long."""
        self._deadline = time.monotonic() + self._answer_s
        self._allowed_bytes = MAX_ANSWER_BYTES
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self._send_rest(memoryview(data)[sent:])

    def _send_rest(self, rest: memoryview) -> None:
        outgoing = select.poll()
        outgoing.register(self._socket, select.POLLOUT)
        while rest:
            if not _is_ready(outgoing, self._deadline):
                raise TimeoutError(f"the server did not take a request within {self._answer_s:g} s")
            rest = rest[self._socket.send(rest) :]

    def nothing(self) -> None:
        """What is answered to SET."""

    def is_ready(self) -> bool:
        """The answer to CHECK, WAIT and CANCEL_WAIT."""
        answer = self.take(1)
        if answer > b"\1":
            raise ProtocolError(f"{answer!r} where nothing but 0 or 1 can be")
        return answer == wire.READY

    def number(self) -> int:
        return int(I64.unpack(self.take(I64.size))[0])

    def text(self) -> bytes:
        return self.take(U64.unpack(self.take(U64.size))[0])

    def texts(self) -> list[bytes]:
        """The answer to LIST_KEYS."""
        return [self.text() for _ in range(self.number())]

    def text_if_any(self) -> bytes | None:
        """The answer to QUEUE_POP."""
        return self.text() if self.number() > 0 else None

    def take(self, size: int) -> bytes:
        """The next `size` bytes of the answer. OSError: they do not come, or not in time."""
        if self._place + size > len(self._data):
            self._fill(size)
        place = self._place
        self._place += size
        data = self._data[place : self._place]
        if self._place == len(self._data):
            self._data, self._place = b"", 0
        return data

    def _fill(self, size: int) -> None:
        pieces = [self._data[self._place :]]
        missing = size - len(pieces[0])
        self._allowed_bytes -= missing
        if self._allowed_bytes < 0:
            raise ProtocolError(f"an answer has more than {MAX_ANSWER_BYTES} bytes")
        while missing > 0:
            pieces.append(self._receive(min(max(missing, RECEIVE_BYTES), LARGE_RECEIVE_BYTES)))
            missing -= len(pieces[-1])
        self._data, self._place = b"".join(pieces), 0

    def _receive(self, size: int) -> bytes:
        if not _is_ready(self._incoming, self._deadline):
            raise TimeoutError("no answer came in time")
        data = self._socket.recv(size)
        if not data:
            raise ConnectionError("the server closed it")
        return data


def _is_ready(poll: select.poll, deadline: float) -> bool:
    """Wait until something can be done; False at the deadline."""
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        if poll.poll(min(left_s, LONGEST_POLL_S) * 1000):
            return True
        if left_s <= LONGEST_POLL_S:
            return False


def connect(host: str, port: int, timeout_s: float) -> TcpClient:
    """Connect to a server and greet it; tried again until `timeout_s` are over, for the server may start after us."""
    name = host_port(host, port)
    deadline = time.monotonic() + timeout_s
    backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    while True:
        try:
            return _connect_once(host, port, name, deadline)
        except (OSError, ProtocolError) as error:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise network_error(f"no store was reached at {name} within {timeout_s:g} s", error) from error
        time.sleep(min(left_s, backoff.next_s()))


def _connect_once(host: str, port: int, name: str, deadline: float) -> TcpClient:
    """At the first address of the host, which is looked up anew each time, that answers."""
    failure: OSError | ProtocolError = OSError("the name has no address")
    for address in resolve(host, port):
        try:
            return _open(address, name, deadline)
        except (OSError, ProtocolError) as error:
            failure = error
    raise failure


def _open(address: Address, name: str, deadline: float) -> TcpClient:
    family, place = address
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        tune(sock)
        sock.settimeout(_left_s(deadline, CONNECT_S))
        sock.connect(place)
        if sock.getsockname() == sock.getpeername():  # which the kernel does at a free port that it would hand out itself
            raise ConnectionRefusedError("nobody listens there")
        client = TcpClient(sock, name)
        client.greet(_left_s(deadline, GREETING_S))
    except BaseException:  # whatever it was, nothing half done may stay; it is raised again
        sock.close()
        raise
    return client


def _left_s(deadline: float, most_s: float) -> float:
    return min(most_s, max(LAST_ATTEMPT_S, deadline - time.monotonic()))


def network_error(what: str, error: Exception) -> StoreNetworkError:
    """That something has failed, and why, in words."""
    return StoreNetworkError(f"{what}: {_cause_of(error)}")


def _cause_of(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


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


class TCPStore(Store):
    """The store at `host_name` and `port`; with `is_master` it is served by this process, until this object is closed or gone.

    With a `world_size`, the master's construction waits until so many stores, its own among them, are connected. Masters in one
    process that are all `multi_tenant` share one server where they name the same port. `use_libuv` has no effect.

    >>> from rallypoint import TCPStore
    >>> store = TCPStore("localhost", 0, world_size=1, is_master=True)  # at a free port
    >>> other = TCPStore("localhost", store.port)
    >>> other.set("ready", "1")
    >>> store.get("ready")
    b'1'
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
        parts = [part for key, value in as_pairs(as_keys(keys), values) for part in (_name(key), as_bytes(value))]
        self._ask(TcpClient.nothing, wire.MULTI_SET, parts)

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
