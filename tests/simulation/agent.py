"""One agent process and its workers, as the real shell runs them: `agent_machine` and `session` decide, the real driver talks to
the others, in a thread of its own.

What comes from the job waits with the driver, as it does there: a thread that starts or stops workers hears nothing.

It can be killed, with its warden or without, stopped for a while, told to leave, or crash with its machine. One of its threads
may hang: the *main* one, which starts and stops workers, or the *driver*, which talks to the store.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.simulation.driver import STORE_TIMEOUT_S, Driver, Place
from tests.simulation.network import Connection, Link, vouch
from tests.simulation.threads import Thread
from tests.simulation.workers import KILL_S, WARDEN_S, WorkerHost
from tests.simulation.world import Clock, World

from rallypoint.coordination.engine import Coordination
from rallypoint.coordination.model import Put, Transaction
from rallypoint.protocol import agent_machine, session
from rallypoint.protocol import job_records as job
from rallypoint.protocol.participant import Joining, Participant
from rallypoint.rendezvous.dynamic import LEAVE_TIMEOUT_S, NO_SESSION_TIMEOUT_S, REFUSAL_TIMEOUT_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tests.simulation.engine import Engine
    from tests.simulation.network import Testimony
    from tests.simulation.oracle import Oracle
    from tests.simulation.setup import Setup

__all__ = ["Agent"]

SLOW_START_S = 0.0  # from taking a seat until the first worker is started; on a slow machine much can happen meanwhile


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
        self.time = lambda: clock.offset_s + world.now * clock.rate  # which is read very often
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
        self.failure = ""  # what is wrong with it, and nobody else
        self.is_shut_down = True  # at its end, as by a launcher that got no signal
        self.session: session.State = session.Apart()
        self.sessions = 0  # at the store
        self.connection: Connection | None = None  # with the store, once that has welcomed us
        self.participant: Participant | None = None  # of the latest session
        self.workers_in = ""  # in which store the generation of its workers was formed
        self.last_number = 0  # of the generations in which it had a seat
        self.place = Place(self)
        self.thread = Thread(world, clock, self.driver_can)
        self.driver = Driver(self)
        self.driver.kill_workers = self._kill_processes
        self.state, _ = agent_machine.begin()
        self._ask()
        self.thread.start(self.driver._run)

    @property
    def seat(self) -> job.Seat | None:
        seated = session.seat_of(self.session)
        return seated.seat if seated is not None else None

    @property
    def node_id(self) -> str:
        return f"{self.name}.{self.sessions}"

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
            for act, args in deferred:
                act(*args)

    # What the driver asks and says.

    def open_session(self) -> tuple[Coordination, Participant] | None:
        """A connection, a lease, and the participant that lives on them; in the driver's thread."""
        setup, self.participant = self.setup, None
        timeout_s = max(STORE_TIMEOUT_S, setup.host_timeout_s) if self.sessions else setup.policy.join_timeout_s
        refusal_timeout_s = max(REFUSAL_TIMEOUT_S, setup.host_timeout_s)
        connected = self.place.connect(setup.ttl_s, timeout_s, refusal_timeout_s, self._pause)
        if connected is None:
            return None
        engine, lease = connected
        self.participant = self._new_participant(engine.identity(), lease)
        return engine, self.participant

    def _pause(self, seconds: float) -> bool:
        self.driver.wait(seconds)
        return not self.driver.is_stopped

    def _new_participant(self, store: str, lease: int) -> Participant:
        self.sessions += 1
        setup = self.setup
        former, memory = self.driver.background(store)
        joining = Joining(
            node_id=self.node_id,
            lease=lease,
            record=self.record,
            settings={**setup.settings, "protocol": 2} if self.is_stranger else setup.settings,
            mismatch=setup.mismatch,
            policy=setup.policy,
            restarts=setup.restarts,
            former=former,
            memory=memory,
        )
        self.oracle.joins(self)
        return setup.participant_class(joining)

    def feel_fence(self) -> None:
        """The main thread notices at once if it is stopping workers; else it hears of it when it can."""
        if self.main_can(self.feel_fence) and self._is_stopping and self.workers:
            self._kill()

    def note_transaction(self, request: Transaction, told_through: int) -> None:
        for operation in request.then:
            if isinstance(operation, Put) and operation.key.startswith("down/signal/"):
                is_own = request.compares[0].key == operation.key
                self.oracle.signal_sent(self, operation, is_own, told_through)

    def listen(self) -> None:
        """Hear what has come, unless there is something else to do."""
        if not self.main_can(self.listen):
            return
        was_staying = isinstance(self.session, session.Staying)
        while self._is_listening() and (word := self.driver.take()) is not None:
            if isinstance(word, session.Refused | session.TimedOut):
                self.world.tally[type(word).__name__.lower()] += 1
            self._follow(*session.hear(self.session, word, self.driver.peek()))
        if was_staying and not isinstance(self.session, session.Staying):
            self._leave()

    def _is_listening(self) -> bool:
        if not self.is_alive or self.is_leaving:
            return self.is_alive and isinstance(self.session, session.Staying)
        return isinstance(self.state, agent_machine.Gathering | agent_machine.Running | agent_machine.Draining)

    # What follows for the session.

    def _step(self, seen: session.Observation) -> None:
        self._follow(*session.step(self.session, seen))

    def _ask(self) -> None:
        """No worker runs here: the next generation may have us."""
        if self.is_alive and not self.is_leaving and isinstance(self.state, agent_machine.Gathering):
            self._step(session.Ask())
            self.listen()

    def _follow(self, state: session.State, actions: tuple[session.Action, ...]) -> None:
        self.session = state
        for action in actions:
            match action:
                case session.SayReady():
                    self.driver.ready(self._hold_port)
                case session.SayFailed() | session.SayDone() | session.SayDeparting() | session.SayClosed():
                    self.driver.tell(partial(session.say, action))
                case session.TakeSeat(seated):
                    self._take_seat(seated.seat)
                case session.Tell(what):
                    if not self.is_leaving:
                        self._observe(what)
                case session.GiveUp(why):
                    is_finished = isinstance(why, session.Ended) and why.closed.kind == "finished"
                    self.finish(is_finished, f"it will have no seat: {why}")
                case session.Stay():
                    self.world.tally["stays for the workers of others"] += 1
                case session.Go():
                    self._go()

    def _hold_port(self) -> int:
        return 20000 + self.world.below(1000)

    def _take_seat(self, seat: job.Seat) -> None:
        self.oracle.takes_seat(self, seat)
        self._observe(agent_machine.Joined(seat.group_rank, seat.group_world_size))
        if self.is_sick:
            self.world.tally["sick nodes"] += 1
            self.failure = "it cannot run workers"
            self.finish(False, self.failure)
        elif SLOW_START_S:
            self.world.after(SLOW_START_S, self._start_late, seat.generation)
        else:
            self._start(seat.generation)

    def _start_late(self, generation: int) -> None:
        if self.is_alive and not self.is_leaving and self.main_can(self._start_late, generation):
            self._start(generation)

    def _me(self) -> session.Me:
        return session.Me(self.name, self.is_host, serves_workers=self.seat is not None and self.seat.group_rank == 0)

    # What follows for the workers.

    def _observe(self, seen: agent_machine.Observation) -> None:
        self.state, action = agent_machine.step(self.state, seen)
        match action:
            case agent_machine.Restart(why, _, _, at_once):
                self._stop(why, at_once)
            case agent_machine.Stop(why):
                self._stop(why, False)
            case agent_machine.Drain():
                self._drain()
            case agent_machine.Finish(succeeded, why):
                self.finish(succeeded, why)

    def _drain(self) -> None:
        if isinstance(self.session, session.Member):
            self.world.after(self.setup.exit_barrier_s, self._stop_draining, self._group)
        self._step(session.Done())

    def _stop_draining(self, group: int) -> None:
        """The others were not seen to finish in time."""
        if group == self._group and isinstance(self.state, agent_machine.Draining) and self.main_can(self._stop_draining, group):
            self._observe(agent_machine.Drained())

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
        self.succeeded, self.why, self.is_leaving, self.is_shut_down = False, "SIGTERM", True, False
        self._step(session.Depart(f"{self.name} received SIGTERM", self._me()))
        if self.workers:
            self._stop("SIGTERM", False)
        else:
            self._leave()

    def close_job(self) -> None:
        """Somebody has had enough: no further generation, but nobody's workers are stopped."""
        if not self.is_leaving and self.main_can(self.close_job):
            self._follow(self.session, (session.SayClosed("closed", f"{self.name} closed it"),))

    def _leave(self) -> None:
        """No worker is left. Whoever is neither ill nor asked to go closes the job, if that still runs with it."""
        if self.is_shut_down and not self.failure and session.closes_the_job(self.session):
            self._follow(self.session, (session.SayClosed("closed", f"{self.name} closed it"),))
        self._step(session.Leave(self.failure, False, self._me()))

    def _go(self) -> None:
        """Let the driver end after what it was told, if it can in time."""
        self.driver.tell(Participant.leave)
        self.driver.stop(0.0)
        self.thread.on_end = self._exit
        self.world.after(LEAVE_TIMEOUT_S if self.sessions else NO_SESSION_TIMEOUT_S, self._exit)
        if self.thread.has_ended:
            self._exit()

    def _exit(self) -> None:
        if self.main_can(self._exit):
            self.is_alive = False
            self.thread.kill()
            self.world.note(self.name, "exits", self.succeeded)
            self.oracle.ended(self)

    def die(self, with_machine: bool = False, with_warden: bool = False) -> None:
        """kill -9, after which the warden ends the workers and testifies; or the warden with it; or everything at once."""
        if not self.is_alive:
            return
        self.world.note(self.name, "crashes with its machine" if with_machine else "is killed")
        testimony, self.is_alive, self.stuck = self.licence.testimony, False, {}
        self.why = "killed"
        self._group += 1
        self.link.is_dead = with_machine
        self.thread.kill()
        if with_machine:
            self._workers_gone(self._group)
        else:
            delay_s = self.world.between(0.001, KILL_S if with_warden else WARDEN_S)
            self.world.after(delay_s, self._end_by_warden, self._group, None if with_warden else testimony)
        self.oracle.ended(self)

    def _end_by_warden(self, group: int, testimony: Testimony | None) -> None:
        """All below the warden is gone; if something was entrusted to it, it testifies."""
        self._workers_gone(group)
        if testimony is not None:
            self.world.tally["testimonies"] += 1
            vouch(self.world, self.link, self.engine, testimony)
