"""A store for the members of a job, kept in an etcd cluster under a prefix; called like torch's EtcdStore."""

from __future__ import annotations

import random
import time
from functools import partial

from rallypoint.base import defaults
from rallypoint.coordination.engine import Coordination
from rallypoint.coordination.etcd.engine import EtcdCoordination
from rallypoint.coordination.etcd.gateway import EtcdAccess, access_of
from rallypoint.coordination.shared_store import SharedStore
from rallypoint.store.interface import as_seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import timedelta
    from typing import Any

__all__ = ["EtcdStore", "cas_delay"]

CONNECT_S = 30.0
LONGEST_DELAY_S = 0.1


class EtcdStore(SharedStore):
    """Keys and values under `etcd_store_prefix`, for everybody who comes to the same cluster with the same prefix.

    `etcd_client` says how to come at it: an `EtcdAccess`, an endpoint as text, ``host:port``, or a client of python-etcd, of
    which host and port are used, with etcd's v3 API.
    """

    def __init__(self, etcd_client: Any, etcd_store_prefix: str, timeout: timedelta | float | None = None) -> None:
        timeout_s = float(defaults.STORE_TIMEOUT_S) if timeout is None else as_seconds(timeout)
        super().__init__(partial(_connect, access_of(etcd_client), f"{etcd_store_prefix.rstrip('/')}/"), "", timeout_s)


def cas_delay() -> None:
    """Sleep for a short time that nobody can foresee, so that those who collide do not do so again."""
    time.sleep(random.uniform(0, LONGEST_DELAY_S))


def _connect(access: EtcdAccess, prefix: str) -> Coordination:
    engine = EtcdCoordination(access, prefix)
    try:
        engine.connect(time.monotonic() + CONNECT_S)
    except BaseException:  # its threads and sockets must not stay; it is raised again
        engine.close()
        raise
    return engine
