"""Torch's C10d back end over stores of ours and of torch's, and the stores that programs ask for by torch's functions."""

from __future__ import annotations

import importlib.util
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.ports import free_port
from tests.torch_process import torch_importable

from rallypoint.compat import c10d_backend
from rallypoint.compat.c10d_backend import C10dRendezvousBackend, create_backend
from rallypoint.compat.torch_names import create_c10d_store
from rallypoint.errors import RendezvousConnectionError, RendezvousStateError
from rallypoint.rendezvous.dynamic_handler import create_handler
from rallypoint.rendezvous.handler import RendezvousParameters
from rallypoint.store.file_store import FileStore
from rallypoint.store.hash_store import HashStore
from rallypoint.store.interface import StoreError, StoreNetworkError, StoreTimeoutError
from rallypoint.store.tcp_store import TCPStore

KEY = "torch.rendezvous.job"


ERRORS = [RuntimeError("e"), ValueError("e"), TimeoutError("e"), StoreError("e"), OSError("e")]
WITH_TORCH = pytest.param("torch", marks=pytest.mark.torch)


@pytest.fixture(scope="module", autouse=True)
def _libuv_is_loaded() -> None:
    """The first of torch's stores opens a pipe that stays for the life of the process."""
    if importlib.util.find_spec("torch") is not None:
        with torch_importable():
            importlib.import_module("torch.distributed").TCPStore("127.0.0.1", 0, is_master=True)


@pytest.fixture(params=["ours", WITH_TORCH])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose stores there are; where they are ours, no other test's import of torch counts."""
    if request.param == "torch":
        pytest.importorskip("torch.distributed")
    else:
        monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    return str(request.param)


@pytest.fixture
def hash_store(family: str) -> Any:
    return sys.modules["torch.distributed"].HashStore() if family == "torch" else HashStore()


def test_a_state_is_written_only_by_who_has_seen_the_latest(hash_store: Any) -> None:
    backend = C10dRendezvousBackend(hash_store, "job")
    assert (backend.name, backend.get_state(), backend.set_state(b"late", b"token")) == ("c10d", None, None)
    assert backend.set_state(b"one") == (b"one", b64encode(b"one"), True)
    assert hash_store.get(KEY) == b64encode(b"one")
    state = backend.set_state(b"\0two", b64encode(b"one"))
    assert state == (b"\0two", b64encode(b"\0two"), True)
    for token in (None, b64encode(b"one"), b"other", "text", 5):
        assert backend.set_state(b"three", token) == (*state[:2], False)
    assert backend.get_state() == state[:2]
    assert C10dRendezvousBackend(hash_store, "job").get_state() == state[:2], "another one leaves what is there"


def test_what_is_not_base64_is_corrupt(hash_store: Any) -> None:
    backend = C10dRendezvousBackend(hash_store, "job")
    hash_store.set(KEY, "not_base64")
    for call in (backend.get_state, lambda: backend.set_state(b"x"), lambda: backend.set_state(b"x", b"token")):
        with pytest.raises(RendezvousStateError, match="corrupt") as caught:
            call()
        assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    "error", [RuntimeError("e"), ValueError("e"), TimeoutError("e"), StoreError("e"), OSError("e")], ids=repr
)
def test_a_store_that_fails_cannot_be_reached(error: Exception) -> None:
    store = mock.Mock(**{"compare_set.side_effect": error, "get.side_effect": error})
    with pytest.raises(RendezvousConnectionError):
        C10dRendezvousBackend(store, "job")
    store.compare_set.side_effect = None
    backend = C10dRendezvousBackend(store, "job")
    store.compare_set.side_effect = error
    for call in (backend.get_state, lambda: backend.set_state(b"x")):
        with pytest.raises(RendezvousConnectionError, match="connection to the C10d store has failed") as caught:
            call()
        assert caught.value.__cause__ is error


def test_a_job_needs_a_name() -> None:
    with pytest.raises(ValueError, match="run id must be a non-empty string"):
        C10dRendezvousBackend(HashStore(), "")


# --- create_backend --------------------------------------------------------------------------------------------------------


Create = Callable[..., tuple[C10dRendezvousBackend, Any]]


@pytest.fixture
def create(family: str) -> Iterator[Create]:
    stores = []

    def create(endpoint: str, **config: Any) -> tuple[C10dRendezvousBackend, Any]:
        backend, store = create_backend(RendezvousParameters("c10d", endpoint, "job", 1, 1, "127.0.0.1", **config))
        stores.append(store)
        return backend, store

    yield create
    for store in stores:
        if hasattr(store, "close"):
            store.close()
    stores.clear()  # torch's are closed when nobody has them any more


def test_the_first_at_the_endpoint_serves_and_the_others_are_clients(create: Create, family: str) -> None:
    endpoint = f"localhost:{free_port()}"
    backend, store = create(endpoint, read_timeout="10")
    assert (backend.name, store.host, f"localhost:{store.port}", store.libuvBackend) == ("c10d", "localhost", endpoint, True)
    assert (type(store) is TCPStore, store.timeout) == (family == "ours", timedelta(seconds=10))
    backend.set_state(b"state")
    for config in ({}, {"is_host": "false"}, {"is_host": True}, {"store_type": " TCP "}):
        other, store = create(endpoint, **config)
        assert other.get_state() == (b"state", b64encode(b"state"))
    assert store.timeout == timedelta(seconds=60)


def test_the_default_port_is_looked_up_when_it_is_needed(create: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d_backend, "DEFAULT_PORT", free_port())
    assert create("localhost")[1].port == c10d_backend.DEFAULT_PORT


def test_a_file_is_a_store_too(create: Create, tmp_path: Path, family: str) -> None:
    backend, store = create(str(tmp_path / "file"), store_type=" fIlE ")
    backend.set_state(b"state")
    assert (type(store) is FileStore, store.path) == (family == "ours", str(tmp_path / "file"))
    assert create(str(tmp_path / "file"), store_type="file")[0].get_state() == (b"state", b64encode(b"state"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"store_type": "other"}, "store type"),
        ({"read_timeout": "0"}, "read timeout must be a positive integer"),
        ({"read_timeout": "-10"}, "read timeout must be a positive integer"),
        ({"read_timeout": "x"}, "read_timeout"),
        ({"is_host": "perhaps"}, "is_host"),
    ],
)
def test_settings_that_mean_nothing_are_refused(config: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_backend(RendezvousParameters("c10d", "localhost", "job", 1, 1, **config))


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    params = RendezvousParameters("c10d", f"localhost:{free_port()}", "job", 1, 1, is_host="false", read_timeout="1")
    with pytest.raises(RendezvousConnectionError) as caught:
        create_backend(params)
    assert isinstance(caught.value.__cause__, StoreNetworkError)


def test_a_job_over_it(create: Create, family: str) -> None:
    backend, store = create(f"localhost:{free_port()}")
    handler = create_handler(store, backend, RendezvousParameters("c10d", "", "job", 1, 1, "127.0.0.1"))
    info = handler.next_rendezvous()
    info.store.set("key", "value")
    assert (info.store.get("key"), handler.get_backend()) == (b"value", "c10d")
    assert handler.shutdown()


# --- create_c10d_store -----------------------------------------------------------------------------------------------------


def test_a_store_is_served_and_joined(family: str) -> None:
    server = create_c10d_store(True, "127.0.0.1", timeout=5)
    client = create_c10d_store(False, "127.0.0.1", server.port, timeout=5, use_libuv=False)
    server.set("key", "value")
    assert (client.get("key"), client.timeout, client.libuvBackend) == (b"value", timedelta(seconds=5), True)
    assert (type(server) is TCPStore) == (family == "ours")


def test_a_port_that_was_given_is_tried_once_and_one_that_was_found_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = create_c10d_store(True, "127.0.0.1", timeout=5)
    found = iter([server.port, server.port, free_port()])
    monkeypatch.setattr("rallypoint.compat.torch_names.get_free_port", lambda: next(found))
    with pytest.raises(RuntimeError, match=r"(?i)address already in use"):
        create_c10d_store(True, "127.0.0.1", server.port, timeout=5)
    assert create_c10d_store(True, "127.0.0.1", timeout=5).port != server.port


def test_errors_of_stores_are_those_of_their_family(family: str, capfd: pytest.CaptureFixture[str]) -> None:
    torch = sys.modules.get("torch.distributed")
    network, late = (torch.DistNetworkError, torch.DistStoreError) if torch else (StoreNetworkError, StoreTimeoutError)
    with pytest.raises(network):
        create_c10d_store(False, "127.0.0.1", free_port(), timeout=0.5)
    with pytest.raises(late, match=r"1.*2 clients joined"):
        create_c10d_store(True, "127.0.0.1", free_port(), world_size=2, timeout=0.5)
    with pytest.raises(ValueError, match="server_port"):
        create_c10d_store(True, "127.0.0.1", world_size=2)
