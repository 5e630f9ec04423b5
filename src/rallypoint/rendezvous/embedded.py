"""The elastic rendezvous on the embedded store: from parameters, checked, to a handler. Nothing is opened yet.

Where the nodes of a job meet: the embedded store at the endpoint, which one of them hosts.

Whoever can bind the endpoint's address is the host, unless ``is_host`` says otherwise; all others, and whoever comes second on
the host's own machine, are its clients. Who is a client tries until its time is over: hosts start late, names resolve late.
"""

from __future__ import annotations

import time
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
from rallypoint.rendezvous.joining import embedded_terms
from rallypoint.rendezvous.place import Place
from rallypoint.rendezvous.secret import load_secret
from rallypoint.rendezvous.settings import Settings, announce, check_node_unit, node_count, read_settings
from rallypoint.rendezvous.worker_store import WorkerStore, settings_for_worker_store

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

    from rallypoint.net.endpoint import Address

__all__ = ["Endpoint", "MeetingPlace", "create_handler"]


# --- meeting place ---------------------------------------------------------------------------------------------------------


FILES_PER_NODE = 2  # a node's own connection, and one for the store that members share
QUIET_LINGER_S = 2.0


class Endpoint(Value):
    host: str
    port: int

    def __str__(self) -> str:
        return host_port(self.host, self.port)


class MeetingPlace(Place):
    """The embedded store, which this node may be the host of."""

    def __init__(
        self,
        endpoint: Endpoint,
        run_id: str,
        max_nodes: int,
        secret: bytes | None,
        settings: Settings,
        take_in_worker: Callable[[socket.socket, str], None] | None = None,
    ) -> None:
        """With `take_in_worker`, workers may come to the same address; it gets their connections."""
        super().__init__(str(endpoint))
        self.endpoint = endpoint
        self._take_in_worker = take_in_worker
        self.server: CoordinationServer | None = None
        self._run_id = run_id
        self._max_nodes = max_nodes
        self._secret = secret
        self._settings = settings
        self._lookup: Lookup | None = None  # while it is not known whether this node is the host
        self._is_name_of_loopback = False  # on this machine alone

    def _try_once(self, lease_s: float, slice_ends: float) -> tuple[Coordination, int]:
        if self.server is None and not self._identity and self._settings.is_host is not False:
            self._try_to_host(slice_ends)
        return super()._try_once(lease_s, slice_ends)

    @property
    def _goes_on(self) -> bool:
        return True

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

    @property
    def _connect_timeout_s(self) -> float:
        return self._settings.store_timeout_s

    def _new_engine(self) -> EmbeddedCoordination:
        host = self.server_address() or self.endpoint.host
        return EmbeddedCoordination(host, self.endpoint.port, self._run_id, self._secret)

    def _try_to_host(self, until: float) -> None:
        endpoint = self.endpoint
        try:
            addresses = self._look_up(until)
            if addresses is None:
                return  # the engine asks too, and can say so
            may_be_everywhere = self._secret is not None and self._take_in_worker is None  # workers prove nothing
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
        self.server = CoordinationServer(listeners, self._run_id, self._secret, take_in_worker=self._take_in_worker)
        self.server.start()
        self._is_name_of_loopback = is_loopback_here_only(endpoint.host, addresses)
        self._tell_of_hosting(addresses)

    def _look_up(self, until: float) -> list[Address] | None:
        """The addresses of the endpoint; None if no name server has answered by then. OSError: there are none."""
        self._lookup = self._lookup or Lookup(self.endpoint.host, self.endpoint.port)
        self._lookup.ask(time.monotonic())
        wait_readable([self._lookup.fileno()], until - time.monotonic())
        answer = self._lookup.take()
        if isinstance(answer, OSError):
            raise answer
        return answer

    def _tell_of_hosting(self, addresses: list[Address]) -> None:
        endpoint = self.endpoint
        open_to_all = "" if self._secret else "; no secret: anyone who can reach it can join or end the job (see --secret-file)"
        report.info(f"this node hosts the coordination store at {endpoint}{open_to_all}")
        if self._is_name_of_loopback and not self._is_everywhere and self._max_nodes > 1:
            own = address_of_default_route()
            example = "" if own == LOOPBACK else f", e.g. {own},"
            secret = "" if self._take_in_worker is not None else ", or give a secret with --secret-file"
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

    @property
    def is_host(self) -> bool:
        return self.server is not None

    def advertised_address(self, engine: Coordination) -> str:
        if not self._is_everywhere:
            return engine.local_address()
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


# --- embedded --------------------------------------------------------------------------------------------------------------


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
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
    secret = load_secret(settings, environment.own)
    place = MeetingPlace(Endpoint(host, port), params.run_id, params.max_nodes, secret, settings)
    terms = embedded_terms(settings, params.max_nodes)
    return DynamicRendezvous(params, settings, place, terms, WorkerStore(settings_for_worker_store(settings, environment.own)))
