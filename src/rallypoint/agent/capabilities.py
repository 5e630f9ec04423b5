"""What an agent's collaborators can do beyond torch's interfaces.

Handlers, contexts and log specs may be ours, or anybody's who writes for torch's interfaces. Ours can do more. Which kind is at
hand is asked here and nowhere else: for one that can do no more there is a null object, so that the agent need not ask again.
"""

from __future__ import annotations

import signal

from rallypoint.agent.peers import CoordinatedPeers, PlainPeers, WakingPeers
from rallypoint.agent.workers import WorkerSpec
from rallypoint.output.log_specs import DefaultLogsSpecs, LogFolder, LogsSpecs
from rallypoint.processes.context import PContext
from rallypoint.processes.warden_context import EndReason, WardedContext
from rallypoint.rendezvous.coordinated import CoordinatedHandler
from rallypoint.rendezvous.handler import WakingHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rallypoint.failures.process_failure import ProcessFailure
    from rallypoint.processes.standby import Standby

__all__ = ["NoFolders", "NoHold", "NoReserve", "folders_of", "hold_on", "news_fd_of", "peers_of"]


def peers_of(spec: WorkerSpec) -> PlainPeers:
    """The other nodes, as far as this spec's handler tells of them."""
    match spec.rdzv_handler:
        case CoordinatedHandler() as handler:
            return CoordinatedPeers(spec, handler)
        case WakingHandler() as handler:
            return WakingPeers(spec, handler)
    return PlainPeers(spec)


class NoHold:
    """On workers that were not started by us, or not yet: they can be waited for and closed, and that is all."""

    kill_wait_s = 0.0
    hurry_fd: int | None = None
    licence_expired = False
    staying: frozenset[int] = frozenset()
    succeeded: frozenset[int] = frozenset()
    ends_with_failure = False
    wants_last_words = False
    once_told: Callable[[], None] | None = None

    def __init__(self) -> None:
        self.commands: dict[int, tuple[str, ...]] = {}
        self.last_words: dict[int, ProcessFailure] = {}
        self.on_long_wait: Callable[[], None] = lambda: None

    def kill_at_once(self) -> None:
        return

    def pass_on(self, number: signal.Signals) -> None:
        return

    def explain_end(self, pid: int, reason: EndReason) -> None:
        return

    def end_worker(self, local_rank: int, reason: EndReason) -> None:
        return

    def await_others(self, timeout_s: float, urgent_fd: int | None) -> None:
        return


def hold_on(context: PContext | None) -> WardedContext | NoHold:
    """By which the workers of a context are licensed, killed past their warden, or ended for a reason."""
    return context if isinstance(context, WardedContext) else NoHold()


def news_fd_of(context: PContext | None) -> int | None:
    """Readable when a worker may have ended; None where only polling tells, as with what others put in a context's place."""
    return context.news_fd() if isinstance(context, PContext) else None


class NoReserve:
    """Of processes on standby (`agent.reserve`), where nobody asks for them."""

    def equip(self, envs: Mapping[int, dict[str, str]]) -> dict[int, tuple[int, ...]]:
        """What the workers that are about to start need; the files that they get for it, by local rank."""
        return {}

    def started(self) -> None:
        """They run."""

    def look(self, context: PContext, now: float) -> None:
        """See who is ready, and whether it is time."""

    def news_fds(self) -> list[int]:
        """Readable when there is something to see."""
        return []

    def next_look_at(self) -> float | None:
        return None

    def take(self) -> Standby | None:
        """Those who are to be the next workers, if there are any."""
        return None

    def close(self) -> None:
        """There will be no more workers."""


class NoFolders:
    """Of log specs that are not ours: where they keep what is theirs alone."""

    keeps_output = True  # as far as we know
    is_temporary = True
    root_log_dir = ""
    run_log_dir = ""
    attempt_dir = ""
    run_folder: LogFolder | None = None

    def make_run_folder(self, run_id: str) -> None:
        return

    def link(self) -> None:
        return

    def discard_if_empty(self) -> bool:
        return False


def folders_of(logs_specs: LogsSpecs) -> DefaultLogsSpecs | NoFolders:
    """The folders in which a run keeps its files."""
    return logs_specs if isinstance(logs_specs, DefaultLogsSpecs) else NoFolders()
