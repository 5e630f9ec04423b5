"""The rendezvous in which nothing is left to find out: the user says which node is which, and where rank 0 is.

In this version it serves one node, and needs no network for that.
"""

from __future__ import annotations

from rallypoint import defaults
from rallypoint.errors import UsageError
from rallypoint.rendezvous.endpoint import parse_rendezvous_endpoint
from rallypoint.rendezvous.handler import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    WakingHandler,
)
from rallypoint.store.hash_store import HashStore

__all__ = ["StaticTCPRendezvous", "create_rdzv_handler"]

NO_PORT = -1


class StaticTCPRendezvous(WakingHandler):
    """Ranks and the master address as the user gave them; port 0 stands for a free one, found anew each time."""

    def __init__(self, master_addr: str, master_port: int, rank: int, world_size: int, run_id: str, timeout: int) -> None:
        if world_size > 1:
            raise UsageError(f"nnodes is {world_size}: several nodes are not in this version yet")
        if not 0 <= rank < world_size:
            raise UsageError(f"node_rank is {rank}, but with {world_size} node(s) it must be from 0 to {world_size - 1}")
        if timeout <= 0:
            raise UsageError(f"the rendezvous timeout is {timeout} s; it must be longer than 0 s")
        self.master_addr = master_addr
        self.master_port = master_port
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id
        self.timeout_s = timeout

    def get_backend(self) -> str:
        return defaults.BACKEND_CLI

    @property
    def use_agent_store(self) -> bool:
        """False: in this version it is rank 0's worker, not its agent, that opens the master port."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        store = HashStore()
        store.set_timeout(self.timeout_s)
        where = RendezvousStoreInfo.build(self.rank, store, self.master_addr, self.master_port)
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
        return True


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
    return StaticTCPRendezvous(address, port, rank, params.max_nodes, params.run_id, timeout_s)
