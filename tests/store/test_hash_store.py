"""The in-process store: each operation, what it does to a model, and how it waits."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.store.hash_store import HashStore
from rallypoint.store.interface import QueueEmptyError, Store, StoreError, StoreTimeoutError


@pytest.fixture
def store() -> HashStore:
    store = HashStore()
    store.set_timeout(0.01)
    return store


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Start `work` beside the test; the list gets what it returns or raises."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(work())
        except StoreError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


# --- one operation at a time -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [b"x", "x", bytearray(b"x"), memoryview(b"x")])
def test_values_are_bytes_however_they_were_given(store: HashStore, value: bytes) -> None:
    store.set("k", value)
    assert store.get("k") == b"x"
    assert isinstance(store.get("k"), bytes)


def test_text_is_kept_as_utf8(store: HashStore) -> None:
    store.set("k", "größer")
    assert store.get("k").decode() == "größer"


@pytest.mark.parametrize("value", [1, None, 1.5, ["x"]])
def test_other_values_are_refused(store: HashStore, value: object) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        store.set("k", value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "expected", "desired", "answer", "after"),
    [
        (None, "", "new", b"new", b"new"),  # a missing key of which nothing was expected
        (None, "old", "new", b"old", None),  # a missing key of which something was expected
        ("old", "old", "new", b"new", b"new"),
        ("other", "old", "new", b"other", b"other"),
        ("other", "", "new", b"other", b"other"),
        ("", "", "new", b"new", b"new"),
        ("", "old", "new", b"", b""),
    ],
)
def test_compare_set(before: str | None, expected: str, desired: str, answer: bytes, after: bytes | None) -> None:
    store = HashStore()
    if before is not None:
        store.set("k", before)
    assert store.compare_set("k", expected, desired) == answer
    assert (store.get("k") if store.check(["k"]) else None) == after


def test_counters_are_kept_as_digits(store: HashStore) -> None:
    assert [store.add("n", 5), store.add("n", -7), store.add("n", 0)] == [5, -2, -2]
    assert store.get("n") == b"-2"
    store.set("n", "40")
    assert store.add("n", 2) == 42


@pytest.mark.parametrize(("before", "after"), [("", 1), ("12x", 13), (" -3 or so", -2), (str(2**63 - 1), -(2**63))])
def test_a_counter_goes_on_from_the_number_that_its_value_begins_with(store: HashStore, before: str, after: int) -> None:
    store.set("n", before)
    assert store.add("n", 1) == after
    assert store.get("n") == str(after).encode()


@pytest.mark.parametrize("value", ["many", "x12", "-", " ", str(2**63), "9" * 5000])
def test_what_is_no_number_cannot_be_added_to(store: HashStore, value: str) -> None:
    store.set("n", value)
    with pytest.raises(StoreError, match=f"'n'.*{value[:40]}"):
        store.add("n", 1)
    assert store.get("n") == value.encode()


def test_append_delete_and_list(store: HashStore) -> None:
    store.append("a", "x")
    store.append("a", b"y")
    store.multi_set(["b", "c"], ["1", "2"])
    assert store.multi_get(["c", "a"]) == [b"2", b"xy"]
    assert store.num_keys() == 3
    assert [store.delete_key("b"), store.delete_key("b")] == [True, False]
    assert sorted(store.list_keys()) == ["a", "c"]


def test_multi_set_refuses_unequal_lists(store: HashStore) -> None:
    with pytest.raises(ValueError, match="2 keys and 1 values"):
        store.multi_set(["a", "b"], ["1"])
    assert store.num_keys() == 0


@pytest.mark.parametrize("operation", ["wait", "check"])
def test_a_lone_key_is_not_taken_for_its_letters(store: HashStore, operation: str) -> None:
    with pytest.raises(TypeError, match=r"\['key'\]"):
        getattr(store, operation)("key")


def test_queues_are_first_in_first_out_and_are_there_only_while_they_hold_something(store: HashStore) -> None:
    assert store.queue_len("q") == 0
    store.queue_push("q", "1")
    store.queue_push("q", "2")
    assert (store.queue_len("q"), store.check(["q"]), store.num_keys(), store.list_keys()) == (2, True, 0, [])
    store.wait(["q"], 0)
    assert [store.queue_pop("q"), store.queue_pop("q", block=False)] == [b"1", b"2"]
    assert not store.check(["q"])
    with pytest.raises(QueueEmptyError, match="'q'"):
        store.queue_pop("q", block=False)


def test_a_clone_has_the_same_keys_and_its_own_timeout(store: HashStore) -> None:
    twin = store.clone()
    twin.set("k", "v")
    twin.set_timeout(timedelta(seconds=7))
    assert store.get("k") == b"v"
    assert (store.timeout, twin.timeout) == (timedelta(seconds=0.01), timedelta(seconds=7))


def test_the_default_timeout_is_that_of_torch() -> None:
    assert HashStore().timeout == timedelta(seconds=300)


@pytest.mark.parametrize("timeout", [-1, timedelta(seconds=-1), float("nan")])
def test_a_timeout_below_zero_is_refused(store: HashStore, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        store.set_timeout(timeout)


# --- against a model -------------------------------------------------------------------------------------------------------

keys = st.sampled_from(["a", "b", "c"])
values = st.one_of(st.binary(max_size=3), st.integers(-9, 9).map(lambda n: str(n).encode()))
operations = st.one_of(
    st.tuples(st.just("set"), keys, values),
    st.tuples(st.just("append"), keys, values),
    st.tuples(st.just("add"), keys, st.integers(-99, 99)),
    st.tuples(st.just("compare_set"), keys, values, values),
    st.tuples(st.just("delete_key"), keys),
    st.tuples(st.just("check"), st.lists(keys)),
    st.tuples(st.just("num_keys")),
)


def leading_number(value: bytes) -> int:
    """The number of 64 bits that a value begins with; ValueError where there is none."""
    found = re.match(rb"[ \t\n\v\f\r]*([+-]?[0-9]+)", value)
    number = int(found[1]) if found else None
    if number is None or not -(2**63) <= number < 2**63:
        raise ValueError(f"{value!r} begins with no number of 64 bits")
    return number


def model_step(model: dict[str, bytes], operation: str, *args: object) -> object:
    """What each operation does to a plain dictionary."""
    match operation, *args:
        case "set", str(key), bytes(value):
            model[key] = value
        case "append", str(key), bytes(value):
            model[key] = model.get(key, b"") + value
        case "add", str(key), int(amount):
            model[key] = str(leading_number(model.get(key) or b"0") + amount).encode()
            return int(model[key])
        case "compare_set", str(key), bytes(expected), bytes(desired):
            if (key not in model and not expected) or model.get(key) == expected:
                model[key] = desired
            return model.get(key, expected)
        case "delete_key", str(key):
            return model.pop(key, None) is not None
        case "check", list(wanted):
            return all(key in model for key in wanted)
        case ("num_keys",):
            return len(model)
    return None


def torchs_store() -> Any:
    import torch.distributed

    return torch.distributed.HashStore()


@pytest.mark.parametrize("create", [HashStore, pytest.param(torchs_store, marks=pytest.mark.torch)])
@settings(deadline=None)  # the first to need torch imports it
@given(steps=st.lists(operations, max_size=30))
def test_it_behaves_like_a_dictionary(create: Callable[[], Any], steps: list[tuple[object, ...]]) -> None:
    """So does torch's, of which the model is a description too."""
    store, model = create(), dict[str, bytes]()
    for operation, *args in steps:
        try:
            expected = model_step(model, str(operation), *args)
        except ValueError:  # added to what is no number, for which torch's store has errors of C++
            with pytest.raises(StoreError if create is HashStore else (ValueError, IndexError)):
                getattr(store, str(operation))(*args)
            continue
        assert getattr(store, str(operation))(*args) == expected
        assert {key: store.get(key) for key in store.list_keys()} == model


# --- waiting ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "write",
    [
        lambda store: store.set("k", "5"),
        lambda store: store.add("k", 5),
        lambda store: store.append("k", "5"),
        lambda store: store.compare_set("k", "", "5"),
        lambda store: store.multi_set(["j", "k"], ["4", "5"]),
    ],
    ids=["set", "add", "append", "compare_set", "multi_set"],
)
def test_every_write_wakes_who_waits(write: Callable[[Store], object]) -> None:
    store = HashStore()
    store.set_timeout(10)
    readers = [in_thread(lambda: store.get("k")), in_thread(lambda: store.multi_get(["k"])), in_thread(lambda: store.wait(["k"]))]
    write(store)
    for thread, _ in readers:
        thread.join(10)
    assert [results for _, results in readers] == [[b"5"], [[b"5"]], [None]]


def test_a_push_wakes_who_pops_and_each_value_is_popped_once() -> None:
    store = HashStore()
    store.set_timeout(10)
    poppers = [in_thread(lambda: store.queue_pop("q")) for _ in range(8)]
    for number in range(8):
        store.queue_push("q", str(number))
    for thread, _ in poppers:
        thread.join(10)
    assert sorted(value for _, results in poppers for value in results) == [str(number).encode() for number in range(8)]


def test_wait_names_the_keys_that_did_not_come(store: HashStore) -> None:
    store.set("here", "1")
    with pytest.raises(StoreTimeoutError, match=r"0\.02 s.*'gone', 'lost'.*1 of 3") as caught:
        store.wait(["here", "gone", "lost"], timedelta(seconds=0.02))
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, RuntimeError)
    assert "here" not in str(caught.value).partition("'gone'")[0]


@pytest.mark.parametrize("operation", ["get", "queue_pop"])
def test_the_stores_own_timeout_ends_a_wait(store: HashStore, operation: str) -> None:
    with pytest.raises(StoreTimeoutError, match=r"0\.01 s.*'k'"):
        getattr(store, operation)("k")


def test_a_list_of_many_missing_keys_is_cut(store: HashStore) -> None:
    with pytest.raises(StoreTimeoutError, match=r"'k15', … in vain \(0 of 50"):
        store.wait([f"k{number}" for number in range(50)], 0)


def test_an_endless_timeout_is_taken() -> None:
    store = HashStore()
    store.set_timeout(timedelta.max)
    thread, results = in_thread(lambda: store.get("k"))
    store.set("k", "v")
    thread.join(10)
    assert results == [b"v"]


def test_a_wait_for_nothing_is_over_at_once(store: HashStore) -> None:
    store.wait([], 0)


def test_counters_and_queues_lose_nothing_between_threads() -> None:
    store = HashStore()

    def work() -> None:
        for _ in range(200):
            store.add("n", 1)
            store.append("a", "x")

    workers = [in_thread(work) for _ in range(4)]
    for thread, _ in workers:
        thread.join(30)
    assert store.get("n") == b"800"
    assert len(store.get("a")) == 800


# --- the barrier of the store ----------------------------------------------------------------------------------------------


def test_barrier_lets_all_go_when_the_last_has_come() -> None:
    store = HashStore()
    first = [in_thread(lambda: store.barrier("b", 3, 10)) for _ in range(2)]
    assert [results for _, results in first] == [[], []]
    store.barrier("b", 3, timedelta(seconds=10))
    for thread, _ in first:
        thread.join(10)
    assert [results for _, results in first] == [[None], [None]]


def test_barrier_ends_in_time(store: HashStore) -> None:
    with pytest.raises(StoreTimeoutError):
        store.barrier("b", 2)


# --- stores that can less --------------------------------------------------------------------------------------------------


class SmallStore(HashStore):
    """A store with the abstract methods only, as a plug-in may bring it."""

    append, list_keys, clone, has_extended_api = Store.append, Store.list_keys, Store.clone, Store.has_extended_api
    queue_push, queue_pop, queue_len = Store.queue_push, Store.queue_pop, Store.queue_len


@pytest.mark.parametrize(
    ("operation", "args"),
    [("append", "kv"), ("list_keys", ""), ("clone", ""), ("queue_push", "kv"), ("queue_pop", "k"), ("queue_len", "k")],
)
def test_what_a_store_cannot_do_is_said_by_name(operation: str, args: str) -> None:
    with pytest.raises(NotImplementedError, match=f"SmallStore has no {operation}"):
        getattr(SmallStore(), operation)(*args)
    assert not SmallStore().has_extended_api()
    assert HashStore().has_extended_api()
