"""Torch's names for etcd: its store, its back end that is one key, and its older handler, all over etcd's v3 API.

``EtcdRendezvousBackend`` is a cell in the cluster for `DynamicRendezvousHandler`. ``EtcdRendezvousHandler`` is our own handler on
etcd; the ``EtcdRendezvous`` that it is made from only says where and for which job: torch's has the phases of a protocol on
etcd's v2 API, which etcd no longer has.
"""

from __future__ import annotations

import binascii
import random
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from functools import partial

from rallypoint.base import defaults, environment
from rallypoint.base.records import Record
from rallypoint.coordination.engine import Coordination, CoordinationError
from rallypoint.coordination.etcd.engine import EtcdCell, EtcdCoordination
from rallypoint.coordination.etcd.gateway import EtcdAccess, access_of
from rallypoint.coordination.model import Item
from rallypoint.coordination.shared_store import SharedStore
from rallypoint.errors import RendezvousConnectionError, RendezvousStateError
from rallypoint.rendezvous import etcd
from rallypoint.rendezvous.dynamic import DynamicRendezvous
from rallypoint.rendezvous.dynamic_handler import RendezvousBackend
from rallypoint.rendezvous.handler import RendezvousHandler, RendezvousParameters
from rallypoint.store.interface import as_seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import timedelta
    from typing import Any, TypeVar

    T = TypeVar("T")

__all__ = [
    "EtcdRendezvous", "EtcdRendezvousBackend", "EtcdRendezvousHandler", "EtcdRendezvousRetryImmediately",
    "EtcdRendezvousRetryableFailure", "EtcdStore", "cas_delay", "create_backend", "create_rdzv_handler",
]  # fmt: skip

KEY_PREFIX = "/torch/elastic/rendezvous"
STORE_PREFIX = "/torch/elastic/store"
TTL_S = 7200
CONNECT_S = 30.0
LONGEST_DELAY_S = 0.1
FAILED = "The connection to etcd has failed. See inner exception for details."
CORRUPT = "The state object is corrupt. See inner exception for details."


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


class EtcdRendezvousRetryableFailure(Exception):
    """Kept for code that names it: nothing here raises it."""


class EtcdRendezvousRetryImmediately(Exception):
    """Kept for code that names it: nothing here raises it."""


class EtcdRendezvousBackend(RendezvousBackend):
    """The state of the job `run_id` under a key of etcd; `client` is what `EtcdStore` takes. It is gone `ttl` s after the end."""

    def __init__(self, client: Any, run_id: str, key_prefix: str | None = None, ttl: int | None = None) -> None:
        if not run_id:
            raise ValueError("The run id must be a non-empty string.")
        prefix = (key_prefix or KEY_PREFIX).rstrip("/")
        self._cell = EtcdCell(access_of(client), prefix, run_id, ttl if ttl and ttl > 0 else TTL_S)

    @property
    def name(self) -> str:
        return defaults.BACKEND_ETCD_V2

    def get_state(self) -> tuple[bytes, Any] | None:
        return _decoded(_talk(self._cell.get))

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        """The token is the revision of the key. One that is none of ours cannot be that of what is there."""
        if token is not None and not isinstance(token, int):
            found = self.get_state()
            return None if found is None else (*found, False)
        content = b64encode(state)
        has_set, item = _talk(lambda: self._cell.put(content, token or 0))
        found = _decoded(item)
        return None if found is None else (*found, has_set)


def create_backend(params: RendezvousParameters) -> tuple[EtcdRendezvousBackend, EtcdStore]:
    """The back end that `params` describe, and a store in the same cluster."""
    endpoint = params.endpoint or f"localhost:{defaults.ETCD_PORT}"
    access = etcd.read_etcd_settings(params.config, environment.own).access(endpoint)
    backend = EtcdRendezvousBackend(access, params.run_id, key_prefix=KEY_PREFIX)
    backend.get_state()  # so that who cannot reach it hears of it now
    return backend, EtcdStore(access, STORE_PREFIX)


class EtcdRendezvous(Record):
    """Where a job meets, and how many its nodes are; what torch's class does in phases is our handler's own affair."""

    client: Any
    prefix: str
    run_id: str
    num_min_workers: int
    num_max_workers: int
    timeout: float
    last_call_timeout: float

    def parameters(self, local_addr: str | None) -> RendezvousParameters:
        """The same as parameters of a handler."""
        access = access_of(self.client)
        return RendezvousParameters(
            defaults.BACKEND_ETCD,
            ",".join(access.names()),
            self.run_id,
            self.num_min_workers,
            self.num_max_workers,
            local_addr,
            protocol=access.protocol,
            prefix=self.prefix.rstrip("/"),
            join_timeout=self.timeout,
            last_call_timeout=self.last_call_timeout,
        )


class EtcdRendezvousHandler(DynamicRendezvous):
    """Our handler on etcd, made as torch's is, or from parameters, which have room for more settings."""

    def __init__(self, rdzv_impl: EtcdRendezvous | RendezvousParameters, local_addr: str | None) -> None:
        params = rdzv_impl if isinstance(rdzv_impl, RendezvousParameters) else rdzv_impl.parameters(local_addr)
        super().__init__(*etcd.handler_parts(params))


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Our handler for a job whose nodes meet in etcd."""
    return EtcdRendezvousHandler(params, params.local_addr)


def _talk(call: Callable[[], T]) -> T:
    try:
        return call()
    except (CoordinationError, OSError) as error:
        raise RendezvousConnectionError(FAILED) from error


def _decoded(item: Item | None) -> tuple[bytes, Any] | None:
    if item is None:
        return None
    try:
        return b64decode(item.value), item.mod_revision
    except binascii.Error as error:
        raise RendezvousStateError(CORRUPT) from error
