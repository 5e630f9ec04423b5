"""One agent process and its workers, as the real shell runs them: `agent_machine` decides, the driver talks to the others.

It can be killed, with its warden or without, stopped for a while, told to leave, or crash with its machine. One of its threads
may hang: the *main* one, which starts and stops workers, or the *driver*, which talks to the store.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.driver import Driver
from tests.simulation.network import Connection, Link
from tests.simulation.workers import KILL_S, WARDEN_S, WorkerHost
from tests.simulation.world import Clock, World

from rallypoint.coordination.model import Put, Transaction
from rallypoint.protocol import agent_machine, news
from rallypoint.protocol import job_records as job
from rallypoint.protocol.participant import Joining, Participant

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
        is_sick: bool = False,
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
        self.is_sick = is_sick  # it cannot start workers
        self.well_again_at = 0.0
        self.stuck: dict[str, list[tuple[Callable[..., None], tuple[object, ...]]]] = {}  # and what each thread has to do then
        self._closed: job.Closed | None = None
        self._sessions = 0
        self.seat: job.Seat | None = None
        self.driver = Driver(self)
        self.state, _ = agent_machine.begin()
        self.may_be_ready()
        self.driver.dial()

    def time(self) -> float:
        return self.clock.read(self.world.now)

    @property
    def node_id(self) -> str:
        return f"{self.name}.{self._sessions}"

    def well_since(self) -> float:
        """Since when nothing has been wrong with its process and its link."""
        is_ill = self.stuck or self.link.cut_up or self.link.cut_down
        return self.world.now if is_ill else max(self.started_at, self.well_again_at, self.link.healed_at)

    # Being stopped for a while, as a whole or one thread of it.

    def _can(self, thread: str, act: Callable[..., None], *args: object) -> bool:
        """Whether this can be done now; if the thread hangs, it is done when that goes on."""
        if thread in self.stuck:
            self.stuck[thread].append((act, args))
        return self.is_alive and thread not in self.stuck

    def main_can(self, act: Callable[..., None], *args: object) -> bool:
        return self._can("main", act, *args)

    def driver_can(self, act: Callable[..., None], *args: object) -> bool:
        return self._can("driver", act, *args)

    def stick(self, *threads: str) -> None:
        for thread in threads:
            self.stuck.setdefault(thread, [])

    def go_on(self, *threads: str) -> None:
        """Whichever of its threads is first: neither may do any harm before the other has had its turn."""
        stuck = [thread for thread in threads if thread in self.stuck]
        if self.world.chance(0.5):
            stuck.reverse()
        for thread in stuck:
            deferred = self.stuck.pop(thread)
            if not self.is_alive:
                continue
            self.well_again_at = self.world.now
            if thread == "driver":
                self.driver.check_fence()
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
            former=self.driver.former,
        )
        self.oracle.joins(self)
        return setup.participant_class(joining)

    def may_be_ready(self) -> None:
        """Tell the driver, if no worker runs, that the next generation may have us."""
        if self.workers or self._closed is not None or self.is_leaving:
            return
        if isinstance(self.state, agent_machine.Gathering | agent_machine.Starting) and self.seat is None:
            self.driver.ready_port = 20000 + self.world.below(1000)
            if self.driver.participant is not None:
                self.driver.participant.ready(self.time(), self.driver.ready_port)

    def fenced(self, why: str) -> None:
        """The driver kills the workers by itself; the main thread hears of it when it can."""
        self.licence = 0.0
        if self.is_alive:
            self._kill_processes()
            self._hear_of_fence(why)

    def _hear_of_fence(self, why: str) -> None:
        if self.main_can(self._hear_of_fence, why):
            self._kill()
            self.seat = None
            if not self.is_leaving:
                self._observe(agent_machine.Fenced(why))

    def give_up(self, why: str) -> None:
        """There is no store any more that we could take part through."""
        self.licence = 0.0
        self._kill_processes()
        self._hear_of_end(why)

    def _hear_of_end(self, why: str) -> None:
        if self.main_can(self._hear_of_end, why):
            self._kill()
            self.finish(False, why)

    def note_transaction(self, request: Transaction) -> None:
        for operation in request.then:
            if isinstance(operation, Put) and operation.key.startswith("down/signal/"):
                self.oracle.signal_sent(self, operation, is_own=request.compares[0].key == operation.key)

    def hear(self, heard: list[news.News]) -> None:
        for one in heard:
            if isinstance(one, news.Seated):
                self.oracle.seated(self, one.seat, one.generation)
        self._hear(heard)

    def _hear(self, heard: list[news.News]) -> None:
        if not self.main_can(self._hear, heard):
            return
        stops = {one.generation for one in heard if isinstance(one, news.Regroup)}
        for one in heard:
            match one:
                case news.Seated(seat, generation):
                    self._seated(seat, generation, stops)
                case news.Regroup(why, generation):
                    self._told_to_stop(generation, why)
                case news.Ended(closed):
                    self._ended(closed)
                case news.Refused(why) | news.TimedOut(why):
                    self.world.tally[f"{type(one).__name__}".lower()] += 1
                    self.finish(False, why)

    def _seated(self, seat: job.Seat, generation: job.Generation, stops: set[int]) -> None:
        if self.is_leaving or not self.is_alive:
            return
        if seat.generation in stops:
            self.may_be_ready()
            return
        self.seat = seat
        self._observe(agent_machine.Joined(seat.group_rank, seat.group_world_size))
        if self.is_sick:
            self._fall_out()
        else:
            self._start(seat.generation)

    def _fall_out(self) -> None:
        """No worker can be started here; that need not concern the others."""
        self.world.tally["sick nodes"] += 1
        if self.driver.participant is not None:
            self.driver.participant.departing(f"{self.name} cannot run workers", is_sick=True)
        self.finish(False, "it cannot run workers")

    def _told_to_stop(self, generation: int, why: str) -> None:
        if self.seat is None or self.seat.generation != generation or self.is_leaving:
            return
        self._stop_why = why
        if not self._is_starting:
            self._observe(agent_machine.Regroup(why))

    def _ended(self, closed: job.Closed) -> None:
        self._closed = closed
        self._tell_end()

    def _tell_end(self) -> None:
        closed = self._closed
        if closed is not None and not self.is_leaving:
            how = {"finished": "succeeded", "failed": "failed", "host_left": "failed"}.get(closed.kind, "closed")
            self._observe(agent_machine.JobEnded(how, closed.why))

    # What follows.

    def _observe(self, seen: agent_machine.Observation) -> None:
        self.state, action = agent_machine.step(self.state, seen)
        match action:
            case agent_machine.Restart(why, _, _, at_once):
                self._stop(why, at_once)
            case agent_machine.Stop(why):
                self._stop(why, False)
            case agent_machine.Drain():
                if self.driver.participant is not None:
                    self.driver.participant.done()
                    self.driver.pump()
            case agent_machine.Finish(succeeded, why):
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
        """SIGTERM: the others are told at once; we leave when our workers are gone. The second one is one of impatience."""
        if not self.main_can(self.terminate):
            return
        if self.is_leaving:
            if self.workers:
                self._kill()
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
        if self.driver.participant is not None and not self.is_leaving and self.main_can(self.close_job):
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

    def die(self, with_machine: bool = False, with_warden: bool = False) -> None:
        """kill -9, after which the warden ends the workers and testifies; or the warden with it; or everything at once."""
        if not self.is_alive:
            return
        self.world.note(self.name, "crashes with its machine" if with_machine else "is killed")
        lease, self.is_alive, self.stuck = self.driver.lease, False, {}
        self.why = "killed"
        self._group += 1
        if with_machine:
            self.link.is_dead = True
            self._workers_gone(self._group)
        else:
            self.driver.close()
            testifies = not with_warden and not self.setup.is_replicated
            delay_s = self.world.between(0.001, KILL_S if with_warden else WARDEN_S)
            self.world.after(delay_s, self._end_by_warden, self._group, lease if testifies else 0)
        self.oracle.ended(self)

    def _end_by_warden(self, group: int, lease: int) -> None:
        """All below the warden is gone; where the store takes its word, it testifies."""
        self._workers_gone(group)
        if lease:
            self.world.tally["testimonies"] += 1
            Connection(self.world, self.link, self.driver, self.engine).send_up(("vouch", lease))
