"""Stacks of workers elsewhere, through the store of their job: who answers, what is left of it, and how much it may be."""

from __future__ import annotations

import binascii
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence

import pytest
from tests.inspection.test_asking import add_node

from rallypoint.coordination.model import Put, Transaction
from rallypoint.inspection import asking, stack_relay, store_relay
from rallypoint.inspection.stack_relay import Answers, Others, ask_others, pack, read_others, unpack
from rallypoint.inspection.stack_view import ProcessDump, WorkerDump
from rallypoint.inspection.store_relay import MOST_BYTES
from rallypoint.inspection.view import NodeView, WorkerView, to_document
from rallypoint.protocol import job_records as job
from rallypoint.testing.memory import MemoryCoordination, MemoryEngine

PATIENCE_S = 60.0


@pytest.fixture
def store() -> Iterator[MemoryEngine]:
    engine = MemoryEngine()
    yield engine
    engine.close()


class Node:
    """One that answers what it is asked, by a thread; with stacks unless it `is_deaf`."""

    def __init__(self, store: MemoryEngine, name: str, ranks: Sequence[int], is_deaf: bool = False) -> None:
        self.client, self.name, self.is_deaf = store.connect(), name, is_deaf
        workers = tuple(WorkerView(rank, local, 100 + rank) for local, rank in enumerate(ranks))
        self.view = NodeView("a-job", name, f"{name}.example", 1, id=f"{name}#1", phase="running", workers=workers)
        self.answers = Answers(self.dump)
        self.dumped: list[stack_relay.Ranks] = []
        self.is_over = False
        add_node(self.client, name)
        revision = self.client.read(job.DOWN, time.monotonic() + PATIENCE_S).revision
        self.client.watch(job.DOWN, revision + 1, time.monotonic() + PATIENCE_S)
        self.thread = threading.Thread(target=self._answer_all)
        self.thread.start()

    def dump(self, ranks: stack_relay.Ranks, _: float) -> list[WorkerDump]:
        self.dumped.append(ranks)
        return [
            WorkerDump("a-job", self.name, one.rank, one.pid, (ProcessDump(one.pid, "socket", "x"),)) for one in self.view.workers
        ]

    def _answer_all(self) -> None:
        while not self.is_over:
            for event in self.client.take_events():
                if event.key == job.ASKED and event.item is not None:
                    self._answer(event.revision, job.decode(job.Asked, event.item.value))
            time.sleep(0.001)

    def _answer(self, number: int, asked: job.Asked) -> None:
        if asked.node not in ("", self.view.id):
            return
        if asked.what == "look":
            asking.answer(self.client, self.view, number)
        elif asked.what == "stacks" and not self.is_deaf:
            answer = self.answers.make(self.view.id, number, asked.detail)
            if answer is not None:
                self.client.transact(answer, time.monotonic() + PATIENCE_S)


@pytest.fixture
def start(store: MemoryEngine) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def start(*args: object, **more: object) -> Node:
        nodes.append(Node(store, *args, **more))  # type: ignore[arg-type]
        return nodes[-1]

    yield start
    for node in nodes:
        node.is_over = True
        node.thread.join()


def ask(
    store: MemoryEngine, here: Sequence[tuple[str, int]] = (), ranks: stack_relay.Ranks = None, within_s: float = PATIENCE_S
) -> Others:
    return ask_others(store.connect(), "me", here, ranks, PATIENCE_S, within_s)


def left_over(client: MemoryCoordination) -> list[str]:
    return [item.key for item in client.read(job.SHOWN, time.monotonic() + PATIENCE_S).items]


def test_all_other_nodes_are_asked_and_nothing_stays(store: MemoryEngine, start: Callable[..., Node]) -> None:
    own, other, third = start("a", (0, 1)), start("b", (2, 3)), start("c", (4,))
    found = ask(store, here=[("a.example", 1)])
    assert [(one.node, one.rank) for one in sorted(found.workers, key=lambda one: one.rank or 0)] == [
        ("b", 2),
        ("b", 3),
        ("c", 4),
    ]
    assert (found.silent, found.ranks) == ((), ((2, 4),))
    assert (own.dumped, other.dumped, third.dumped) == ([], [None], [None])
    assert left_over(own.client) == []


def test_only_the_one_that_has_the_rank_is_asked(store: MemoryEngine, start: Callable[..., Node]) -> None:
    nodes = start("a", (0, 1)), start("b", (2, 3))
    found = ask(store, ranks=[(3, 3)])
    assert [one.rank for one in found.workers] == [3]
    assert [node.dumped for node in nodes] == [[], [[(3, 3)]]]
    assert left_over(nodes[0].client) == []


def test_who_does_not_answer_is_named(store: MemoryEngine, start: Callable[..., Node]) -> None:
    start("a", (0,))
    start("deaf", (1,), is_deaf=True)
    found = ask(store, within_s=0.05)
    assert found.silent == ("deaf",)
    assert found.ranks == ((0, 1),)


def test_a_late_answer_gives_way_to_the_next(store: MemoryEngine, start: Callable[..., Node]) -> None:
    node = start("a", (0,))
    answers = Answers(node.dump)
    detail = json.dumps({"ranks": None, "but": [], "bytes": 10_000, "within_s": 1})
    for number in (5, 6):
        answer = answers.make("a#1", number, detail)
        assert answer is not None
        node.client.transact(answer, time.monotonic() + PATIENCE_S)
        assert left_over(node.client) == [f"{job.SHOWN}{number}/a#1"]


@pytest.mark.parametrize("detail", ["", "[]", "{}", "[" * 100_000, '{"ranks": [[1]], "but": [], "bytes": 1, "within_s": 1}'])
def test_what_is_no_question_gets_no_answer(detail: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Answers(lambda *_: []).make("a#1", 1, detail)


@pytest.mark.parametrize(
    "junk",
    [b"", b"#", b"junk", binascii.b2a_base64(zlib.compress(b"{}")), binascii.b2a_base64(zlib.compress(b"[7]")),
     binascii.b2a_base64(zlib.compress(b"[" * 100_000))],
)  # fmt: skip
def test_what_nobody_can_read_was_not_said(junk: bytes) -> None:
    assert unpack(junk) == []


def test_what_is_packed_small_is_not_unpacked_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_relay, "UNPACKED_BYTES", 1000)
    assert unpack(binascii.b2a_base64(zlib.compress(b"[" + b" " * 100_000 + b"]"))) == []


def test_an_answer_has_its_size_whatever_is_in_it() -> None:
    """Stacks of which nothing is alike, of many threads: they are cut before whole workers are left out."""
    texts = [" ".join(f"{number * 7919 + rank:x}" for number in range(3_000)) for rank in range(8)]
    workers = [WorkerDump("a-job", "a", rank, rank, (ProcessDump(rank, "signal", text),)) for rank, text in enumerate(texts)]
    for most in (30_000, 4096):
        told = pack(workers, most)
        assert len(told) <= most
        found = unpack(told)
        assert [one.rank for one in found] == list(range(8))
        assert all(
            text.startswith(one.processes[0].text.removesuffix("\n(cut short)")) for one, text in zip(found, texts, strict=True)
        )
    assert unpack(pack([one.replace(error=texts[one.rank or 0] * 2) for one in workers], 100)) == []
    alike = [worker.replace(processes=(ProcessDump(1, "signal", texts[0]),)) for worker in workers]
    assert len(pack(alike, MOST_BYTES)) < len(pack(workers, 10 * MOST_BYTES)) / 4


def test_what_an_agent_has_gathered_comes_back_as_it_was() -> None:
    others = Others((WorkerDump("a-job", "b", 2, 7),), ("c",), ((2, 2), (4, 7)))
    assert read_others(json.loads(json.dumps(to_document(others)))) == others
    for wrong in ({}, {"workers": 7, "silent": [], "ranks": []}, {"workers": [], "silent": [], "ranks": [["x"]]}):
        with pytest.raises(ValueError, match=r".+"):
            read_others(wrong)


def test_a_transaction_is_what_a_store_takes(store: MemoryEngine) -> None:
    """One value of an embedded store is at most 160 KB, whatever a node has to say."""
    transaction = Answers(lambda *_: [WorkerDump("j", "n", 0, 1, (ProcessDump(1, "socket", "\\x00" * 10_000_000),))]).make(
        "n#1", 1, json.dumps({"ranks": None, "but": None, "bytes": 10**9, "within_s": 1})
    )
    assert isinstance(transaction, Transaction)
    (put,) = transaction.then
    assert isinstance(put, Put)
    assert len(put.value) <= MOST_BYTES
