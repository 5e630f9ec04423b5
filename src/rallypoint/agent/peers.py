"""The other nodes of a job, as an agent deals with them.

What is possible depends on the rendezvous handler: there is one class for each kind of it, and each adds to the one before.
`PlainPeers`, the null object, is for a handler with torch's interface and nothing else: the agent meets the others through the
handler's store, asks again and again whether anybody waits, and rules on its own failures. `WakingPeers` need not be asked. With
`CoordinatedPeers` the `job` as a whole decides on restarts and ranks, and all that happens elsewhere comes as an observation; the
others have a `NoJob` in its place.

Which of them an agent has is decided once, in `agent.capabilities`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping

from rallypoint.agent.workers import RunResult, WorkerSpec
from rallypoint.base import defaults, report
from rallypoint.base.signals import inbox
from rallypoint.errors import UnfitHostError
from rallypoint.processes.context import wait_readable
from rallypoint.protocol import agent_machine, restarts
from rallypoint.protocol.worker_plan import WorkerRanks
from rallypoint.rendezvous.coordinated import CoordinatedHandler, Introduction
from rallypoint.rendezvous.handler import RendezvousInfo, WakingHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.coordination.engine import Coordination
    from rallypoint.failures.process_failure import ProcessFailure
    from rallypoint.output.waits import Wait
    from rallypoint.preflight.attendant import Attendant
    from rallypoint.protocol.inquiry import Statement
    from rallypoint.protocol.job_records import ClosedKind, NodeDrain
    from rallypoint.protocol.pace import Pace
    from rallypoint.protocol.session import AskedFor, LastWord, Noticed, Ruled
    from rallypoint.protocol.verdict import NodeReport, Verdict

__all__ = ["CoordinatedPeers", "NoAttendant", "NoJob", "OwnRestarts", "PlainPeers", "WakingPeers"]

CHECKS_PATIENCE_S = 3.0  # for checks of this machine, until the others are told not to wait for them
_NONE: Mapping[int, ProcessFailure] = {}


class NoJob:
    """For a handler through which nodes do not act as one: what is told is heard by nobody, and there is never any news."""

    def worker_ranks(self) -> tuple[WorkerRanks, ...] | None:
        """None: they have to be computed."""
        return None

    def restart_count(self) -> int | None:
        """None: each agent counts its own."""
        return None

    def last_failure(self) -> str:
        """How the attempts before this one failed, if they did so alike, as the purse knows it."""
        return ""

    def generation(self) -> int:
        return 0

    def formed_after(self) -> tuple[str, str] | None:
        return None

    def last_word(self, group_rank: int | None) -> LastWord | None:
        return None

    def verdict(self) -> Verdict | None:
        return None

    def own_address(self) -> str:
        return ""

    def whereabouts(self, timeout_s: float) -> tuple[str, str, str] | None:
        return None

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

    def on_asked(self, answer: Callable[[AskedFor], None]) -> None:
        return

    def on_doubt(self, hear: Callable[[str], None]) -> None:
        return

    def on_drain(self, hear: Callable[[Noticed | Ruled], None]) -> None:
        return

    def give_notice(self, generation: int, why: str, left_s: float) -> None:
        return

    def report_drain(self, generation: int, told: NodeDrain) -> None:
        return

    def on_inquiry(self, hear: Callable[[int, bytes], None]) -> None:
        return

    def declare(self, generation: int, statement: Statement) -> bool:
        return False

    def on_pace(self, hear: Callable[[int, bytes], None]) -> None:
        return

    def tell_pace(self, generation: int, workers: Iterable[Pace]) -> bool:
        return False

    def new_connection(self) -> Coordination | None:
        return None

    def min_nodes(self) -> int:
        return 1

    def hosts_store(self) -> bool:
        return False

    def store(self) -> str:
        return ""

    def was_fenced(self, why: str) -> None:
        return

    def depart(self, why: str, signal: int = 0, ends_as: ClosedKind = "host_left") -> None:
        return

    def leave(self, failure: str) -> None:
        return

    def end_error(self) -> Exception | None:
        return None


class NoAttendant:
    """Where nobody has asked for checks of this machine (`preflight.attendant`)."""

    why_unfit = news = ""
    is_checking = needs_others = False

    def suspect(self) -> None:
        return

    def look(self) -> None:
        return

    def next_look_at(self) -> float | None:
        return None

    def fileno(self) -> int | None:
        return None

    def close(self) -> None:
        return


class PlainPeers:
    """Known only through a handler with torch's interface, which is read from the spec each time: callers replace it there."""

    act_as_one = False  # whether the job as a whole rules on failures, and ends with one verdict
    must_be_polled = True

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self.job: CoordinatedHandler | NoJob = NoJob()
        self.alike: tuple[tuple[str, str | int], ...] = ()  # what must be the same on all nodes, of no rendezvous's
        self.attendant: Attendant | NoAttendant = NoAttendant()
        self.on_long_wait: Callable[[], None] = lambda: None  # called when something takes long, perhaps more than once

    def next_rendezvous(self, shutdown_timeout_s: float, while_waiting: Callable[[int | None], None]) -> RendezvousInfo:
        """Meet them. Only a handler that we do not know may block in a way that nothing but an exception can end."""
        self._be_fit()
        self.on_long_wait()
        with inbox.interrupting():
            return self._spec.rdzv_handler.next_rendezvous()

    def _be_fit(self) -> None:
        """Where a seat cannot be left to another node, an unfit machine ends the run."""
        self._await_checks(None)
        if self.attendant.why_unfit:
            raise UnfitHostError(self.attendant.news)

    def _await_checks(self, timeout_s: float | None) -> None:
        """Until those that are due are done, or for so long."""
        began = time.monotonic()
        ends_at = math.inf if timeout_s is None else began + timeout_s
        long_at = began + defaults.LONG_WAIT_S
        self.attendant.look()
        while self.attendant.is_checking and (now := time.monotonic()) < ends_at:
            if now >= long_at:
                long_at = math.inf
                self.on_long_wait()
            wake_at = min(ends_at, long_at)
            wait_readable([self.attendant.fileno(), inbox.fileno()], None if wake_at == math.inf else wake_at - now)
            inbox.raise_pending()
            self.attendant.look()

    def nodes_waiting(self) -> int:
        return self._spec.rdzv_handler.num_nodes_waiting()

    def wakeup_fd(self) -> int | None:
        """Readable when there may be something to observe."""
        return None

    def report_failure(self, result: RunResult, late: Mapping[int, ProcessFailure] = _NONE, step: int = -1) -> None:
        """Tell the others of it, and how far our workers came; `late` are those that failed only when they were stopped."""
        self.attendant.suspect()

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

    def next_rendezvous(self, shutdown_timeout_s: float, while_waiting: Callable[[int | None], None]) -> RendezvousInfo:
        self._be_fit()
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
        self._told_unfit = ""
        self._has_complained = False

    def next_rendezvous(self, shutdown_timeout_s: float, while_waiting: Callable[[int | None], None]) -> RendezvousInfo:
        """What can be done while we wait is done once, when it shows that there is a wait."""
        job, spec, has_waited = self._job, self._spec, False
        entry_point = spec.get_entrypoint_name()
        about = spec.role, spec.local_world_size, spec.max_restarts, entry_point, shutdown_timeout_s
        job.introduce(Introduction(*about, is_watched=report.is_live(), alike=self.alike))
        self.attendant.look()
        if self.attendant.needs_others:  # they can be found once we are there, as one that is not to have a seat yet
            self._tell_fitness()
        self._await_checks(CHECKS_PATIENCE_S)
        self._tell_fitness()
        began = time.monotonic()
        with report.meanwhile(lambda: _waiting(job, began)):
            while (info := job.poll_rendezvous()) is None:
                if not has_waited:
                    has_waited = True
                    while_waiting(job.licence_fd())
                look_at = self.attendant.next_look_at()
                left_s = None if look_at is None else max(0.0, look_at - time.monotonic())
                wait_readable([job.wakeup_fd(), inbox.fileno(), self.attendant.fileno()], left_s)
                inbox.raise_pending()
                self.attendant.look()
                self._tell_fitness()
        return info

    def _tell_fitness(self) -> None:
        """The others go on without us while a check fails, or takes its time."""
        if self._told_unfit != self.attendant.why_unfit:
            self._told_unfit = self.attendant.why_unfit
            self._job.tell_fitness(self._told_unfit)
            if self.attendant.news:
                self._has_complained = True
                report.warn(f"{self.attendant.news}; it waits outside of the job, and is checked again from time to time")
            elif not self._told_unfit and self._has_complained:
                self._has_complained = False
                report.info("this machine is fit to run workers")

    def nodes_waiting(self) -> int:
        """They make a generation with us when the job decides so, and that is an observation."""
        return 0

    def report_failure(self, result: RunResult, late: Mapping[int, ProcessFailure] = _NONE, step: int = -1) -> None:
        report = _as_told(result.failures, late, self._spec).replace(step=step)
        if any(not one.stopped and not one.is_echo for one in report.failures):
            self.attendant.suspect()
        self._job.report_failure(report)

    def drain(self, timeout_s: float) -> agent_machine.Observation:
        """The job is done when all are, or it begins anew for a failure elsewhere."""
        self._job.report_done()
        began = time.monotonic()
        with report.meanwhile(lambda: _draining(began, began + timeout_s)):
            while (seen := self._job.observe()) is None:
                left_s = began + timeout_s - time.monotonic()
                if left_s <= 0:
                    report.warn(f"after {timeout_s:g} s the other nodes were not seen to finish")
                    return agent_machine.Drained()
                wait_readable([self._job.wakeup_fd(), inbox.fileno()], left_s)
                inbox.raise_pending()
        return seen


def _waiting(job: CoordinatedHandler, since: float) -> Wait:
    from rallypoint.output.waits import ForNodes

    return ForNodes(since, *job.standing())


def _draining(since: float, until: float) -> Wait:
    from rallypoint.output.waits import ForOthers

    return ForOthers("all workers here are done; waiting for the other nodes", since, until)


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
            hung=one.hung,
            wish=one.wish,
            frames=one.frames,
            advice=one.advice,
            stacks_file=one.stacks_file,
        )
        failures.append(failure)
    return NodeReport(failures=tuple(failures), stopped=max(0, spec.local_world_size - len(failures)))


def _cause_of(failures: Mapping[int, ProcessFailure], world_size: int) -> restarts.Failure | None:
    """The failure that came first, and whether all workers failed just so."""
    if not failures:
        return None
    rank = min(failures, key=lambda rank: (failures[rank].failed_at, rank))
    first = failures[rank]
    is_everywhere = 0 < world_size <= len(failures) and all(one.kind == first.kind for one in failures.values())
    return restarts.Failure(rank, first.exitcode, first.message, first.place, is_everywhere, first.hung)


class OwnRestarts:
    """The restarts that an agent may spend by itself, where nobody rules for the job as a whole."""

    def __init__(self, policy: restarts.RestartPolicy) -> None:
        self._policy = policy
        self._purse = restarts.Purse()
        self._started_at = self._began_at = time.monotonic()

    def are_surely_spent(self, left: int) -> bool:
        """With a window for them, or after a long healthy run, some may have come back."""
        return left <= 0 and self._policy.window_s <= 0 and self._policy.healthy_after_s <= 0

    @property
    def ask_for_steps(self) -> bool:
        """Whether it matters how far workers came, whatever ends them."""
        return self._policy.max_no_progress is not None or self._policy.max_same_failures is not None

    def wants_step(self, failures: Mapping[int, ProcessFailure]) -> bool:
        """Whether it matters how far workers came that failed so."""
        may_repeat = any(one.looks_hopeless or one.looks_doubtful for one in failures.values())
        return self.ask_for_steps or (may_repeat and not self._policy.retry_hopeless)

    def may_be_hopeless(self, failures: Mapping[int, ProcessFailure], last_failure: str = "") -> bool:
        """Whether it matters if all fail so; the last attempts failed as the job says, or as we know."""
        if self._policy.retry_hopeless:
            return False
        before = last_failure or self._purse.streak_of
        return any(restarts.matters_if_shared(one.exitcode, one.message, one.place, before) for one in failures.values())

    def began(self) -> None:
        """Workers have been started."""
        self._began_at = time.monotonic()

    def rule(
        self, result: RunResult, max_restarts: int, spent: int, step: int = -1, world_size: int = 0
    ) -> restarts.Again | restarts.GiveUp:
        """What is left allows; subclasses of the agent may have changed how much that is."""
        now = time.monotonic()
        codes = tuple(failure.exitcode for failure in result.failures.values()) or (1,)
        ended = restarts.Ended(
            failed_exit_codes=codes,
            ran_s=now - self._started_at,
            cause=_cause_of(result.failures, world_size),
            after_s=now - self._began_at,
            step=step,
            no_retry=next((one.message for one in result.failures.values() if one.wish == restarts.NO_RETRY), ""),
        )
        ruling = restarts.judge(self._policy.replace(max_restarts=max_restarts), self._purse.replace(failures=spent), ended)
        if isinstance(ruling, restarts.Again):
            self._purse, self._started_at = ruling.purse, now
        return ruling
