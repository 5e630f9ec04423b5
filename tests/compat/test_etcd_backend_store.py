"""A store in a real etcd: what members of a job exchange through it."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.etcd_cluster import start_cluster

from rallypoint.compat.etcd_backend import EtcdStore
from rallypoint.store.interface import QueueEmptyError, StoreTimeoutError


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_cluster(Path(tmp_path_factory.mktemp("etcd"))) as cluster:
        yield cluster.endpoints[0]


@pytest.fixture
def make(endpoint: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    stores: list[EtcdStore] = []

    def make_store(timeout: Any = 5.0) -> EtcdStore:
        stores.append(EtcdStore(endpoint, f"/tests/{request.node.name}", timeout))
        return stores[-1]

    yield make_store
    for store in stores:
        store.close()


def test_what_one_writes_another_reads(make: Any) -> None:
    one, other = make(), make(timedelta(seconds=5))
    one.set("k", b"\0\xff")
    assert other.get("k") == b"\0\xff"
    assert [one.add("n", 2), other.add("n", 3)] == [2, 5]
    assert other.compare_set("k", b"\0\xff", "new") == one.get("k") == b"new"
    one.append("k", "er")
    assert other.multi_get(["k", "n"]) == [b"newer", b"5"]
    assert sorted(one.list_keys()) == ["k", "n"]
    assert [other.delete_key("k"), other.delete_key("k"), one.check(["k"])] == [True, False, False]


def test_who_waits_is_woken_and_who_waits_in_vain_is_told_the_key(make: Any) -> None:
    one, other = make(), make(0.2)
    with pytest.raises(StoreTimeoutError, match="'late'"):
        other.get("late")
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(make().get("late")))
    waiting.start()
    one.set("late", "1")
    waiting.join(10)
    assert found == [b"1"]


def test_queues(make: Any) -> None:
    one, other = make(), make()
    one.queue_push("q", "a")
    one.queue_push("q", "b")
    assert [other.queue_len("q"), other.queue_pop("q"), one.queue_pop("q")] == [2, b"a", b"b"]
    with pytest.raises(QueueEmptyError):
        other.queue_pop("q", block=False)


def test_counters_of_many_lose_nothing(make: Any) -> None:
    def count() -> None:
        store = make()
        for _ in range(10):
            store.add("n", 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert make().add("n", 0) == 40


def test_a_copy_in_another_process_connects_anew(make: Any) -> None:
    make().set("k", "v")
    copy = pickle.loads(pickle.dumps(make()))
    try:
        assert copy.get("k") == b"v"
    finally:
        copy.close()
