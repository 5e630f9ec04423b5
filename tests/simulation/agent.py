"""One agent process and its workers, as the real shell runs them: `core.agent` decides, the driver talks to the others.

It can be killed, stopped for a while, told to leave, or crash with its machine.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.driver import BROKEN_GRACE_S, Driver
from tests.simulation.network import Link
from tests.simulation.workers import KILL_S, WARDEN_S, WorkerHost
from tests.simulation.world import Clock, World

from rallypoint.core import agent as machine
from rallypoint.core import job_records as job
from rallypoint.core import news
from rallypoint.core.coordination import Put, Transaction
from rallypoint.core.participant import Joining, Participant

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tests.simulation.engine import Engine
    from tests.simulation.oracle import Oracle
    from tests.simulation.setup import Setup

__all__ = ["Agent"]

LEAVE_TIMEOUT_S = 5.0


class Agent(WorkerHost):
    """A process on a machine."""

    def __init__(
        self,
        world: World,
        engine: Engine,
        oracle: Oracle,
        setup: Setup,
        record: job.NodeRecord,
        link: Link,
        clock: Clock,
        serial: int,
        is_stranger: bool = False,
    ) -> None:
        super().__init__()
        self.world, self.engine, self.oracle, self.setup = world, engine, oracle, setup
        self.record, self.link, self.clock = record, link, clock
        self.name = f"{record.name}#{serial}"
        self.is_host = link.is_local
        self.is_stranger = is_stranger  # it takes the job for another one, and must not be let in
        self.started_at = world.now
        self.is_alive = True
        self.is_leaving = False
        self.succeeded: bool | None = None
        self.why = ""
        self.excused_until = 0.0  # it was stopped, and may be as late as that with what its fence demands
        self.is_paused = False
        self._deferred: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        self._closed: job.Closed | None = None
        self._sessions = 0
        self.seat: job.Seat | None = None
        self.driver = Driver(self)
        self.state, _ = machine.begin()
        self.driver.dial()

    def time(self) -> float:
        return self.clock.read(self.world.now)

    @property
    def node_id(self) -> str:
        return f"{self.name}.{self._sessions}"

    def well_since(self) -> float:
        """Since when nothing has been wrong with its process and its link."""
        is_ill = self.is_paused or self.link.cut_up or self.link.cut_down
        return self.world.now if is_ill else max(self.started_at, self.excused_until, self.link.healed_at)

    # Being stopped for a while.

    def is_awake(self, act: Callable[..., None], *args: object) -> bool:
        """Whether this can be done now; if the process is stopped, it is done when it goes on."""
        if self.is_paused:
            self._deferred.append((act, args))
        return self.is_alive and not self.is_paused

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        """The first thing after waking is to look whether we may still run workers; a break that it slept through it sees now."""
        if not self.is_alive or not self.is_paused:
            return
        self.is_paused = False
        self.excused_until = self.world.now + BROKEN_GRACE_S + KILL_S + 0.01
        self.driver.check_fence()
        deferred, self._deferred = self._deferred, []
        for act, args in deferred:
            act(*args)

    # What the driver asks and says.

    def new_participant(self, lease: int) -> Participant:
        self._sessions += 1
        setup = self.setup
        joining = Joining(
            node_id=self.node_id,
            lease=lease,
            record=self.record,
            settings={**setup.settings, "protocol": 2} if self.is_stranger else setup.settings,
            mismatch=setup.mismatch,
            policy=setup.policy,
            restarts=setup.restarts,
        )
        self.oracle.joins(self)
        return setup.participant_class(joining)

    def may_be_ready(self) -> None:
        """Tell the participant, if there is one and no worker runs, that the next generation may have us."""
        participant = self.driver.participant
        if participant is None or self.workers or self._closed is not None or self.is_leaving:
            return
        if isinstance(self.state, machine.Gathering | machine.Starting) and self.seat is None:
            participant.ready(self.time(), 20000 + self.world.below(1000))

    def fenced(self, why: str) -> None:
        if self.is_alive:
            self._kill()
            self.seat = None
        if not self.is_leaving:
            self._observe(machine.Fenced(why))

    def give_up(self, why: str) -> None:
        """There is no store any more that we could take part through."""
        self._kill()
        self.finish(False, why)

    def note_transaction(self, request: Transaction) -> None:
        for operation in request.then:
            if isinstance(operation, Put) and operation.key.startswith("down/signal/"):
                self.oracle.signal_sent(self, operation, is_own=request.compares[0].key == operation.key)

    def hear(self, heard: list[news.News]) -> None:
        stops = {one.generation for one in heard if isinstance(one, news.Stop)}
        for one in heard:
            match one:
                case news.Seated(seat, generation):
                    self._seated(seat, generation, stops)
                case news.Stop(generation, signal):
                    self._told_to_stop(generation, signal)
                case news.Ended(closed):
                    self._ended(closed)
                case news.Refused(why) | news.TimedOut(why):
                    self.world.tally[f"{type(one).__name__}".lower()] += 1
                    self.finish(False, why)

    def _seated(self, seat: job.Seat, generation: job.Generation, stops: set[int]) -> None:
        self.oracle.seated(self, seat, generation)
        if self.is_leaving or not self.is_alive or not self.driver.check_fence():
            return
        if seat.generation in stops:
            self.may_be_ready()
            return
        self.seat = seat
        self._observe(machine.Joined(seat.group_rank, seat.group_world_size))
        self._start(seat.generation)

    def _told_to_stop(self, generation: int, signal: job.Signal) -> None:
        if self.seat is None or self.seat.generation != generation or self.is_leaving:
            return
        self._stop_why = signal.why
        if not self._is_starting:
            self._observe(machine.Regroup(signal.why))

    def _ended(self, closed: job.Closed) -> None:
        self._closed = closed
        self._tell_end()

    def _tell_end(self) -> None:
        closed = self._closed
        if closed is not None and not self.is_leaving:
            how = {"finished": "succeeded", "failed": "failed", "host_left": "failed"}.get(closed.kind, "closed")
            self._observe(machine.JobEnded(how, closed.why))

    # What follows.

    def _observe(self, seen: machine.Observation) -> None:
        self.state, action = machine.step(self.state, seen)
        match action:
            case machine.Restart(why, _, _, at_once):
                self._stop(why, at_once)
            case machine.Stop(why):
                self._stop(why, False)
            case machine.Drain():
                if self.driver.participant is not None:
                    self.driver.participant.done()
                    self.driver.pump()
            case machine.Finish(succeeded, why):
                self.finish(succeeded, why)

    def finish(self, succeeded: bool, why: str) -> None:
        """The run is over: no worker is left behind, and the others are told that we go."""
        if self.is_leaving or not self.is_alive:
            return
        self.world.note(self.name, "finishes", (succeeded, why))
        self.succeeded, self.why, self.is_leaving = succeeded, why, True
        if self.workers:
            self._kill()
        else:
            self._leave()

    def terminate(self) -> None:
        """SIGTERM: the others are told at once; we leave when our workers are gone."""
        if self.is_leaving or not self.is_alive:
            return
        self.world.note(self.name, "gets SIGTERM")
        participant = self.driver.participant
        if participant is not None:
            if self.is_host:
                participant.close("host_left", f"{self.name} hosts the store")
            else:
                participant.departing(f"{self.name} received SIGTERM")
            self.driver.pump()
        self.succeeded, self.why, self.is_leaving = False, "SIGTERM", True
        if self.workers:
            self._stop("SIGTERM", False)
        else:
            self._leave()

    def close_job(self) -> None:
        """Somebody has had enough: no further generation, but nobody's workers are stopped."""
        if self.driver.participant is not None and not self.is_leaving:
            self.driver.participant.close("closed", f"{self.name} closed it")
            self.driver.pump()

    def _leave(self) -> None:
        self.world.after(LEAVE_TIMEOUT_S, self._exit)
        if self.driver.participant is None:
            self._exit()
            return
        self.driver.participant.leave()
        self.driver.pump()
        self._look_whether_left()

    def _look_whether_left(self) -> None:
        if not self.is_alive:
            return
        participant = self.driver.participant
        if participant is None or participant.has_left:
            self._exit()
        else:
            self.world.after(0.02, self._look_whether_left)

    def _exit(self) -> None:
        if self.is_alive:
            self.is_alive = False
            self.driver.close()
            self.world.note(self.name, "exits", self.succeeded)
            self.oracle.ended(self)

    def die(self, with_machine: bool) -> None:
        """kill -9, after which the warden ends the workers; or everything at once."""
        if not self.is_alive:
            return
        self.world.note(self.name, "crashes with its machine" if with_machine else "is killed")
        if self.is_paused:
            self.excused_until = self.world.now + WARDEN_S + 1e-6
        self.is_alive, self.is_paused = False, False
        self.why = "killed"
        self._group += 1
        if with_machine:
            self.link.is_dead = True
            self._workers_gone(self._group)
        else:
            self.driver.close()
            self.world.after(self.world.between(0.001, WARDEN_S), self._workers_gone, self._group)
        self.oracle.ended(self)
