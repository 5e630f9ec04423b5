"""Where the nodes of a job meet, whichever engine is there: finding it, and trying again until it is there.

A store may end with its host, and be started anew. Where that is waited for, whoever was part of the job takes the new one, and
nobody who means the old one gets there.

An attempt may last as long as the network needs. It is made in slices, so that between them it is seen whether this node is still
wanted, and whether it can be the host by now.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from rallypoint.base import report
from rallypoint.coordination import fence
from rallypoint.coordination.engine import Coordination, StoreGoneError, StoreReplacedError, UnreachableError
from rallypoint.coordination.model import Transaction
from rallypoint.coordination.shared_store import SharedStore
from rallypoint.protocol import job_records as job
from rallypoint.protocol.generation import clearing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["CLEAR_S", "SLICE_S", "Place", "clear_if_over"]

SLICE_S = 0.5  # after each we look whether we are still wanted
HINT_S = 1.5
PROGRESS_INTERVAL_S = 10.0
GRANT_S = 10.0  # for round trips of seconds
CLEAR_S = 10.0


class Place(ABC):
    """The coordination store of one job, as one node finds it; `name` says where it is."""

    _goes_on = False  # whether an engine that was not welcomed in one slice may be in the next

    def __init__(
        self, name: str, connect_timeout_s: float, clock: Callable[[], float] = time.monotonic, host_timeout_s: float = 0.0
    ) -> None:
        """With `host_timeout_s`, a store that has ended is waited for so long, and may be another one then."""
        self._name = name
        self.host_timeout_s = host_timeout_s
        self._clock = clock
        self._connect_timeout_s = connect_timeout_s  # for the store that members share
        self.identity = ""  # of the store, once it was reached
        self._engine: Coordination | None = None  # the latest, which knows how the last session ended
        self._unfinished: Coordination | None = None  # the same, while it is not connected yet
        self._store: SharedStore | None = None

    def connect(
        self, lease_s: float, timeout_s: float, refusal_timeout_s: float, pause: Callable[[float], bool]
    ) -> tuple[Coordination, int] | None:
        """A connection to the store, which is opened here if need be, and a lease. None if `pause`, which sleeps, says stop.

        As long as there is time any break is only a reason to try again: there is nothing yet that could be lost by it.
        """
        began, is_told = self._clock(), False
        hint_at, tell_at = began + HINT_S, began + PROGRESS_INTERVAL_S
        refused_since = self._engine.connection().refused_since if self._engine else None
        try:
            while True:
                slice_ends = self._clock() + SLICE_S
                try:
                    return self._try_once(lease_s, slice_ends)
                except UnreachableError as error:
                    trouble, now = str(error), self._clock()
                is_refused = self._engine is not None and self._engine.connection().refused_since is not None
                refused_since = (refused_since or now) if is_refused else None
                tried = fence.Connection(math.inf, began, refused_since, trouble)
                match fence.judge_joining(self._name, tried, bool(self.identity), timeout_s, refusal_timeout_s, now):
                    case fence.NotReached(why):
                        raise UnreachableError(why)
                    case fence.GiveUp(why):
                        raise StoreGoneError(why)
                if self.identity and self.host_timeout_s and not is_told:
                    is_told = True
                    waits_s = min(timeout_s, refusal_timeout_s) if is_refused else timeout_s
                    report.warn(f"{trouble}; its host has ended or is out of reach; waiting up to {waits_s:g} s for it")
                if now >= hint_at:
                    hint_at = math.inf
                    self._hint(trouble, timeout_s)
                if now >= tell_at:
                    tell_at = now + PROGRESS_INTERVAL_S
                    report.info(f"{trouble}; trying for another {began + timeout_s - now:.0f} s")
                if not pause(0.0 if now >= slice_ends else 0.05):
                    return None
        finally:
            self._stop_trying()

    def _hint(self, trouble: str, timeout_s: float) -> None:
        """It takes longer than it does where all is well: say so, if something can be advised."""
        advice = self._advice()
        if advice and not self.identity:
            report.info(f"{trouble}; trying for up to {timeout_s:g} s. {advice[0].upper()}{advice[1:]}")

    def _advice(self) -> str:
        """What a user may look at when the store is not found; nothing where the trouble says it all."""
        return ""

    def _try_once(self, lease_s: float, slice_ends: float) -> tuple[Coordination, int]:
        """One slice of trying, for which the next one goes on with the same engine where that can be."""
        engine = self._engine = self._unfinished or self._new_engine()
        self._unfinished = None
        try:
            self._open(engine, slice_ends)
            self._recognise(engine)
            return engine, engine.grant(lease_s, self._clock() + GRANT_S)
        except UnreachableError:
            self._unfinished = engine
            if not self._goes_on:
                self._stop_trying()
            raise
        except BaseException:  # whatever it was, the socket must not stay; it is raised again
            engine.close()
            raise

    def _stop_trying(self) -> None:
        engine, self._unfinished = self._unfinished, None
        if engine is not None:
            engine.close()

    def _recognise(self, engine: Coordination) -> None:
        """A store that was started anew knows nothing of the job that we are part of, but what its nodes tell it."""
        if self.identity not in ("", engine.identity()):
            if not self.host_timeout_s:
                raise self._replaced("the job ends here")
            report.info(f"the coordination store at {self._name} was started anew; this node tells it what it knows of the job")
        self.identity = engine.identity()

    def _replaced(self, what_follows: str) -> StoreReplacedError:
        return StoreReplacedError(
            f"the coordination store at {self._name} was started anew, without the state of this job; {what_follows}"
        )

    def new_connection(self) -> Coordination:
        """Another connection to the same store, without a lease."""
        return self._connection_to(self.identity)

    def _connection_to(self, identity: str) -> Coordination:
        """To that store, and to none that came after it."""
        engine = self._new_engine()
        try:
            self._open(engine, self._clock() + self._connect_timeout_s)
            if identity not in ("", engine.identity()):
                raise self._replaced("what was shared in the old one is gone")
        except BaseException:  # whatever it was, the socket must not stay; it is raised again
            engine.close()
            raise
        return engine

    def open_store(self, generation: job.Generation) -> Any:
        """The store that the members of a generation share; it has a connection only if somebody uses it."""
        self.close_store()
        connect = partial(self._connection_to, self.identity)
        self._store = SharedStore(connect, f"{job.DATA}{generation.number}.{generation.attempt}/")
        return self._store

    def close_store(self) -> None:
        """That of an older generation, or at the end."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    @abstractmethod
    def _new_engine(self) -> Coordination:
        """A client that is not connected yet."""

    @abstractmethod
    def _open(self, engine: Coordination, deadline: float) -> None:
        """Connect it."""

    @property
    def is_host(self) -> bool:
        """Whether the store ends with this node."""
        return False

    def advertised_address(self, engine: Coordination) -> str:
        """The address of this node that its peers have reached, or can reach."""
        return engine.local_address()

    @abstractmethod
    def close(self, close_timeout_s: float) -> None:
        """This node has left; a host stays until the others have gone, or for its time."""


def clear_if_over(engine: Coordination, silent_s: float = 0.0, but_closed: bool = False, within_s: float = CLEAR_S) -> None:
    """Delete what is left of a job of which no node is alive; with `but_closed` one that somebody has closed stays closed."""
    left = engine.read("", time.monotonic() + within_s)
    ends = (job.decode(job.Closed, item.value).kind for item in left.items if item.key == job.CLOSED)
    transaction = clearing(left, silent_s)
    if isinstance(transaction, Transaction) and not (but_closed and "closed" in ends):
        engine.transact(transaction, time.monotonic() + within_s)
