"""The elastic rendezvous (``c10d``, ``--standalone``) of a job that can never have more than one node.

There is nobody to meet. So no port is opened for agents, and nothing of theirs goes over the network: each generation gets a
store of its own inside the agent, which an older one cannot reach, and another for its workers.
"""

from __future__ import annotations

from rallypoint.base import defaults, environment
from rallypoint.errors import RendezvousClosedError
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

__all__ = ["LocalRendezvous", "create_handler"]


class LocalRendezvous(WakingHandler):
    """A rendezvous of one node with itself, again and again until it is closed."""

    def __init__(
        self,
        run_id: str,
        local_addr: str | None = None,
        worker_store: WorkerStore | None = None,
        backend: str = defaults.BACKEND_ELASTIC,
    ) -> None:
        self._run_id = run_id
        self._worker_store = worker_store or WorkerStore(WorkerStoreSettings())
        self._master_addr = local_addr or defaults.MASTER_ADDR
        self._closed = False
        self._backend = backend

    def get_backend(self) -> str:
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        return self._worker_store.is_agents

    def next_rendezvous(self) -> RendezvousInfo:
        if self._closed:
            raise RendezvousClosedError(f"the rendezvous of run {self._run_id!r} is closed: the job has ended")
        self._worker_store.end_generation()
        where = RendezvousStoreInfo(self._master_addr, self._worker_store.hold(self._master_addr))
        self._worker_store.serve()
        return RendezvousInfo(HashStore(), 0, 1, where)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def wakeup_fd(self) -> None:
        return None

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self.set_closed()
        self.close_worker_store()
        return True

    def close_worker_store(self) -> None:
        self._worker_store.close()


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The handler for `params`, whose endpoint is checked but not used: there is nobody else who could be there."""
    parse_rendezvous_endpoint(params.endpoint, defaults.ELASTIC_PORT)
    worker_store = WorkerStore(read_worker_store_settings(params.config, environment.own))
    return LocalRendezvous(params.run_id, params.local_addr, worker_store, params.backend)
