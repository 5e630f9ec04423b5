"""The workers of one node as the agent sees them: what to run, who has which rank, in which state they are, how they ended.

The names, fields and slots are those that code written for torch's elastic agents uses.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from enum import Enum

from rallypoint.base import defaults
from rallypoint.base.records import Record, field
from rallypoint.errors import UsageError
from rallypoint.rendezvous.handler import RendezvousHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.failures.process_failure import ProcessFailure
    from rallypoint.protocol.worker_plan import WorkerRanks

__all__ = ["RunResult", "Worker", "WorkerGroup", "WorkerSpec", "WorkerState", "workers_of"]


class _RoleInstanceInfo:
    """What agents tell each other so that each can compute its workers' ranks: the role and the number of workers of one agent.

    The name is kept because code elsewhere imports it.
    """

    __slots__ = ["local_world_size", "rank", "role"]

    def __init__(self, role: str, rank: int, local_world_size: int) -> None:
        self.role = role
        self.rank = rank
        self.local_world_size = local_world_size

    def serialize(self) -> bytes:
        import json

        return json.dumps({"role": self.role, "rank": self.rank, "local_world_size": self.local_world_size}).encode()

    @staticmethod
    def deserialize(data: bytes) -> _RoleInstanceInfo:
        import json

        fields = json.loads(data)
        return _RoleInstanceInfo(fields["role"], fields["rank"], fields["local_world_size"])

    @staticmethod
    def compare(obj1: _RoleInstanceInfo, obj2: _RoleInstanceInfo) -> int:
        """Order by role, then by rank, in the manner of a comparison function."""
        first, second = (obj1.role, obj1.rank), (obj2.role, obj2.rank)
        return (first > second) - (first < second)

    @staticmethod
    def find_role_boundaries(roles_infos: Sequence[_RoleInstanceInfo], role: str) -> tuple[int, int]:
        """The first and the last place of this role in an ordered list; (-1, -1) where it is not in it."""
        places = [place for place, info in enumerate(roles_infos) if info.role == role]
        return (places[0], places[-1]) if places else (-1, -1)


class WorkerSpec(Record):
    """What the workers of one role on this node run, and how they are looked after.

    >>> from rallypoint import WorkerSpec
    >>> from rallypoint.rendezvous import RendezvousParameters, get_rendezvous_handler
    >>> handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "my-job", 1, 1))
    >>> WorkerSpec("trainer", 2, handler, entrypoint="/opt/train.py").get_entrypoint_name()
    'train.py'
    """

    role: str
    local_world_size: int
    rdzv_handler: RendezvousHandler
    fn: Callable[..., Any] | None = None
    entrypoint: Callable[..., Any] | str | None = None
    args: tuple[Any, ...] = ()
    max_restarts: int = defaults.MAX_RESTARTS_API
    monitor_interval: float = defaults.MONITOR_INTERVAL_S
    master_port: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None
    event_log_handler: str = defaults.EVENT_LOG_HANDLER
    numa_options: Any = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False

    def __post_init__(self) -> None:
        if self.local_world_size < 1:
            raise UsageError(f"local_world_size must be at least 1, not {self.local_world_size}")
        if self.monitor_interval <= 0:
            raise UsageError(f"monitor_interval must be more than 0 seconds, not {self.monitor_interval}")
        if self.fn is not None:
            self._adopt_fn(self.fn)
        if not self.entrypoint:
            raise UsageError("entrypoint is missing: give a function, or the path of a program")

    def _adopt_fn(self, fn: Callable[..., Any]) -> None:
        import warnings

        warnings.warn("WorkerSpec.fn is the old name of WorkerSpec.entrypoint", category=DeprecationWarning, stacklevel=4)
        self.entrypoint = fn

    def get_entrypoint_name(self) -> str:
        """The function's qualified name, or the program's file name."""
        if isinstance(self.entrypoint, str):
            return os.path.basename(self.entrypoint)
        return str(getattr(self.entrypoint, "__qualname__", self.entrypoint))


def _get_entrypoint_name(entrypoint: Callable[..., Any] | str | None, args: Sequence[Any]) -> str:
    """A function's name; for our own interpreter the script, which is the first argument that is no flag; else the program."""
    if isinstance(entrypoint, str):
        if entrypoint != sys.executable:
            return entrypoint
        return next((str(arg) for arg in args if not str(arg).startswith("-")), "")
    return str(getattr(entrypoint, "__qualname__", entrypoint)) if entrypoint is not None else ""


class Worker:
    """One worker; its id is whatever the agent knows it by, for a local agent its process id.

    >>> from rallypoint import Worker
    >>> Worker(local_rank=1, global_rank=5, world_size=8).global_rank
    5
    """

    __slots__ = ["global_rank", "id", "local_rank", "role_rank", "role_world_size", "world_size"]

    def __init__(
        self,
        local_rank: int,
        global_rank: int = -1,
        role_rank: int = -1,
        world_size: int = -1,
        role_world_size: int = -1,
    ) -> None:
        self.id: Any = None
        self.local_rank = local_rank
        self.global_rank = global_rank
        self.role_rank = role_rank
        self.world_size = world_size
        self.role_world_size = role_world_size

    def __str__(self) -> str:
        return ",".join(f"{name}={getattr(self, name)}" for name in _WORKER_FIELDS)

    __repr__ = __str__


_WORKER_FIELDS = ("local_rank", "global_rank", "role_rank", "world_size", "role_world_size")


def workers_of(ranks: Sequence[WorkerRanks]) -> list[Worker]:
    return [Worker(one.local_rank, one.global_rank, one.role_rank, one.world_size, one.role_world_size) for one in ranks]


class WorkerState(str, Enum):
    """The state of a group of workers, which changes as a whole.

    >>> from rallypoint import WorkerState
    >>> WorkerState.is_running(WorkerState.HEALTHY)
    True
    """

    UNKNOWN = "UNKNOWN"  # the agent has lost track of them; nothing can be done about it
    INIT = "INIT"  # not yet started
    HEALTHY = "HEALTHY"  # running
    UNHEALTHY = "UNHEALTHY"  # running, but not as they should
    STOPPED = "STOPPED"  # ended by the agent, which will start them again
    SUCCEEDED = "SUCCEEDED"  # all ended with exit code 0
    FAILED = "FAILED"  # at least one did not

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        return state in {WorkerState.HEALTHY, WorkerState.UNHEALTHY}


class WorkerGroup:
    """The workers of one spec on this node; ranks and master are known after a rendezvous."""

    __slots__ = ["group_rank", "group_world_size", "master_addr", "master_port", "spec", "state", "store", "workers"]

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank=rank) for rank in range(spec.local_world_size)]
        self.store: Any = None
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self.state = WorkerState.INIT


class RunResult(Record):
    """How the workers of this node ended, by global rank: all succeeded, or the failures of those that did not.

    >>> from rallypoint import RunResult, WorkerState
    >>> RunResult(WorkerState.SUCCEEDED, {0: "done"}).is_failed()
    False
    """

    state: WorkerState
    return_values: dict[int, Any] = field(factory=dict)
    failures: dict[int, ProcessFailure] = field(factory=dict)

    def is_failed(self) -> bool:
        return self.state == WorkerState.FAILED
