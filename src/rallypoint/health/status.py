"""What an agent shows of itself to whoever asks: a snapshot that the agent replaces as a whole, and other threads read."""

from __future__ import annotations

import _thread  # threading takes longer to import, and this is on the way to the first worker
from collections.abc import Callable

from rallypoint.base.records import Value
from rallypoint.story.phases import Ledger

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.protocol.pace import Pace, Scores

__all__ = ["AgentStatus", "StatusBoard"]


class AgentStatus(Value):
    """How the agent stands; times are of the monotonic clock."""

    run_id: str
    role: str
    hostname: str
    began_at: float
    ledger: Ledger  # the phase, since when, and the seconds of all phases
    why: str = ""  # it is in this phase
    generation: int = 0  # groups of workers that were started here; in a job of several nodes, the number that all of them know
    group_rank: int | None = None
    group_world_size: int | None = None
    world_size: int | None = None
    ranks: tuple[int, ...] = ()  # global ranks of the workers here
    pids: tuple[int | str, ...] = ()
    restarts: int = 0
    max_restarts: int = 0
    failed_workers: int = 0  # so far
    hung_workers: int = 0
    expired_timers: int = 0


class StatusBoard:
    """Where the agent puts its status; `read_progress` gives the time of the workers' last sign of progress, if they give any."""

    def __init__(self, status: AgentStatus) -> None:
        self.status = status
        self.read_progress: Callable[[], float | None] = lambda: None
        self.read_paces: Callable[[], list[Pace]] = list  # how long the workers here take for a step, if they tell of any
        self.read_slowness: Callable[[], Scores | None] = lambda: None  # the same, beside all others of the job
        self._lock = _thread.allocate_lock()

    def change(self, **changes: object) -> None:
        with self._lock:
            self.status = self.status.replace(**changes)

    def count(self, name: str, more: int = 1) -> None:
        """Add to one of the numbers; timers expire on a thread of their own."""
        with self._lock:
            self.status = self.status.replace(**{name: getattr(self.status, name) + more})
