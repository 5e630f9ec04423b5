"""Torch's ``C10dRendezvousBackend``: a cell of bytes with a version under one key of a store, torch's or ours.

The key is torch's, ``torch.rendezvous.<run id>``, and holds the state in base64. The token is what the key held.
"""

from __future__ import annotations

import binascii
import os
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Callable

from rallypoint import events
from rallypoint.compat.torch_names import new_file_store, new_tcp_store
from rallypoint.errors import RendezvousConnectionError, RendezvousError, RendezvousStateError
from rallypoint.events import NodeState
from rallypoint.net.endpoint import parse_rendezvous_endpoint
from rallypoint.rendezvous.dynamic_handler import RendezvousBackend
from rallypoint.rendezvous.handler import RendezvousParameters

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["DEFAULT_PORT", "C10dRendezvousBackend", "create_backend"]

DEFAULT_PORT = 29400  # looked up when it is needed: callers replace it
READ_TIMEOUT_S = 60
EMPTY = "Y2FuaW1hZGFt"  # what torch writes where there is no state; a key that is not there would have to be waited for
FAILED = "The connection to the C10d store has failed. See inner exception for details."
CORRUPT = "The state object is corrupt. See inner exception for details."


class C10dRendezvousBackend(RendezvousBackend):
    """The state of the job `run_id` in `store`."""

    def __init__(self, store: Any, run_id: str) -> None:
        if not run_id:
            raise ValueError("The run id must be a non-empty string.")
        self._store = store
        self._key = f"torch.rendezvous.{run_id}"
        _talk(lambda: store.compare_set(self._key, "", EMPTY))

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, Any] | None:
        return _decoded(_talk(lambda: bytes(self._store.get(self._key))))

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        """A token that is none of ours cannot be that of what is there."""
        if token is not None and not isinstance(token, bytes):
            found = self.get_state()
            return None if found is None else (*found, False)
        expected = EMPTY if token is None else token.decode()
        desired = b64encode(state).decode()
        there = _talk(lambda: bytes(self._store.compare_set(self._key, expected, desired)))
        found = _decoded(there)
        return None if found is None else (*found, there == desired.encode())


def create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Any]:
    """The back end that `params` describe, and the store that it is in: a server here, a client of one, or a file."""
    kind = str(params.get("store_type", "tcp")).strip().lower()
    try:
        store = _create_store(kind, params)
        backend = C10dRendezvousBackend(store, params.run_id)
    except Exception as error:  # it is recorded, and raised again
        message = f"{type(error).__name__}: {error}"
        events.construct_and_record_rdzv_event(message=message, run_id=params.run_id, node_state=NodeState.FAILED)
        raise
    return backend, store


def _create_store(kind: str, params: RendezvousParameters) -> Any:
    if kind == "file":
        return _create_file_store(params)
    if kind == "tcp":
        return _create_tcp_store(params)
    raise ValueError("Invalid store type given. Currently only supports file and tcp.")


def _create_file_store(params: RendezvousParameters) -> Any:
    """At the path that the endpoint is, or at a new one, for nodes that find it otherwise."""
    try:
        path = params.endpoint or _new_file()
    except OSError as error:
        raise RendezvousError("The file creation for C10d store has failed. See inner exception for details.") from error
    return _talk(lambda: new_file_store(path))


def _new_file() -> str:
    file, path = tempfile.mkstemp()
    os.close(file)
    return path


def _create_tcp_store(params: RendezvousParameters) -> Any:
    """Where nothing else was said, whoever is at the endpoint serves it, if nobody does yet; all others are clients."""
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=DEFAULT_PORT)
    is_host = params.get_as_bool("is_host")
    timeout_s = params.get_as_int("read_timeout", READ_TIMEOUT_S) or 0
    if timeout_s <= 0:
        raise ValueError("The read timeout must be a positive integer.")

    def connect(is_master: bool) -> Any:
        store = _talk(lambda: new_tcp_store(host, port, is_master=is_master, timeout_s=timeout_s, multi_tenant=True))
        if is_master:
            message = f"Process {os.getpid()} hosts the TCP store for the C10d rendezvous backend."
            events.construct_and_record_rdzv_event(run_id=params.run_id, message=message, node_state=NodeState.INIT)
        return store

    if is_host is not None:
        return connect(is_host)
    if _is_this_machine(host):
        try:
            return connect(True)
        except RendezvousConnectionError:
            """Somebody else listens there already."""
    return connect(False)


def _is_this_machine(host: str) -> bool:
    """Whether a name stands for an address of this machine: one that a socket of it can have."""
    import socket

    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: Any) -> bool:
    import socket

    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _talk(call: Callable[[], Any]) -> Any:
    """Stores of torch's raise RuntimeErrors and ValueErrors of their own; ours are RuntimeErrors too."""
    try:
        return call()
    except (RuntimeError, ValueError, OSError) as error:
        raise RendezvousConnectionError(FAILED) from error


def _decoded(content: bytes) -> tuple[bytes, Any] | None:
    if content == EMPTY.encode():
        return None
    try:
        return b64decode(content), content
    except binascii.Error as error:
        raise RendezvousStateError(CORRUPT) from error
