"""The elastic rendezvous over several nodes: torchrun's ``c10d``, on rallypoint's own coordination store.

The handler stands between two threads. The driver's thread carries on this node's part in the job; the agent's thread asks here,
gets an answer at once, and waits on `wakeup_fd` when there is none. `protocol.session` decides; here it is done.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable

from rallypoint import errors
from rallypoint.base import defaults, environment, report
from rallypoint.base.text import many
from rallypoint.coordination.engine import Coordination
from rallypoint.processes.context import wait_readable
from rallypoint.processes.licence import Licence
from rallypoint.protocol import agent_machine, session
from rallypoint.protocol.inquiry import Statement
from rallypoint.protocol.job_records import MAX_WHY, Closed, NodeDrain, Notice
from rallypoint.protocol.participant import Participant
from rallypoint.protocol.session import Patience
from rallypoint.protocol.verdict import NodeReport, Verdict, cause_text, explain
from rallypoint.protocol.worker_plan import WorkerRanks
from rallypoint.rendezvous.coordinated import CoordinatedHandler, Introduction
from rallypoint.rendezvous.driver import Driver
from rallypoint.rendezvous.handler import RendezvousInfo, RendezvousParameters, RendezvousStoreInfo
from rallypoint.rendezvous.joining import Identity, Terms, find_rank_hint, make_joining, stable_name
from rallypoint.rendezvous.place import Place
from rallypoint.rendezvous.settings import Settings, describe
from rallypoint.rendezvous.worker_store import WorkerStore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.output.waits import Wait
    from rallypoint.protocol.job_records import ClosedKind
    from rallypoint.protocol.pace import Pace

__all__ = ["DynamicRendezvous"]

REFUSAL_TIMEOUT_S = 3.0
LEAVE_TIMEOUT_S = 5.0
NO_SESSION_TIMEOUT_S = 0.6  # it may be waiting for a name to be resolved, which nothing can interrupt


class DynamicRendezvous(CoordinatedHandler):
    """One node's handler for a job of several."""

    def __init__(
        self, params: RendezvousParameters, settings: Settings, place: Place, terms: Terms, worker_store: WorkerStore
    ) -> None:
        self._params = params
        self._settings = settings
        self._place = place
        self._terms = terms
        self._worker_store = worker_store
        self._own_address = ""  # once a session has shown it
        self._id = ""  # of our record in the latest session
        self._has_place = threading.Event()
        self._address = ""  # which the workers are told, once a session has shown it
        self._hint = find_rank_hint(settings.node_rank, environment.own)
        self.name = stable_name(self._hint, os.uname().nodename)
        self._introduction = Introduction("", 1, 0, "", defaults.SHUTDOWN_TIMEOUT_S)
        self._driver: Driver | None = None
        self._if_dropped: weakref.finalize[..., DynamicRendezvous] | None = None
        self._licence: Licence | None = None
        self._kill_workers: Callable[[], None] = lambda: None
        self._answer: Callable[[session.AskedFor], None] = lambda _: None
        self._hear_of_doubt: Callable[[str], None] = lambda _: None
        self._hear_of_drain: Callable[[session.Noticed | session.Ruled], None] = lambda _: None
        self._hear_of_hangs: Callable[[int, bytes], None] = lambda *_: None
        self._hear_of_pace: Callable[[int, bytes], None] = lambda *_: None
        self._state: session.State = session.Apart()
        self._untold: deque[agent_machine.Regroup | agent_machine.Fenced | agent_machine.JobEnded] = deque()
        self._standing: tuple[str, float | None] = "", None
        self._unfit = ""  # why this machine must not have a seat now
        self._sessions = 0  # that were opened, by the driver's thread

    # As torch's handlers.

    def get_backend(self) -> str:
        return self._params.backend

    def get_run_id(self) -> str:
        return self._params.run_id

    @property
    def use_agent_store(self) -> bool:
        return self._worker_store.is_agents

    def next_rendezvous(self) -> RendezvousInfo:
        while (info := self.poll_rendezvous()) is None:
            wait_readable([self.wakeup_fd()], None)  # it ends by the join timeout at the latest
        return info

    def is_closed(self) -> bool:
        return isinstance(self._state, session.JobOver) or any(isinstance(one, session.Ended) for one in self._untaken())

    def set_closed(self) -> None:
        self._say(session.SayClosed("closed", f"{self.name} closed it"))

    def num_nodes_waiting(self) -> int:
        """For agents that only ask this: 1 when the generation is over, so that they meet anew."""
        return int(session.has_to_regroup(self._untaken()))

    def shutdown(self) -> bool:
        if session.closes_the_job(self._state):
            self.set_closed()
        self.leave()
        return True

    # The event-driven side.

    def wakeup_fd(self) -> int:
        return self._start().fileno()

    def introduce(self, introduction: Introduction) -> None:
        self._introduction = introduction

    def tell_fitness(self, unfit: str) -> None:
        self._unfit = unfit
        self._start().tell(lambda participant: participant.judged(unfit))

    def poll_rendezvous(self) -> RendezvousInfo | None:
        self._step(session.Ask())
        driver = self._start()
        while (word := driver.take()) is not None:
            for action in self._hear(word, driver.peek()):
                if isinstance(action, session.TakeSeat):
                    return self._take_seat(action.seated)
        return None

    def standing(self) -> tuple[str, float | None]:
        return self._standing

    def worker_ranks(self) -> tuple[WorkerRanks, ...]:
        seated = session.seat_of(self._state)
        assert seated is not None
        return seated.seat.worker_ranks(self._introduction.workers)

    def own_address(self) -> str:
        return self._own_address

    def whereabouts(self, timeout_s: float) -> tuple[str, str, str] | None:
        return (self._id, self.name, self._own_address) if self._has_place.wait(timeout_s) else None

    def settings_in_force(self) -> str:
        return describe(self._settings)

    def generation(self) -> int:
        seated = session.seat_of(self._state)
        return seated.generation.number if seated else 0

    def formed_after(self) -> tuple[str, str] | None:
        seated = session.seat_of(self._state)
        return (seated.generation.after, seated.generation.why) if seated else None

    def last_word(self, group_rank: int | None) -> session.LastWord:
        speaks = self._driver is not None and self._driver.speaks_for_job
        return session.last_word(self._state, self._me(), speaks, group_rank)

    def verdict(self) -> Verdict | None:
        return self._state.closed.verdict if isinstance(self._state, session.JobOver) else None

    def restart_count(self) -> int:
        seated = session.seat_of(self._state)
        return seated.generation.purse.failures if seated else 0

    def last_failure(self) -> str:
        seated = session.seat_of(self._state)
        return seated.generation.purse.streak_of if seated else ""

    def observe(self) -> agent_machine.Regroup | agent_machine.Fenced | agent_machine.JobEnded | None:
        driver = self._start()
        while not self._untold and (word := driver.take()) is not None:
            self._hear(word)
        return self._untold.popleft() if self._untold else None

    def fence_fd(self) -> int | None:
        return self._driver.fence_fileno() if self._driver else None

    def licence_fd(self) -> int | None:
        return self._licence.fileno() if self._licence else None

    def on_fence(self, kill: Callable[[], None]) -> None:
        self._kill_workers = kill
        if self._driver is not None:
            self._driver.kill_workers = kill

    def on_asked(self, answer: Callable[[session.AskedFor], None]) -> None:
        self._answer = answer
        if self._driver is not None:
            self._driver.tell(Participant.ask_again)

    def on_doubt(self, hear: Callable[[str], None]) -> None:
        self._hear_of_doubt = hear

    def _asked(self, asked: session.AskedFor) -> None:
        """In the driver's thread."""
        if asked.asked.what == "recheck":
            self._hear_of_doubt(asked.asked.by)
        else:
            self._answer(asked)

    def on_drain(self, hear: Callable[[session.Noticed | session.Ruled], None]) -> None:
        self._hear_of_drain = hear
        if self._driver is not None:
            self._driver.on_drain = hear

    def give_notice(self, generation: int, why: str, left_s: float) -> None:
        if (driver := self._driver) is not None:
            driver.tell(lambda participant: participant.noticed(generation, Notice(why[:MAX_WHY], self.name, left_s)))

    def report_drain(self, generation: int, told: NodeDrain) -> None:
        if (driver := self._driver) is not None:
            driver.tell(lambda participant: participant.drains(generation, told))

    def on_inquiry(self, hear: Callable[[int, bytes], None]) -> None:
        self._hear_of_hangs = hear
        if self._driver is not None:
            self._driver.on_inquiry = hear

    def declare(self, generation: int, statement: Statement) -> bool:
        if self._driver is None:
            return False
        told = statement.replace(node=self.name)
        self._driver.tell(lambda participant: participant.declare(generation, told))
        return True

    def on_pace(self, hear: Callable[[int, bytes], None]) -> None:
        self._hear_of_pace = hear
        if self._driver is not None:
            self._driver.on_pace = hear

    def tell_pace(self, generation: int, workers: Iterable[Pace]) -> bool:
        if self._driver is None:
            return False
        from rallypoint.protocol.pace import told_of

        told = told_of(self.name, workers)
        self._driver.tell(lambda participant: participant.paced(generation, told))
        return True

    def new_connection(self) -> Coordination:
        return self._place.new_connection()

    def min_nodes(self) -> int:
        return self._params.min_nodes

    def hosts_store(self) -> bool:
        return self._place.is_host

    def store(self) -> str:
        return self._place.identity

    def was_fenced(self, why: str) -> None:
        self._step(session.Expired())

    def report_failure(self, report: NodeReport) -> None:
        self._step(session.Failed(report.replace(node=self.name)))

    def report_done(self) -> None:
        self._step(session.Done())

    def depart(self, why: str, signal: int = 0, ends_as: ClosedKind = "host_left") -> None:
        self._step(session.Depart(why, self._me(), signal, ends_as))

    def leave(self, failure: str = "", ends_job: bool = False) -> None:
        if self._driver is not None:
            self._step(session.Leave(failure, ends_job, self._me()))

    def end_error(self) -> Exception | None:
        return _end_error(self._state.closed) if isinstance(self._state, session.JobOver) else None

    # What is decided, and done.

    def _me(self) -> session.Me:
        return session.Me(self.name, self._place.is_host, self._worker_store.is_serving)

    def _untaken(self) -> tuple[session.Word, ...]:
        return self._driver.peek() if self._driver else ()

    def _step(self, seen: session.Observation) -> None:
        self._state, actions = session.step(self._state, seen)
        for action in actions:
            self._perform(action)

    def _hear(self, word: session.Word, behind: tuple[session.Word, ...] = ()) -> tuple[session.Action, ...]:
        """What followed from it, and was done; to take a seat is left to the caller."""
        self._state, actions = session.hear(self._state, word, behind)
        for action in actions:
            self._perform(action)
        return actions

    def _perform(self, action: session.Action) -> None:
        match action:
            case session.SayReady():
                self._standing = "", None
                self._worker_store.end_generation()
                self._start().ready(self._hold_port)
            case session.SayFailed() | session.SayDone() | session.SayDeparting() | session.SayClosed():
                self._say(action)
            case session.Tell(what):
                self._untold.append(what)
            case session.Announce(text, gives_up_at):
                self._standing = text, gives_up_at
                if not report.is_live():
                    report.info(f"waiting: {text}")
            case session.GiveUp(why):
                raise self._error(why)
            case session.Stay():
                self._stay()
            case session.Go(stays_for_others):
                self._go(stays_for_others)

    def _say(self, saying: session.Saying) -> None:
        if self._driver is not None:
            self._driver.tell(lambda participant: session.say(saying, participant))

    def _take_seat(self, seated: session.Seated) -> RendezvousInfo:
        self._untold.clear()  # it is of the last one
        seat, generation = seated.seat, seated.generation
        size = f"{many(seat.group_world_size, 'node')}, {many(seat.world_size, 'worker')}"
        why = f"; {generation.why}" if generation.number > 1 else ""  # the first one has no other reason than that all are here
        report.info(f"generation {generation.number} started: {size}; this is node {seat.group_rank}{why}")
        self._worker_store.serve_if(seat.group_rank == 0)
        where = RendezvousStoreInfo(generation.master_addr, generation.master_port)
        return RendezvousInfo(self._place.open_store(generation), seat.group_rank, seat.group_world_size, where)

    def _stay(self) -> None:
        """Until the job has ended, or goes on in a generation without us; then leave."""
        driver = self._driver
        assert driver is not None
        report.info("staying for the workers of other nodes, whose store is here")
        began = time.monotonic()
        with report.meanwhile(lambda: _staying(began)):
            while isinstance(self._state, session.Staying):
                word = driver.take()
                if word is None:
                    wait_readable([driver.fileno()], None)
                else:
                    self._hear(word)
        self.leave()

    def _go(self, stays_for_others: bool) -> None:
        driver = self._take_driver()
        assert driver is not None
        self._place.close_store()
        driver.tell(Participant.leave)
        patience_s = LEAVE_TIMEOUT_S if self._sessions else NO_SESSION_TIMEOUT_S
        if not driver.stop(patience_s) and self._sessions:
            report.warn(f"the coordination store did not answer within {patience_s:g} s; leaving without a word")
        self._place.close(float("inf") if stays_for_others else self._settings.close_timeout_s)
        self._worker_store.close()
        driver.close()
        self._licence = None

    def _take_driver(self) -> Driver | None:
        """From now on somebody else ends it."""
        driver, self._driver = self._driver, None
        if self._if_dropped is not None:
            self._if_dropped.detach()
        return driver

    def _hold_port(self) -> int:
        """In the driver's thread, when it is known by which address the others reach us."""
        return self._worker_store.hold(self._address)

    def _error(self, why: session.Ended | session.Refused | session.TimedOut | session.Lost) -> Exception:
        """What to raise for a node that waits for the next generation, which will not have it."""
        match why:
            case session.Ended(closed):
                return _end_error(closed) or errors.RendezvousGracefulExitError("the job has finished without it")
            case session.Refused(reason):
                return errors.UsageError(f"this node may not join the job: {reason}")
            case session.TimedOut(reason):
                return errors.RendezvousTimeoutError(f"run {self.get_run_id()!r}: {reason}; see join_timeout in --rdzv-conf")
            case session.Lost(error):
                return self._lost_error(error)

    def _lost_error(self, error: Exception) -> Exception:
        is_told = isinstance(error, errors.RendezvousError) or errors.is_hosts_fault(error)
        return error if is_told else errors.RendezvousConnectionError(str(error))

    def _start(self) -> Driver:
        if self._driver is None:
            self._licence = Licence()
            open_session = weakref.WeakMethod(self._open_session)  # its thread does not keep a handler that nobody else has
            patience = self._patience()
            self._driver = Driver(lambda: opening() if (opening := open_session()) is not None else None, patience, self._licence)
            self._if_dropped = weakref.finalize(self, _abandon, self._driver, self._place, self._worker_store)
            self._if_dropped.atexit = False  # threads end with the process
            self._driver.kill_workers = self._kill_workers
            asked = weakref.WeakMethod(self._asked)  # as above
            self._driver.on_asked = lambda one: hear(one) if (hear := asked()) is not None else None
            self._driver.on_drain = self._hear_of_drain
            self._driver.on_inquiry = self._hear_of_hangs
            self._driver.on_pace = self._hear_of_pace
            self._driver.start()
        return self._driver

    def _patience(self) -> Patience:
        """Who waits for a host that has ended does so whether the endpoint refuses it or is silent, like a machine that boots."""
        host_timeout_s = self._place.host_timeout_s
        store_timeout_s = max(self._terms.patience_s(self._settings.store_timeout_s), host_timeout_s)
        return Patience(self._terms.lease_s, store_timeout_s, max(REFUSAL_TIMEOUT_S, host_timeout_s), host_timeout_s > 0)

    def _open_session(self) -> tuple[Coordination, Participant] | None:
        """A connection, a lease, and the participant that lives on them; in the driver's thread."""
        driver, settings = self._driver, self._settings
        assert driver is not None

        def pause(seconds: float) -> bool:
            driver.wait(seconds)
            return not driver.is_stopped

        host_timeout_s = self._place.host_timeout_s
        timeout_s = max(settings.store_timeout_s, host_timeout_s) if self._sessions else settings.join_timeout_s
        connected = self._place.connect(self._terms.lease_s, timeout_s, max(REFUSAL_TIMEOUT_S, host_timeout_s), pause)
        if connected is None:
            return None
        engine, lease = connected
        self._sessions += 1
        self._own_address = self._params.local_addr or self._place.advertised_address(engine)
        self._address = self._worker_store.address_for(self._own_address)
        me = Identity(self.name, self._hint, self._address, lease)
        joining = make_joining(self._params, settings, self._introduction, me, self._terms)
        record = joining.record.replace(unfit=self._unfit)
        self._id = joining.node_id
        self._has_place.set()
        former, memory = driver.background(engine.identity())
        return engine, Participant(joining.replace(record=record, former=former, memory=memory))


def _staying(since: float) -> Wait:
    from rallypoint.output.waits import ForOthers

    return ForOthers("staying for the workers of other nodes", since)


def _abandon(driver: Driver, place: Place, worker_store: WorkerStore) -> None:
    """Nobody has the handler any more: end what it started. That the node goes is not said; the others will take it for dead."""
    place.close_store()
    if driver.stop(LEAVE_TIMEOUT_S):
        place.close(0.0)
    worker_store.close()
    driver.close()


def _end_error(closed: Closed) -> Exception | None:
    """What to raise at the end of a run that the job has ended; nothing where it ended well."""
    if closed.kind == "finished":
        return None
    if closed.kind == "stopped":
        return errors.JobStoppedError(f"the job was stopped: {closed.why}", signal.SIGTERM, for_all=True)
    if closed.kind in ("preempted", "unsaved"):
        return errors.JobPreemptedError(f"the job was preempted: {closed.why}", all_saved=closed.kind == "preempted")
    if closed.signal:
        return errors.JobStoppedError(f"the job was stopped on purpose: {closed.why}", closed.signal)
    if closed.kind != "failed":
        return errors.RendezvousClosedError(f"the job has ended: {closed.why}")
    verdict = closed.verdict
    cause = verdict.cause if verdict else None
    lines = explain(verdict) if verdict else []
    if verdict is None or cause is None:
        return errors.JobFailedError(closed.why, lines, None, is_hopeless=closed.is_hopeless)
    alike, is_hopeless = verdict.alike, closed.is_hopeless
    return errors.JobFailedError(closed.why, lines, cause.exitcode, cause.rank, cause_text(verdict), alike, is_hopeless)
