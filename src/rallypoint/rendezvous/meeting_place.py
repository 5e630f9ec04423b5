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
from rallypoint.rendezvous.settings import Settings
from rallypoint.store.client import EmbeddedCoordination
from rallypoint.store.coordination import StoreGoneError, UnreachableError
from rallypoint.store.listening import open_listeners
from rallypoint.store.server import CoordinationServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

__all__ = ["Endpoint", "MeetingPlace"]

FILES_PER_NODE = 2  # a node's own connection, and one for the store that members share
SPARE_FILES = 256
QUIET_LINGER_S = 2.0
SLICE_S = 0.5  # after each we look whether we are still wanted, and whether we could be the host
PROGRESS_INTERVAL_S = 10.0


class Endpoint(Value):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class MeetingPlace:
    """The store of one job, as one node finds it."""

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
        self.endpoint = endpoint
        self._take_in_worker = take_in_worker
        self.server: CoordinationServer | None = None
        self._run_id = run_id
        self._max_nodes = max_nodes
        self._secret = secret
        self._settings = settings
        self._identity = ""
        self._engine: EmbeddedCoordination | None = None  # the latest, which knows how the last session ended

    def connect(self, timeout_s: float, refusal_timeout_s: float, pause: Callable[[float], bool]) -> EmbeddedCoordination | None:
        """A connection to the store, which is opened here if need be. None if `pause`, which sleeps, says that we are to stop."""
        began = time.monotonic()
        tell_at = began + PROGRESS_INTERVAL_S
        refused_since = self._engine.connection().refused_since if self._engine else None
        while True:
            try:
                return self._try_once()
            except UnreachableError as error:
                trouble, now = str(error), time.monotonic()
            is_refused = self._engine is not None and self._engine.connection().refused_since is not None
            refused_since = (refused_since or now) if is_refused else None
            self._give_up_if_hopeless(trouble, now - began, timeout_s, now - (refused_since or now), refusal_timeout_s)
            if now >= tell_at:
                tell_at = now + PROGRESS_INTERVAL_S
                report.info(f"{trouble}; trying for another {began + timeout_s - now:.0f} s")
            if not pause(0.05):
                return None

    def _give_up_if_hopeless(
        self, trouble: str, tried_s: float, timeout_s: float, refused_s: float, refusal_timeout_s: float
    ) -> None:
        if tried_s >= timeout_s:
            raise UnreachableError(f"the coordination store at {self.endpoint} was not reached within {timeout_s:g} s: {trouble}")
        if self._identity and refused_s >= refusal_timeout_s:
            raise StoreGoneError(
                f"the coordination store at {self.endpoint} is gone: its host has refused connections for"
                f" {refusal_timeout_s:g} s; the agent there has ended or was killed, and the job ends with it"
            )

    def _try_once(self) -> EmbeddedCoordination:
        if self.server is None and not self._identity:
            self._try_to_host()
        engine = self._engine = self._new_engine()
        try:
            engine.connect(time.monotonic() + SLICE_S)
            self._check_identity(engine)
        except BaseException:  # whatever it was, the socket must not stay; it is raised again
            engine.close()
            raise
        return engine

    def _new_engine(self) -> EmbeddedCoordination:
        host = self.server_address() or self.endpoint.host
        return EmbeddedCoordination(host, self.endpoint.port, self._run_id, self._secret)

    def _check_identity(self, engine: EmbeddedCoordination) -> None:
        """A store that was started anew knows nothing of the job that we are part of."""
        if self._identity and engine.identity() != self._identity:
            raise StoreGoneError(
                f"the coordination store at {self.endpoint} was started anew, without the state of this job; the job ends here"
            )
        self._identity = engine.identity()

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

    def new_connection(self) -> EmbeddedCoordination:
        """Another connection to the same store, without a lease, for the store that members share."""
        engine = self._new_engine()
        try:
            engine.connect(time.monotonic() + self._settings.store_timeout_s)
            self._check_identity(engine)
        except BaseException:  # as above
            engine.close()
            raise
        return engine

    def server_address(self) -> str | None:
        """How the host itself reaches its store, where that is not by the endpoint's name."""
        if self.server is None:
            return None
        addresses = [address[0] for address in self.server.addresses]
        return "127.0.0.1" if "0.0.0.0" in addresses else "::1" if "::" in addresses else addresses[0]

    @property
    def is_host(self) -> bool:
        return self.server is not None

    def advertised_address(self, engine: EmbeddedCoordination) -> str:
        """The address of this node that its peers have reached, or can reach."""
        address = engine.local_address()
        is_behind_wildcard = self.server is not None and self.server_address() not in {one[0] for one in self.server.addresses}
        return self.endpoint.host if is_behind_wildcard else address

    def close(self, close_timeout_s: float) -> None:
        """The host stays until the others have gone, or for its time."""
        server, self.server = self.server, None
        if server is None:
            return
        if not server.wait_until_alone(time.monotonic() + QUIET_LINGER_S, except_for=0):
            report.info("staying for the other nodes, whose coordination store is here")
        if not server.wait_until_alone(time.monotonic() + close_timeout_s, except_for=0):
            report.warn(f"other nodes were still connected {close_timeout_s:g} s after the end; the store is closed")
        server.stop(0.0)
