"""The workers' store of one node: which port it holds, whom it serves, how it ends, and what its settings say."""

from __future__ import annotations

import _socket
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_ports, is_free

from rallypoint.base import defaults
from rallypoint.errors import RendezvousError, UsageError
from rallypoint.net import endpoint
from rallypoint.rendezvous.worker_store import WorkerStore, WorkerStoreSettings, read_worker_store_settings
from rallypoint.store.interface import StoreError, StoreNetworkError
from rallypoint.store.tcp_store import TCPStore

HERE = "127.0.0.1"
NOT_OURS = "192.0.2.7"
TIMEOUT_S = 10.0
RANK0 = WorkerStoreSettings(defaults.WORKER_STORE_RANK0)


@pytest.fixture
def make() -> Iterator[Callable[..., WorkerStore]]:
    """``make(ports=…, …)`` is the store of a node, which is closed when the test ends."""
    with contextlib.ExitStack() as stores:

        def make(settings: WorkerStoreSettings | None = None, **fields: Any) -> WorkerStore:
            store = WorkerStore(settings or WorkerStoreSettings(**fields))
            stores.callback(store.close)
            return store

        yield make


@pytest.fixture
def connect() -> Iterator[Callable[..., TCPStore]]:
    """``connect(port, address=…)`` is a worker's connection, which is closed when the test ends."""
    with contextlib.ExitStack() as clients:

        def connect(port: int, address: str = HERE) -> TCPStore:
            client = TCPStore(address, port, timeout=TIMEOUT_S)
            clients.callback(client.close)
            return client

        yield connect


# --- holding and serving ---------------------------------------------------------------------------------------------------


def test_p13_a_port_is_held_from_the_moment_that_it_is_known(make: Any, connect: Any) -> None:
    store = make()
    port = store.hold(HERE)
    assert not is_free(port)
    assert store.hold(HERE) == port
    store.serve()
    assert not is_free(port)
    connect(port).set("k", "v")
    assert connect(port).get("k") == b"v"
    store.close()
    assert is_free(port)


def test_who_comes_before_it_is_served_waits(make: Any, connect: Any) -> None:
    """It need not try again: the kernel keeps it."""
    store = make()
    port = store.hold(HERE)
    early: list[int] = []
    waiting = threading.Thread(target=lambda: early.append(connect(port).add("n", 1)))
    waiting.start()
    store.serve()
    waiting.join(TIMEOUT_S)
    assert early == [1]


def test_it_listens_at_its_address_and_at_no_other(make: Any, connect: Any) -> None:
    store = make()
    port = store.hold("127.0.0.3")
    store.serve()
    assert connect(port, "127.0.0.3").num_keys() == 0
    for other in (HERE, "127.0.0.2"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port), timeout=TIMEOUT_S)


@pytest.mark.parametrize("is_fixed", [False, True], ids=["any port", "a fixed port"])
def test_p16_each_generation_has_a_store_of_its_own(make: Any, connect: Any, is_fixed: bool) -> None:
    """Also at the same port; whoever still holds on to the old one is cut off."""
    store = make(ports=free_ports(1) if is_fixed else (0,))
    ports, stale = [], None
    for _ in range(3):
        store.close()
        ports.append(store.hold(HERE))
        store.serve()
        if stale is not None:
            with pytest.raises(StoreNetworkError):
                stale.get("old")
        stale = connect(ports[-1])
        assert stale.num_keys() == 0
        stale.set("old", "value")
        assert stale.get("old") == b"value"
    assert len(set(ports)) == 1 or not is_fixed


def test_who_waits_for_a_key_learns_at_once_that_the_store_is_gone(make: Any, connect: Any) -> None:
    store = make()
    port = store.hold(HERE)
    store.serve()
    worker, raised = connect(port), []

    def wait_in_vain() -> None:
        worker.set("here", "")
        try:
            worker.get("never")
        except StoreError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait_in_vain)
    waiting.start()
    connect(port).wait(["here"])
    store.close()
    waiting.join(TIMEOUT_S / 2)
    assert [type(error) for error in raised] == [StoreNetworkError]


def test_ending_is_ending_however_often_and_whenever(make: Any) -> None:
    """Without a port, with one that is held, and with one that is served."""
    store = make()
    store.close()
    for steps in ((), ("hold",), ("hold", "serve")):
        port = store.hold(HERE) if "hold" in steps else None
        if "serve" in steps:
            store.serve()
        store.close()
        store.close()
        store.close()
        assert port is None or is_free(port)
    assert not [thread for thread in threading.enumerate() if thread.name == "rallypoint-tcp-store"]


def test_a_store_that_nobody_uses_has_a_thread_that_sleeps_and_ends(make: Any) -> None:
    store = make()
    store.hold(HERE)
    store.serve()
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "rallypoint-tcp-store"] == [True]
    store.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rallypoint-tcp-store"]


def test_what_it_may_hold_is_bounded(make: Any, connect: Any) -> None:
    """Who stores too much is cut off; what others have stays, and they go on."""
    store = make(limit_bytes=10_000)
    port = store.hold(HERE)
    store.serve()
    modest, greedy = connect(port), connect(port)
    modest.set("k", "v")
    greedy.set("much", b"x" * 20_000)
    with pytest.raises(StoreError):
        greedy.get("k")
    assert modest.get("k") == b"v"
    modest.set("another", "one")
    assert not modest.check(["much"])


# --- which port ------------------------------------------------------------------------------------------------------------


def test_a_port_that_is_given_wins_over_those_of_the_settings(make: Any) -> None:
    first, second = free_ports(2)
    store = make(ports=(first,))
    assert store.hold(HERE, second) == second
    store.close()
    assert store.hold(HERE) == first
    store.close()
    assert store.hold(HERE, 0) not in (0, first, second)


def test_p13_jobs_share_out_a_range(make: Any) -> None:
    """Each has another port; one job too many is told which ports it could not have."""
    ports = free_ports(3)
    stores = [make(ports=ports) for _ in ports]
    assert sorted(store.hold(HERE) for store in stores) == list(ports)
    with pytest.raises(
        RendezvousError, match=f"at {HERE}, ports {ports[0]} to {ports[-1]}: .*Address already in use.*--worker-store-port"
    ):
        make(ports=ports).hold(HERE)
    stores[1].close()
    assert make(ports=ports).hold(HERE) == ports[1]


def test_p13_a_busy_port_is_refused_by_name(make: Any) -> None:
    port = make().hold(HERE)
    with pytest.raises(RendezvousError, match=f"at {HERE}, port {port}: cannot listen at {HERE}:{port}: Address already in use"):
        make().hold(HERE, port)


@pytest.mark.parametrize(
    ("address", "told"), [(NOT_OURS, f"{NOT_OURS} is no address of this machine"), ("no-such-host.invalid", "[Nn]ame")]
)
def test_an_address_that_is_not_ours_is_refused_by_name(make: Any, address: str, told: str) -> None:
    complaint = f"the workers' store cannot be opened at {address}, any port: .*{told}.*--local-addr"
    with pytest.raises(RendezvousError, match=complaint):
        make().hold(address)


def test_p13_who_listens_first_has_the_port(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs can bind one port at the same time, as long as neither listens: the slower one takes the next of its range."""
    first, second = free_ports(2)
    bind, others = endpoint._bind, contextlib.ExitStack()

    def bind_and_be_overtaken(family: int, address: tuple[Any, ...]) -> _socket.socket | None:
        sock = bind(family, address)
        if address[1] == first:
            others.enter_context(socket.create_server(address))
        return sock

    monkeypatch.setattr(endpoint, "_bind", bind_and_be_overtaken)
    with others:
        assert make(ports=(first, second)).hold(HERE) == second


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let every name stand for these addresses."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    names = {**vars(_socket), "getaddrinfo": lambda *_, **__: found}
    monkeypatch.setattr(endpoint, "_socket", type("_socket", (), names))


def test_p13_any_port_is_one_that_is_free_at_all_addresses_of_a_name(
    make: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where what the kernel chose for the first is taken at the second, another is tried."""
    bind, taken = endpoint._bind, contextlib.ExitStack()

    def bind_and_take_the_other(family: int, address: tuple[Any, ...]) -> _socket.socket | None:
        sock = bind(family, address)
        if address == (HERE, 0) and sock is not None and len(tried) < 3:
            tried.append(sock.getsockname()[1])
            taken.enter_context(socket.create_server(("127.0.0.2", tried[-1])))
        return sock

    tried: list[int] = []
    resolving(monkeypatch, HERE, "127.0.0.2")
    monkeypatch.setattr(endpoint, "_bind", bind_and_take_the_other)
    store = make()
    with taken:
        port = store.hold("a-name")
    monkeypatch.undo()
    assert len(tried) == 3
    assert port not in tried
    assert all(is_free(other) for other in tried)  # what was bound in vain was given back
    store.serve()
    connect(port).set("k", "v")
    assert connect(port, "127.0.0.2").get("k") == b"v"


# --- the worker of rank 0 --------------------------------------------------------------------------------------------------


def test_the_worker_of_rank_0_gets_a_port_that_it_can_bind(make: Any) -> None:
    store = make(RANK0)
    assert not store.is_agents
    port = store.hold(HERE)
    assert is_free(port)
    store.serve()
    assert is_free(port)
    assert store.hold(HERE, 29_500) == 29_500  # whatever it is: whoever binds it will see
    first, second = free_ports(2)
    with socket.create_server((HERE, first)):
        assert make(RANK0.replace(ports=(first, second))).hold(HERE) == second


# --- settings --------------------------------------------------------------------------------------------------------------


def test_by_default_it_is_the_agents_at_any_port() -> None:
    settings = read_worker_store_settings({"rank": 0, "timeout": 5}, {})
    assert (settings.by, list(settings.ports), settings.limit_bytes) == ("agent", [0], 1 << 30)


@pytest.mark.parametrize(
    ("given", "ports"), [("0", [0]), ("29600", [29600]), (29600, [29600]), ("29600-29602", [29600, 29601, 29602])]
)
def test_ports_are_one_or_a_range(given: object, ports: list[int]) -> None:
    assert list(read_worker_store_settings({"worker_store_port": given}, {}).ports) == ports
    variable = {"RALLYPOINT_WORKER_STORE_PORT": str(given)}
    assert list(read_worker_store_settings({}, variable).ports) == ports


@pytest.mark.parametrize(("given", "size"), [("4096", 4096), ("64K", 65_536), ("500m", 500 << 20), ("2G", 2 << 30), (7, 7)])
def test_sizes_are_written_as_users_write_them(given: object, size: int) -> None:
    assert read_worker_store_settings({"worker_store_memory": given}, {}).limit_bytes == size


@pytest.mark.parametrize(
    ("config", "environ", "by"),
    [
        ({"worker_store": "rank0"}, {}, "rank0"),
        ({}, {"RALLYPOINT_WORKER_STORE": "rank0"}, "rank0"),
        ({}, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, "rank0"),
        ({"worker_store_port": "29600"}, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, "rank0"),
        ({}, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}, "agent"),
        ({}, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": ""}, "agent"),
        ({"worker_store": "agent"}, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, "agent"),
        ({"worker_store": "agent"}, {"RALLYPOINT_WORKER_STORE": "rank0"}, "agent"),
    ],
)
def test_who_serves_it(config: dict[str, Any], environ: dict[str, str], by: str) -> None:
    """torchrun's variable is the weakest word, but it is one."""
    assert read_worker_store_settings(config, environ).by == by


def test_a_file_may_say_it(tmp_path: Path) -> None:
    path = tmp_path / "settings"
    path.write_text("worker_store_port = 29600-29601\nworker_store_memory = 1M\njoin_timeout = 5\n")
    for config, environ in (({"conf_file": str(path)}, {}), ({}, {defaults.ENV_CONF: str(path)})):
        settings = read_worker_store_settings(config, environ)
        assert (list(settings.ports), settings.limit_bytes) == ([29600, 29601], 1 << 20)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("worker_store_port", value) for value in ("-1", "65536", "x", "5-4", "1-2-3", "0-9", "29600-", "", 1.5, True)),
        *(("worker_store_memory", value) for value in ("0", "-1", "lots", "1T", "K", 0, 2.5, True)),
        *(("worker_store", value) for value in ("rank1", "Agent", "", 0)),
    ],
)
def test_what_is_none_of_these_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"--{key.replace('_', '-')} or --rdzv-conf: {key} must be .*, not "):
        read_worker_store_settings({key: value}, {})
    if isinstance(value, str) and value:
        with pytest.raises(UsageError, match=f"RALLYPOINT_{key.upper()}: {key} must be"):
            read_worker_store_settings({}, {f"RALLYPOINT_{key.upper()}": value})


def test_the_secret_alone_is_no_setting() -> None:
    assert read_worker_store_settings({}, {defaults.ENV_SECRET: "x" * 20, **os.environ}) == WorkerStoreSettings(ports=range(1))
