"""An agent among others: what it tells a job of several nodes, and how it waits for them.

With a handler that coordinates, the job as a whole decides on restarts and ranks, and everything that happens elsewhere comes
as an observation. With any other handler the agent meets its peers through the store that the handler gives it, and rules on
its own failures.
"""

from __future__ import annotations

import time

from rallypoint.agent.workers import RunResult, WorkerGroup, WorkerSpec
from rallypoint.base import report
from rallypoint.base.signals import inbox
from rallypoint.processes.context import wait_readable
from rallypoint.protocol import agent_machine, restarts
from rallypoint.rendezvous.coordinated import CoordinatedHandler, Introduction
from rallypoint.rendezvous.handler import RendezvousInfo, WakingHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.protocol.failure_reports import WorkerFailure

__all__ = ["AgentPeers"]


class AgentPeers:
    """The part of an agent that deals with other nodes."""

    _worker_group: WorkerGroup
    _remaining_restarts: int
    _exit_barrier_timeout: float
    _shutdown_timeout: float
    _restart_policy: restarts.RestartPolicy
    _purse: restarts.Purse
    _started_at: float

    def _peers(self) -> CoordinatedHandler | None:
        handler = self._worker_group.spec.rdzv_handler
        return handler if isinstance(handler, CoordinatedHandler) else None

    def _next_rendezvous(self, spec: WorkerSpec) -> RendezvousInfo:
        """Only a handler that we do not know may block in a way that nothing but an exception can end."""
        peers = self._peers()
        if peers is not None:
            return self._meet(peers)
        if isinstance(spec.rdzv_handler, WakingHandler):
            return spec.rdzv_handler.next_rendezvous()
        with inbox.interrupting():
            return spec.rdzv_handler.next_rendezvous()

    def _meet(self, peers: CoordinatedHandler) -> RendezvousInfo:
        spec = self._worker_group.spec
        entry_point, is_entrusted = spec.get_entrypoint_name(), False
        peers.introduce(Introduction(spec.role, spec.local_world_size, spec.max_restarts, entry_point, self._shutdown_timeout))
        while (info := peers.poll_rendezvous()) is None:
            if not is_entrusted:
                is_entrusted = True
                self._entrust_licence(peers.licence_fd())
            wait_readable([peers.wakeup_fd(), inbox.fileno()], None)
            inbox.raise_pending()
        self._remaining_restarts = spec.max_restarts - peers.restart_count()
        return info

    def _entrust_licence(self, licence_fd: int | None) -> None:
        """Whoever cleans up after us can tell the others so, also while we wait."""

    def _observe_peers(self) -> agent_machine.Regroup | agent_machine.Fenced | agent_machine.JobEnded | None:
        peers = self._peers()
        return peers.observe() if peers is not None else None

    def _fenced(self, why: str) -> agent_machine.Fenced:
        """Our workers are gone because the others may take us for dead: then we are no longer part of their generation."""
        peers = self._peers()
        if peers is not None:
            peers.was_fenced(why)
        return agent_machine.Fenced(why)

    def _report_failure(self, result: RunResult) -> restarts.Again | restarts.GiveUp | None:
        """Tell the job, which then rules; where there is nobody to tell, the ruling."""
        peers = self._peers()
        if peers is None:
            return self._rule(result)
        peers.report_failure({rank: _as_told(rank, self._worker_group.spec.role, one) for rank, one in result.failures.items()})
        return None

    def _rule(self, result: RunResult) -> restarts.Again | restarts.GiveUp:
        """What this agent's own budget allows; subclasses may have changed what is left of it."""
        spent = self._worker_group.spec.max_restarts - self._remaining_restarts
        now = time.monotonic()
        codes = tuple(failure.exitcode for failure in result.failures.values()) or (1,)
        ended = restarts.Ended(failed_exit_codes=codes, ran_s=now - self._started_at)
        policy = self._restart_policy.replace(max_restarts=self._worker_group.spec.max_restarts)
        ruling = restarts.judge(policy, self._purse.replace(failures=spent), ended)
        if isinstance(ruling, restarts.Again):
            self._purse, self._started_at = ruling.purse, now
        return ruling

    def _drain(self, peers: CoordinatedHandler) -> agent_machine.Observation:
        """We are done; the job is when all are, or it begins anew for a failure elsewhere."""
        peers.report_done()
        began = time.monotonic()
        while (seen := peers.observe()) is None:
            left_s = began + self._exit_barrier_timeout - time.monotonic()
            if left_s <= 0:
                report.warn(f"after {self._exit_barrier_timeout:g} s the other nodes were not seen to finish")
                return agent_machine.Drained()
            wait_readable([peers.wakeup_fd(), inbox.fileno()], left_s)
            inbox.raise_pending()
        return seen

    def _close_worker_store(self) -> None:
        """Our workers are gone. In a job of several nodes others may still need it, and it stays until we leave."""
        handler = self._worker_group.spec.rdzv_handler
        if isinstance(handler, WakingHandler):
            handler.close_worker_store()

    def _depart(self, why: str) -> None:
        peers = self._peers()
        if peers is not None:
            peers.depart(why)


def _as_told(rank: int, role: str, failure: object) -> WorkerFailure:
    """A failure as other nodes are told of it: by how long ago it was, because clocks of two hosts differ."""
    from rallypoint.failures.process_failure import ProcessFailure
    from rallypoint.protocol.failure_reports import WorkerFailure

    assert isinstance(failure, ProcessFailure)
    age_s = max(0.0, time.time() - failure.failed_at)
    return WorkerFailure(
        rank, failure.local_rank, role, failure.hostname, failure.pid, failure.exitcode, failure.message, age_s, failure.log_file
    )
