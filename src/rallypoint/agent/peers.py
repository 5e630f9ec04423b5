"""The other nodes of a job, as an agent deals with them.

What is possible depends on the rendezvous handler: there is one class for each kind of it, and each adds to the one before.
`PlainPeers`, the null object, is for a handler with torch's interface and nothing else: the agent meets the others through the
handler's store, asks again and again whether anybody waits, and rules on its own failures. `WakingPeers` need not be asked. With
`CoordinatedPeers` the `job` as a whole decides on restarts and ranks, and all that happens elsewhere comes as an observation; the
others have a `NoJob` in its place.

Which of them an agent has is decided once, in `agent.capabilities`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rallypoint.agent.workers import RunResult, WorkerSpec
from rallypoint.base import report
from rallypoint.base.signals import inbox
from rallypoint.processes.context import wait_readable
from rallypoint.protocol import agent_machine, restarts
from rallypoint.protocol.worker_plan import WorkerRanks
from rallypoint.rendezvous.coordinated import CoordinatedHandler, Introduction
from rallypoint.rendezvous.handler import RendezvousInfo, WakingHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.failures.process_failure import ProcessFailure
    from rallypoint.protocol.verdict import NodeReport

__all__ = ["CoordinatedPeers", "NoJob", "OwnRestarts", "PlainPeers", "WakingPeers"]

_NONE: Mapping[int, ProcessFailure] = {}


class NoJob:
    """For a handler through which nodes do not act as one: what is told is heard by nobody, and there is never any news."""

    def worker_ranks(self) -> tuple[WorkerRanks, ...] | None:
        """None: they have to be computed."""
        return None

    def restart_count(self) -> int | None:
        """None: each agent counts its own."""
        return None

    def generation(self) -> int:
        return 0

    def own_address(self) -> str:
        return ""

    def settings_in_force(self) -> str:
        return ""

    def observe(self) -> agent_machine.Regroup | agent_machine.Fenced | agent_machine.JobEnded | None:
        return None

    def fence_fd(self) -> int | None:
        return None

    def licence_fd(self) -> int | None:
        return None

    def on_fence(self, kill: Callable[[], None]) -> None:
        return

    def was_fenced(self, why: str) -> None:
        return

    def depart(self, why: str, signal: int = 0) -> None:
        return

    def leave(self, failure: str) -> None:
        return

    def end_error(self) -> Exception | None:
        return None


class PlainPeers:
    """Known only through a handler with torch's interface, which is read from the spec each time: callers replace it there."""

    act_as_one = False  # whether the job as a whole rules on failures, and ends with one verdict
    must_be_polled = True

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self.job: CoordinatedHandler | NoJob = NoJob()

    def next_rendezvous(self, shutdown_timeout_s: float, entrust: Callable[[int | None], None]) -> RendezvousInfo:
        """Meet them. Only a handler that we do not know may block in a way that nothing but an exception can end."""
        with inbox.interrupting():
            return self._spec.rdzv_handler.next_rendezvous()

    def nodes_waiting(self) -> int:
        return self._spec.rdzv_handler.num_nodes_waiting()

    def wakeup_fd(self) -> int | None:
        """Readable when there may be something to observe."""
        return None

    def report_failure(self, result: RunResult, late: Mapping[int, ProcessFailure] = _NONE) -> None:
        """Tell the others of it; `late` are those that failed only when they were stopped."""

    def drain(self, timeout_s: float) -> agent_machine.Observation | None:
        """We are done; what became of the job then. None: all there is to wait at is a barrier in the store."""
        return None

    def close_worker_store(self) -> None:
        """Our workers are gone. In a job of several nodes others may still need it, and it stays until we leave."""


class WakingPeers(PlainPeers):
    """Behind a handler that says when there is something to ask it for."""

    must_be_polled = False

    def __init__(self, spec: WorkerSpec, handler: WakingHandler) -> None:
        super().__init__(spec)
        self._waking = handler

    def next_rendezvous(self, shutdown_timeout_s: float, entrust: Callable[[int | None], None]) -> RendezvousInfo:
        return self._waking.next_rendezvous()

    def wakeup_fd(self) -> int | None:
        return self._waking.wakeup_fd()

    def close_worker_store(self) -> None:
        self._waking.close_worker_store()


class CoordinatedPeers(WakingPeers):
    """Agents that act as one."""

    act_as_one = True

    def __init__(self, spec: WorkerSpec, handler: CoordinatedHandler) -> None:
        super().__init__(spec, handler)
        self.job = self._job = handler

    def next_rendezvous(self, shutdown_timeout_s: float, entrust: Callable[[int | None], None]) -> RendezvousInfo:
        """While we wait, whoever cleans up after us can already tell the others so."""
        job, spec, is_entrusted = self._job, self._spec, False
        entry_point = spec.get_entrypoint_name()
        job.introduce(Introduction(spec.role, spec.local_world_size, spec.max_restarts, entry_point, shutdown_timeout_s))
        while (info := job.poll_rendezvous()) is None:
            if not is_entrusted:
                is_entrusted = True
                entrust(job.licence_fd())
            wait_readable([job.wakeup_fd(), inbox.fileno()], None)
            inbox.raise_pending()
        return info

    def nodes_waiting(self) -> int:
        """They make a generation with us when the job decides so, and that is an observation."""
        return 0

    def report_failure(self, result: RunResult, late: Mapping[int, ProcessFailure] = _NONE) -> None:
        self._job.report_failure(_as_told(result.failures, late, self._spec))

    def drain(self, timeout_s: float) -> agent_machine.Observation:
        """The job is done when all are, or it begins anew for a failure elsewhere."""
        self._job.report_done()
        began = time.monotonic()
        while (seen := self._job.observe()) is None:
            left_s = began + timeout_s - time.monotonic()
            if left_s <= 0:
                report.warn(f"after {timeout_s:g} s the other nodes were not seen to finish")
                return agent_machine.Drained()
            wait_readable([self._job.wakeup_fd(), inbox.fileno()], left_s)
            inbox.raise_pending()
        return seen


def _as_told(failed: Mapping[int, ProcessFailure], late: Mapping[int, ProcessFailure], spec: WorkerSpec) -> NodeReport:
    """Failures as other nodes are told of them: by how long ago they were, because clocks of two hosts differ."""
    from rallypoint.protocol.verdict import NodeReport, WorkerFailure

    failures = []
    for rank, one in {**failed, **late}.items():
        failure = WorkerFailure(
            rank=rank,
            local_rank=one.local_rank,
            role=spec.role,
            host=one.hostname,
            pid=one.pid,
            exitcode=one.exitcode,
            message=one.message,
            age_s=max(0.0, time.time() - one.failed_at),
            log_file=one.log_file,
            stopped=rank in late,
            place=one.place,
        )
        failures.append(failure)
    return NodeReport(failures=tuple(failures), stopped=max(0, spec.local_world_size - len(failures)))


class OwnRestarts:
    """The restarts that an agent may spend by itself, where nobody rules for the job as a whole."""

    def __init__(self, policy: restarts.RestartPolicy) -> None:
        self._policy = policy
        self._purse = restarts.Purse()
        self._started_at = time.monotonic()

    def are_surely_spent(self, left: int) -> bool:
        """With a window for them, some may have come back."""
        return left <= 0 and self._policy.window_s <= 0

    def rule(self, result: RunResult, max_restarts: int, spent: int) -> restarts.Again | restarts.GiveUp:
        """What is left allows; subclasses of the agent may have changed how much that is."""
        now = time.monotonic()
        codes = tuple(failure.exitcode for failure in result.failures.values()) or (1,)
        ended = restarts.Ended(failed_exit_codes=codes, ran_s=now - self._started_at)
        ruling = restarts.judge(self._policy.replace(max_restarts=max_restarts), self._purse.replace(failures=spent), ended)
        if isinstance(ruling, restarts.Again):
            self._purse, self._started_at = ruling.purse, now
        return ruling
