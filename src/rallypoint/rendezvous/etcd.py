"""The elastic rendezvous on an etcd v3 cluster: any node of the job may die, and none of them hosts anything.

A job's place in an etcd cluster: a prefix, which is empty before its first node comes and after its last one has gone.
"""

from __future__ import annotations

import time
from contextlib import suppress
from math import inf

from rallypoint.base import defaults, environment, report
from rallypoint.coordination.engine import Coordination, CoordinationError, UnreachableError
from rallypoint.coordination.etcd.access import EtcdAccess
from rallypoint.coordination.etcd.engine import EtcdCoordination
from rallypoint.coordination.model import Event, Item, Transaction
from rallypoint.errors import UsageError
from rallypoint.protocol.generation import MayReturn, clearing
from rallypoint.rendezvous.dynamic import DynamicRendezvous
from rallypoint.rendezvous.etcd_settings import read_etcd_settings
from rallypoint.rendezvous.handler import RendezvousHandler, RendezvousParameters
from rallypoint.rendezvous.joining import Terms, etcd_terms
from rallypoint.rendezvous.place import Place
from rallypoint.rendezvous.secret import load_secret
from rallypoint.rendezvous.settings import Settings, announce, check_node_unit, node_count, read_settings
from rallypoint.rendezvous.worker_store import WorkerStore, settings_for_worker_store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.rendezvous.etcd_bootstrap import Bootstrap

__all__ = ["EtcdPlace", "create_handler", "handler_parts"]


# --- etcd place ------------------------------------------------------------------------------------------------------------


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


# --- etcd ------------------------------------------------------------------------------------------------------------------


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """From parameters, checked, to a handler. Nothing is opened yet."""
    return DynamicRendezvous(*handler_parts(params))


def handler_parts(params: RendezvousParameters) -> tuple[RendezvousParameters, Settings, Place, Terms, WorkerStore]:
    """What such a handler is made of."""
    _check_run_id(params.run_id)
    cluster = read_etcd_settings(params.endpoint, params.config, environment.own)
    settings = read_settings(cluster.others, environment.own)
    check_node_unit(settings, params.min_nodes, params.max_nodes)
    if params.backend == defaults.BACKEND_ETCD_V2:
        report.info(f"the back end {params.backend} speaks etcd's v3 API, as {defaults.BACKEND_ETCD} does: v2 is gone from etcd")
    if load_secret(settings, environment.own) is not None:
        report.warn("the job's secret has no effect on etcd: who may join is up to the cluster's users and certificates")
    where = ", ".join(cluster.access.names())
    size = node_count(params.min_nodes, params.max_nodes)
    announce(f"rendezvous in etcd at {where}: {size}, fence {cluster.fence_s:g} s", settings)
    bootstrap = _bootstrap(cluster.access, params.run_id) if cluster.bootstrap else None
    place = EtcdPlace(cluster.access, f"{cluster.prefix}/{params.run_id}/", cluster.fence_s, settings, bootstrap)
    terms = etcd_terms(settings, params.max_nodes, cluster.fence_s)
    return params, settings, place, terms, WorkerStore(settings_for_worker_store(settings, environment.own))


def _bootstrap(access: EtcdAccess, run_id: str) -> Bootstrap:
    from rallypoint.coordination.etcd.member import plan_cluster
    from rallypoint.rendezvous.etcd_bootstrap import Bootstrap

    return Bootstrap(plan_cluster(access, run_id), access, environment.own)


def _check_run_id(run_id: str) -> None:
    if run_id == defaults.RUN_ID_CLI:
        raise UsageError(
            f"--rdzv-id is {run_id!r}: a cluster serves many jobs, and those without a name would meet; name this one"
        )
    if "/" in run_id:
        raise UsageError(f"--rdzv-id is {run_id!r}: in etcd a job's keys stand under its name, which cannot have a slash")
