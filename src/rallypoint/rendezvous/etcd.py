"""The elastic rendezvous on an etcd v3 cluster: any node of the job may die, and none of them hosts anything."""

from __future__ import annotations

import os

from rallypoint import defaults, report
from rallypoint.errors import UsageError
from rallypoint.rendezvous.dynamic import DynamicRendezvous
from rallypoint.rendezvous.etcd_place import EtcdPlace
from rallypoint.rendezvous.etcd_settings import read_etcd_settings
from rallypoint.rendezvous.handler import RendezvousHandler, RendezvousParameters
from rallypoint.rendezvous.joining import Terms, etcd_terms
from rallypoint.rendezvous.place import Place
from rallypoint.rendezvous.secret import load_secret
from rallypoint.rendezvous.settings import Settings, check_node_unit, describe, read_settings
from rallypoint.rendezvous.worker_store import WorkerStore, settings_for_worker_store
from rallypoint.store.etcd_access import EtcdAccess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.rendezvous.etcd_bootstrap import Bootstrap

__all__ = ["create_handler", "handler_parts"]


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """From parameters, checked, to a handler. Nothing is opened yet."""
    return DynamicRendezvous(*handler_parts(params))


def handler_parts(params: RendezvousParameters) -> tuple[RendezvousParameters, Settings, Place, Terms, WorkerStore]:
    """What such a handler is made of."""
    _check_run_id(params.run_id)
    cluster = read_etcd_settings(params.endpoint, params.config, os.environ)
    settings = read_settings(cluster.others, os.environ)
    check_node_unit(settings, params.min_nodes, params.max_nodes)
    if params.backend == defaults.BACKEND_ETCD_V2:
        report.info(f"the back end {params.backend} speaks etcd's v3 API, as {defaults.BACKEND_ETCD} does: v2 is gone from etcd")
    if load_secret(settings, os.environ) is not None:
        report.warn("the job's secret has no effect on etcd: who may join is up to the cluster's users and certificates")
    where = ", ".join(cluster.access.names())
    report.info(
        f"rendezvous of {params.min_nodes} to {params.max_nodes} nodes in etcd at {where}: fence {cluster.fence_s:g} s,"
        f" {describe(settings)}"
    )
    bootstrap = _bootstrap(cluster.access, params.run_id) if cluster.bootstrap else None
    place = EtcdPlace(cluster.access, f"{cluster.prefix}/{params.run_id}/", cluster.fence_s, settings, bootstrap)
    terms = etcd_terms(settings, params.max_nodes, cluster.fence_s)
    return params, settings, place, terms, WorkerStore(settings_for_worker_store(settings, os.environ))


def _bootstrap(access: EtcdAccess, run_id: str) -> Bootstrap:
    from rallypoint.rendezvous.etcd_bootstrap import Bootstrap
    from rallypoint.rendezvous.etcd_member import plan_cluster

    return Bootstrap(plan_cluster(access, run_id), access, os.environ)


def _check_run_id(run_id: str) -> None:
    if run_id == defaults.RUN_ID_CLI:
        raise UsageError(
            f"--rdzv-id is {run_id!r}: a cluster serves many jobs, and those without a name would meet; name this one"
        )
    if "/" in run_id:
        raise UsageError(f"--rdzv-id is {run_id!r}: in etcd a job's keys stand under its name, which cannot have a slash")
