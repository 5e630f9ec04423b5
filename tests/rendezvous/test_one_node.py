"""The rendezvous of a single node, static and elastic."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from rallypoint.errors import RendezvousClosedError, UsageError
from rallypoint.rendezvous import local, static
from rallypoint.rendezvous.handler import RendezvousParameters, WakingHandler
from rallypoint.rendezvous.local import LocalRendezvous
from rallypoint.rendezvous.static import StaticTCPRendezvous


def params(backend: str, endpoint: str = "host:1234", max_nodes: int = 1, **settings: Any) -> RendezvousParameters:
    return RendezvousParameters(backend, endpoint, "job", 1, max_nodes, **settings)


# --- static ----------------------------------------------------------------------------------------------------------------


def test_static_gives_what_the_user_gave() -> None:
    handler = static.create_rdzv_handler(params("static", "[2001:db8::1]:90", rank="0", timeout="60"))
    assert isinstance(handler, StaticTCPRendezvous)
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert (info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) == ("2001:db8::1", 90)
    assert info.store.timeout_s == 60
    assert (handler.get_backend(), handler.get_run_id(), handler.use_agent_store) == ("static", "job", False)


def test_static_goes_on_as_often_as_asked_each_time_with_a_fresh_store() -> None:
    handler = StaticTCPRendezvous("127.0.0.1", 29500, 0, 1, "job", 60)
    stores = [handler.next_rendezvous().store for _ in range(2)]
    stores[0].set("stale", "1")
    assert not stores[1].check(["stale"])
    handler.set_closed()
    assert not handler.is_closed()
    assert handler.shutdown()
    assert handler.next_rendezvous().world_size == 1


def test_static_port_0_is_a_free_one() -> None:
    info = StaticTCPRendezvous("127.0.0.1", 0, 0, 1, "job", 60).next_rendezvous()
    with socket.create_server(("127.0.0.1", info.bootstrap_store_info.master_port)):
        pass


@pytest.mark.parametrize(
    ("endpoint", "max_nodes", "settings", "complaint"),
    [
        ("host:1", 1, {}, "--node-rank"),
        ("host:1", 1, {"rank": "first"}, "rank='first'"),
        ("", 1, {"rank": 0}, "--master-addr and --master-port"),
        ("  ", 1, {"rank": 0}, "--master-addr and --master-port"),
        ("host", 1, {"rank": 0}, "'host' has none; give --master-port"),
        ("host:x", 1, {"rank": 0}, "'host:x'"),
        ("host:1", 2, {"rank": 0}, "several nodes are not in this version yet"),
        ("host:1", 1, {"rank": 1}, "node_rank is 1"),
        ("host:1", 1, {"rank": -1}, "node_rank is -1"),
        ("host:1", 1, {"rank": 0, "timeout": 0}, "timeout is 0 s"),
        ("host:1", 1, {"rank": 0, "timeout": "soon"}, "timeout='soon'"),
    ],
)
def test_static_refuses_what_cannot_be(endpoint: str, max_nodes: int, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        static.create_rdzv_handler(params("static", endpoint, max_nodes, **settings))


# --- elastic ---------------------------------------------------------------------------------------------------------------


def test_local_gives_each_generation_its_own_store_and_a_free_port() -> None:
    handler = local.create_handler(params("c10d", ""))
    first, second = handler.next_rendezvous(), handler.next_rendezvous()
    first.store.set("stale", "1")
    assert not second.store.check(["stale"])
    for info in (first, second):
        assert (info.rank, info.world_size, info.bootstrap_store_info.master_addr) == (0, 1, "127.0.0.1")
        with socket.create_server(("127.0.0.1", info.bootstrap_store_info.master_port)):
            pass
    assert (handler.get_backend(), handler.get_run_id(), handler.use_agent_store) == ("c10d", "job", False)


def test_local_names_the_address_that_the_user_gave() -> None:
    handler = local.create_handler(params("c10d", local_addr="10.1.2.3"))
    assert handler.next_rendezvous().bootstrap_store_info.master_addr == "10.1.2.3"


@pytest.mark.parametrize("close", [LocalRendezvous.set_closed, LocalRendezvous.shutdown])
def test_local_ends_when_it_is_closed(close: Any) -> None:
    handler = LocalRendezvous("job")
    assert not handler.is_closed()
    close(handler)
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedError, match="'job'"):
        handler.next_rendezvous()


def test_local_refuses_an_endpoint_that_is_none() -> None:
    with pytest.raises(UsageError, match="'host:x'"):
        local.create_handler(params("c10d", "host:x"))


@pytest.mark.parametrize("handler", [LocalRendezvous("job"), StaticTCPRendezvous("127.0.0.1", 1, 0, 1, "job", 60)])
def test_nobody_ever_waits_so_nobody_need_ask(handler: WakingHandler) -> None:
    assert handler.num_nodes_waiting() == 0
    assert handler.wakeup_fd() is None
