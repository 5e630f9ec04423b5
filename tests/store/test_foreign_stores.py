"""Torch's stores in the place of ours: one that behaves like them, as strict about types, and the real ones where torch is."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from rallypoint.rendezvous.handler import RendezvousStoreInfo
from rallypoint.store.barriers import barrier, get_all, store_timeout, synchronize
from rallypoint.store.hash_store import HashStore
from rallypoint.store.interface import StoreTimeoutError
from rallypoint.store.prefix_store import PrefixStore


class ForeignError(RuntimeError):
    """What a store that is not ours raises, as torch's DistStoreError."""


class TorchLike:
    """A store with torch's methods and none of our classes: timeouts are timedeltas, positional, and never None."""

    def __init__(self) -> None:
        self._inner = HashStore()

    def __getattr__(self, name: str) -> Any:
        if name not in {"add", "append", "check", "compare_set", "delete_key", "list_keys", "multi_set", "num_keys", "set"}:
            raise AttributeError(name)
        return getattr(self._inner, name)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return self._inner.multi_get(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        assert isinstance(keys, list)
        assert all(isinstance(value, timedelta) for value in timeout)
        try:
            self._inner.wait(keys, *timeout)
        except StoreTimeoutError as error:
            raise ForeignError(f"wait timeout: {error}") from None

    def barrier(self, key: str, world_size: int, *timeout: timedelta) -> None:
        self._inner.barrier(key, world_size, *timeout)

    @property
    def timeout(self) -> timedelta:
        return self._inner.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        assert isinstance(timeout, timedelta)
        self._inner.set_timeout(timeout)


@pytest.fixture(params=["like torch's", pytest.param("torch HashStore", marks=pytest.mark.torch)])
def foreign(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "like torch's":
        yield TorchLike()
    else:
        import torch.distributed

        yield torch.distributed.HashStore()


def test_store_timeout_sets_and_restores(foreign: Any) -> None:
    foreign.set_timeout(timedelta(seconds=5))
    with store_timeout(foreign, 2.5):
        assert foreign.timeout == timedelta(seconds=2.5)
    assert foreign.timeout == timedelta(seconds=5)


def test_members_exchange_data(foreign: Any) -> None:
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda rank: synchronize(foreign, f"{rank}".encode(), rank, 3, "x", 10), range(3)))
    assert answers == [[b"0", b"1", b"2"]] * 3


def test_get_all_alone(foreign: Any) -> None:
    foreign.set("x0", "only")
    assert get_all(foreign, 0, "x", 1) == [b"only"]


def test_a_barrier_opens(foreign: Any) -> None:
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda rank: barrier(foreign, 3, "b", 10, rank), range(3))) == [None] * 3


def test_a_barrier_raises_what_the_store_raises_and_names_the_missing(foreign: Any) -> None:
    with pytest.raises(RuntimeError, match=r"1 of 3 came, missing_ranks=\[0, 2\]") as caught:
        barrier(foreign, 3, "b", 0.05, rank=1)
    assert type(caught.value) is type(caught.value.__cause__)
    assert not isinstance(caught.value, StoreTimeoutError)


def test_a_store_that_breaks_meanwhile_gives_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TorchLike()

    def broken(keys: list[str]) -> bool:
        raise ForeignError("connection reset")

    store.check = broken  # type: ignore[method-assign]
    with pytest.raises(ForeignError, match="wait timeout"):
        barrier(store, 2, "b", 0.01, rank=0)


def test_a_part_of_it_has_all_operations(foreign: Any) -> None:
    part = PrefixStore("job", foreign)
    part.set("k", "v")
    part.append("k", b"w")
    part.multi_set(["a", "b"], [b"1", "2"])
    assert (part.get("k"), foreign.get("job/k")) == (b"vw", b"vw")
    assert part.multi_get(["a", "b"]) == [b"1", b"2"]
    assert (part.add("n", 2), part.compare_set("a", "1", b"\xff\x00")) == (2, b"\xff\x00")
    assert (part.check(["a"]), part.check(["z"])) == (True, False)
    part.wait(["a"])
    part.wait(["a"], 1.5)
    part.wait(["a"], timedelta(seconds=1))
    part.barrier("alone", 1)
    part.barrier("alone2", 1, 2.0)
    assert part.delete_key("n")
    part.set_timeout(3)
    assert foreign.timeout == part.timeout == timedelta(seconds=3)


def test_a_part_of_it_names_what_did_not_come(foreign: Any) -> None:
    with pytest.raises(RuntimeError):
        PrefixStore("job", foreign).wait(["k"], 0.01)


def test_the_master_address_is_agreed_on_through_it(foreign: Any) -> None:
    published = RendezvousStoreInfo.build(0, foreign, "host-0", 1234)
    assert RendezvousStoreInfo.build(1, foreign) == published == RendezvousStoreInfo("host-0", 1234)
