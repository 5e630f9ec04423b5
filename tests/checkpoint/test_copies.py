"""Snapshots between agents, over real connections: copied as they are saved, fetched where they are missing."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from tests.checkpoint.test_slots import Array
from tests.pace import is_under

from rallypoint.base import defaults, outbox
from rallypoint.checkpoint import courier as courier_module
from rallypoint.checkpoint.layout import Mark, write_mark
from rallypoint.checkpoint.line import Line
from rallypoint.checkpoint.slots import ROOM_BYTES, Slots
from rallypoint.checkpoint.transfer import Channel, TransferError
from rallypoint.checkpoint.vault import Group, Snapshots
from rallypoint.store.hash_store import HashStore

MEMORY = 64 << 20
WORKERS = 2


class Worker:
    """A worker's side of it, in this process."""

    def __init__(self, place: str, rank: int, world: int, generation: int) -> None:
        files, most_bytes, line_fd = place.split(":")
        self.line = Line(os.dup(int(line_fd))) if line_fd else None
        self.slots = Slots([*map(int, files.split(","))], int(most_bytes), rank, world, generation)

    def save(self, step: int, state: Any) -> None:
        if self.line is not None:
            self.line.wait_until_copied()
        self.slots.save(step, state)
        if self.line is not None:
            self.line.tell_saved()


class Cluster:
    """Agents of so many nodes, each with two workers; any of them can be lost."""

    def __init__(self, stack: contextlib.ExitStack, nodes: int, memory: int = MEMORY) -> None:
        self._stack, self._memory, self.generation = stack, memory, 0
        self.agents = [self.new_agent() for _ in range(nodes)]
        self.workers: list[Worker] = []

    def new_agent(self) -> Snapshots:
        agent = Snapshots(self._memory, WORKERS, None, 1)
        self._stack.callback(agent.close)
        return agent

    def replace(self, node: int) -> None:
        """This one is lost with all that it has, and another comes."""
        self.agents[node].close()
        self._stack.callback((agent := self.new_agent()).close)
        self.agents[node] = agent

    def begin(self, *order: int, addresses: Sequence[str] = ()) -> None:
        """A generation, in which the agents have places in this order."""
        self.hang_up()
        self.generation += 1
        self.agents = [self.agents[one] for one in order] if order else self.agents
        store, nodes, self.workers = HashStore(), len(self.agents), []
        for node, agent in enumerate(self.agents):
            ranks = {local: WORKERS * node + local for local in range(WORKERS)}
            envs: dict[int, dict[str, str]] = {local: {} for local in ranks}
            address = addresses[node] if addresses else "127.0.0.1"
            agent.prepare(Group(self.generation, node, nodes, WORKERS * nodes, ranks, store, address), envs)
            for local, rank in ranks.items():
                place = envs[local][defaults.ENV_CHECKPOINT]
                self.workers.append(Worker(place, rank, WORKERS * nodes, self.generation))
        for agent in self.agents:
            agent.started()
        for worker in self.workers:
            assert worker.line is not None
            worker.line.wait_until_ready()

    def save(self, step: int, size: int = 100_000) -> None:
        for rank, worker in enumerate(self.workers):
            worker.save(step, state_of(rank, step, size))

    def wait_until_copied(self) -> None:
        for worker in self.workers:
            assert worker.line is not None
            worker.line.wait_until_copied()

    def hang_up(self) -> None:
        for worker in self.workers:
            if worker.line is not None:
                worker.line._sock.close()


def state_of(rank: int, step: int, size: int = 100_000) -> dict[str, Any]:
    content = bytes([rank, step % 256]) * size
    return {"rank": rank, "step": step, "pickled": content, "copied": [Array(content), Array(b""), Array(content[:99])]}


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def cluster(stack: contextlib.ExitStack) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(nodes: int, memory: int = MEMORY) -> Cluster:
        made.append(Cluster(stack, nodes, memory))
        return made[-1]

    yield make
    for one in made:
        one.hang_up()


def check(cluster: Cluster, moment: tuple[int, int], size: int = 100_000) -> None:
    for rank, worker in enumerate(cluster.workers):
        assert moment in worker.slots.moments(), rank
        assert worker.slots.load(moment, copy=True) == state_of(rank, moment[1], size)


def test_nobody_waits_for_a_node_that_others_cannot_reach(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    """It has what is its own and can send copies; those that it was to keep are missed by the node whose they are."""
    monkeypatch.setattr(courier_module, "OTHERS_S", 1000.0)
    job, addresses = cluster(3), ["127.0.0.1", "192.0.2.77", "127.0.0.1"]
    for _ in range(2):
        job.begin(addresses=addresses)
        for step in range(3):
            job.save(step)
        job.wait_until_copied()
    job.begin(addresses=addresses)
    check(job, (2, 2))
    assert any("other nodes cannot reach this one" in line for line in warnings)


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 0, 2)])
def test_what_a_lost_node_had_is_fetched_wherever_its_ranks_are_now(
    cluster: Callable[..., Cluster], lost: int, order: tuple[int, ...]
) -> None:
    job = cluster(3)
    job.begin()
    for step in range(5):
        job.save(step)
    job.wait_until_copied()
    job.replace(lost)
    job.begin(*order)
    check(job, (1, 4))
    for worker in job.workers:
        worker.slots.begin_from((1, 4))
    job.save(5)
    job.save(6)
    job.wait_until_copied()
    job.replace((lost + 1) % 3)
    job.begin()
    check(job, (2, 6))


def test_a_copy_that_was_not_complete_is_none(cluster: Callable[..., Cluster]) -> None:
    """The last step of all but one rank: all go back to the one before it, also with the node that never got that."""
    job = cluster(2)
    job.begin()
    for step in range(3):
        job.save(step)
    for rank in (0, 1, 2):
        job.workers[rank].save(3, state_of(rank, 3))
    job.wait_until_copied()
    job.replace(1)
    job.begin()
    check(job, (1, 2))
    job.workers[0].slots.begin_from((1, 2))


def test_what_has_no_room_on_the_partner_is_told_once_and_nobody_waits(
    cluster: Callable[..., Cluster], caplog: pytest.LogCaptureFixture
) -> None:
    job = cluster(2)
    job.agents[1].close()
    job.agents[1] = job._stack.enter_context(contextlib.closing(Snapshots(1 << 20, WORKERS, None, 1)))
    job.begin()
    for step in range(4):
        for rank in (0, 1):
            job.workers[rank].save(step, state_of(rank, step))
    job.wait_until_copied()
    outbox.settle()
    assert caplog.text.count("--checkpoint-copies: what rank 0 saves is not copied: ") == 1


def test_all_the_memory_that_there_is_can_be_used(cluster: Callable[..., Cluster], caplog: pytest.LogCaptureFixture) -> None:
    """Three snapshots for each worker and three for each of the partner's, all as large as they may be."""
    size = (ROOM_BYTES - 8192) // 4  # of a state's content, which is there twice, with two bytes for one
    job = cluster(2, 6 * WORKERS * ROOM_BYTES)
    job.begin()
    for step in range(8):
        job.save(step, size)
    job.wait_until_copied()
    outbox.settle()
    assert "--checkpoint-copies:" not in caplog.text
    job.replace(1)
    job.begin()
    check(job, (1, 7), size)


def test_a_partner_that_cannot_be_reached_keeps_nobody_from_saving(
    cluster: Callable[..., Cluster], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told once it has been so for a while: a node that was lost is not told of in two ways."""
    monkeypatch.setattr(courier_module, "AGAIN_S", 0.0)
    job = cluster(2)
    job.begin()
    job.save(0)
    job.wait_until_copied()
    job.agents[1].close()
    for step in range(1, 5):
        for rank in (0, 1):
            job.workers[rank].save(step, state_of(rank, step))
            line = job.workers[rank].line
            assert line is not None
            line.wait_until_copied()
    outbox.settle()
    assert caplog.text.count("saves is not copied now: ") == 1


def test_a_connection_that_has_broken_is_made_again(cluster: Callable[..., Cluster]) -> None:
    job = cluster(2)
    job.begin()
    job.save(0)
    job.wait_until_copied()
    courier = job.agents[0]._courier
    assert courier is not None
    assert courier._partner is not None
    courier._partner.abort()
    job.save(1)
    job.wait_until_copied()
    job.replace(0)
    job.begin()
    check(job, (1, 1))


def test_large_snapshots_go_in_pieces_and_no_faster_than_they_may(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(courier_module._Pace, "wait", lambda self, count: waits.append(count))
    job = cluster(2, 512 << 20)
    job.begin()
    job.save(0, size=5_000_000)
    job.wait_until_copied()
    assert sum(waits) >= 4 * 20_000_000
    assert max(waits) <= 4 << 20
    job.replace(1)
    job.begin()
    check(job, (1, 0), size=5_000_000)


def test_a_pace_is_kept() -> None:
    wake = courier_module.WakeFd()
    began = courier_module.time.monotonic()
    pace = courier_module._Pace(10_000_000, wake)
    for _ in range(4):
        pace.wait(1_000_000)
    assert courier_module.time.monotonic() - began >= 0.3
    wake.set()
    slow = courier_module._Pace(1, wake)
    slow.wait(1_000_000)
    slow.wait(1)  # whoever is woken does not wait
    wake.close()


# --- strangers -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def depot(cluster: Callable[..., Cluster]) -> Any:
    job = cluster(2)
    job.begin()
    job.save(0)
    job.wait_until_copied()
    return job.agents[0]._depot


def test_who_does_not_know_the_key_gets_and_leaves_nothing(depot: Any) -> None:
    with pytest.raises(TransferError, match="the secret, or the name of the job, is not the same"):
        Channel.call("127.0.0.1", depot.port, os.urandom(32))
    with socket.create_connection(("127.0.0.1", depot.port)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(100) == b""


@pytest.mark.parametrize(
    "message",
    [
        ["what"],
        ["put", "00", 1, None],
        ["put", "zz" * 60, 1, None],
        ["put", write_mark(Mark(1, 1, 1, 0, 4, 100, 10)).hex(), 1, None],
        ["put", write_mark(Mark(1, 1, 1, 0, 4, 1, 10)).hex(), 0, None],
        ["get", "0", 4, 1, 0],
        ["get", 0, 4, 1],
        [1],
        {},
    ],
)
def test_what_breaks_the_rules_ends_the_connection(depot: Any, message: Any) -> None:
    with contextlib.closing(Channel.call("127.0.0.1", depot.port, depot.key)) as channel:
        channel._send_frame(json.dumps(message).encode())
        with pytest.raises(TransferError):
            channel.hear()


def test_a_snapshot_that_is_not_there_is_not_given(depot: Any) -> None:
    with contextlib.closing(Channel.call("127.0.0.1", depot.port, depot.key)) as channel:
        channel.say("get", 0, 4, 1, 77)
        assert channel.hear() == ["none"]
        channel.say("get", 0, 4, 1, 0)
        assert channel.hear()[0] == "mark"


def test_a_put_that_breaks_off_leaves_no_snapshot(depot: Any) -> None:
    before = depot._vault.holdings(4)
    with contextlib.closing(Channel.call("127.0.0.1", depot.port, depot.key)) as channel:
        mark = Mark(9, 1, 9, 2, 4, 0, 1000)
        channel.say("put", write_mark(mark).hex(), 1, None)
        assert channel.hear() == ["go"]
        channel._sock.sendall(bytes(999))
    with contextlib.closing(Channel.call("127.0.0.1", depot.port, depot.key)) as channel:
        channel.say("put", write_mark(mark).hex(), 1, None)
        assert channel.hear() == ["go"]
        channel._sock.sendall(bytes(1000))
        assert channel.hear() == ["got"]
        channel.say("drop")
        assert channel.hear() == ["kept"]
    assert set(depot._vault.holdings(4)) <= set(before)


def test_a_new_generation_ends_what_is_being_left(depot: Any) -> None:
    with contextlib.closing(Channel.call("127.0.0.1", depot.port, depot.key)) as channel:
        channel.say("put", write_mark(Mark(9, 1, 9, 2, 4, 0, 1000)).hex(), 1, None)
        assert channel.hear() == ["go"]
        ended = threading.Thread(target=depot.begin, args=(2,))
        ended.start()
        ended.join(10)
        assert not ended.is_alive()
        assert not any(depot._guests.values())
        with pytest.raises(TransferError):
            channel.hear()


def test_the_end_of_a_generation_does_not_wait_for_nodes_that_never_came(stack: contextlib.ExitStack) -> None:
    agent = stack.enter_context(contextlib.closing(Snapshots(MEMORY, WORKERS, None, 1)))
    store = HashStore()
    began = time.monotonic()
    for generation in (1, 2, 3):
        envs: dict[int, dict[str, str]] = {0: {}, 1: {}}
        agent.prepare(Group(generation, 0, 2, 4, {0: 0, 1: 1}, store, "127.0.0.1"), envs)
        agent.started()
    agent.prepare(Group(4, 0, 2, 4, {0: 0, 1: 1}, store, "127.0.0.1"), envs)
    assert is_under(time.monotonic() - began, 1.0)
    store.set("rallypoint/snapshots/1", b"whatever, so that nobody waits any more")


@pytest.mark.parametrize("last_word", [b"", b"x"], ids=["without a word", "with one"])
def test_a_worker_whose_agent_is_dead_does_nothing_more(monkeypatch: pytest.MonkeyPatch, last_word: bytes) -> None:
    slept: list[float] = []
    monkeypatch.setattr("rallypoint.checkpoint.line.time.sleep", slept.append)
    agents, workers = socket.socketpair()
    line = Line(workers.detach())
    agents.send(b"r")
    line.wait_until_ready()
    line.tell_saved()
    agents.send(b"c")
    line.wait_until_copied()
    line.tell_saved()
    agents.send(last_word)
    agents.close()
    line.wait_until_copied()
    line.tell_saved()
    line.wait_until_copied()
    assert len(slept) == (not last_word)
    line._sock.close()
