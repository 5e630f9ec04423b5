"""Static rendezvous of several nodes: the door that agents and workers share, what is refused, and handlers that meet there."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_port

from rallypoint.base import report
from rallypoint.errors import RendezvousError, UsageError
from rallypoint.protocol.verdict import NodeReport, WorkerFailure
from rallypoint.rendezvous import embedded, one_node
from rallypoint.rendezvous.coordinated import Introduction
from rallypoint.rendezvous.dynamic import DynamicRendezvous
from rallypoint.rendezvous.embedded import Endpoint, SharedDoor
from rallypoint.rendezvous.handler import RendezvousInfo, RendezvousParameters
from rallypoint.rendezvous.worker_store import WorkerStoreSettings
from rallypoint.store import tcp_protocol as wire
from rallypoint.store.interface import StoreNetworkError
from rallypoint.store.tcp_store import TCPStore

HERE = "127.0.0.1"
TIMEOUT_S = 10.0
PING, PONG = wire.request(wire.PING, (), 7), wire.U32.pack(7)
SET_K, GET_K = wire.request(wire.SET, [b"/k", b"v"]), wire.request(wire.GET, [b"/k"])


# --- the door --------------------------------------------------------------------------------------------------------------


class Worker:
    """Both ends of a connection; the far one is what the door is given."""

    def __init__(self) -> None:
        with socket.create_server((HERE, 0)) as server:
            self.near = socket.create_connection(server.getsockname()[:2], timeout=TIMEOUT_S)
            self.far, _ = server.accept()
        self.far.setblocking(False)

    def come(self, door: SharedDoor, said: bytes = wire.GREETING) -> Worker:
        self.near.sendall(said)
        door.take_in(self.far, "a worker")
        return self

    def ask(self, request: bytes, size: int) -> bytes:
        """The answer, of this size, or less where it is cut off."""
        self.near.sendall(request)
        return self.hear(size)

    def hear(self, size: int) -> bytes:
        told = b""
        with contextlib.suppress(ConnectionError):
            while len(told) < size and (more := self.near.recv(size - len(told))):
                told += more
        return told

    @property
    def is_cut_off(self) -> bool:
        return self.hear(1) == b""

    @property
    def is_told_something(self) -> bool:
        return bool(select.select([self.near], [], [], 0)[0])


@pytest.fixture
def worker() -> Iterator[Callable[[], Worker]]:
    """``worker()`` is connected, and has said nothing yet."""
    with contextlib.ExitStack() as sockets:

        def make() -> Worker:
            one = Worker()
            sockets.enter_context(one.near)
            sockets.enter_context(one.far)
            return one

        yield make


@pytest.fixture
def door() -> Iterator[SharedDoor]:
    door = SharedDoor(WorkerStoreSettings(limit_bytes=1 << 20), Endpoint("master", 29500))
    yield door
    door.close()


def test_workers_are_told_the_one_address_that_there_is(door: SharedDoor) -> None:
    """Whatever this node's own address is, and whichever port is asked for; nothing is bound for it."""
    assert door.address_for("10.1.2.3") == "master"
    assert door.hold("master") == door.hold("10.1.2.3", 7) == 29500
    assert door.is_agents


def test_who_comes_early_is_served_when_there_is_a_store(door: SharedDoor, worker: Any) -> None:
    early = [worker().come(door, wire.GREETING + PING) for _ in range(3)]
    assert not any(one.is_told_something for one in early)
    door.serve()
    assert [one.hear(4) for one in early] == [PONG] * 3
    late = worker().come(door)
    assert late.ask(PING, 4) == PONG
    early[0].near.sendall(SET_K)
    assert early[0].ask(PING, 4) == PONG
    assert late.ask(GET_K, 9) == wire.packed(b"v")


def test_p16_who_was_served_is_cut_off_and_who_comes_later_finds_another_store(door: SharedDoor, worker: Any) -> None:
    door.serve()
    old = worker().come(door)
    assert old.ask(SET_K + PING, 4) == PONG
    door.end_generation()
    assert old.is_cut_off
    between = worker().come(door, wire.GREETING + PING)
    assert not between.is_told_something
    door.serve()
    assert between.hear(4) == PONG
    assert between.ask(GET_K, 8) == wire.packed(b"")


def test_p16_who_has_gone_while_it_waited_says_nothing_in_the_next_generation(door: SharedDoor, worker: Any) -> None:
    """A worker of the old generation that came too late, and was stopped: what it wanted to store is not for the new one."""
    door.serve()
    door.end_generation()
    stale = worker().come(door, wire.GREETING + SET_K)
    stale.near.close()
    door.serve()
    fresh = worker().come(door)
    assert fresh.ask(PING, 4) == PONG
    assert fresh.ask(GET_K, 8) == wire.packed(b"")
    assert fresh.ask(wire.request(wire.GETNUMKEYS), 8) == wire.I64.pack(0)


def test_ending_is_ending_however_often(door: SharedDoor, worker: Any) -> None:
    waiting = worker().come(door)
    door.end_generation()  # of the generation: it may still be served
    assert not waiting.is_told_something
    door.close()
    door.close()
    door.end_generation()
    assert waiting.is_cut_off


def test_who_comes_when_all_is_over_is_cut_off(door: SharedDoor, worker: Any) -> None:
    door.serve()
    door.close()
    assert worker().come(door).is_cut_off


def test_not_more_than_so_many_wait(door: SharedDoor, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "MOST_WAITING", 2)
    waiting = [worker().come(door, wire.GREETING + PING) for _ in range(2)]
    assert worker().come(door).is_cut_off
    door.serve()
    assert [one.hear(4) for one in waiting] == [PONG] * 2


def test_nobody_waits_for_ever(door: SharedDoor, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "LONGEST_WAIT_S", 0.0)
    early = worker().come(door, wire.GREETING + PING)
    late = worker().come(door, wire.GREETING + PING)
    assert early.is_cut_off
    door.serve()
    assert late.hear(4) == PONG


def test_it_holds_no_more_than_it_may(door: SharedDoor, worker: Any) -> None:
    door.serve()
    greedy, modest = worker().come(door), worker().come(door)
    greedy.near.sendall(wire.request(wire.SET, [b"/much", b"x" * (1 << 20)]))
    assert greedy.is_cut_off
    assert modest.ask(PING, 4) == PONG


def test_workers_come_from_one_thread_while_generations_change_in_another(door: SharedDoor, worker: Any) -> None:
    """Each is served, or cut off with its generation; none is forgotten."""
    workers = [worker() for _ in range(60)]

    def come() -> None:
        for one in workers:
            one.come(door, wire.GREETING + PING)

    coming = threading.Thread(target=come)
    coming.start()
    while coming.is_alive():
        door.serve()
        door.end_generation()
    coming.join()
    door.serve()
    door.close()
    assert {one.hear(5) for one in workers} <= {PONG, b""}


# --- what is refused -------------------------------------------------------------------------------------------------------


def params(endpoint: str = f"{HERE}:29500", nodes: int = 2, **settings: Any) -> RendezvousParameters:
    return RendezvousParameters("static", endpoint, "job", nodes, nodes, **settings)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"worker_store": "rank0"}, "static rendezvous of 2 nodes: agents and workers meet at the master port"),
        ({"worker_store_port": "29600"}, "static rendezvous of 2 nodes: agents and workers meet at the master port"),
        ({"worker_store_memory": "lots"}, "worker_store_memory must be .*, not 'lots'"),
        ({"rank": 2}, r"node_rank is 2, but with 2 .* it must be from 0 to 1"),
        ({"rank": -1}, "node_rank is -1"),
        ({"node_unit": 3}, "node_unit is 3"),
        ({"no_such_setting": 1}, "no rendezvous setting 'no_such_setting'"),
        ({"secret_file": "/no/such/file"}, "/no/such/file"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_opened(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        one_node.create_rdzv_handler(params(**{"rank": 0, **settings}))


def test_nodes_cannot_meet_at_any_port() -> None:
    with pytest.raises(UsageError, match="--master-port is 0: nodes that are to meet need a port"):
        one_node.create_rdzv_handler(params(f"{HERE}:0", rank=0))


def test_torchruns_variable_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is set against stale keys, which there are none of here, and may stand in the environment of every job."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert one_node.create_rdzv_handler(params(rank=1)).use_agent_store


def test_the_number_of_nodes_is_the_largest_and_never_changes() -> None:
    handler = one_node.create_rdzv_handler(RendezvousParameters("static", f"{HERE}:29500", "job", 1, 3, rank=1))
    assert isinstance(handler, DynamicRendezvous)
    assert (handler._params.min_nodes, handler._params.max_nodes) == (3, 3)
    assert (handler.get_backend(), handler.get_run_id(), handler.use_agent_store) == ("static", "job", True)
    assert handler.name == "rank1"


@pytest.mark.parametrize(
    ("settings", "join_timeout_s"), [({}, 900.0), ({"timeout": 7}, 7.0), ({"join_timeout": 5, "timeout": 7}, 5.0)]
)
def test_the_time_to_wait_is_torchruns_unless_ours_is_given(settings: dict[str, Any], join_timeout_s: float) -> None:
    handler = one_node.create_rdzv_handler(params(rank=1, **settings))
    assert isinstance(handler, DynamicRendezvous)
    assert handler._settings.join_timeout_s == join_timeout_s
    assert (handler._settings.node_rank, handler._settings.is_host) == (1, False)


def test_the_start_is_told_in_one_line() -> None:
    lines: list[str] = []
    report.set_sink(lambda level, text: lines.append(text), least=report.INFO)
    try:
        one_node.create_rdzv_handler(params("[::1]:29500", 4, rank=0, timeout=60, close_timeout=5))
    finally:
        report.set_sink(None)
    (line,) = lines
    assert line == "static rendezvous at [::1]:29500: 4 nodes; join_timeout 60 s (timeout), close_timeout 5 s (--rdzv-conf)"


# --- handlers that meet ----------------------------------------------------------------------------------------------------


class Node:
    """A handler, and the steps that an agent takes with it."""

    def __init__(self, rank: int, port: int, nodes: int, settings: dict[str, Any]) -> None:
        conf = {"timeout": TIMEOUT_S, "restart_backoff": 0, **settings}
        handler = one_node.create_rdzv_handler(params(f"{HERE}:{port}", nodes, rank=rank, **conf))
        assert isinstance(handler, DynamicRendezvous)
        self.handler, self.rank = handler, rank
        handler.introduce(Introduction("default", 1, 3, "train.py", 30.0))

    def ask(self) -> None:
        """Say that no worker runs here; the seat is taken by `meet`."""
        assert self.handler.poll_rendezvous() is None

    def meet(self) -> RendezvousInfo:
        deadline = time.monotonic() + TIMEOUT_S
        while (info := self.handler.poll_rendezvous()) is None:
            select.select([self.handler.wakeup_fd()], [], [], deadline - time.monotonic())
            assert time.monotonic() < deadline, "no seat in time"
        return info

    def fail(self) -> None:
        failure = WorkerFailure(self.rank, 0, "default", "host", os.getpid(), 1, "boom", 0.0, "")
        self.handler.report_failure(NodeReport(failures=(failure,)))

    def stop(self) -> None:
        """Wait until the generation is over."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.handler.observe() is None:
            select.select([self.handler.wakeup_fd()], [], [], deadline - time.monotonic())
            assert time.monotonic() < deadline, "nothing was heard in time"


@pytest.fixture
def make_nodes() -> Iterator[Callable[..., list[Node]]]:
    """``make_nodes(2, **settings)`` are the nodes of a job, by rank; the host leaves last."""
    with contextlib.ExitStack() as nodes:

        def make(count: int, **settings: Any) -> list[Node]:
            port = free_port()
            made = [Node(rank, port, count, settings) for rank in range(count)]
            for node in made:
                nodes.callback(node.handler.shutdown)
            return made

        yield make


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_p27_ranks_are_those_that_were_given(make_nodes: Any, order: tuple[int, ...]) -> None:
    nodes = make_nodes(3)
    for rank in order:
        nodes[rank].ask()
    infos = [node.meet() for node in nodes]
    assert [(info.rank, info.world_size) for info in infos] == [(0, 3), (1, 3), (2, 3)]
    assert [ranks.global_rank for node in nodes for ranks in node.handler.worker_ranks()] == [0, 1, 2]
    masters = {(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in infos}
    assert masters == {(HERE, nodes[0].handler._place.endpoint.port)}


def test_p16_workers_find_their_store_and_in_the_next_generation_another(make_nodes: Any) -> None:
    """At the same port; the connection of the old generation is cut when rank 0's workers are gone."""
    nodes = make_nodes(2)
    port = nodes[0].handler._place.endpoint.port
    for node in nodes:
        node.ask()
    for node in nodes:
        node.meet()
    old = TCPStore(HERE, port, timeout=TIMEOUT_S)
    old.set("k", "v")
    assert old.get("k") == b"v"
    nodes[1].fail()
    for node in nodes:
        node.stop()
    nodes[0].ask()
    with pytest.raises(StoreNetworkError):
        old.get("k")
    old.close()
    found: list[int] = []
    early = threading.Thread(target=lambda: found.append(count_keys(port)))
    early.start()  # before there is a store: it waits
    nodes[1].ask()
    for node in nodes:
        node.meet()
    early.join(TIMEOUT_S)
    assert found == [0]
    assert [node.handler.restart_count() for node in nodes] == [1, 1]


def count_keys(port: int) -> int:
    store = TCPStore(HERE, port, timeout=TIMEOUT_S)
    try:
        return store.num_keys()
    finally:
        store.close()


def test_p19_a_default_may_be_said_by_one_and_left_out_by_another() -> None:
    """It is the same word, so the nodes agree."""
    port = free_port()
    nodes = [Node(0, port, 2, {}), Node(1, port, 2, {"worker_store": "agent"})]
    with contextlib.ExitStack() as leaving:
        for node in nodes:
            leaving.callback(node.handler.shutdown)
            node.ask()
        assert [node.meet().rank for node in nodes] == [0, 1]


def test_who_finds_no_host_in_time_says_where_it_looked(make_nodes: Any) -> None:
    nodes = make_nodes(2, join_timeout=0.3)
    with pytest.raises(RendezvousError, match=rf"at {HERE}:\d+ was not reached within 0\.3 s"):
        nodes[1].meet()


def test_p13_a_host_whose_port_is_taken_says_so(make_nodes: Any) -> None:
    nodes = make_nodes(2)
    port = nodes[0].handler._place.endpoint.port
    with (
        socket.create_server((HERE, port)),
        pytest.raises(RendezvousError, match=f"cannot listen at {HERE}:{port}: Address already in use"),
    ):
        nodes[0].meet()


def test_p36_with_a_secret_agents_prove_themselves_and_workers_come_as_ever(make_nodes: Any, tmp_path: Path) -> None:
    secret_file = tmp_path / "secret"
    secret_file.write_text("correct horse battery staple\n")
    secret_file.chmod(0o600)
    nodes = make_nodes(2, secret_file=str(secret_file))
    for node in nodes:
        node.ask()
    for node in nodes:
        node.meet()
    assert count_keys(nodes[0].handler._place.endpoint.port) == 0


def test_what_is_done_is_let_go(make_nodes: Any) -> None:
    """Port, threads and workers' connections are gone when the host has left."""
    nodes = make_nodes(2)
    port = nodes[0].handler._place.endpoint.port
    for node in nodes:
        node.ask()
    for node in nodes:
        node.meet()
    worker = TCPStore(HERE, port, timeout=TIMEOUT_S)
    for node in nodes:
        node.handler.report_done()
    for node in nodes:
        node.stop()
    assert worker.num_keys() == 0
    for node in reversed(nodes):
        assert node.handler.shutdown()
    with pytest.raises(StoreNetworkError):
        worker.num_keys()
    worker.close()
    with socket.create_server((HERE, port)):
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("rallypoint")]
