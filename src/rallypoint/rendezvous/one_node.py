"""The rendezvous of a job that has one node, elastic or static.

There is nobody to meet. So no port is opened for agents, and nothing of theirs goes over the network: each generation gets a
store of its own inside the agent, which an older one cannot reach, and another for its workers. It is elastic (``c10d``,
``--standalone``) where the job can never have more nodes, and static where the user has said that this is the only one, and where
its workers meet.
"""

from __future__ import annotations

from rallypoint.base import defaults, environment
from rallypoint.base.text import many
from rallypoint.errors import RendezvousClosedError, UsageError, bad_field
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

__all__ = ["LocalRendezvous", "StaticTCPRendezvous", "create_handler", "create_rdzv_handler"]

NO_PORT = -1


class _OneNode(WakingHandler):
    """A rendezvous of one node with itself, again and again; it is never closed, and nobody waits for it."""

    def __init__(self, backend: str, run_id: str, worker_store: WorkerStore | None) -> None:
        self._backend = backend
        self.run_id = run_id
        self._worker_store = worker_store or WorkerStore(WorkerStoreSettings())

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self.run_id

    @property
    def use_agent_store(self) -> bool:
        return self._worker_store.is_agents

    def _begin_generation(self, address: str, port: int | None = None) -> RendezvousInfo:
        self._worker_store.end_generation()
        where = RendezvousStoreInfo(address, self._worker_store.hold(address, port))
        self._worker_store.serve()
        return RendezvousInfo(HashStore(), 0, 1, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """There is nothing to close."""

    def num_nodes_waiting(self) -> int:
        return 0

    def wakeup_fd(self) -> None:
        return None

    def shutdown(self) -> bool:
        self.set_closed()
        self.close_worker_store()
        return True

    def close_worker_store(self) -> None:
        self._worker_store.close()


class LocalRendezvous(_OneNode):
    """The elastic one, which can be closed."""

    def __init__(
        self,
        run_id: str,
        local_addr: str | None = None,
        worker_store: WorkerStore | None = None,
        backend: str = defaults.BACKEND_ELASTIC,
    ) -> None:
        super().__init__(backend, run_id, worker_store)
        self._master_addr = local_addr or defaults.MASTER_ADDR
        self._closed = False

    def next_rendezvous(self) -> RendezvousInfo:
        if self._closed:
            raise RendezvousClosedError(f"the rendezvous of run {self.run_id!r} is closed: the job has ended")
        return self._begin_generation(self._master_addr)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True


class StaticTCPRendezvous(_OneNode):
    """The static one, at the master address that the user gave; port 0 stands for a free one, found anew each time."""

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
        super().__init__(defaults.BACKEND_CLI, run_id, worker_store)
        self.master_addr = master_addr
        self.master_port = master_port
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout

    def next_rendezvous(self) -> RendezvousInfo:
        info = self._begin_generation(self.master_addr, self.master_port)
        info.store.set_timeout(self.timeout_s)
        return info


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The elastic handler for `params`, whose endpoint is checked but not used: there is nobody else who could be there."""
    parse_rendezvous_endpoint(params.endpoint, defaults.ELASTIC_PORT)
    worker_store = WorkerStore(read_worker_store_settings(params.config, environment.own))
    return LocalRendezvous(params.run_id, params.local_addr, worker_store, params.backend)


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The static handler for `params`, of any number of nodes, whose rank is one of its settings."""
    rank = params.get_as_int("rank")
    if rank is None:
        raise bad_field("rdzv_configs", ": the static rendezvous needs the rank of this node, as rank")
    if not params.endpoint.strip():
        raise bad_field("rdzv_endpoint", " is empty: the static rendezvous needs the master's address and port, as host:port")
    address, port = parse_rendezvous_endpoint(params.endpoint, NO_PORT)
    if port == NO_PORT:
        raise bad_field("rdzv_endpoint", f" {params.endpoint!r} has no port: the static rendezvous needs one, as host:port")
    timeout_s = params.get_as_int("timeout")
    if timeout_s is None:
        timeout_s = defaults.RDZV_TIMEOUT_S
    if params.max_nodes == 1:
        settings = read_worker_store_settings(params.config, environment.own)
        if any(settings.ports):
            problem = " cannot be given: with static rendezvous the workers' store is at the master port"
            raise bad_field("worker_store_port", problem)
        worker_store = WorkerStore(settings)
        return StaticTCPRendezvous(address, port, rank, 1, params.run_id, timeout_s, worker_store=worker_store)
    _check(rank, params.max_nodes, timeout_s)
    from rallypoint.rendezvous import embedded

    return embedded.create_static_handler(params, embedded.Endpoint(address, port), rank, timeout_s)


def _check(rank: int, nodes: int, timeout_s: int) -> None:
    if not 0 <= rank < nodes:
        raise UsageError(f"node_rank is {rank}, but with {many(nodes, 'node')} it must be from 0 to {nodes - 1}")
    if timeout_s <= 0:
        raise UsageError(f"the rendezvous timeout is {timeout_s} s; it must be longer than 0 s")
