"""The rendezvous in which nothing is left to find out: the user says which node is which, and where rank 0 is.

One node has nobody to meet, and needs only the store of its workers; several meet as `static_nodes` says.
"""

from __future__ import annotations

from rallypoint.base import defaults, environment
from rallypoint.base.text import many
from rallypoint.errors import UsageError
from rallypoint.net.endpoint import parse_rendezvous_endpoint
from rallypoint.rendezvous.handler import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    WakingHandler,
)
from rallypoint.rendezvous.worker_store import WorkerStore, WorkerStoreSettings, read_worker_store_settings
from rallypoint.store.hash_store import HashStore

__all__ = ["StaticTCPRendezvous", "create_rdzv_handler"]

NO_PORT = -1


class StaticTCPRendezvous(WakingHandler):
    """One node, with the master address as the user gave it; port 0 stands for a free one, found anew each time."""

    def __init__(
        self,
        master_addr: str,
        master_port: int,
        rank: int,
        world_size: int,
        run_id: str,
        timeout: int,
        *,
        worker_store: WorkerStore | None = None,
    ) -> None:
        if world_size > 1:
            raise UsageError(f"world_size is {world_size}: a static rendezvous of several nodes is made by create_rdzv_handler")
        _check(rank, world_size, timeout)
        self.master_addr = master_addr
        self.master_port = master_port
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id
        self.timeout_s = timeout
        self._worker_store = worker_store or WorkerStore(WorkerStoreSettings())

    def get_backend(self) -> str:
        return defaults.BACKEND_CLI

    @property
    def use_agent_store(self) -> bool:
        return self._worker_store.is_agents

    def next_rendezvous(self) -> RendezvousInfo:
        store = HashStore()
        store.set_timeout(self.timeout_s)
        self._worker_store.end_generation()
        where = RendezvousStoreInfo(self.master_addr, self._worker_store.hold(self.master_addr, self.master_port))
        self._worker_store.serve()
        return RendezvousInfo(store, self.rank, self.world_size, where)

    def is_closed(self) -> bool:
        """Never: the nodes are fixed, and each ends by itself."""
        return False

    def set_closed(self) -> None:
        """There is nothing to close."""

    def num_nodes_waiting(self) -> int:
        return 0

    def wakeup_fd(self) -> None:
        return None

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        self.close_worker_store()
        return True

    def close_worker_store(self) -> None:
        self._worker_store.close()


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The handler for `params`; rank and timeout come from its settings, the master address from its endpoint."""
    rank = params.get_as_int("rank")
    if rank is None:
        raise UsageError("the static rendezvous needs the rank of this node; give --node-rank")
    if not params.endpoint.strip():
        raise UsageError("the static rendezvous needs an endpoint; give --master-addr and --master-port")
    address, port = parse_rendezvous_endpoint(params.endpoint, NO_PORT)
    if port == NO_PORT:
        raise UsageError(f"the static rendezvous needs a port, and the endpoint {params.endpoint!r} has none; give --master-port")
    timeout_s = params.get_as_int("timeout")
    if timeout_s is None:
        timeout_s = defaults.RDZV_TIMEOUT_S
    if params.max_nodes == 1:
        settings = read_worker_store_settings(params.config, environment.own)
        if any(settings.ports):
            raise UsageError("static rendezvous: the workers' store is at the master port; leave --worker-store-port out")
        worker_store = WorkerStore(settings)
        return StaticTCPRendezvous(address, port, rank, 1, params.run_id, timeout_s, worker_store=worker_store)
    _check(rank, params.max_nodes, timeout_s)
    from rallypoint.rendezvous import static_nodes
    from rallypoint.rendezvous.embedded import Endpoint

    return static_nodes.create_handler(params, Endpoint(address, port), rank, timeout_s)


def _check(rank: int, nodes: int, timeout_s: int) -> None:
    if not 0 <= rank < nodes:
        raise UsageError(f"node_rank is {rank}, but with {many(nodes, 'node')} it must be from 0 to {nodes - 1}")
    if timeout_s <= 0:
        raise UsageError(f"the rendezvous timeout is {timeout_s} s; it must be longer than 0 s")
