"""The elastic rendezvous on an etcd v3 cluster: any node of the job may die, and none of them hosts anything.

A job's place in the cluster is a prefix, which is empty before its first node comes and after its last one has gone. The settings
that only this back end has say how to come at the cluster; names that torchrun's back end knows are kept.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from math import inf

from rallypoint.base import defaults, environment, report
from rallypoint.base.records import Value, field
from rallypoint.coordination.engine import Coordination, CoordinationError, UnreachableError
from rallypoint.coordination.etcd.engine import EtcdCoordination
from rallypoint.coordination.etcd.gateway import EtcdAccess
from rallypoint.coordination.model import Event, Item, Transaction
from rallypoint.errors import UsageError, bad_field
from rallypoint.net.endpoint import parse_rendezvous_endpoint
from rallypoint.protocol.generation import MayReturn, clearing
from rallypoint.rendezvous.dynamic import DynamicRendezvous
from rallypoint.rendezvous.handler import RendezvousHandler, RendezvousParameters
from rallypoint.rendezvous.joining import Terms, terms_of
from rallypoint.rendezvous.place import CLEAR_S, Place, clear_if_over
from rallypoint.rendezvous.secrets import tls_of
from rallypoint.rendezvous.settings import (
    Setting,
    Settings,
    announce,
    check_node_unit,
    converted,
    load_secret,
    node_count,
    read_settings,
    setting,
    settings_of,
    shown,
)
from rallypoint.rendezvous.worker_store import WorkerStore, settings_for_worker_store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Literal

    from rallypoint.rendezvous.etcd_bootstrap import Bootstrap

__all__ = [
    "ETCD_SETTINGS", "EtcdPlace", "EtcdSettings", "create_handler", "handler_parts", "markdown", "parse_endpoints",
    "read_etcd_settings",
]  # fmt: skip


# --- settings --------------------------------------------------------------------------------------------------------------


_PASSWORD_BYTES = 4096


class EtcdSettings(Value):
    """What the back end was told. `others` is left for the settings that all elastic back ends have."""

    # A table is read by its rows.
    # fmt: off
    protocol: Literal["http", "https"] = setting("protocol", "http", "http or https.")
    cacert: str | None = setting(
        "path", None, "CA file that the members' certificates must be signed by.", other_name="ca_cert")
    cert: str | None = setting(
        "path", None, "This node's certificate file, if the cluster requires one.", other_name="ssl_cert")
    key: str | None = setting("path", None, "Key file for that certificate.", other_name="ssl_cert_key")
    user: str | None = setting("text", None, "User name, if the cluster requires one.")
    password_file: str | None = setting("path", None, "File with that user's password.")
    prefix: str = setting(
        "text", defaults.ETCD_PREFIX, "Key prefix for all jobs; each job is under its ID.", other_name="etcd_prefix")
    read_timeout_s: float = setting("seconds", 60.0, "Time limit for one answer.")
    fence_s: float = setting(
        "seconds", defaults.ETCD_FENCE_S,
        "How long the workers of a node that has lost the cluster keep running before they are killed, and how long the"
        " other nodes wait before they replace it.")
    bootstrap: bool = setting("truth", False, "Start a cluster member on each host in the endpoint.")
    # fmt: on
    others: dict[str, Any] = field(factory=dict)

    def access(self, endpoint: str) -> EtcdAccess:
        """How to come at the cluster that is there."""
        password = _password(self.user, self.password_file)
        tls = self.cacert, self.cert, self.key
        _check_tls(self.protocol, *tls)
        return EtcdAccess(parse_endpoints(endpoint), self.protocol, *tls, self.user, password, self.read_timeout_s)


ETCD_SETTINGS = settings_of(EtcdSettings)


def read_etcd_settings(config: Mapping[str, Any], environ: Mapping[str, str]) -> EtcdSettings:
    """UsageError names the setting, its value and where that stands."""
    names = {name for setting in ETCD_SETTINGS for name in (setting.key, setting.other_name)}
    given = {setting.field: value for setting in ETCD_SETTINGS if (value := _value_of(setting, config, environ)) is not None}
    return EtcdSettings(**given, others={name: value for name, value in config.items() if name not in names})


def _value_of(setting: Setting, config: Mapping[str, Any], environ: Mapping[str, str]) -> Any:
    variable = f"{defaults.ENV_SETTING_PREFIX}ETCD_{setting.key.upper()}"
    sources = {f"--rdzv-conf: {name}": config.get(name) for name in (setting.key, setting.other_name)}
    sources[variable] = environ.get(variable) or None
    given = ((source, value) for source, value in sources.items() if value is not None)
    return next((converted(setting.kind, value, source) for source, value in given), None)


def markdown() -> str:
    """The settings as a table for the documentation."""
    rows = []
    for one in ETCD_SETTINGS:
        names = ", ".join(f"`{name}`" for name in (one.key, one.other_name) if name)
        rows.append(f"| {names} | {shown(one.kind, one.default) or '-'} | {one.help} |")
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows])


def parse_endpoints(endpoint: str) -> tuple[tuple[str, int], ...]:
    """Every member of ``a:2379,b,c``; without a port it is etcd's usual one."""
    names = [name for name in map(str.strip, endpoint.split(",")) if name]
    if not names:
        problem = " is empty: the etcd back end needs an endpoint, as host:2379, or several of them with commas between them"
        raise bad_field("rdzv_endpoint", problem)
    return tuple(parse_rendezvous_endpoint(name, defaults.ETCD_PORT) for name in names)


def _password(user: str | None, path: str | None) -> str | None:
    if user is None or path is None:
        if user is not path:
            raise UsageError("etcd: a user needs a password_file, and a password_file a user; one of them is not given")
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline(_PASSWORD_BYTES).rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"password_file: {path} cannot be read: {error}") from None


def _check_tls(protocol: str, ca_cert: str | None, cert: str | None, key: str | None) -> None:
    files = [path for path in (ca_cert, cert, key) if path is not None]
    if files and protocol != "https":
        raise UsageError(f"etcd: {files[0]} is given, but protocol is http; add protocol=https")
    if key is not None and cert is None:
        raise UsageError("etcd: there is a key, and no certificate that it belongs to; give cert")


# --- etcd place ------------------------------------------------------------------------------------------------------------


NODES_PER_KEEPALIVE_SECOND = 200
CONNECT_S = 5.0  # a cluster that has just lost its leader needs seconds to answer


class EtcdPlace(Place):
    """Where a job is in the cluster; with `bootstrap` in one that its own nodes run."""

    def __init__(
        self, access: EtcdAccess, prefix: str, fence_s: float, settings: Settings, bootstrap: Bootstrap | None = None
    ) -> None:
        super().__init__(", ".join(access.names()), settings.store_timeout_s)
        self._access = access
        self._prefix = prefix
        self._fence_s = fence_s
        self._bootstrap = bootstrap
        self._is_cleared = False
        self._found: tuple[Item, ...] = ()  # what is left of a job that may have ended
        self._silent_since = 0.0

    @property
    def is_host(self) -> bool:
        return self._bootstrap is not None and self._bootstrap.is_whole_cluster

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

    def close(self, close_timeout_s: float) -> None:
        """The last one to leave takes the job's keys along, or the cluster, if that is the job's own."""
        if self._bootstrap is not None:
            self._bootstrap.leave(self._prefix, close_timeout_s if self.identity else 0.0)
        elif self.identity and not self._is_away():
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


# --- etcd ------------------------------------------------------------------------------------------------------------------


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """From parameters, checked, to a handler. Nothing is opened yet."""
    return DynamicRendezvous(*handler_parts(params))


def handler_parts(params: RendezvousParameters) -> tuple[RendezvousParameters, Settings, Place, Terms, WorkerStore]:
    """What such a handler is made of."""
    _check_run_id(params.run_id)
    cluster = read_etcd_settings(params.config, environment.own)
    access = cluster.access(params.endpoint)
    settings = read_settings(cluster.others, environment.own)
    check_node_unit(settings, params.min_nodes, params.max_nodes)
    if params.backend == defaults.BACKEND_ETCD_V2:
        report.info(f"the back end {params.backend} speaks etcd's v3 API, as {defaults.BACKEND_ETCD} does: v2 is gone from etcd")
    if load_secret(settings, environment.own) is not None:
        report.warn("the job's secret has no effect on etcd: who may join is up to the cluster's users and certificates")
    if tls_of(settings) is not None:
        report.warn("tls_cert, tls_key and tls_ca have no effect on etcd, whose own settings are cert, key and cacert")
    where = ", ".join(access.names())
    size = node_count(params.min_nodes, params.max_nodes)
    announce(f"rendezvous in etcd at {where}: {size}, fence {cluster.fence_s:g} s", settings)
    bootstrap = _bootstrap(access, params.run_id) if cluster.bootstrap else None
    place = EtcdPlace(access, f"{cluster.prefix}/{params.run_id}/", cluster.fence_s, settings, bootstrap)
    terms = terms_of(settings, params.max_nodes, NODES_PER_KEEPALIVE_SECOND, cluster.fence_s)
    return params, settings, place, terms, WorkerStore(settings_for_worker_store(settings, environment.own))


def _bootstrap(access: EtcdAccess, run_id: str) -> Bootstrap:
    from rallypoint.coordination.etcd.member import plan_cluster
    from rallypoint.rendezvous.etcd_bootstrap import Bootstrap

    return Bootstrap(plan_cluster(access, run_id), access, environment.own)


def _check_run_id(run_id: str) -> None:
    if run_id == defaults.RUN_ID_CLI:
        problem = f" is {run_id!r}: a cluster serves many jobs, and those without a name would meet; name this one"
        raise bad_field("run_id", problem)
    if "/" in run_id:
        raise bad_field("run_id", f" is {run_id!r}: in etcd a job's keys stand under its name, which cannot have a slash")
