"""Torch's ``DynamicRendezvousHandler``: a rendezvous over any back end that is one cell of bytes with a version.

It is the same rendezvous as on our own stores (`dynamic`), with the cell as its store. An agent of ours uses it as such. Any
other caller finds torch's: `is_closed`, `set_closed` and `num_nodes_waiting` ask the back end, and raise what it raises; whoever
calls `next_rendezvous` while its generation runs makes all others come back too; and `shutdown` closes the job. Names, defaults
and refusals are torch's, so that back ends and programs written for it fit.
"""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count

from rallypoint import events
from rallypoint.base import defaults, environment, report
from rallypoint.base.environment import torch_distributed
from rallypoint.base.records import Value
from rallypoint.coordination.cell.engine import CellCoordination
from rallypoint.coordination.engine import Coordination, CoordinationError
from rallypoint.coordination.model import Compare, Put, Snapshot, Transaction
from rallypoint.errors import RendezvousClosedError, RendezvousConnectionError, RendezvousError, UsageError
from rallypoint.events import NodeState
from rallypoint.net.endpoint import get_local_address
from rallypoint.protocol import agent_machine, session
from rallypoint.protocol import job_records as job
from rallypoint.protocol.verdict import NodeReport
from rallypoint.rendezvous.coordinated import Introduction
from rallypoint.rendezvous.dynamic import LEAVE_TIMEOUT_S, DynamicRendezvous
from rallypoint.rendezvous.handler import RendezvousInfo, RendezvousParameters
from rallypoint.rendezvous.joining import terms_of
from rallypoint.rendezvous.place import Place, clear_if_over
from rallypoint.rendezvous.settings import Settings, read_settings
from rallypoint.rendezvous.worker_store import WorkerStore, settings_for_worker_store
from rallypoint.store.prefix_store import PrefixStore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar, TypeVar

    from typing_extensions import Self

    from rallypoint.coordination.cell.engine import Backend

    T = TypeVar("T")

__all__ = ["DynamicRendezvousHandler", "RendezvousBackend", "RendezvousSettings", "RendezvousTimeout", "create_handler"]


# --- cell backend ----------------------------------------------------------------------------------------------------------


HEARTBEAT_TIMEOUT_S = 5


class RendezvousBackend(ABC):
    """Where a job keeps the state of its rendezvous: all of it at once, and changed only by who has seen the latest."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of this kind of back end."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Any] | None:
        """The state and its token, None if there is none.

        Raises RendezvousConnectionError if the back end cannot be reached, RendezvousStateError if what is there is corrupt.
        """

    @abstractmethod
    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        """Write the state if the one that is there still has `token`, or, without a token, if there is none.

        Gives the state and the token that are there now, and whether they are ours.
        """


class RendezvousTimeout:
    """How long things may take; each must be longer than nothing.

    >>> from datetime import timedelta
    >>> from rallypoint.rendezvous import RendezvousTimeout
    >>> RendezvousTimeout(join=timedelta(minutes=10)).join
    datetime.timedelta(seconds=600)
    """

    _DEFAULT_TIMEOUTS: ClassVar[dict[str, timedelta]] = {
        "join": timedelta(seconds=defaults.JOIN_TIMEOUT_S),
        "last_call": timedelta(seconds=defaults.LAST_CALL_TIMEOUT_S),
        "close": timedelta(seconds=defaults.CLOSE_TIMEOUT_S),
        "heartbeat": timedelta(seconds=HEARTBEAT_TIMEOUT_S),
    }

    def __init__(
        self,
        join: timedelta | None = None,
        last_call: timedelta | None = None,
        close: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        self._join = self._checked("join", join)
        self._last_call = self._checked("last_call", last_call)
        self._close = self._checked("close", close)
        self._heartbeat = self._checked("heartbeat", heartbeat)

    @property
    def join(self) -> timedelta:
        """How long a node waits to be let in."""
        return self._join

    @property
    def last_call(self) -> timedelta:
        """How long more nodes are waited for, once the least number is here."""
        return self._last_call

    @property
    def close(self) -> timedelta:
        """How long the end may take."""
        return self._close

    @property
    def heartbeat(self) -> timedelta:
        """How long a sign of life may take; the time of each call is the back end's own affair here."""
        return self._heartbeat

    def _checked(self, name: str, timeout: timedelta | None) -> timedelta:
        if timeout is None:
            return self._DEFAULT_TIMEOUTS[name]
        if timeout <= timedelta(0):
            raise ValueError(f"The {name} timeout ({timeout}) must be positive.")
        return timeout


class RendezvousSettings(Value):
    """What a handler was told. The lease of a node is `keep_alive_interval` times `keep_alive_max_attempt`."""

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int
    cas_backoff_max_seconds: float = 0.0  # the longest pause after a write of the state that lost to another; 0: as we think fit


# --- cell place ------------------------------------------------------------------------------------------------------------


CONNECT_S = 10.0
CLEAR_S = 5.0
NODES_PER_KEEPALIVE_SECOND = 20  # each writes all that there is, and only one at a time can


class CellPlace(Place):
    """A job's place in a back end that somebody else has written. `store` is what the nodes share beside its cell."""

    def __init__(self, backend: Backend, backend_name: str, run_id: str, store: Any, backoff_max_s: float) -> None:
        super().__init__(f"the back end {backend_name!r}", CONNECT_S)
        self._backend = backend
        self._run_id = run_id
        self._shared = store
        self._backoff_max_s = backoff_max_s

    def connect(
        self, lease_s: float, timeout_s: float, refusal_timeout_s: float, pause: Callable[[float], bool]
    ) -> tuple[Coordination, int] | None:
        """A back end that cannot be reached at first is not waited for: whoever made it has waited."""
        if self.identity:
            return super().connect(lease_s, timeout_s, refusal_timeout_s, pause)
        return self._try_once(lease_s, time.monotonic())

    def open_store(self, generation: job.Generation) -> Any:
        return _part_of(self._shared, f"torch.rendezvous.{self._run_id}.{generation.number}.{generation.attempt}")

    def _new_engine(self) -> Coordination:
        return CellCoordination(self._backend, backoff_max_s=self._backoff_max_s)

    def _open(self, engine: Coordination, deadline: float) -> None:
        assert isinstance(engine, CellCoordination)
        engine.connect(max(deadline, time.monotonic() + CONNECT_S))
        if not self.identity:
            _clear_if_over(engine)

    def advertised_address(self, engine: Coordination) -> str:
        return get_local_address()

    def close(self, close_timeout_s: float) -> None:
        """The last one to leave takes the job's keys along, unless it was closed for good."""
        if self.identity and self._engine is not None and self._engine.connection().unreachable_since is None:
            engine = self._new_engine()
            with suppress(CoordinationError):  # what is left is cleared when the job begins anew
                _clear_if_over(engine)
            engine.close()


def _clear_if_over(engine: Coordination) -> None:
    """Nobody comes back, as the fence is as long as the lease. A job that somebody has closed stays closed, as torch's do."""
    clear_if_over(engine, math.inf, but_closed=True, within_s=CLEAR_S)


def _part_of(store: Any, prefix: str) -> Any:
    """A part of the store, of the same family: torch's own code takes only torch's stores."""
    torch = torch_distributed()
    is_torchs = torch is not None and isinstance(store, torch.Store)
    return torch.PrefixStore(prefix, store) if torch is not None and is_torchs else PrefixStore(prefix, store)


# --- dynamic handler -------------------------------------------------------------------------------------------------------


UNCOUNTED = 1_000_000  # restarts: agents that are not ours count them, each its own
LEAST_LEASE_S = 1.0
_local_ids = count()  # of the handlers of this process
KEEP_ALIVE_INTERVAL_S = 5
KEEP_ALIVE_MAX_ATTEMPT = 3


class DynamicRendezvousHandler(DynamicRendezvous):
    """One node's handler over a back end; made by `from_backend` or `create_handler`."""

    def __init__(
        self, node: str | None, settings: RendezvousSettings, backend_name: str, store: Any, state_holder: RendezvousBackend
    ) -> None:
        """`node` is the address by which peers reach this node, if it was given; `state_holder` is the back end."""
        _check(settings)
        self._told = settings
        self._backend = state_holder
        self._is_introduced = False
        self._local_id = next(_local_ids)
        self._node = f"{node or os.uname().nodename}_{os.getpid()}_{self._local_id}"
        own = _own_settings(settings)
        super().__init__(
            RendezvousParameters(backend_name, "", settings.run_id, settings.min_nodes, settings.max_nodes, node),
            own,
            CellPlace(state_holder, backend_name, settings.run_id, store, settings.cas_backoff_max_seconds),
            terms_of(own, settings.max_nodes, NODES_PER_KEEPALIVE_SECOND),
            WorkerStore(settings_for_worker_store(own, environment.own)),
        )
        self._introduction = self._introduction.replace(max_restarts=UNCOUNTED)

    @classmethod
    def from_backend(
        cls,
        run_id: str,
        store: Any,
        backend: RendezvousBackend,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        timeout: RendezvousTimeout | None = None,
        keep_alive_interval: int = KEEP_ALIVE_INTERVAL_S,
        keep_alive_max_attempt: int = KEEP_ALIVE_MAX_ATTEMPT,
        cas_backoff_max_seconds: float = 0.0,
    ) -> Self:
        """A handler for the job `run_id`; `store` is what its nodes share once they have met."""
        interval = timedelta(seconds=keep_alive_interval)
        timeout = timeout or RendezvousTimeout()
        attempts, backoff_s = keep_alive_max_attempt, cas_backoff_max_seconds
        settings = RendezvousSettings(run_id, min_nodes, max_nodes, timeout, interval, attempts, backoff_s)
        return cls(local_addr, settings, backend.name, store, backend)

    @property
    def settings(self) -> RendezvousSettings:
        """What it was told."""
        return self._told

    def introduce(self, introduction: Introduction) -> None:
        self._is_introduced = True
        super().introduce(introduction)

    # As torch's handlers, for agents that are not ours.

    def next_rendezvous(self) -> RendezvousInfo:
        """After an error nothing is left that runs, and it may be called again."""
        self._record(NodeState.RUNNING, f"The node {self._node!r} attempts to join the next round of the rendezvous.")
        try:
            self._end_generation()
            info = super().next_rendezvous()
        except BaseException as error:  # whatever it was; it is raised again
            self._record(NodeState.FAILED, f"{type(error).__name__}: {error}")
            self._withdraw()
            raise
        place = f"as rank {info.rank} in a world of size {info.world_size}"
        self._record(NodeState.RUNNING, f"The node {self._node!r} has joined the rendezvous {place}.", info.rank)
        return info

    def _end_generation(self) -> None:
        """The caller's workers are gone. If nobody else has stopped them, it has, and it does not say why."""
        if not isinstance(self._state, session.Member):
            return
        seen = self.observe()
        if isinstance(seen, agent_machine.JobEnded):
            raise RendezvousClosedError(f"the job has ended: {seen.why}")
        if seen is None:
            self.report_failure(NodeReport(stopped=self._introduction.workers))

    def is_closed(self) -> bool:
        if isinstance(self._state, session.JobOver):
            return True
        return self._ask(lambda engine, until: bool(engine.read(job.CLOSED, until).items))

    def set_closed(self) -> None:
        closed = job.encode(job.Closed("closed", f"{self.name} closed it", self.name))
        first = Transaction((Compare(job.CLOSED, "create", 0),), (Put(job.CLOSED, closed),))
        self._ask(lambda engine, until: engine.transact(first, until))
        self._record(NodeState.SUCCEEDED, f"The node {self._node!r} has closed the rendezvous.")

    def num_nodes_waiting(self) -> int:
        return max(super().num_nodes_waiting(), self._ask(lambda engine, until: self._count_waiting(engine.read("", until))))

    def shutdown(self) -> bool:
        """Whether it went well. A node of an agent of ours that has no seat only leaves; any other closes the job."""
        try:
            if self._is_introduced:
                return super().shutdown()
            self.set_closed()
        except RendezvousError as error:
            report.warn(f"the rendezvous of run {self.get_run_id()!r} was not closed: {error}")
            return False
        finally:
            self.leave()
        return True

    def _stop_heartbeats(self) -> None:
        """Say no more that this node lives, nor that it goes: the others will take it for dead."""
        driver = self._take_driver()
        if driver is not None:
            driver.stop(LEAVE_TIMEOUT_S)
            driver.close()
        self._forget()
        self._worker_store.close()

    def _record(self, state: NodeState, message: str, rank: int | None = None) -> None:
        events.construct_and_record_rdzv_event(
            self.get_run_id(), message, state, name=type(self).__name__, local_id=self._local_id, rank=rank
        )

    def _withdraw(self) -> None:
        self.leave()
        self._forget()

    def _forget(self) -> None:
        """The next rendezvous begins anew."""
        self._state = session.Apart()

    def _count_waiting(self, state: Snapshot) -> int:
        """Nodes that are ready and have no seat, while there is a generation with room for them."""
        found = {item.key: item for item in state.items}
        if job.GENERATION not in found:
            return 0
        generation = job.decode(job.Generation, found[job.GENERATION].value)
        seats = job.seats_of_attempt(generation.number, generation.attempt)
        seated = {key.removeprefix(seats) for key in found if key.startswith(seats)}
        nodes = {key.removeprefix(job.node_key("")): one for key, one in found.items() if key.startswith(job.node_key(""))}
        waiting = [one for node, one in nodes.items() if node not in seated and _is_ready(one.value)]
        return len(waiting) if len(seated) < self._told.max_nodes else 0

    def _ask(self, question: Callable[[Coordination, float], T]) -> T:
        """Ask the back end, now."""
        engine = CellCoordination(self._backend)
        try:
            return question(engine, time.monotonic() + self._settings.store_timeout_s)
        except CoordinationError as error:
            raise self._lost_error(error) from error
        finally:
            engine.close()

    def _lost_error(self, error: Exception) -> Exception:
        """What the back end itself has raised reaches the caller as it is, also where we have put it into words of ours."""
        if not isinstance(error, CoordinationError | OSError):
            return error
        cause = error.__cause__
        is_theirs = isinstance(cause, Exception) and type(cause).__name__ == RendezvousConnectionError.__name__
        return cause if isinstance(cause, Exception) and is_theirs else RendezvousConnectionError(str(error))


def create_handler(store: Any, backend: RendezvousBackend, params: RendezvousParameters) -> DynamicRendezvousHandler:
    """A handler for `params`, whose settings are those of ``--rdzv-conf``."""
    try:
        return _create_handler(store, backend, params)
    except Exception as error:  # it is recorded, and raised again
        message = f"{type(error).__name__}: {error}"
        events.construct_and_record_rdzv_event(message=message, run_id=params.run_id, node_state=NodeState.FAILED)
        raise


def _create_handler(store: Any, backend: RendezvousBackend, params: RendezvousParameters) -> DynamicRendezvousHandler:
    seconds = {name: params.get_as_int(f"{name}_timeout") for name in ("join", "last_call", "close", "heartbeat")}
    timeout = RendezvousTimeout(**{name: timedelta(seconds=one) for name, one in seconds.items() if one is not None})
    return DynamicRendezvousHandler.from_backend(
        params.run_id,
        store,
        backend,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        timeout,
        keep_alive_interval=params.get_as_int("keep_alive_interval", KEEP_ALIVE_INTERVAL_S) or 0,
        keep_alive_max_attempt=params.get_as_int("keep_alive_max_attempt", KEEP_ALIVE_MAX_ATTEMPT) or 0,
        cas_backoff_max_seconds=_as_float("cas_backoff_max_seconds", params.get("cas_backoff_max_seconds", 0.0)),
    )


def _as_float(key: str, value: Any) -> float:
    try:
        return float(value)
    except (ValueError, TypeError) as error:
        raise UsageError(f"rendezvous setting {key}={value!r} is not a number") from error


def _check(settings: RendezvousSettings) -> None:
    least, most, backoff_s = settings.min_nodes, settings.max_nodes, settings.cas_backoff_max_seconds
    if not settings.run_id:
        raise ValueError("The run id must be a non-empty string.")
    if least < 1:
        raise ValueError(f"The minimum number of nodes ({least}) must be greater than zero.")
    if most < least:
        raise ValueError(
            f"The maximum number of nodes ({most}) must be greater than or equal to the minimum number of nodes ({least})."
        )
    if not 0 <= backoff_s < math.inf:
        raise ValueError(f"cas_backoff_max_seconds ({backoff_s}) must be finite and non-negative.")


def _own_settings(told: RendezvousSettings) -> Settings:
    """In our words; a lease that no node could keep is made longer, since torch refuses none."""
    attempts = max(1, told.keep_alive_max_attempt)
    return read_settings({}, environment.own).replace(
        join_timeout_s=told.timeout.join.total_seconds(),
        last_call_timeout_s=told.timeout.last_call.total_seconds(),
        close_timeout_s=told.timeout.close.total_seconds(),
        keep_alive_interval_s=max(told.keep_alive_interval.total_seconds(), LEAST_LEASE_S / attempts),
        keep_alive_max_attempt=attempts,
    )


def _is_ready(record: bytes) -> bool:
    return job.decode(job.NodeRecord, record).ready_after != job.NOT_READY
