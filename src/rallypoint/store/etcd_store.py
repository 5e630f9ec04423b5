"""A store for the members of a job, kept in an etcd cluster under a prefix; called like torch's EtcdStore."""

from __future__ import annotations

import time
from functools import partial

from rallypoint import defaults
from rallypoint.store.coordination import Coordination
from rallypoint.store.etcd_access import EtcdAccess
from rallypoint.store.etcd_engine import EtcdCoordination
from rallypoint.store.interface import as_seconds
from rallypoint.store.shared_store import SharedStore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import timedelta

__all__ = ["EtcdStore"]

CONNECT_S = 30.0


class EtcdStore(SharedStore):
    """Keys and values under `etcd_store_prefix`, for everybody who comes to the same cluster with the same prefix.

    `etcd_client` says how to come at it: an `EtcdAccess`, or an endpoint as text, ``host:port``.
    """

    def __init__(self, etcd_client: EtcdAccess | str, etcd_store_prefix: str, timeout: timedelta | float | None = None) -> None:
        access = EtcdAccess((_split(etcd_client),)) if isinstance(etcd_client, str) else etcd_client
        timeout_s = float(defaults.STORE_TIMEOUT_S) if timeout is None else as_seconds(timeout)
        super().__init__(partial(_connect, access, f"{etcd_store_prefix.rstrip('/')}/"), "", timeout_s)


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def _connect(access: EtcdAccess, prefix: str) -> Coordination:
    engine = EtcdCoordination(access, prefix)
    try:
        engine.connect(time.monotonic() + CONNECT_S)
    except BaseException:  # its threads and sockets must not stay; it is raised again
        engine.close()
        raise
    return engine
