"""The workers of one simulated agent: a group of them is a generation number and the time that things take.

What a worker computes is of no interest here. They start, succeed, fail or are stopped, also while their agent is stopped itself,
which learns it when it goes on. Their warden holds a licence: when it is over it kills them, whatever their agent does.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.world import Clock, World

from rallypoint.protocol import agent_machine, session
from rallypoint.protocol import job_records as job
from rallypoint.protocol.verdict import NodeReport, WorkerFailure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tests.simulation.driver import Driver
    from tests.simulation.network import Testimony
    from tests.simulation.oracle import Oracle
    from tests.simulation.setup import Setup

__all__ = ["KILL_S", "WARDEN_S", "WorkerHost"]

KILL_S = 0.05
WARDEN_S = 0.1
START_S = 0.2


class Licence:
    """The page that the driver writes and the warden reads: until when workers may run, and what to testify."""

    def __init__(self) -> None:
        self.until = 0.0
        self.testimony: Testimony | None = None

    def extend(self, until: float) -> None:
        self.until = until

    def entrust(self, testimony: Testimony | None) -> None:
        self.testimony = testimony

    def close(self) -> None:
        pass


class WorkerHost:
    """The part of an agent that has workers. `workers` is the generation whose workers may run here, 0 when there are none."""

    name: str
    record: job.NodeRecord
    world: World
    oracle: Oracle
    setup: Setup
    driver: Driver
    state: agent_machine.State
    seat: job.Seat | None
    is_alive: bool
    is_leaving: bool
    main_can: Callable[..., bool]
    time: Callable[[], float]
    clock: Clock
    listen: Callable[[], None]
    _ask: Callable[[], None]
    _observe: Callable[[agent_machine.Observation], None]
    _step: Callable[[session.Observation], None]
    _leave: Callable[[], None]

    def __init__(self) -> None:
        self.workers = 0
        self.is_stubborn = False  # its agent will take too long to stop them
        self.licence = Licence()
        self.warden_is_stopped = False
        self._known_until = 0.0  # what the warden has read of it
        self._group = 0  # which group of workers, so that what was planned for another is void
        self._dead_group = 0  # the last that was killed without its agent's doing
        self._is_stopping = self._is_killing = self._is_starting = False

    def _start(self, generation: int) -> None:
        self._group += 1
        self._is_starting, self._is_stopping, self._is_killing = True, False, False
        if self.time() < self.licence.until and not self.warden_is_stopped:
            self.workers = generation
            self.world.note(self.name, "starts workers", generation)
            self.oracle.workers_start(self, generation)
            self._known_until = self.licence.until
            self.world.at(self.clock.when(self._known_until), self._look_at_licence, self._group)
        else:
            self.world.tally["starts refused by the warden"] += 1
            self._dead_group = self._group
        self.world.after(self.world.between(0.001, START_S), self._started, self._group)

    def _started(self, group: int) -> None:
        if group != self._group or self._is_killing or not self.main_can(self._started, group):
            return
        self._is_starting = False
        self._observe(agent_machine.Started())
        self.world.after(self.setup.work_s(self.world), self._succeed, group)
        self.listen()
        if group == self._dead_group:
            self._hear_of_expiry(group)

    # The warden.

    def _look_at_licence(self, group: int) -> None:
        """The time that the warden knows of is over: has it been given more?"""
        if group != self._group or not self.workers or self.warden_is_stopped:
            return
        if self.time() >= self.licence.until:
            self.world.note(self.name, "licence is over", self.workers)
            self.world.tally["licences over"] += 1
            self._kill_processes()
            return
        self._known_until = self.licence.until
        self.world.at(self.clock.when(self._known_until), self._look_at_licence, group)

    def stop_warden(self) -> None:
        self.warden_is_stopped = True

    def continue_warden(self) -> None:
        if self.warden_is_stopped:
            self.warden_is_stopped = False
            self._look_at_licence(self._group)

    def _kill_processes(self) -> None:
        """Whoever notices first kills them, by their process ids; their agent hears of it when it can."""
        if self.workers:
            self.world.after(self.world.between(0.001, KILL_S), self._processes_gone, self._group)

    def _processes_gone(self, group: int) -> None:
        if group != self._group or not self.workers:
            return
        self.world.note(self.name, "workers were killed", self.workers)
        self.workers, self._dead_group = 0, group
        if self._is_stopping:
            self._workers_gone(group)
        elif not self._is_starting:
            self._hear_of_expiry(group)

    def _hear_of_expiry(self, group: int) -> None:
        if group == self._group and not self._is_stopping and self.is_alive and self.main_can(self._hear_of_expiry, group):
            self._step(session.Expired())
            self._observe(agent_machine.Fenced("the licence of the workers is over"))

    # What becomes of them.

    def _succeed(self, group: int) -> None:
        if group != self._group or self._is_stopping or group == self._dead_group:
            return
        if self.workers:  # they end by themselves, whatever their agent does
            self.oracle.workers_succeeded(self, self.workers)
            self.world.note(self.name, "workers succeeded", self.workers)
            self.workers = 0
        if self.main_can(self._succeed, group):
            self._observe(agent_machine.Succeeded())
            self.listen()

    def fail(self, group: int, exitcode: int, message: str) -> None:
        """One worker fails, as long as this group runs."""
        if group != self._group or self._is_stopping or not self.workers or not isinstance(self.state, agent_machine.Running):
            return
        if not self.main_can(self.fail, group, exitcode, message):
            return
        self.world.note(self.name, "a worker fails", (self.workers, message))
        self.oracle.worker_failed(self, self.workers)
        failure = WorkerFailure(self.seat.first_rank, 0, self.record.role, self.record.name, 77, exitcode, message, 0.0)
        self._step(session.Failed(NodeReport(self.record.name, 0, (failure,))))
        self._observe(agent_machine.Failed(message, None))

    @property
    def group(self) -> int:
        return self._group

    @property
    def runs(self) -> bool:
        return self.is_alive and bool(self.workers) and not self._is_stopping and isinstance(self.state, agent_machine.Running)

    def _stop(self, why: str, at_once: bool) -> None:
        if at_once:
            self._kill()
        elif not self._is_stopping:
            self._is_stopping = True
            delay_s = self.world.between(0.001, self.setup.grace_s) if self.workers else 0.0
            if self.is_stubborn and self.workers:
                delay_s, self.is_stubborn = delay_s + self.world.between(5.0, 45.0), False
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
        if self.main_can(self._workers_gone, group):
            self._group += 1
            self._is_stopping = self._is_killing = False
            self._stopped()

    def _stopped(self) -> None:
        if self.is_leaving:
            self._leave()
            return
        self._observe(agent_machine.Stopped())
        self._ask()
