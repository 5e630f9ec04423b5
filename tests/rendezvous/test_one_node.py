"""The rendezvous of a single node, static and elastic."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from tests.ports import free_port

from rallypoint.errors import RendezvousClosedError, RendezvousError, UsageError
from rallypoint.rendezvous import one_node
from rallypoint.rendezvous.handler import RendezvousHandler, RendezvousInfo, RendezvousParameters, WakingHandler
from rallypoint.rendezvous.one_node import LocalRendezvous, StaticTCPRendezvous

Handler = TypeVar("Handler", bound=RendezvousHandler)


def params(backend: str, endpoint: str = "host:1234", max_nodes: int = 1, **settings: Any) -> RendezvousParameters:
    return RendezvousParameters(backend, endpoint, "job", 1, max_nodes, **settings)


# --- static ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def closing(request: pytest.FixtureRequest) -> Callable[[Handler], Handler]:
    """``closing(handler)``: what it holds open is closed after the test."""

    def close_later(handler: Handler) -> Handler:
        request.addfinalizer(handler.shutdown)
        return handler

    return close_later


def is_held(info: RendezvousInfo) -> bool:
    """Whether nobody else can have the port that the workers are told."""
    where = info.bootstrap_store_info
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind((where.master_addr, where.master_port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
        return False


def test_static_gives_what_the_user_gave(closing: Any) -> None:
    port = free_port()
    handler = closing(one_node.create_rdzv_handler(params("static", f"[::1]:{port}", rank="0", timeout="60")))
    assert isinstance(handler, StaticTCPRendezvous)
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert (info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) == ("::1", port)
    assert info.store.timeout_s == 60
    assert (handler.get_backend(), handler.get_run_id(), handler.use_agent_store) == ("static", "job", True)


def test_static_goes_on_as_often_as_asked_each_time_with_a_fresh_store(closing: Any) -> None:
    handler = closing(StaticTCPRendezvous("127.0.0.1", free_port(), 0, 1, "job", 60))
    stores = [handler.next_rendezvous().store for _ in range(2)]
    stores[0].set("stale", "1")
    assert not stores[1].check(["stale"])
    handler.set_closed()
    assert not handler.is_closed()
    assert handler.shutdown()
    assert handler.next_rendezvous().world_size == 1


def test_p13_static_port_0_is_a_free_one_that_is_held() -> None:
    handler = StaticTCPRendezvous("127.0.0.1", 0, 0, 1, "job", 60)
    info = handler.next_rendezvous()
    assert is_held(info)
    handler.shutdown()
    assert not is_held(info)


@pytest.mark.parametrize(
    ("endpoint", "max_nodes", "settings", "complaint"),
    [
        ("host:1", 1, {}, "^rdzv_configs: .*, as rank$"),
        ("host:1", 1, {"rank": "first"}, "rank='first'"),
        ("", 1, {"rank": 0}, "^rdzv_endpoint is empty: .*host:port"),
        ("  ", 1, {"rank": 0}, "^rdzv_endpoint is empty: .*host:port"),
        ("host", 1, {"rank": 0}, "^rdzv_endpoint 'host' has no port"),
        ("host:x", 1, {"rank": 0}, "'host:x'"),
        ("host:1", 2, {"rank": 2}, r"node_rank is 2, but with 2 nodes"),
        ("host:1", 2, {"rank": 0, "timeout": 0}, "timeout is 0 s"),
        ("host:1", 1, {"rank": 1}, "node_rank is 1"),
        ("host:1", 1, {"rank": -1}, "node_rank is -1"),
        ("host:1", 1, {"rank": 0, "timeout": 0}, "timeout is 0 s"),
        ("host:1", 1, {"rank": 0, "timeout": "soon"}, "timeout='soon'"),
    ],
)
def test_static_refuses_what_cannot_be(endpoint: str, max_nodes: int, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        one_node.create_rdzv_handler(params("static", endpoint, max_nodes, **settings))


# --- elastic ---------------------------------------------------------------------------------------------------------------


def test_p13_local_gives_each_generation_its_own_store_and_holds_its_port(closing: Any) -> None:
    handler = closing(one_node.create_handler(params("c10d", "")))
    first, second = handler.next_rendezvous(), handler.next_rendezvous()
    first.store.set("stale", "1")
    assert not second.store.check(["stale"])
    for info in (first, second):
        assert (info.rank, info.world_size, info.bootstrap_store_info.master_addr) == (0, 1, "127.0.0.1")
    assert is_held(second)
    assert (handler.get_backend(), handler.get_run_id(), handler.use_agent_store) == ("c10d", "job", True)


def test_local_names_the_address_that_the_user_gave(closing: Any) -> None:
    handler = closing(one_node.create_handler(params("c10d", local_addr="127.0.0.9")))
    assert handler.next_rendezvous().bootstrap_store_info.master_addr == "127.0.0.9"


def test_an_address_that_is_not_ours_is_refused_by_name() -> None:
    handler = one_node.create_handler(params("c10d", local_addr="192.0.2.1"))
    with pytest.raises(RendezvousError, match=r"192\.0\.2\.1 is no address of this machine.*--local-addr"):
        handler.next_rendezvous()


def test_the_worker_of_rank_0_may_open_the_store_instead() -> None:
    handler = one_node.create_handler(params("c10d", worker_store="rank0"))
    assert not handler.use_agent_store
    assert not is_held(handler.next_rendezvous())


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
        one_node.create_handler(params("c10d", "host:x"))


@pytest.mark.parametrize("handler", [LocalRendezvous("job"), StaticTCPRendezvous("127.0.0.1", 1, 0, 1, "job", 60)])
def test_nobody_ever_waits_so_nobody_need_ask(handler: WakingHandler) -> None:
    assert handler.num_nodes_waiting() == 0
    assert handler.wakeup_fd() is None
