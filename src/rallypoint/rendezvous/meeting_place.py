"""Where the nodes of a job meet: the embedded store at the endpoint, which one of them hosts.

Whoever can bind the endpoint's address is the host, unless ``is_host`` says otherwise; all others, and whoever comes second on
the host's own machine, are its clients. Who is a client tries until its time is over: hosts start late, names resolve late.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rallypoint import report
from rallypoint.file_limit import make_room
from rallypoint.records import Value
from rallypoint.rendezvous.place import Place
from rallypoint.rendezvous.settings import Settings
from rallypoint.store.client import EmbeddedCoordination
from rallypoint.store.coordination import Coordination, UnreachableError
from rallypoint.store.listening import open_listeners
from rallypoint.store.server import CoordinationServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

__all__ = ["Endpoint", "MeetingPlace"]

FILES_PER_NODE = 2  # a node's own connection, and one for the store that members share
SPARE_FILES = 256
QUIET_LINGER_S = 2.0


class Endpoint(Value):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


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

    def _try_once(self) -> Coordination:
        if self.server is None and not self._identity:
            self._try_to_host()
        return super()._try_once()

    def _open(self, engine: Coordination, deadline: float) -> None:
        assert isinstance(engine, EmbeddedCoordination)
        engine.connect(deadline)

    @property
    def _connect_timeout_s(self) -> float:
        return self._settings.store_timeout_s

    def _new_engine(self) -> EmbeddedCoordination:
        host = self.server_address() or self.endpoint.host
        return EmbeddedCoordination(host, self.endpoint.port, self._run_id, self._secret)

    def _try_to_host(self) -> None:
        try:
            may_be_everywhere = self._secret is not None and self._take_in_worker is None  # workers prove nothing
            listeners = open_listeners(
                self.endpoint.host, self.endpoint.port, is_host=self._settings.is_host, wildcard_allowed=may_be_everywhere
            )
        except OSError as error:
            if self._settings.is_host:
                raise
            raise UnreachableError(f"the endpoint {self.endpoint} cannot be found: {error}") from error
        if listeners is None:
            return
        make_room(SPARE_FILES + FILES_PER_NODE * self._max_nodes)
        self.server = CoordinationServer(listeners, self._run_id, self._secret, take_in_worker=self._take_in_worker)
        self.server.start()
        report.info(f"this node hosts the coordination store at {self.endpoint}")
        if self._secret is None:
            report.info(
                f"the job has no secret: whoever reaches {self.endpoint} can join or end it; --secret-file closes it to strangers"
            )

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
        address = engine.local_address()
        is_behind_wildcard = self.server is not None and self.server_address() not in {one[0] for one in self.server.addresses}
        return self.endpoint.host if is_behind_wildcard else address

    def close(self, close_timeout_s: float) -> None:
        server, self.server = self.server, None
        if server is None:
            return
        if not server.wait_until_alone(time.monotonic() + QUIET_LINGER_S, except_for=0):
            report.info("staying for the other nodes, whose coordination store is here")
        if not server.wait_until_alone(time.monotonic() + close_timeout_s, except_for=0):
            report.warn(f"other nodes were still connected {close_timeout_s:g} s after the end; the store is closed")
        server.stop(0.0)
