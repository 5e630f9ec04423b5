"""Static rendezvous of several nodes: the ranks are given, all else is as in the elastic one.

The agent of rank 0 listens at the master address and port, and nowhere else. What comes there is told apart by its first bytes:
agents, who meet in the coordination store behind it, and workers, who look for their own. A node that fails is told to all others
at once, and may be started anew with its rank; the number of nodes never changes.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque

from rallypoint.base import defaults, environment
from rallypoint.errors import UsageError
from rallypoint.rendezvous.dynamic import DynamicRendezvous
from rallypoint.rendezvous.embedded import Endpoint, MeetingPlace
from rallypoint.rendezvous.handler import RendezvousHandler, RendezvousParameters
from rallypoint.rendezvous.joining import embedded_terms
from rallypoint.rendezvous.secret import load_secret
from rallypoint.rendezvous.settings import Settings, announce, check_node_unit, read_settings
from rallypoint.rendezvous.worker_store import WorkerStore, WorkerStoreSettings
from rallypoint.store.tcp_server import TcpStoreServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

__all__ = ["SharedDoor", "create_handler"]

MOST_WAITING = 16_384
LONGEST_WAIT_S = 60.0  # workers are started when there is a generation, so rank 0 has its seat soon


class SharedDoor(WorkerStore):
    """The workers' store behind the listener at which the agents meet, which is always there.

    A worker may come before the agent of rank 0 has its seat: it waits until there is a store. Whoever comes when a generation is
    over waits for the next one's; its workers are gone by then.
    """

    def __init__(self, settings: WorkerStoreSettings, endpoint: Endpoint) -> None:
        super().__init__(settings)
        self._endpoint = endpoint
        self._limit_bytes = settings.limit_bytes
        self._lock = threading.Lock()
        self._waiting: deque[tuple[socket.socket, str, float]] = deque()  # with the time when it came
        self._is_closed = False

    def address_for(self, own_address: str) -> str:
        return self._endpoint.host

    def hold(self, address: str, port: int | None = None) -> int:
        return self._endpoint.port

    def serve(self) -> None:
        server = TcpStoreServer([], self._limit_bytes)
        server.start()
        with self._lock:
            self._server = server
            while self._waiting:
                sock, peer, _ = self._waiting.popleft()
                if _has_gone(sock):  # a worker of the last generation, or whoever: what it has said is not for this store
                    sock.close()
                else:
                    server.adopt(sock, peer)

    def take_in(self, sock: socket.socket, peer: str) -> None:
        """A worker has come; called by the thread that serves the agents."""
        now = time.monotonic()
        with self._lock:
            while self._waiting and self._waiting[0][2] < now - LONGEST_WAIT_S:
                self._waiting.popleft()[0].close()
            if self._server is not None:
                self._server.adopt(sock, peer)
            elif len(self._waiting) < MOST_WAITING and not self._is_closed:
                self._waiting.append((sock, peer, now))
            else:
                sock.close()

    def end_generation(self) -> None:
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def close(self) -> None:
        self.end_generation()
        with self._lock:
            self._is_closed = True
            while self._waiting:
                self._waiting.popleft()[0].close()


def _has_gone(sock: socket.socket) -> bool:
    """Whether the other side has ended the connection, whatever it had said before."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def create_handler(params: RendezvousParameters, endpoint: Endpoint, rank: int, timeout_s: int) -> RendezvousHandler:
    """The handler for node `rank`; the others wait `timeout_s` for whoever is missing."""
    if endpoint.port == 0:
        raise UsageError("--master-port is 0: nodes that are to meet need a port that all of them know")
    settings = _settings(params, rank, timeout_s)
    check_node_unit(settings, params.max_nodes, params.max_nodes)
    if settings.worker_store == defaults.WORKER_STORE_RANK0 or settings.worker_store_port != defaults.WORKER_STORE_PORTS:
        raise UsageError(
            f"static rendezvous of {params.max_nodes} nodes: agents and workers meet at the master port, so that"
            " --worker-store and --worker-store-port have no meaning; leave them out, or use --rdzv-backend c10d"
        )
    door = SharedDoor(WorkerStoreSettings(limit_bytes=settings.worker_store_memory), endpoint)
    announce(f"static rendezvous at {endpoint}: {params.max_nodes} nodes", settings, but="worker_store_port")
    secret = load_secret(settings, environment.own)
    place = MeetingPlace(endpoint, params.run_id, params.max_nodes, secret, settings, door.take_in)
    fixed = RendezvousParameters(
        params.backend, params.endpoint, params.run_id, params.max_nodes, params.max_nodes, params.local_addr, **params.config
    )
    return DynamicRendezvous(fixed, settings, place, embedded_terms(settings, params.max_nodes), door)


def _settings(params: RendezvousParameters, rank: int, timeout_s: int) -> Settings:
    """What the user has set, and what follows from the rank; torchrun's timeout is that of joining."""
    config = {key: value for key, value in params.config.items() if key != "rank"}
    settings = read_settings(config, environment.own)
    settings = settings.replace(node_rank=rank, is_host=rank == 0)
    if settings.is_given("join_timeout"):
        return settings
    given = () if timeout_s == defaults.RDZV_TIMEOUT_S else (("join_timeout", "timeout"),)
    return settings.replace(join_timeout_s=float(timeout_s), sources=(*settings.sources, *given))
