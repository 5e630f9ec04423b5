"""How nodes meet, as an interface: a *handler* gathers the nodes of a job and tells each its place among them.

The agent calls ``next_rendezvous`` once for each generation of workers, and gets a store that all members share, its own rank
and the number of nodes. What happens in between is the affair of the back end, which is made from `RendezvousParameters`
by the creator that is registered under its name. Names and meanings are torch's, so that back ends written for it fit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from rallypoint.base.records import Record
from rallypoint.base.text import parse_truth
from rallypoint.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
    UsageError,
)
from rallypoint.net.endpoint import get_free_port, get_local_address
from rallypoint.store.interface import StoreLike

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar

__all__ = [
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeoutError",
    "WakingHandler",
    "registry_of_the_process",
    "rendezvous_handler_registry",
]


class RendezvousStoreInfo(Record):
    """Where the workers find their own store: the address and port that rank 0 opens.

    >>> from rallypoint import HashStore
    >>> from rallypoint.rendezvous import RendezvousStoreInfo
    >>> RendezvousStoreInfo.build(0, HashStore(), local_addr="n1", server_port=29500)
    RendezvousStoreInfo(master_addr='n1', master_port=29500)
    """

    MASTER_ADDR_KEY: ClassVar[str] = "MASTER_ADDR"
    MASTER_PORT_KEY: ClassVar[str] = "MASTER_PORT"
    master_addr: str
    master_port: int

    @staticmethod
    def build(rank: int, store: StoreLike, local_addr: str | None = None, server_port: int | None = None) -> RendezvousStoreInfo:
        """Agree on it through `store`: rank 0 chooses and publishes, the others read.

        Rank 0 names `local_addr` or its own machine, and `server_port` or a port that is free there.
        """
        if rank == 0:
            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, (local_addr or get_local_address()).encode())
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(server_port or get_free_port()).encode())
        address = store.get(RendezvousStoreInfo.MASTER_ADDR_KEY).decode()
        return RendezvousStoreInfo(address, int(store.get(RendezvousStoreInfo.MASTER_PORT_KEY)))


class RendezvousInfo:
    """What a node learns at a rendezvous.

    >>> from rallypoint import HashStore
    >>> from rallypoint.rendezvous import RendezvousInfo, RendezvousStoreInfo
    >>> place = RendezvousInfo(HashStore(), 1, 4, RendezvousStoreInfo("n1", 29500))
    >>> place.rank, place.world_size
    (1, 4)
    """

    def __init__(self, store: Any, rank: int, world_size: int, bootstrap_store_info: RendezvousStoreInfo) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._bootstrap_store_info = bootstrap_store_info

    def __repr__(self) -> str:
        where = self._bootstrap_store_info
        return f"RendezvousInfo(rank={self._rank}, world_size={self._world_size}, bootstrap_store_info={where!r})"

    @property
    def store(self) -> Any:
        """The agents' store, a `Store` or one of torch's; all nodes of this rendezvous share it."""
        return self._store

    @property
    def rank(self) -> int:
        """This node's place among the nodes."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many nodes there are."""
        return self._world_size

    @property
    def bootstrap_store_info(self) -> RendezvousStoreInfo:
        """Where the workers find theirs."""
        return self._bootstrap_store_info


class RendezvousHandler(ABC):
    """Gathers the nodes of one job, again for each generation."""

    @abstractmethod
    def get_backend(self) -> str:
        """The name under which this kind of handler is registered."""

    @property
    def use_agent_store(self) -> bool:
        """Whether the store at the master address is the agents', so that workers join it instead of opening their own."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until enough nodes are here, and tell this one its place.

        Raises one of the errors under `RendezvousError`; ``RendezvousGracefulExitError`` means that this node may go home.
        """

    @abstractmethod
    def is_closed(self) -> bool:
        """Whether the job has ended, so that no further rendezvous will come; learned sooner or later, not at once."""

    @abstractmethod
    def set_closed(self) -> None:
        """Declare the job ended for all nodes."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """How many nodes wait to be let in by the next rendezvous."""

    @abstractmethod
    def get_run_id(self) -> str:
        """The name of the job."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Free what the handler holds; whether all went well."""


class WakingHandler(RendezvousHandler):
    """A handler that can wake its agent, so that nobody has to ask it again and again."""

    @abstractmethod
    def wakeup_fd(self) -> int | None:
        """Becomes readable when `num_nodes_waiting` or `is_closed` may have changed; None where that never happens."""

    def close_worker_store(self) -> None:
        """The workers of this node are gone, and others will not come unless there is another rendezvous."""


class RendezvousParameters:
    """What a back end is made from; `kwargs` are its own settings, those of ``--rdzv-conf``.

    >>> from rallypoint.rendezvous import RendezvousParameters
    >>> params = RendezvousParameters("c10d", "node0:29400", "my-job", 2, 4, join_timeout="600", is_host="yes")
    >>> params.get_as_int("join_timeout"), params.get_as_bool("is_host")
    (600, True)
    """

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend:
            raise UsageError("the rendezvous backend has no name")
        if min_nodes < 1:
            raise UsageError(f"min_nodes is {min_nodes}; a job needs at least one node")
        if max_nodes < min_nodes:
            raise UsageError(f"max_nodes ({max_nodes}) is less than min_nodes ({min_nodes})")
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.local_addr = local_addr
        self.config = kwargs

    def get(self, key: str, default: Any = None) -> Any:
        """A setting as it was given, or `default`."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """A setting as a yes or no."""
        value = self.get(key, default)
        if value is None:
            return None
        try:
            return parse_truth(value)
        except ValueError as error:
            raise UsageError(f"rendezvous setting {key}={error}") from None

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """A setting as a whole number."""
        value = self.get(key, default)
        if value is None:
            return None
        try:
            return int(value)
        except (ValueError, TypeError) as error:
            raise UsageError(f"rendezvous setting {key}={value!r} is not a whole number") from error


RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]


class RendezvousHandlerRegistry:
    """Which creator stands behind which back end's name; the one of this process knows those that nobody has registered too.

    >>> from rallypoint.rendezvous import RendezvousHandlerRegistry
    >>> registry = RendezvousHandlerRegistry()
    >>> registry.register("ours", lambda params: ...)
    >>> registry.names()
    ['ours']
    """

    def __init__(self) -> None:
        self._registry: dict[str, RendezvousHandlerCreator] = {}
        self._find_elsewhere: Callable[[str], RendezvousHandlerCreator] | None = None

    def __contains__(self, backend: str) -> bool:
        return backend in self._registry

    def names(self) -> list[str]:
        """The names that are registered."""
        return sorted(self._registry)

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Let `creator` make the handlers of `backend`; a name belongs to one creator."""
        if not backend:
            raise ValueError("a rendezvous backend needs a name")
        other = self._registry.setdefault(backend, creator)
        if other != creator:
            raise ValueError(f"rendezvous backend {backend!r} belongs to {other!r} already; {creator!r} needs another name")

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """The handler that `params` ask for."""
        handler = self._creator_of(params.backend)(params)
        if handler.get_backend() != params.backend:
            raise RuntimeError(f"asked for rendezvous backend {params.backend!r}, its creator made a {handler.get_backend()!r}")
        return handler

    def _creator_of(self, backend: str) -> RendezvousHandlerCreator:
        creator = self._registry.get(backend)
        if creator is not None:
            return creator
        if self._find_elsewhere is not None:
            return self._find_elsewhere(backend)
        raise UsageError(f"rendezvous backend {backend!r} is not registered; those that are: {', '.join(self.names()) or 'none'}")


def registry_of_the_process() -> RendezvousHandlerRegistry:
    """Empty, so that a program may register a name of its own choice; whom it lacks, `registry` knows or finds."""

    def find_creator(backend: str) -> RendezvousHandlerCreator:
        from rallypoint.rendezvous import registry

        return registry.find_creator(backend)

    made = RendezvousHandlerRegistry()
    made._find_elsewhere = find_creator
    return made


rendezvous_handler_registry = registry_of_the_process()
