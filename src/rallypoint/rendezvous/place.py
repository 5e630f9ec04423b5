"""Where the nodes of a job meet, whichever engine is there: finding it, and trying again until it is there."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from rallypoint import report
from rallypoint.core import job_records as job
from rallypoint.store.coordination import Coordination, StoreGoneError, UnreachableError
from rallypoint.store.shared_store import SharedStore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["SLICE_S", "Place"]

SLICE_S = 0.5  # after each we look whether we are still wanted
PROGRESS_INTERVAL_S = 10.0


class Place(ABC):
    """The coordination store of one job, as one node finds it; `name` says where it is."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._identity = ""
        self._engine: Coordination | None = None  # the latest, which knows how the last session ended
        self._store: SharedStore | None = None

    def connect(self, timeout_s: float, refusal_timeout_s: float, pause: Callable[[float], bool]) -> Coordination | None:
        """A connection to the store, which is opened here if need be. None if `pause`, which sleeps, says that we are to stop."""
        began = time.monotonic()
        tell_at = began + PROGRESS_INTERVAL_S
        refused_since = self._engine.connection().refused_since if self._engine else None
        while True:
            try:
                return self._try_once()
            except UnreachableError as error:
                trouble, now = str(error), time.monotonic()
            is_refused = self._engine is not None and self._engine.connection().refused_since is not None
            refused_since = (refused_since or now) if is_refused else None
            self._give_up_if_hopeless(trouble, now - began, timeout_s, now - (refused_since or now), refusal_timeout_s)
            if now >= tell_at:
                tell_at = now + PROGRESS_INTERVAL_S
                report.info(f"{trouble}; trying for another {began + timeout_s - now:.0f} s")
            if not pause(0.05):
                return None

    def _give_up_if_hopeless(
        self, trouble: str, tried_s: float, timeout_s: float, refused_s: float, refusal_timeout_s: float
    ) -> None:
        if tried_s >= timeout_s:
            raise UnreachableError(f"the coordination store at {self._name} was not reached within {timeout_s:g} s: {trouble}")
        if self._identity and refused_s >= refusal_timeout_s:
            raise StoreGoneError(
                f"the coordination store at {self._name} is gone: its host has refused connections for"
                f" {refusal_timeout_s:g} s; the agent there has ended or was killed, and the job ends with it"
            )

    def _try_once(self) -> Coordination:
        engine = self._engine = self._new_engine()
        return self._connected(engine, time.monotonic() + SLICE_S)

    def _connected(self, engine: Coordination, deadline: float) -> Coordination:
        try:
            self._open(engine, deadline)
            self._check_identity(engine)
        except BaseException:  # whatever it was, the socket must not stay; it is raised again
            engine.close()
            raise
        return engine

    def _check_identity(self, engine: Coordination) -> None:
        """A store that was started anew knows nothing of the job that we are part of."""
        if self._identity and engine.identity() != self._identity:
            raise StoreGoneError(
                f"the coordination store at {self._name} was started anew, without the state of this job; the job ends here"
            )
        self._identity = engine.identity()

    def new_connection(self) -> Coordination:
        """Another connection to the same store, without a lease, for the store that members share."""
        return self._connected(self._new_engine(), time.monotonic() + self._connect_timeout_s)

    def open_store(self, generation: job.Generation) -> Any:
        """The store that the members of a generation share; it has a connection only if somebody uses it."""
        self.close_store()
        self._store = SharedStore(self.new_connection, f"{job.DATA}{generation.number}.{generation.attempt}/")
        return self._store

    def close_store(self) -> None:
        """That of an older generation, or at the end."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    @property
    @abstractmethod
    def _connect_timeout_s(self) -> float:
        """How long such a connection is tried for."""

    @abstractmethod
    def _new_engine(self) -> Coordination:
        """A client that is not connected yet."""

    @abstractmethod
    def _open(self, engine: Coordination, deadline: float) -> None:
        """Connect it."""

    @property
    @abstractmethod
    def is_host(self) -> bool:
        """Whether the store ends with this node."""

    @abstractmethod
    def advertised_address(self, engine: Coordination) -> str:
        """The address of this node that its peers have reached, or can reach."""

    @abstractmethod
    def close(self, close_timeout_s: float) -> None:
        """This node has left; a host stays until the others have gone, or for its time."""
