"""The elastic rendezvous over several nodes: torchrun's ``c10d``, on rallypoint's own coordination store.

The handler stands between two threads. The driver's thread carries on this node's part in the job; the agent's thread asks here,
gets an answer at once, and waits on `wakeup_fd` when there is none. What is decided is decided in `protocol`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from rallypoint.base import defaults, environment, report
from rallypoint.coordination.engine import Coordination
from rallypoint.errors import RendezvousConnectionError, RendezvousError, is_hosts_fault
from rallypoint.processes.context import wait_readable
from rallypoint.processes.licence import Licence
from rallypoint.protocol import agent_machine, news
from rallypoint.protocol import job_records as job
from rallypoint.protocol.failure_reports import NodeReport, WorkerFailure
from rallypoint.protocol.participant import Participant
from rallypoint.protocol.ranks import WorkerRanks
from rallypoint.rendezvous import exit_reasons
from rallypoint.rendezvous.coordinated import CoordinatedHandler, Introduction
from rallypoint.rendezvous.driver import Driver, Fenced, Lost, Patience, Word
from rallypoint.rendezvous.handler import RendezvousInfo, RendezvousParameters, RendezvousStoreInfo
from rallypoint.rendezvous.joining import Identity, Terms, find_rank_hint, make_joining, stable_name
from rallypoint.rendezvous.place import Place
from rallypoint.rendezvous.settings import Settings, describe
from rallypoint.rendezvous.worker_store import WorkerStore

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
        self._address = ""  # which the workers are told, once a session has shown it
        self._hint = find_rank_hint(settings.node_rank, environment.own)
        self.name = stable_name(self._hint, os.uname().nodename)
        self._introduction = Introduction("", 1, 0, "", defaults.SHUTDOWN_TIMEOUT_S)
        self._driver: Driver | None = None
        self._licence: Licence | None = None
        self._kill_workers: Callable[[], None] = lambda: None
        self._has_asked = False
        self._seated: news.Seated | None = None
        self._is_over = False  # the generation in which we sat
        self._is_done = False  # our workers of it have all succeeded
        self._is_departing = False  # we were asked to go
        self._closed: job.Closed | None = None
        self._lost: Exception | None = None
        self._sessions = 0

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
        heard = self._driver.peek() if self._driver else ()
        return self._closed is not None or any(isinstance(one, news.Ended) for one in heard)

    def set_closed(self) -> None:
        self._tell(lambda participant: participant.close("closed", f"{self.name} closed it"))

    def num_nodes_waiting(self) -> int:
        """For agents that only ask this: 1 when the generation is over, so that they meet anew."""
        heard = self._driver.peek() if self._driver else ()
        return int(any(isinstance(one, news.Stop | Fenced | Lost) for one in heard))

    def shutdown(self) -> bool:
        if self._seated is not None and not self._is_over and self._closed is None:
            self.set_closed()
        self.leave()
        return True

    # The event-driven side.

    def wakeup_fd(self) -> int:
        return self._start().fileno()

    def introduce(self, introduction: Introduction) -> None:
        self._introduction = introduction

    def poll_rendezvous(self) -> RendezvousInfo | None:
        if self._lost is not None:
            raise self._lost_error(self._lost)
        driver = self._start()
        if not self._has_asked:
            self._has_asked, self._seated = True, None
            self._worker_store.end_generation()
            driver.ready(self._hold_port)
        while (word := driver.take()) is not None:
            info = self._hear_while_waiting(driver, word)
            if info is not None:
                return info
        return None

    def worker_ranks(self) -> tuple[WorkerRanks, ...]:
        assert self._seated is not None
        return self._seated.seat.worker_ranks(self._introduction.workers)

    def settings_in_force(self) -> str:
        return describe(self._settings)

    def generation(self) -> int:
        return self._seated.generation.number if self._seated else 0

    def restart_count(self) -> int:
        return self._seated.generation.purse.failures if self._seated else 0

    def observe(self) -> agent_machine.Regroup | agent_machine.Fenced | agent_machine.JobEnded | None:
        driver = self._start()
        while (word := driver.take()) is not None:
            match word:
                case news.Stop(_, signal):
                    self._is_over = True
                    return agent_machine.Regroup(signal.why)
                case Fenced(why):
                    self._is_over = True
                    return agent_machine.Fenced(why)
                case Lost(error):
                    self._lost, self._is_over = error, True
                    return agent_machine.Fenced(str(error))
                case news.Ended(closed):
                    self._closed = closed
                    return agent_machine.JobEnded(exit_reasons.how(closed), closed.why)
                case news.Refused(why):
                    return agent_machine.JobEnded("failed", why)
        return None

    def fence_fd(self) -> int | None:
        return self._driver.fence_fileno() if self._driver else None

    def licence_fd(self) -> int | None:
        return self._licence.fileno() if self._licence else None

    def on_fence(self, kill: Callable[[], None]) -> None:
        self._kill_workers = kill
        if self._driver is not None:
            self._driver.kill_workers = kill

    def was_fenced(self, why: str) -> None:
        self._is_over = True

    def report_failure(self, failures: Mapping[int, WorkerFailure]) -> None:
        told = NodeReport(self.name, 0, tuple(failures.values()), stopped=max(0, self._introduction.workers - len(failures)))
        self._tell(lambda participant: participant.failed(told))

    def report_done(self) -> None:
        self._is_over = self._is_done = True
        self._tell(Participant.done)

    def depart(self, why: str) -> None:
        self._is_departing = True
        if self._driver is None:
            return
        if self._place.is_host:
            ends = f"{why}; {self.name} hosts the coordination store, so the job ends for all"
            self._tell(lambda participant: participant.close("host_left", ends))
        else:
            self._tell(lambda participant: participant.departing(why))

    def leave(self, failure: str = "", ends_job: bool = False) -> None:
        driver, self._driver = self._driver, None
        if driver is None:
            return
        if self._is_done and self._worker_store.is_serving and not (failure or self._is_departing):
            self._stay_for_workers(driver)
        if self._closed is None:
            self._say_how_it_ends(driver, failure, ends_job)
        self._place.close_store()
        driver.tell(Participant.leave)
        patience_s = LEAVE_TIMEOUT_S if self._sessions else NO_SESSION_TIMEOUT_S
        if not driver.stop(patience_s) and self._sessions:
            report.warn(f"the coordination store did not answer within {patience_s:g} s; leaving without a word")
        stays_for_others = self._closed is None and self._is_done
        self._place.close(float("inf") if stays_for_others else self._settings.close_timeout_s)
        self._worker_store.close()
        driver.close()
        self._licence = None

    def _stay_for_workers(self, driver: Driver) -> None:
        """We are done, but the workers' store is here: stay until the job has ended, or goes on in a generation without us."""
        if self._closed is None:
            report.info("staying for the workers of other nodes, whose store is here")
        while self._closed is None:
            match driver.take():
                case news.Ended(closed):
                    self._closed = closed
                case news.Stop() | news.Refused() | Fenced() | Lost():
                    return
                case None:
                    wait_readable([driver.fileno()], None)

    def _say_how_it_ends(self, driver: Driver, failure: str, ends_job: bool) -> None:
        """What is wrong with this node alone need not end the job: the others go on if they are enough. The end of the host
        ends it, unless that is done and stays for the others.
        """
        sick = f"{self.name} cannot run workers: {failure}"[: job.MAX_WHY]
        if failure and ends_job and self._seated is not None:
            driver.tell(lambda participant: participant.close("failed", f"{self.name}: {failure}"[: job.MAX_WHY]))
        elif failure and self._place.is_host:
            driver.tell(lambda participant: participant.close("failed", sick))
        elif failure and self._seated is not None:  # who was refused must not stop a job of others
            driver.tell(lambda participant: participant.departing(sick, is_sick=True))
        elif self._place.is_host and not self._is_done:
            why = f"{self.name}, which hosts the coordination store, has ended"
            driver.tell(lambda participant: participant.close("host_left", why))

    def end_error(self) -> Exception | None:
        return exit_reasons.error(self._closed)

    # What is heard while we wait for a seat.

    def _hear_while_waiting(self, driver: Driver, word: news.News | Fenced | Lost) -> RendezvousInfo | None:
        match word:
            case news.Seated() as seated:
                return self._take_seat(driver, seated)
            case news.Progress(text):
                report.info(f"waiting: {text}")
            case news.Ended(closed):
                self._closed = closed
                raise exit_reasons.while_waiting(closed)
            case news.Refused(why):
                raise exit_reasons.refused(why)
            case news.TimedOut(why):
                raise exit_reasons.timed_out(why, self._params.run_id)
            case Lost(error):
                self._lost = error
                raise self._lost_error(error)
        return None

    def _take_seat(self, driver: Driver, seated: news.Seated) -> RendezvousInfo | None:
        """Our place, unless that generation is over for us already: then no worker has to be started for it."""
        number = seated.seat.generation
        if any(isinstance(one, Fenced) or (isinstance(one, news.Stop) and one.generation == number) for one in driver.peek()):
            self._worker_store.end_generation()  # workers elsewhere may have been told its port already
            driver.ready(self._hold_port)
            return None
        self._seated, self._has_asked, self._is_over, self._is_done = seated, False, False, False
        seat, generation = seated.seat, seated.generation
        report.info(
            f"generation {generation.number}: this node is {seat.group_rank} of {seat.group_world_size},"
            f" {seat.world_size} workers in all; {generation.why}"
        )
        self._worker_store.serve_if(seat.group_rank == 0)
        where = RendezvousStoreInfo(generation.master_addr, generation.master_port)
        return RendezvousInfo(self._place.open_store(generation), seat.group_rank, seat.group_world_size, where)

    def _hold_port(self) -> int:
        """In the driver's thread, when it is known by which address the others reach us."""
        return self._worker_store.hold(self._address)

    def _lost_error(self, error: Exception) -> Exception:
        is_told = isinstance(error, RendezvousError) or is_hosts_fault(error)
        return error if is_told else RendezvousConnectionError(str(error))

    def _tell(self, word: Word) -> None:
        if self._driver is not None:
            self._driver.tell(word)

    def _start(self) -> Driver:
        if self._driver is None:
            store_timeout_s = self._terms.patience_s(self._settings.store_timeout_s)
            self._licence = Licence()
            self._driver = Driver(
                self._open_session, Patience(self._terms.lease_s, store_timeout_s, REFUSAL_TIMEOUT_S), self._licence
            )
            self._driver.kill_workers = self._kill_workers
            self._driver.start()
        return self._driver

    def _open_session(self) -> tuple[Coordination, Participant] | None:
        """A connection, a lease, and the participant that lives on them; in the driver's thread."""
        driver, settings = self._driver, self._settings
        assert driver is not None

        def pause(seconds: float) -> bool:
            driver.wait(seconds)
            return not driver.is_stopped

        is_first = self._sessions == 0
        timeout_s = settings.join_timeout_s if is_first else settings.store_timeout_s
        connected = self._place.connect(self._terms.lease_s, timeout_s, REFUSAL_TIMEOUT_S, pause)
        if connected is None:
            return None
        engine, lease = connected
        self._sessions += 1
        self._address = self._worker_store.address_for(self._params.local_addr or self._place.advertised_address(engine))
        me = Identity(self.name, self._hint, self._address, lease)
        joining = make_joining(self._params, settings, self._introduction, me, self._terms)
        return engine, Participant(joining.replace(former=driver.former))
