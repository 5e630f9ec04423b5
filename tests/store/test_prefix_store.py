"""A part of a store: the same operations, on keys of its own."""

from __future__ import annotations

from datetime import timedelta

import pytest

from rallypoint.store.hash_store import HashStore
from rallypoint.store.interface import StoreTimeoutError
from rallypoint.store.prefix_store import PrefixStore


def test_keys_get_the_prefix() -> None:
    whole = HashStore()
    part = PrefixStore("job", whole)
    part.set("k", "v")
    assert whole.get("job/k") == b"v"
    assert part.underlying_store is whole


def test_every_operation_works_on_the_part() -> None:
    part = PrefixStore("outer", PrefixStore("inner", HashStore()))
    part.multi_set(["a", "b"], ["1", "2"])
    part.append("a", "x")
    part.queue_push("q", "first")
    assert part.multi_get(["a", "b"]) == [b"1x", b"2"]
    assert part.add("n", 3) == 3
    assert part.compare_set("b", "2", "3") == b"3"
    assert (part.check(["a", "n"]), part.check(["a", "other"])) == (True, False)
    assert (part.queue_len("q"), part.queue_pop("q")) == (1, b"first")
    assert part.delete_key("n")
    assert sorted(part.list_keys()) == ["a", "b"]
    part.wait(["a"], 0)
    part.barrier("alone", 1)
    assert part.has_extended_api()


def test_parts_do_not_see_each_other() -> None:
    whole = HashStore()
    left, right = PrefixStore("job", whole), PrefixStore("job2", whole)
    left.set("k", "left")
    right.set("k", "right")
    assert (left.get("k"), right.get("k")) == (b"left", b"right")
    assert (left.list_keys(), right.list_keys()) == (["k"], ["k"])
    assert left.num_keys() == whole.num_keys() == 2


def test_the_timeout_is_that_of_the_store_below() -> None:
    whole = HashStore()
    part = PrefixStore("job", whole)
    part.set_timeout(0.01)
    assert whole.timeout == part.timeout == timedelta(seconds=0.01)
    with pytest.raises(StoreTimeoutError, match="'job/k'"):
        part.get("k")


def test_a_clone_is_the_same_part() -> None:
    part = PrefixStore("job", HashStore())
    part.set("k", "v")
    assert part.clone().get("k") == b"v"
