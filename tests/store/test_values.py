"""What the operations of a store mean: tables, and a comparison with a model that is as simple as can be."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.store.values import ITEM_OVERHEAD_BYTES, NotANumber, StoreFull, Values, number_in

GREATEST, SMALLEST = 2**63 - 1, -(2**63)


def recount(values: Values) -> int:
    """What everything that is held takes, counted from nothing."""
    singles = sum(ITEM_OVERHEAD_BYTES + len(key) + len(value) for key, value in values.values.items())
    queued = sum(ITEM_OVERHEAD_BYTES + len(value) for queue in values.queues.values() for value in queue)
    return singles + queued + sum(map(len, values.queues))


# --- numbers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (b"0", 0),
        (b"12", 12),
        (b"-12", -12),
        (b"+12", 12),
        (b"007", 7),
        (b"-0", 0),
        (b"12x", 12),
        (b"12 13", 12),
        (b"1_000", 1),
        (b"1.5", 1),
        (b"0x10", 0),
        (b" \t\n\v\f\r 5", 5),
        (b" -5 ", -5),
        (b"5\0", 5),
        (b"", None),
        (b" ", None),
        (b"-", None),
        (b"+", None),
        (b"- 5", None),
        (b"--5", None),
        (b"+-5", None),
        (b"x12", None),
        (b"\0" + b"5", None),
        ("\N{NO-BREAK SPACE}5".encode(), None),
        ("\N{ARABIC-INDIC DIGIT FIVE}".encode(), None),
        (b"%d" % GREATEST, GREATEST),
        (b"%d" % SMALLEST, SMALLEST),
        (b"%d" % (GREATEST + 1), None),
        (b"%d" % (SMALLEST - 1), None),
        (b"9999999999999999999", None),
        (b"0" * 5000 + b"7", 7),
        (b"-" + b"0" * 5000, 0),
        (b"9" * 5000, None),  # more digits than Python's int would take
        (b"9" * 1_000_000, None),
    ],
)
def test_the_number_that_a_value_begins_with(value: bytes, number: int | None) -> None:
    assert number_in(value) == number


@given(st.integers(SMALLEST * 2, GREATEST * 2))
def test_a_number_of_64_bits_is_read_as_int_reads_it(number: int) -> None:
    assert number_in(b"%d" % number) == (number if SMALLEST <= number <= GREATEST else None)


@given(st.lists(st.sampled_from([b" ", b"\n", b"-", b"+", b"0", b"1", b"9", b"x", b"_", b"\0"]), max_size=8).map(b"".join))
def test_what_stands_around_a_number_is_passed_over(value: bytes) -> None:
    found = re.match(rb"[ \t\n\v\f\r]*([+-]?[0-9]+)", value)
    assert number_in(value) == (int(found[1]) if found else None)


# --- one operation at a time -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "amount", "after"),
    [
        (None, 5, 5),
        (None, 0, 0),
        (b"40", 2, 42),
        (b"-3", 1, -2),
        (b"12x", 1, 13),
        (b"%d" % GREATEST, 1, SMALLEST),
        (b"%d" % SMALLEST, -1, GREATEST),
    ],
)
def test_a_counter_is_kept_as_digits_and_wraps_around_at_64_bits(before: bytes | None, amount: int, after: int) -> None:
    values = Values()
    if before is not None:
        values.set(b"n", before)
    assert values.add(b"n", amount) == after
    assert values.values == {b"n": b"%d" % after}


@pytest.mark.parametrize("value", [b"", b"many", b"9" * 5000, b"\xff"])
def test_what_is_no_number_cannot_be_added_to_and_stays(value: bytes) -> None:
    values = Values()
    values.set(b"n\xff", value)
    with pytest.raises(NotANumber, match="cannot add to 'n�'") as caught:
        values.add(b"n\xff", 1)
    assert len(str(caught.value)) < 250
    assert values.values == {b"n\xff": value}


@pytest.mark.parametrize(
    ("before", "expected", "answer", "is_written"),
    [
        (None, b"", b"new", True),  # a missing key of which nothing was expected
        (None, b"old", b"old", False),  # a missing key of which something was expected
        (b"old", b"old", b"new", True),
        (b"other", b"old", b"other", False),
        (b"other", b"", b"other", False),
        (b"", b"", b"new", True),
        (b"", b"old", b"", False),
        (b"new", b"new", b"new", True),
    ],
)
def test_compare_set(before: bytes | None, expected: bytes, answer: bytes, is_written: bool) -> None:
    values = Values()
    if before is not None:
        values.set(b"k", before)
    assert values.compare_set(b"k", expected, b"new") == (answer, is_written)
    assert values.values.get(b"k") == (b"new" if is_written else before)


def test_a_queue_stands_beside_the_value_of_the_same_key() -> None:
    values = Values()
    values.push(b"k", b"1")
    values.push(b"k", b"2")
    assert (b"k" in values, values.queue_length(b"k"), values.values) == (True, 2, {})
    assert values.missing([b"k", b"other"]) == [b"other"]
    assert not values.delete(b"k")
    values.set(b"k", b"v")
    assert values.delete(b"k")
    assert [values.pop(b"k"), values.pop(b"k"), values.pop(b"k")] == [b"1", b"2", None]
    assert (b"k" in values, values.queue_length(b"k"), values.held_bytes) == (False, 0, 0)


# --- the limit -------------------------------------------------------------------------------------------------------------


def test_a_full_store_refuses_what_it_cannot_hold_and_stays_as_it_was() -> None:
    values = Values(limit_bytes=2 * ITEM_OVERHEAD_BYTES + 10)
    values.set(b"k", b"1234")
    values.push(b"q", b"1234")  # ten bytes and twice what an item takes: to the brim
    held = dict(values.values), values.held_bytes
    for refused in (
        lambda: values.set(b"k", b"12345"),
        lambda: values.set(b"j", b""),
        lambda: values.append(b"k", b"x"),
        lambda: values.add(b"n", 1),
        lambda: values.compare_set(b"j", b"", b"x"),
        lambda: values.compare_set(b"k", b"1234", b"12345"),
        lambda: values.push(b"q", b""),
        lambda: values.push(b"p", b""),
    ):
        with pytest.raises(StoreFull, match=str(values.limit_bytes)):
            refused()
    assert (dict(values.values), values.held_bytes) == held
    assert set(values.queues) == {b"q"}


def test_a_full_store_takes_what_makes_it_smaller() -> None:
    values = Values(limit_bytes=ITEM_OVERHEAD_BYTES + 5)
    values.set(b"k", b"1234")
    values.set(b"k", b"4321")
    values.set(b"k", b"1")
    values.append(b"k", b"234")
    assert values.delete(b"k")
    values.push(b"q", b"1234")
    assert values.pop(b"q") == b"1234"
    assert values.held_bytes == 0


# --- against a model -------------------------------------------------------------------------------------------------------

keys = st.sampled_from([b"", b"a", b"b", b"long key"])
texts = st.one_of(st.binary(max_size=3), st.integers(-9, 9).map(lambda n: b"%d" % n))
operations = st.one_of(
    st.tuples(st.sampled_from(["set", "append", "push"]), keys, texts),
    st.tuples(st.just("add"), keys, st.integers(SMALLEST, GREATEST)),
    st.tuples(st.just("compare_set"), keys, texts, texts),
    st.tuples(st.sampled_from(["delete", "pop", "queue_length"]), keys),
    st.tuples(st.just("missing"), st.lists(keys)),
)


class Model:
    """The same with nothing but a dictionary and lists."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, list[bytes]] = {}

    def set(self, key: bytes, value: bytes) -> None:
        self.values[key] = value

    def append(self, key: bytes, more: bytes) -> None:
        self.values[key] = self.values.get(key, b"") + more

    def push(self, key: bytes, value: bytes) -> None:
        self.queues[key] = [*self.queues.get(key, []), value]

    def add(self, key: bytes, amount: int) -> int:
        before = number_in(self.values.get(key, b"0"))
        if before is None:
            raise ValueError(key)
        count = int.from_bytes(((before + amount) % 2**64).to_bytes(8, "little"), "little", signed=True)
        self.values[key] = str(count).encode()
        return count

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> tuple[bytes, bool]:
        fits = self.values[key] == expected if key in self.values else expected == b""
        if fits:
            self.values[key] = desired
        return self.values.get(key, expected), fits

    def delete(self, key: bytes) -> bool:
        return self.values.pop(key, None) is not None

    def pop(self, key: bytes) -> bytes | None:
        first, *rest = self.queues.pop(key, []) or [None]
        if rest:
            self.queues[key] = [value for value in rest if value is not None]
        return first

    def queue_length(self, key: bytes) -> int:
        return len(self.queues.get(key, []))

    def missing(self, wanted: list[bytes]) -> list[bytes]:
        return [key for key in wanted if key not in self.values.keys() | self.queues.keys()]


def outcome(of: Values | Model, operation: str, *args: object) -> object:
    try:
        return getattr(of, operation)(*args)
    except ValueError:
        return ValueError


def empty_out(values: Values) -> None:
    for key in list(values.values):
        values.delete(key)
    for key in list(values.queues):
        while values.pop(key) is not None:
            pass


@given(st.lists(operations, max_size=40))
def test_it_behaves_like_its_model_and_knows_what_it_holds(steps: list[tuple[str, object]]) -> None:
    values, model = Values(), Model()
    for operation, *args in steps:
        assert outcome(values, operation, *args) == outcome(model, operation, *args)
        assert values.values == model.values
        assert {key: list(queue) for key, queue in values.queues.items()} == model.queues
        assert values.held_bytes == recount(values)
    empty_out(values)
    assert (values.held_bytes, values.values, values.queues) == (0, {}, {})


@given(st.lists(operations, max_size=40), st.integers(0, 3 * ITEM_OVERHEAD_BYTES))
def test_no_more_than_the_limit_is_ever_held_and_a_refusal_changes_nothing(steps: list[tuple[str, object]], limit: int) -> None:
    values = Values(limit)
    for operation, *args in steps:
        before = dict(values.values), {key: list(queue) for key, queue in values.queues.items()}
        try:
            outcome(values, operation, *args)
        except StoreFull:
            assert (values.values, {key: list(queue) for key, queue in values.queues.items()}) == before
        assert values.held_bytes == recount(values) <= limit
    empty_out(values)
    assert values.held_bytes == 0
