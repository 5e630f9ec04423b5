"""A job's place in an etcd cluster: a prefix, which is empty before its first node comes and after its last one has gone."""

from __future__ import annotations

import time
from contextlib import suppress
from math import inf

from rallypoint import report
from rallypoint.core.clearing import MayReturn, clearing
from rallypoint.core.coordination import Event, Item, Transaction
from rallypoint.rendezvous.place import Place
from rallypoint.rendezvous.settings import Settings
from rallypoint.store.coordination import Coordination, CoordinationError, UnreachableError
from rallypoint.store.etcd_access import EtcdAccess
from rallypoint.store.etcd_engine import EtcdCoordination

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.rendezvous.etcd_bootstrap import Bootstrap

__all__ = ["EtcdPlace"]

CLEAR_S = 10.0
CONNECT_S = 5.0  # a cluster that has just lost its leader needs seconds to answer


class EtcdPlace(Place):
    """Where a job is in the cluster; with `bootstrap` in one that its own nodes run."""

    def __init__(
        self, access: EtcdAccess, prefix: str, fence_s: float, settings: Settings, bootstrap: Bootstrap | None = None
    ) -> None:
        super().__init__(", ".join(access.names()))
        self._access = access
        self._prefix = prefix
        self._fence_s = fence_s
        self._settings = settings
        self._bootstrap = bootstrap
        self._is_cleared = False
        self._found: tuple[Item, ...] = ()  # what is left of a job that may have ended
        self._silent_since = 0.0

    @property
    def is_host(self) -> bool:
        return self._bootstrap is not None and self._bootstrap.is_whole_cluster

    @property
    def _connect_timeout_s(self) -> float:
        return self._settings.store_timeout_s

    def _new_engine(self) -> Coordination:
        return TellingCoordination(self._access, self._prefix, fence_s=self._fence_s)

    def _open(self, engine: Coordination, deadline: float) -> None:
        assert isinstance(engine, EtcdCoordination)
        engine.connect(max(deadline, time.monotonic() + CONNECT_S))
        if not self._is_cleared:
            self._begin_anew_if_over(engine, deadline)
            self._is_cleared = True

    def _begin_anew_if_over(self, engine: Coordination, deadline: float) -> None:
        """Clear what is left of a job that is over; UnreachableError, at the deadline, while that cannot be known."""
        left, now = engine.read("", time.monotonic() + CLEAR_S), time.monotonic()
        if left.items != self._found:
            is_first, self._found, self._silent_since = not self._found, left.items, now
        else:
            is_first = False
        match clearing(left, now - self._silent_since):
            case MayReturn(nodes, for_s):
                why = f"{nodes} nodes of a job of this id are silent, and may be back within {for_s:.0f} s"
                if is_first:
                    report.info(f"{why}; waiting for that")
                time.sleep(max(0.0, min(for_s, deadline - now)))
                raise UnreachableError(why)
            case Transaction() as transaction:
                engine.transact(transaction, time.monotonic() + CLEAR_S)

    def _try_once(self, lease_s: float, slice_ends: float) -> tuple[Coordination, int]:
        if self._bootstrap is not None:
            self._bootstrap.start()
            self._bootstrap.check()
        return super()._try_once(lease_s, slice_ends)

    def advertised_address(self, engine: Coordination) -> str:
        return engine.local_address()

    def close(self, close_timeout_s: float) -> None:
        """The last one to leave takes the job's keys along, or the cluster, if that is the job's own."""
        if self._bootstrap is not None:
            self._bootstrap.leave(self._prefix, close_timeout_s if self._identity else 0.0)
        elif self._identity and not self._is_away():
            self._clear()

    def _clear(self) -> None:
        """Where the cluster is away the keys stay, until the job begins anew."""
        try:
            engine = self.new_connection()
        except CoordinationError as error:
            report.debug(f"the job's keys stay in etcd: {error}")
            return
        with suppress(CoordinationError):
            clear_if_over(engine)
        engine.close()

    def _is_away(self) -> bool:
        return self._engine is not None and self._engine.connection().unreachable_since is not None


class TellingCoordination(EtcdCoordination):
    """Says once when the cluster is away, and once when it is back."""

    _away_since: float | None = None

    def take_events(self) -> list[Event]:
        try:
            events = super().take_events()
        except UnreachableError as error:
            self._tell_away(str(error))
            raise
        self._tell_back()
        return events

    def _tell_away(self, why: str) -> None:
        now = time.monotonic()
        left_s = self.valid_until() - now
        if self._away_since is None and 0 < left_s < inf:
            self._away_since = now
            report.warn(f"etcd does not answer; workers go on without it for another {left_s:.0f} s at most: {why}")

    def _tell_back(self) -> None:
        if self._away_since is not None:
            report.info(f"etcd answers again, after {time.monotonic() - self._away_since:.1f} s")
            self._away_since = None


def clear_if_over(engine: Coordination) -> None:
    """Delete what is left of a job of which no node is alive."""
    transaction = clearing(engine.read("", time.monotonic() + CLEAR_S))
    if isinstance(transaction, Transaction):
        engine.transact(transaction, time.monotonic() + CLEAR_S)
