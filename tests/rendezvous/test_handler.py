"""The interface of a rendezvous: parameters, the registry, and the agreement on the master address."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rallypoint import errors
from rallypoint.errors import UsageError
from rallypoint.rendezvous import handler as handler_module
from rallypoint.rendezvous.handler import (
    RendezvousHandler,
    RendezvousHandlerRegistry,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from rallypoint.store.hash_store import HashStore


def make_params(backend: str = "mine", min_nodes: int = 1, max_nodes: int = 1, **settings: Any) -> RendezvousParameters:
    return RendezvousParameters(backend, "host:1", "job", min_nodes, max_nodes, **settings)


class MyHandler(RendezvousHandler):
    """A back end such as a plug-in brings."""

    def __init__(self, params: RendezvousParameters) -> None:
        self.params = params

    def get_backend(self) -> str:
        return "mine"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("host", 1))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "job"

    def shutdown(self) -> bool:
        return True


class OtherHandler(MyHandler):
    """Another back end under the same name."""


# --- parameters ------------------------------------------------------------------------------------------------------------


def test_parameters_are_kept() -> None:
    params = RendezvousParameters("b", "e", "r", 2, 3, "addr", timeout=5, other="x")
    assert (params.backend, params.endpoint, params.run_id, params.min_nodes, params.max_nodes) == ("b", "e", "r", 2, 3)
    assert (params.local_addr, params.config) == ("addr", {"timeout": 5, "other": "x"})
    assert (params.get("other"), params.get("none"), params.get("none", 7)) == ("x", None, 7)


@pytest.mark.parametrize(
    ("backend", "min_nodes", "max_nodes", "complaint"),
    [
        ("", 1, 1, "no name"),
        (None, 1, 1, "no name"),
        ("b", 0, 1, "min_nodes is 0"),
        ("b", -5, 1, "min_nodes is -5"),
        ("b", 3, 2, r"max_nodes \(2\).*min_nodes \(3\)"),
    ],
)
def test_impossible_parameters_are_refused(backend: str, min_nodes: int, max_nodes: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make_params(backend, min_nodes, max_nodes)


@pytest.mark.parametrize(
    ("value", "meaning"),
    [(word, True) for word in ("1", "True", "tRue", "T", "yEs", "Y", 1, True)]
    + [(word, False) for word in ("0", "False", "F", "nO", "N", 0, False)],
)
def test_booleans(value: object, meaning: bool) -> None:
    assert make_params(setting=value).get_as_bool("setting") is meaning


@pytest.mark.parametrize("value", ["01", "Flse", "4", "_", "", "truefalse", 2, -1, 1.0, []])
def test_other_values_are_no_booleans(value: object) -> None:
    with pytest.raises(UsageError, match="setting="):
        make_params(setting=value).get_as_bool("setting")


@pytest.mark.parametrize("value", ["0", "-10", " 4 ", 0, -4, 3])
def test_integers(value: Any) -> None:
    assert make_params(setting=value).get_as_int("setting") == int(value)


@pytest.mark.parametrize("value", ["a", "0a", "", "1.5", []])
def test_other_values_are_no_integers(value: object) -> None:
    with pytest.raises(UsageError, match="setting="):
        make_params(setting=value).get_as_int("setting")


def test_missing_settings_have_their_default() -> None:
    params = make_params()
    assert (params.get_as_bool("x"), params.get_as_bool("x", True), params.get_as_bool("x", False)) == (None, True, False)
    assert (params.get_as_int("x"), params.get_as_int("x", 5)) == (None, 5)


# --- the registry ----------------------------------------------------------------------------------------------------------


def test_the_registered_creator_makes_the_handler() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("mine", MyHandler)
    registry.register("mine", MyHandler)
    params = make_params()
    handler = registry.create_handler(params)
    assert isinstance(handler, MyHandler)
    assert handler.params is params
    assert not handler.use_agent_store


def test_a_name_belongs_to_one_creator() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("mine", MyHandler)
    with pytest.raises(ValueError, match=r"'mine'.*MyHandler"):
        registry.register("mine", OtherHandler)
    assert isinstance(registry.create_handler(make_params()), MyHandler)


def test_a_name_is_needed() -> None:
    with pytest.raises(ValueError, match="name"):
        RendezvousHandlerRegistry().register("", MyHandler)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("other", MyHandler)
    with pytest.raises(ValueError, match=r"'mine'.*other"):
        registry.create_handler(make_params())


def test_a_creator_of_another_backend_is_refused() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("alias", MyHandler)
    with pytest.raises(RuntimeError, match=r"'alias'.*'mine'"):
        registry.create_handler(make_params("alias"))


# --- what a node learns ----------------------------------------------------------------------------------------------------


def test_the_answer_of_a_rendezvous() -> None:
    store, where = HashStore(), RendezvousStoreInfo("host", 1)
    info = RendezvousInfo(store, 2, 3, where)
    assert (info.store, info.rank, info.world_size, info.bootstrap_store_info) == (store, 2, 3, where)
    assert repr(info) == f"RendezvousInfo(rank=2, world_size=3, bootstrap_store_info={where})"


def test_the_others_wait_for_the_address_of_rank_0() -> None:
    store = HashStore()
    store.set_timeout(10)
    answers: list[RendezvousStoreInfo] = []
    other = threading.Thread(target=lambda: answers.append(RendezvousStoreInfo.build(1, store, local_addr="elsewhere")))
    other.start()
    mine = RendezvousStoreInfo.build(0, store, local_addr="host-0")
    other.join(10)
    assert answers == [mine]
    assert mine.master_addr == "host-0"
    assert 0 < mine.master_port < 65536
    assert store.get(RendezvousStoreInfo.MASTER_ADDR_KEY) == b"host-0"
    assert store.get(RendezvousStoreInfo.MASTER_PORT_KEY) == str(mine.master_port).encode()


def test_both_forms_of_build_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler_module, "get_local_address", lambda: "this-host")
    assert RendezvousStoreInfo.build(0, HashStore()).master_addr == "this-host"
    assert RendezvousStoreInfo.build(0, HashStore(), None, 1234) == RendezvousStoreInfo("this-host", 1234)


def test_the_errors_are_the_packages_own() -> None:
    for name in ("Closed", "Connection", "GracefulExit", "State", "Timeout", ""):
        error = f"Rendezvous{name}Error"
        assert getattr(handler_module, error) is getattr(errors, error)
