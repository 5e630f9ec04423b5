"""The workers' own store, at the master address and port: who serves it, and where.

By default the agent of group rank 0 does, in the format of torch's TCPStore. Its port is bound before anybody hears of it and
held until the generation is over, so that nobody else can take it, and each generation has a store of its own. With
``worker_store=rank0`` it is the worker of rank 0 that opens the port, as in older versions of torchrun: then the agent can only
look for one that is free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rallypoint.base import defaults, environment
from rallypoint.base.records import Value
from rallypoint.errors import RendezvousError
from rallypoint.net.endpoint import address_of, hold_port
from rallypoint.store.tcp_server import TcpStoreServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    import socket
    from collections.abc import Callable
    from typing import Any

    from rallypoint.rendezvous.settings import Settings

__all__ = ["WorkerStore", "WorkerStoreSettings", "read_worker_store_settings", "settings_for_worker_store"]


class WorkerStoreSettings(Value):
    """Who serves the store, at which ports (0: any that is free), and how much it may hold."""

    by: str = defaults.WORKER_STORE
    ports: Sequence[int] = (0,)
    limit_bytes: int = defaults.WORKER_STORE_BYTES
    is_for_nodes_only: bool = True


class WorkerStore:
    """The stores of one node, one after the other: `hold` a port, `serve` or `release` it, `end_generation`; at last `close`."""

    def __init__(self, settings: WorkerStoreSettings, objection: Callable[[socket.socket], str] | None = None) -> None:
        """`objection` says who is no worker of the job."""
        self._settings = settings
        self._objection = objection if settings.is_for_nodes_only else None
        self._held: list[_socket.socket] = []
        self._is_fixed = False  # a port that is the only one is held from one generation to the next
        self._server: TcpStoreServer | None = None

    @property
    def is_agents(self) -> bool:
        """Whether workers find an agent's store at the master address, and must not open one there."""
        return self._settings.by == defaults.WORKER_STORE

    @property
    def is_serving(self) -> bool:
        return self._server is not None

    def address_for(self, own_address: str) -> str:
        """Which address the workers are told."""
        return own_address

    def hold(self, address: str, port: int | None = None) -> int:
        """Bind a port of `address`, the one that is given or one of the settings, and give it; the same until it is let go."""
        if port and not self.is_agents:
            return port
        ports = self._settings.ports if port is None else (port,)
        if not self._held:
            self._held, self._is_fixed = self._bind(address, ports), len(ports) == 1 and ports[0] > 0
        _, held_port = address_of(self._held[0])
        if not self.is_agents:
            self.release()  # for the worker of rank 0, which has to bind it anew
        return held_port

    def _bind(self, address: str, ports: Sequence[int]) -> list[_socket.socket]:
        try:
            return hold_port(address, ports)
        except OSError as error:
            raise RendezvousError(
                f"the workers' store cannot be opened at {address}, {_written(ports)}: {error.strerror or error};"
                " --local-addr names another address, --master-port (static) or --worker-store-port another port, and"
                " --worker-store rank0 leaves it to the worker of rank 0"
            ) from error

    def serve(self) -> None:
        """This node has rank 0: serve an empty store at the port that is held."""
        if self.is_agents:
            self._server = TcpStoreServer(self._held, self._settings.limit_bytes, self._objection)
            self._held = []
            self._server.start()

    def serve_if(self, is_first: bool) -> None:
        """In a job of several nodes, only the first serves."""
        if is_first:
            self.serve()
        else:
            self.release()

    def release(self) -> None:
        """Another serves: let the port go."""
        held, self._held = self._held, []
        for sock in held:
            sock.close()

    def end_generation(self) -> None:
        """Its store is not needed any more."""
        server, self._server = self._server, None
        if server is not None:
            self._held = server.end()
        if not self._is_fixed:
            self.release()

    def close(self) -> None:
        """There will be no other store here."""
        self.end_generation()
        self.release()


def read_worker_store_settings(config: Mapping[str, Any], environ: Mapping[str, str]) -> WorkerStoreSettings:
    """The settings for a job of one node; where nothing was said about it, nothing that knows about settings is loaded."""
    given = {key: value for key, value in config.items() if key.startswith("worker_store") or key == "conf_file"}
    if not given and not environment.has_settings(environ):
        return WorkerStoreSettings(_by_default(environ))
    from rallypoint.rendezvous.settings import read_settings

    return settings_for_worker_store(read_settings(given, environ), environ)


def settings_for_worker_store(settings: Settings, environ: Mapping[str, str]) -> WorkerStoreSettings:
    first, last = settings.worker_store_port
    return WorkerStoreSettings(
        settings.worker_store or _by_default(environ),
        range(first, last + 1),
        settings.worker_store_memory,
        settings.worker_store_from == defaults.WORKER_STORE_FROM_NODES,
    )


def _by_default(environ: Mapping[str, str]) -> str:
    """With torchrun's variable, a user has asked for the worker of rank 0 already."""
    return defaults.WORKER_STORE_RANK0 if environ.get(defaults.ENV_DISABLE_SHARED_STORE) == "1" else defaults.WORKER_STORE


def _written(ports: Sequence[int]) -> str:
    if not any(ports):
        return "any port"
    return f"ports {ports[0]} to {ports[-1]}" if len(ports) > 1 else f"port {ports[0]}"
