"""Members that wait for each other: on our stores, and what a barrier tells when somebody does not come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.store.barriers import barrier, get_all, store_timeout, synchronize
from rallypoint.store.hash_store import HashStore
from rallypoint.store.interface import StoreTimeoutError
from rallypoint.store.prefix_store import PrefixStore


def at_once(count: int, work: Callable[[int], object]) -> list[object]:
    """What ``work(0)`` to ``work(count - 1)`` return, run beside each other."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def test_store_timeout_holds_within_the_block_and_is_restored_after_an_error() -> None:
    store = HashStore()
    before = store.timeout
    with store_timeout(store, 0.5):
        assert store.timeout == timedelta(seconds=0.5)
    with pytest.raises(StoreTimeoutError, match=r"0\.01 s"), store_timeout(store, 0.01):
        store.get("never")
    assert store.timeout == before


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_everybody_gets_everybodys_data_by_rank(world_size: int) -> None:
    store = PrefixStore("job", HashStore())
    answers = at_once(world_size, lambda rank: synchronize(store, f"data {rank}".encode(), rank, world_size, "agents/", 10))
    assert answers == [[f"data {rank}".encode() for rank in range(world_size)]] * world_size


def test_rank_0_stays_until_all_have_read() -> None:
    store = HashStore()
    store.multi_set(["x0", "x1"], ["a", "b"])
    first = threading.Thread(target=get_all, args=(store, 0, "x", 2))
    first.start()
    store.wait(["x/finished/num_members"], 10)
    assert first.is_alive()
    assert get_all(store, 1, "x", 2) == [b"a", b"b"]
    first.join(10)
    assert not first.is_alive()


def test_synchronize_says_whose_data_did_not_come() -> None:
    with pytest.raises(StoreTimeoutError, match="'agents1'"):
        synchronize(HashStore(), b"mine", 0, 2, "agents", timeout=0.01)


@pytest.mark.parametrize("with_ranks", [True, False])
def test_a_barrier_opens_when_all_have_come(with_ranks: bool) -> None:
    store = HashStore()
    assert at_once(4, lambda rank: barrier(store, 4, "exit", 10, rank if with_ranks else None)) == [None] * 4


def missing_at(store: HashStore, world_size: int, ranks: list[int], **options: object) -> list[str]:
    """What the ranks that came are told, all others being missing."""

    def wait(index: int) -> str:
        with pytest.raises(StoreTimeoutError) as caught:
            barrier(store.clone(), world_size, "exit", 0.2, ranks[index], **options)  # type: ignore[arg-type]
        return str(caught.value)

    return [str(message) for message in at_once(len(ranks), wait)]


def test_everybody_who_came_is_told_who_did_not() -> None:
    for message in missing_at(HashStore(), 4, [1, 3]):
        assert "'exit'" in message
        assert "0.2 s" in message
        assert "2 of 4 came" in message
        assert "missing_ranks=[0, 2]" in message


def test_the_missing_are_named_by_the_decoder() -> None:
    (message,) = missing_at(HashStore(), 2, [0], rank_tracing_decoder=lambda rank: f"node-{rank}.example")
    assert "missing_ranks=[node-1.example]" in message


def test_at_most_sixteen_are_named() -> None:
    (message,) = missing_at(HashStore(), 100, [0])
    assert message.endswith("missing_ranks=[" + ", ".join(map(str, range(1, 17))) + ", …]")


def test_without_ranks_the_count_is_told() -> None:
    with pytest.raises(StoreTimeoutError, match=r"1 of 3 came$"):
        barrier(HashStore(), 3, "exit", barrier_timeout=0.01)


def test_nobody_is_accused_when_some_came_without_their_rank() -> None:
    store = HashStore()
    store.add("exit/num_members", 1)
    (message,) = missing_at(store, 3, [0])
    assert message.endswith("2 of 3 came")


def test_a_decoder_without_a_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="rank_tracing_decoder"):
        barrier(HashStore(), 1, "exit", rank_tracing_decoder=str)


@given(st.integers(1, 300).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1), max_size=16))))
def test_exactly_the_missing_are_found(case: tuple[int, set[int]]) -> None:
    """Up to sixteen missing ranks among any number are found, in order."""
    world_size, missing = case
    if world_size - 1 in missing or not missing:
        return  # the last rank is the one who asks
    store = HashStore()
    for rank in set(range(world_size - 1)) - missing:
        store.set(f"exit/rank/{rank}", "1")
        store.add("exit/num_members", 1)
    with pytest.raises(StoreTimeoutError) as caught:
        barrier(store, world_size, "exit", barrier_timeout=0, rank=world_size - 1)
    assert str(caught.value).endswith(f"missing_ranks={sorted(missing)}")
