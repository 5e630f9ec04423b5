"""Several nodes that meet in the embedded store at the endpoint, which one of them hosts: the elastic and the static rendezvous.

Whoever can bind the endpoint's address is the host, unless ``is_host`` says otherwise; all others, and whoever comes second on
the host's own machine, are its clients. Who is a client tries until its time is over: hosts start late, names resolve late.

With static ranks all else is as in the elastic one, but the agent of rank 0 listens at the master address and port, and nowhere
else. What comes there is told apart by its first bytes: agents, who meet in the coordination store behind it, and workers, who
look for their own. A node may be started anew with its rank; the number of nodes never changes.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable

from rallypoint.base import defaults, environment, report
from rallypoint.base.limits import make_room
from rallypoint.base.records import Value
from rallypoint.base.text import host_port
from rallypoint.coordination.embedded.client import EmbeddedCoordination
from rallypoint.coordination.embedded.dialling import Lookup, advice
from rallypoint.coordination.embedded.server import CoordinationServer
from rallypoint.coordination.engine import Coordination, UnreachableError
from rallypoint.errors import UsageError
from rallypoint.net.endpoint import (
    LOOPBACK,
    address_of_default_route,
    is_loopback_here_only,
    open_listeners,
    parse_rendezvous_endpoint,
)
from rallypoint.processes.context import wait_readable
from rallypoint.rendezvous.dynamic import DynamicRendezvous
from rallypoint.rendezvous.handler import RendezvousHandler, RendezvousParameters
from rallypoint.rendezvous.joining import NODES_PER_KEEPALIVE_SECOND, terms_of
from rallypoint.rendezvous.place import Place
from rallypoint.rendezvous.secrets import Keyring, secret_of, tls_of
from rallypoint.rendezvous.settings import Settings, announce, check_node_unit, node_count, read_settings
from rallypoint.rendezvous.worker_store import WorkerStore, WorkerStoreSettings, settings_for_worker_store
from rallypoint.store.tcp_server import TcpStoreServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

    from rallypoint.coordination.embedded.tls import Tls
    from rallypoint.net.endpoint import Address

__all__ = ["Endpoint", "MeetingPlace", "SharedDoor", "create_handler", "create_static_handler"]

FILES_PER_NODE = 2  # a node's own connection, and one for the store that members share
QUIET_LINGER_S = 2.0
MOST_WAITING = 16_384
LONGEST_WAIT_S = 60.0  # workers are started when there is a generation, so rank 0 has its seat soon


class Endpoint(Value):
    host: str
    port: int

    def __str__(self) -> str:
        return host_port(self.host, self.port)


class MeetingPlace(Place):
    """The embedded store, which this node may be the host of."""

    _goes_on = True

    def __init__(
        self,
        endpoint: Endpoint,
        run_id: str,
        max_nodes: int,
        secret: bytes | Keyring | None,
        settings: Settings,
        take_in_worker: Callable[[socket.socket, str], None] | None = None,
        tls: Tls | None = None,
    ) -> None:
        """With a `Keyring`, the host offers a secret. With `take_in_worker`, workers may come to the same address; it gets their
        connections."""
        super().__init__(str(endpoint), settings.store_timeout_s, host_timeout_s=settings.host_timeout_s)
        self.endpoint = endpoint
        self._take_in_worker = take_in_worker
        self.server: CoordinationServer | None = None
        self._run_id = run_id
        self._max_nodes = max_nodes
        self._secret = secret
        self._tls = tls
        self._settings = settings
        self._lookup: Lookup | None = None  # while it is not known whether this node is the host
        self._is_name_of_loopback = False  # on this machine alone

    def _try_once(self, lease_s: float, slice_ends: float) -> tuple[Coordination, int]:
        if self.server is None and not self.identity and self._settings.is_host is not False:
            self._try_to_host(slice_ends)
        return super()._try_once(lease_s, slice_ends)

    def _stop_trying(self) -> None:
        super()._stop_trying()
        lookup, self._lookup = self._lookup, None
        if lookup is not None:
            lookup.close()

    def _advice(self) -> str:
        if isinstance(self._engine, EmbeddedCoordination):
            return self._engine.advice()
        host, port = self.endpoint.host, self.endpoint.port
        return advice(host, port, is_name=True, is_known=False, is_refused=False, is_connected=False)

    def _open(self, engine: Coordination, deadline: float) -> None:
        assert isinstance(engine, EmbeddedCoordination)
        engine.connect(deadline)

    def _new_engine(self) -> EmbeddedCoordination:
        host = self.server_address() or self.endpoint.host
        endpoint = self.endpoint
        return EmbeddedCoordination(host, endpoint.port, self._run_id, self._secret, tls=self._tls, tls_name=endpoint.host)

    def _try_to_host(self, until: float) -> None:
        endpoint = self.endpoint
        try:
            addresses = self._look_up(until)
            if addresses is None:
                return  # the engine asks too, and can say so
            # Workers prove nothing, and a secret that is found may not be asked of everybody.
            may_be_everywhere = isinstance(self._secret, bytes) and self._take_in_worker is None
            listeners = open_listeners(
                endpoint.host,
                endpoint.port,
                is_host=self._settings.is_host,
                wildcard_allowed=may_be_everywhere,
                addresses=addresses,
            )
        except OSError as error:
            if self._settings.is_host:
                raise
            raise UnreachableError(f"the endpoint {endpoint} cannot be found: {error}") from error
        if listeners is None:
            return
        self._stop_trying()  # to reach by its name what is here now
        make_room(FILES_PER_NODE * self._max_nodes)
        self.server, guard = self._guarded_server(listeners)
        self.server.start()
        self._is_name_of_loopback = is_loopback_here_only(endpoint.host, addresses)
        self._tell_of_hosting(addresses, guard)

    def _guarded_server(self, listeners: list[socket.socket]) -> tuple[CoordinationServer, str]:
        """The server, and in words who may join, where that is not as the user has said."""
        secret, boxes, judge, guard = self._secret, None, None, ""
        if isinstance(secret, Keyring):
            keyring, offer = secret, secret.offer()
            secret = None
            if offer is not None:
                secret, boxes, guard = offer.secret, offer.boxes, str(offer)
                judge = None if offer.is_strict else keyring.judge
        if self._tls is not None:
            guard = "only who has a certificate of the same authority can join"
        elif secret is None:
            guard = "no secret: anyone who can reach it can join or end the job (see --secret)"
        server = CoordinationServer(
            listeners, self._run_id, secret, take_in_worker=self._take_in_worker, boxes=boxes, judge=judge, tls=self._tls
        )
        return server, guard

    def _look_up(self, until: float) -> list[Address] | None:
        """The addresses of the endpoint; None if no name server has answered by then. OSError: there are none."""
        self._lookup = self._lookup or Lookup(self.endpoint.host, self.endpoint.port)
        self._lookup.ask(time.monotonic())
        wait_readable([self._lookup.fileno()], until - time.monotonic())
        answer = self._lookup.take()
        if isinstance(answer, OSError):
            raise answer
        return answer

    def _tell_of_hosting(self, addresses: list[Address], guard: str) -> None:
        endpoint = self.endpoint
        report.info(f"this node hosts the coordination store at {endpoint}" + (f"; {guard}" if guard else ""))
        if self._is_name_of_loopback and not self._is_everywhere and self._max_nodes > 1:
            own = address_of_default_route()
            example = "" if own == LOOPBACK else f", e.g. {own},"
            secret = "" if self._take_in_worker is not None else ", or give a secret with --secret FILE"
            report.warn(
                f"{endpoint.host} is {addresses[0][1][0]} here (see /etc/hosts): only this machine can reach the store;"
                f" use its address{example} as the endpoint{secret}"
            )

    @property
    def _is_everywhere(self) -> bool:
        """Whether the store listens on all addresses of this machine."""
        return self.server is not None and self.server_address() not in {one[0] for one in self.server.addresses}

    def server_address(self) -> str | None:
        """How the host itself reaches its store, where that is not by the endpoint's name."""
        if self.server is None:
            return None
        addresses = [address[0] for address in self.server.addresses]
        return "127.0.0.1" if "0.0.0.0" in addresses else "::1" if "::" in addresses else addresses[0]

    def objection(self, worker: socket.socket) -> str:
        """Why somebody who has come to the workers' store is none of the job's; only the host of the agents' store can know."""
        server = self.server
        return "" if server is None else server.visitors.objection(worker)

    @property
    def is_host(self) -> bool:
        return self.server is not None

    def advertised_address(self, engine: Coordination) -> str:
        if not self._is_everywhere:
            return super().advertised_address(engine)
        own = address_of_default_route() if self._is_name_of_loopback else LOOPBACK
        return self.endpoint.host if own == LOOPBACK else own

    def close(self, close_timeout_s: float) -> None:
        server, self.server = self.server, None
        if server is None:
            return
        if not server.wait_until_alone(time.monotonic() + QUIET_LINGER_S, except_for=0):
            report.info("staying for the other nodes, whose coordination store is here")
        if not server.wait_until_alone(time.monotonic() + close_timeout_s, except_for=0):
            report.warn(f"other nodes were still connected {close_timeout_s:g} s after the end; the store is closed")
        server.stop(0.0)


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

    def ask_of_workers(self, objection: Callable[[socket.socket], str]) -> None:
        """Which says who is none; it is known after this, as both have to know each other."""
        self._objection = objection if self._settings.is_for_nodes_only else None

    def address_for(self, own_address: str) -> str:
        return self._endpoint.host

    def hold(self, address: str, port: int | None = None) -> int:
        return self._endpoint.port

    def serve(self) -> None:
        server = TcpStoreServer([], self._limit_bytes, self._objection)
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


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The elastic one, from parameters, checked. Nothing is opened yet."""
    host, port = parse_rendezvous_endpoint(params.endpoint, defaults.ELASTIC_PORT)
    if port == 0:
        raise UsageError(f"the endpoint {params.endpoint!r} has port 0; nodes that are to meet need one that all of them know")
    settings = read_settings(params.config, environment.own)
    check_node_unit(settings, params.min_nodes, params.max_nodes)
    announce(f"rendezvous at {Endpoint(host, port)}: {node_count(params.min_nodes, params.max_nodes)}", settings)
    if not (params.endpoint or "").strip() and params.max_nodes > 1:
        report.warn(
            f"no endpoint is given, so the nodes meet at {Endpoint(host, port)}, where only agents on this machine can come;"
            f" for others give --rdzv-endpoint HOST:{port}, the same on all of them, where HOST is one of the nodes"
        )
    secret = secret_of(settings)
    tls = tls_of(settings)
    place = MeetingPlace(Endpoint(host, port), params.run_id, params.max_nodes, secret, settings, tls=tls)
    terms = terms_of(settings, params.max_nodes, NODES_PER_KEEPALIVE_SECOND)
    store = WorkerStore(settings_for_worker_store(settings, environment.own), place.objection)
    return DynamicRendezvous(params, settings, place, terms, store)


def create_static_handler(params: RendezvousParameters, endpoint: Endpoint, rank: int, timeout_s: int) -> RendezvousHandler:
    """The static one for node `rank`; the others wait `timeout_s` for whoever is missing."""
    if endpoint.port == 0:
        raise UsageError("--master-port is 0: nodes that are to meet need a port that all of them know")
    settings = _static_settings(params, rank, timeout_s)
    check_node_unit(settings, params.max_nodes, params.max_nodes)
    if settings.worker_store == defaults.WORKER_STORE_RANK0 or settings.worker_store_port != defaults.WORKER_STORE_PORTS:
        raise UsageError(
            f"static rendezvous of {params.max_nodes} nodes: agents and workers meet at the master port, so that"
            " --worker-store and --worker-store-port have no meaning; leave them out, or use --rdzv-backend c10d"
        )
    is_closed = settings.worker_store_from == defaults.WORKER_STORE_FROM_NODES
    kept = WorkerStoreSettings(limit_bytes=settings.worker_store_memory, is_for_nodes_only=is_closed)
    door = SharedDoor(kept, endpoint)
    announce(f"static rendezvous at {endpoint}: {params.max_nodes} nodes", settings, but="worker_store_port")
    secret = secret_of(settings)
    place = MeetingPlace(endpoint, params.run_id, params.max_nodes, secret, settings, door.take_in, tls_of(settings))
    door.ask_of_workers(place.objection)
    fixed = RendezvousParameters(
        params.backend, params.endpoint, params.run_id, params.max_nodes, params.max_nodes, params.local_addr, **params.config
    )
    terms = terms_of(settings, params.max_nodes, NODES_PER_KEEPALIVE_SECOND)
    return DynamicRendezvous(fixed, settings, place, terms, door)


def _static_settings(params: RendezvousParameters, rank: int, timeout_s: int) -> Settings:
    """What the user has set, and what follows from the rank; torchrun's timeout is that of joining."""
    config = {key: value for key, value in params.config.items() if key != "rank"}
    settings = read_settings(config, environment.own)
    settings = settings.replace(node_rank=rank, is_host=rank == 0)
    if settings.is_given("join_timeout"):
        return settings
    given = () if timeout_s == defaults.RDZV_TIMEOUT_S else (("join_timeout", "timeout"),)
    return settings.replace(join_timeout_s=float(timeout_s), sources=(*settings.sources, *given))
