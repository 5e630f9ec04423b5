"""The elastic rendezvous (``c10d``, ``--standalone``) of a job that can never have more than one node.

There is nobody to meet. So no port is opened and nothing goes over the network: each generation gets a store of its own inside
the agent, which an older one cannot reach, and a free port for the store that rank 0's worker will open.
"""

from __future__ import annotations

from rallypoint import defaults
from rallypoint.errors import RendezvousClosedError
from rallypoint.rendezvous.endpoint import parse_rendezvous_endpoint
from rallypoint.rendezvous.handler import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    WakingHandler,
)
from rallypoint.store.hash_store import HashStore

__all__ = ["LocalRendezvous", "create_handler"]


class LocalRendezvous(WakingHandler):
    """A rendezvous of one node with itself, again and again until it is closed."""

    def __init__(self, run_id: str, local_addr: str | None = None) -> None:
        self._run_id = run_id
        self._master_addr = local_addr or defaults.MASTER_ADDR
        self._closed = False

    def get_backend(self) -> str:
        return defaults.BACKEND_ELASTIC

    def next_rendezvous(self) -> RendezvousInfo:
        if self._closed:
            raise RendezvousClosedError(f"the rendezvous of run {self._run_id!r} is closed: the job has ended")
        store = HashStore()
        where = RendezvousStoreInfo.build(0, store, local_addr=self._master_addr)
        return RendezvousInfo(store, 0, 1, where)

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
        return True


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The handler for `params`, whose endpoint is checked but not used: there is nobody else who could be there."""
    parse_rendezvous_endpoint(params.endpoint, defaults.ELASTIC_PORT)
    return LocalRendezvous(params.run_id, params.local_addr)
