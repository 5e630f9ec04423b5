"""The workers of one simulated agent: a group of them is a generation number and the time that things take.

What a worker computes is of no interest here. They start, succeed, fail or are stopped, also while their agent is stopped itself,
which learns it when it goes on.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.world import World

from rallypoint.core import agent as machine
from rallypoint.core import job_records as job
from rallypoint.core.failure_reports import NodeReport, WorkerFailure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tests.simulation.driver import Driver
    from tests.simulation.oracle import Oracle
    from tests.simulation.setup import Setup

__all__ = ["KILL_S", "WARDEN_S", "WorkerHost"]

KILL_S = 0.05
WARDEN_S = 0.1
START_S = 0.2


class WorkerHost:
    """The part of an agent that has workers. `workers` is the generation whose workers may run here, 0 when there are none."""

    name: str
    record: job.NodeRecord
    world: World
    oracle: Oracle
    setup: Setup
    driver: Driver
    state: machine.State
    seat: job.Seat | None
    is_alive: bool
    is_leaving: bool
    is_awake: Callable[..., bool]
    may_be_ready: Callable[[], None]
    _observe: Callable[[machine.Observation], None]
    _tell_end: Callable[[], None]
    _leave: Callable[[], None]

    def __init__(self) -> None:
        self.workers = 0
        self.is_stubborn = False  # its workers will take too long to stop
        self.is_stuck = False  # they do: no signal ends them, as a process that hangs in the kernel
        self._group = 0  # which group of workers, so that what was planned for another is void
        self._is_stopping = self._is_killing = self._is_starting = False
        self._stop_why = ""

    def _start(self, generation: int) -> None:
        self._group += 1
        self.workers, self._is_starting, self._is_stopping, self._is_killing, self._stop_why = generation, True, False, False, ""
        self.world.note(self.name, "starts workers", generation)
        self.oracle.workers_start(self, generation)
        self.world.after(self.world.between(0.001, START_S), self._started, self._group)

    def _started(self, group: int) -> None:
        if group != self._group or self._is_killing or not self.is_awake(self._started, group):
            return
        self._is_starting = False
        self._observe(machine.Started())
        self.world.after(self.setup.work_s(self.world), self._succeed, group)
        if self._stop_why:
            self._observe(machine.Regroup(self._stop_why))

    def _succeed(self, group: int) -> None:
        if group != self._group or self._is_stopping:
            return
        if self.workers:  # they end by themselves, whatever their agent does
            self.oracle.workers_succeeded(self, self.workers)
            self.world.note(self.name, "workers succeeded", self.workers)
            self.workers = 0
        if self.is_awake(self._succeed, group):
            self._observe(machine.Succeeded())
            self._tell_end()

    def fail(self, group: int, exitcode: int, message: str) -> None:
        """One worker fails, as long as this group runs."""
        if group != self._group or self._is_stopping or not self.workers or not isinstance(self.state, machine.Running):
            return
        if not self.is_awake(self.fail, group, exitcode, message):
            return
        self.world.note(self.name, "a worker fails", (self.workers, message))
        self.oracle.worker_failed(self, self.workers)
        seat, participant = self.seat, self.driver.participant
        failure = WorkerFailure(seat.first_rank, 0, self.record.role, self.record.name, 77, exitcode, message, 0.0)
        if participant is not None:
            participant.failed(NodeReport(self.record.name, 0, (failure,)))
            self.driver.pump()
        self._observe(machine.Failed(message, None))

    @property
    def group(self) -> int:
        return self._group

    @property
    def runs(self) -> bool:
        return self.is_alive and bool(self.workers) and not self._is_stopping and isinstance(self.state, machine.Running)

    def _stop(self, why: str, at_once: bool) -> None:
        if at_once:
            self._kill()
        elif not self._is_stopping:
            self._is_stopping = True
            delay_s = self.world.between(0.001, self.setup.grace_s) if self.workers else 0.0
            if self.is_stubborn:
                delay_s, self.is_stubborn = delay_s + self.world.between(5.0, 45.0), False
                self.is_stuck = True
            self.world.after(delay_s, self._workers_gone, self._group)

    def _kill(self) -> None:
        if not self._is_killing:
            self._is_stopping = self._is_killing = True
            self._is_starting = False
            delay_s = self.world.between(0.001, KILL_S) if self.workers else 0.0
            self.world.after(delay_s, self._workers_gone, self._group)

    def _workers_gone(self, group: int) -> None:
        """The last worker has ended; the agent learns it when it can."""
        if group != self._group:
            return
        if self.workers:
            self.world.note(self.name, "workers are gone", self.workers)
            self.workers = 0
        self.is_stuck = False
        if self.is_awake(self._workers_gone, group):
            self._group += 1
            self._is_stopping = self._is_killing = False
            self._stopped()

    def _stopped(self) -> None:
        self.seat = None
        if self.is_leaving:
            self._leave()
            return
        self._observe(machine.Stopped())
        self._tell_end()
        self.may_be_ready()
        self.driver.pump()
