"""The thread that carries on a node's part in a job, whatever its agent is busy with.

It owns the connection to the coordination store, and drives a `protocol.participant.Participant` over it: one request at a time,
events as they come, keepalives when they are due. `protocol.session` says when a session is over; then a new one begins, under a
new number.

It also keeps the workers' licence: with each word of the store it writes down until when they may run. If this thread hangs, or
the whole process does, the warden ends them by that.

The agent speaks to it through `tell`, and hears from it through `take`; `fileno` wakes the agent.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from rallypoint.base import report
from rallypoint.coordination import fence
from rallypoint.coordination.engine import (
    CompactedError,
    Coordination,
    CoordinationError,
    LeaseLostError,
    RefusedError,
    StoreGoneError,
    StoreReplacedError,
    UnreachableError,
)
from rallypoint.coordination.model import Outcome, Read, Request, Snapshot, Transaction
from rallypoint.errors import RendezvousError
from rallypoint.net.wake_fd import WakeFd
from rallypoint.processes.context import wait_readable
from rallypoint.processes.licence import Licence
from rallypoint.protocol import job_records as job
from rallypoint.protocol import session
from rallypoint.protocol.participant import Former, Participant
from rallypoint.protocol.session import NO_LICENCE, Patience, Tenure

__all__ = ["Driver", "Saying"]

REQUEST_TIMEOUT_S = 10.0
RETRY_S = 0.2


Saying = Callable[[Participant], None]


class Driver:
    """One thread; `connect` gives a connection with a lease and the participant that goes with it, or None when stopped.

    It sleeps nowhere but in `wait` and in calls to that connection, and all its times are those of `clock`.
    """

    def __init__(
        self,
        connect: Callable[[], tuple[Coordination, Participant] | None],
        patience: Patience,
        licence: Licence,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[Iterable[int], float], object] = wait_readable,
    ) -> None:
        self._connect = connect
        self._patience = patience
        self._licence = licence
        self._clock = clock
        self._wait_readable = wait
        self._licence.extend(NO_LICENCE)
        self.kill_workers: Callable[[], None] = lambda: None  # at once, from whatever thread
        self.on_asked: Callable[[session.AskedFor], None] = lambda _: None  # in this thread; it must return at once
        self.on_drain: Callable[[session.Noticed | session.Ruled], None] = lambda _: None  # as that; it is the agent who acts
        self.on_inquiry: Callable[[int, bytes], None] = lambda *_: None  # the same; the agent is woken after it
        self.on_pace: Callable[[int, bytes], None] = lambda *_: None  # the same
        self.speaks_for_job = False  # as of the last word that was passed on
        self._former: tuple[str, Former | None] = "", None  # what the next session is to vouch for, in which store
        self._memory: tuple[str, job.Memory | None] = "", None  # and what to remember, in any other
        self._store = ""  # of the latest session
        self._lock = threading.Lock()
        self._sayings: deque[Saying] = deque()
        self._heard: deque[session.Word] = deque()
        self._bell = WakeFd()  # wakes this thread
        self._out = WakeFd()  # wakes the agent
        self._fenced = WakeFd()  # says that workers must not run
        self._is_stopped = False
        self._ready_port: int | None = None
        self._entrusted: tuple[int, job.Seat | None] = 0, None  # for which lease and seat the warden knows what to say
        self._thread = threading.Thread(target=self._run, name="rallypoint-rendezvous", daemon=True)

    # For the agent's thread.

    def start(self) -> None:
        self._thread.start()

    def ready(self, hold_port: Callable[[], int]) -> None:
        """No worker runs here. Holds for later sessions too, until a seat is found; `hold_port` opens what workers will need."""

        def say(participant: Participant) -> None:
            self._ready_port = hold_port()
            participant.ready(self._clock(), self._ready_port)

        self.tell(say)

    def tell(self, saying: Saying) -> None:
        """Let the participant be told something; in the order of calls."""
        self._sayings.append(saying)
        self._bell.set()

    def take(self) -> session.Word | None:
        """The oldest word that has not been taken."""
        self._out.clear()
        with self._lock:
            heard = self._heard.popleft() if self._heard else None
            if self._heard:
                self._out.set()
        return heard

    def peek(self) -> tuple[session.Word, ...]:
        with self._lock:
            return tuple(self._heard)

    def fileno(self) -> int:
        return self._out.fileno()

    def fence_fileno(self) -> int:
        return self._fenced.fileno()

    def stop(self, timeout_s: float) -> bool:
        """Let the thread end after what it was told; whether it did in time."""
        self._is_stopped = True
        self._bell.set()
        if self._thread is threading.current_thread():  # which has just dropped the last reference to a handler
            return False
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def background(self, store: str) -> tuple[Former | None, job.Memory | None]:
        """What a session in this store has to vouch for, and what to remember."""
        (former_in, former), (learned_in, memory) = self._former, self._memory
        return former if store == former_in else None, memory if store != learned_in else None

    def close(self) -> None:
        """Let go of everything, unless the thread is stuck: then the process's end does it."""
        if self._thread.is_alive():
            return
        for bell in (self._bell, self._out, self._fenced):
            bell.close()
        self._licence.close()

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    def wait(self, timeout_s: float) -> None:
        """For `connect`: sleep, unless there is something to do."""
        self._wait_readable([self._bell.fileno()], timeout_s)
        self._bell.clear()

    # The thread itself.

    def _run(self) -> None:
        try:
            while not self._is_stopped and self._live_one_session():
                pass
        except (CoordinationError, RendezvousError, OSError) as error:
            self._lose(error)
        except Exception as error:  # the thread ends here: whatever it was, the agent must not wait for it for ever
            self._lose(error)
            report.warn(f"the rendezvous thread failed: {error!r}")

    def _lose(self, error: Exception) -> None:
        self._end_licence()
        self._hear(session.Lost(error))

    def _live_one_session(self) -> bool:
        """Until the session ends; whether another one is to follow."""
        connected = self._connect()
        if connected is None:
            return False
        engine, participant = connected
        self._store = engine.identity()
        self._entrust(engine, participant)
        try:
            if self._ready_port is not None:
                participant.ready(self._clock(), self._ready_port)
            return self._drive(engine, Tenure(participant, self._patience))
        finally:
            self._licence.entrust(None)
            engine.close()

    def _drive(self, engine: Coordination, tenure: Tenure) -> bool:
        participant = tenure.participant
        while True:
            match tenure.judge(engine.connection(), self._clock()):
                case fence.Fence(why):
                    return self._end_session(tenure, why)
                case fence.GiveUp(why):
                    raise StoreGoneError(why)
            is_reached = True
            try:
                is_busy = self._turn_or_come_back(engine, tenure)
            except LeaseLostError as error:
                return self._end_session(tenure, str(error))
            except UnreachableError:
                is_busy = is_reached = False
                if self._is_stopped:
                    return False  # nobody there to say goodbye to
            except CompactedError:
                participant.look_again()
                is_busy = True
            except (StoreGoneError, RefusedError) as error:
                is_wanted = self._end_session(tenure, str(error))
                if isinstance(error, StoreReplacedError) and self._patience.takes_another:
                    return is_wanted
                raise
            self._renew_licence(engine, tenure)
            if (participant.lease, participant.seat) != self._entrusted:
                self._entrust(engine, participant)
            self._pass_on(participant)
            if self._is_stopped and not self._sayings and not self._has_to_say(participant):
                return False
            if not is_busy:
                self._rest(engine, participant.wake_at() if is_reached else None)

    def _turn_or_come_back(self, engine: Coordination, tenure: Tenure) -> bool:
        try:
            return self._turn(engine, tenure.participant)
        except LeaseLostError:
            if not self._come_back(engine, tenure):
                raise
            return True

    def _come_back(self, engine: Coordination, tenure: Tenure) -> bool:
        """Our lease has ended: whether we have got a new one while we are still within our fence."""
        returns_until = tenure.returns_until(engine.may_return_until())
        while not self._is_stopped and (now := self._clock()) < returns_until:
            try:
                lease = engine.grant(self._patience.lease_s, min(returns_until, now + REQUEST_TIMEOUT_S))
            except (UnreachableError, LeaseLostError):  # also one that has run out while it was granted
                self.wait(min(RETRY_S, max(0.0, returns_until - self._clock())))
            else:
                tenure.participant.come_back(lease)
                return True
        return False

    def _entrust(self, engine: Coordination, participant: Participant) -> None:
        """Let the warden know what to tell the store, should this process die."""
        self._licence.entrust(engine.testimony(participant.last_will()))
        self._entrusted = participant.lease, participant.seat

    def _renew_licence(self, engine: Coordination, tenure: Tenure) -> None:
        until = tenure.licence_until(engine.valid_until())
        if until is not None:
            self._licence.extend(until)

    def _end_licence(self) -> None:
        self._licence.extend(NO_LICENCE)
        self.kill_workers()

    def _turn(self, engine: Coordination, participant: Participant) -> bool:
        """Take in what came, do the one thing that is next; whether there may be more to do."""
        self._bell.clear()
        while self._sayings:
            self._sayings.popleft()(participant)
        now = self._clock()
        for event in engine.take_events():
            participant.see(event, now)
        request = participant.next_request(now)
        if request is None:
            return False
        answer = self._perform(engine, request)
        participant.replied(request, answer, self._clock())
        return True

    def _perform(self, engine: Coordination, request: Request) -> Outcome | Snapshot | None:
        deadline = min(self._clock() + REQUEST_TIMEOUT_S, engine.valid_until())
        if isinstance(request, Transaction):
            return engine.transact(request, deadline)
        if isinstance(request, Read):
            return engine.read(request.prefix, deadline)
        engine.watch(request.prefix, request.from_revision, deadline)
        return None

    def _rest(self, engine: Coordination, wake_at: float | None) -> None:
        """Until something comes, or is due; what the participant has to ask waits while nobody would answer."""
        times = [engine.wake_at(), engine.valid_until(), self._clock() + REQUEST_TIMEOUT_S]
        if wake_at is not None:
            times.append(wake_at)
        self._wait_readable([engine.fileno(), self._bell.fileno()], min(times) - self._clock())

    def _has_to_say(self, participant: Participant) -> bool:
        return participant.is_leaving and not participant.has_left

    def _end_session(self, tenure: Tenure, why: str) -> bool:
        """We are not part of the job any more; if workers may run, that ends them."""
        ending = tenure.end(self._clock())
        self._note_background(ending)
        if ending.had_seat:
            self._end_licence()
        self._pass_on(tenure.participant)
        if ending.was_stopping:  # our agent hears nothing
            report.warn(f"this node's workers are killed: {why}")
        if ending.had_seat:
            self._fenced.set()
            is_waited_for = self._patience.takes_another and not ending.was_replaced
            self._hear(session.CutOff(why) if is_waited_for else session.Fenced(why))
        else:
            report.info(f"joining anew: {why}")
        return not self._is_stopped

    def _note_background(self, ending: session.Ending) -> None:
        """A store that was started anew may know less of the job than we do: what is newer is kept."""
        known, memory = self._memory[1], ending.memory
        self._former = self._store, ending.former
        if memory is not None and (known is None or memory.number >= known.number):
            self._memory = self._store, memory

    def _pass_on(self, participant: Participant) -> None:
        self.speaks_for_job = participant.speaks_for_job
        for one in participant.take_news():
            if isinstance(one, session.AskedFor):
                self.on_asked(one)
                continue
            if isinstance(one, session.Noticed | session.Ruled):
                self.on_drain(one)
                self._out.set()
                continue
            if isinstance(one, session.Paced):
                self.on_pace(one.generation, one.found)
                self._out.set()
                continue
            if isinstance(one, session.Inquired):
                self.on_inquiry(one.generation, one.inquiry)
                self._out.set()
                continue
            if isinstance(one, session.Seated):
                self._ready_port = None
                self._fenced.clear()
            self._hear(one)

    def _hear(self, one: session.Word) -> None:
        with self._lock:
            self._heard.append(one)
        self._out.set()
