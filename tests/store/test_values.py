"""What the operations of a store mean: tables, and a comparison with a model that is as simple as can be."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.store.values import ITEM_OVERHEAD_BYTES, NotANumber, StoreFull, Values, Waiters, number_in

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


# --- waiters: who is let go by which change --------------------------------------------------------------------------------


Step = tuple[str, int | bytes] | tuple[str, int, frozenset[bytes]]


@pytest.mark.parametrize(
    ("waiting", "changes", "let_go"),
    [
        ({1: b"a"}, ["a"], [[1]]),
        ({1: b"a"}, ["b", "a", "a"], [[], [1], []]),
        ({1: b"ab"}, ["a", "b"], [[], [1]]),
        ({1: b"ab"}, ["b", "b", "a"], [[], [], [1]]),
        ({1: b"aa"}, ["a"], [[1]]),
        ({3: b"a", 1: b"a", 2: b"a"}, ["a"], [[3, 1, 2]]),
        ({1: b"ab", 2: b"a"}, ["a", "b"], [[2], [1]]),
        ({1: b"a", 2: b"a"}, ["+a", "+a", "+a"], [[1], [2], []]),
        ({1: b"a", 2: b"a", 3: b"a"}, ["+a", "a"], [[1], [2, 3]]),
        ({1: b"ab", 2: b"a"}, ["+a", "+a", "+b"], [[2], [], [1]]),  # who still misses something takes it from nobody
        ({1: b"ab", 2: b"a"}, ["+a", "b"], [[2], [1]]),
    ],
)
def test_whom_a_change_lets_go(waiting: dict[int, bytes], changes: list[str], let_go: list[list[int]]) -> None:
    """``+a`` is one more value in the queue ``a``."""
    waiters = Waiters()
    for who, keys in waiting.items():
        waiters.add(who, [bytes([key]) for key in keys])
    told = [waiters.pushed(name[1:].encode()) if name[0] == "+" else waiters.changed(name.encode()) for name in changes]
    assert told == let_go
    assert len(waiters) == len(waiting) - sum(map(len, let_go))


def test_whoever_waits_anew_waits_for_that_only_and_stands_at_the_end() -> None:
    waiters = Waiters()
    waiters.add(1, [b"a", b"b"])
    waiters.add(2, [b"a"])
    waiters.add(1, [b"a"])
    assert (len(waiters), waiters.changed(b"b"), waiters.changed(b"a")) == (2, [], [2, 1])


def test_whoever_is_forgotten_is_not_let_go_and_keeps_nobody_waiting() -> None:
    waiters = Waiters()
    waiters.add(1, [b"a"])
    waiters.add(2, [b"a", b"b"])
    waiters.forget(1)
    waiters.forget(1)
    waiters.forget(99)
    assert (waiters.pushed(b"a"), waiters.pushed(b"b"), len(waiters)) == ([], [2], 0)


# --- promises --------------------------------------------------------------------------------------------------------------

names = st.sampled_from([b"a", b"b", b"c"])
people = st.integers(1, 5)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), people, st.frozensets(names, min_size=1)),
        st.tuples(st.just("forget"), people),
        st.tuples(st.sampled_from(["changed", "pushed"]), names),
    ),
    max_size=40,
)


def holds_nothing(waiters: Waiters) -> bool:
    return not any(getattr(waiters, slot) for slot in Waiters.__slots__)


def model_told(model: dict[int, set[bytes]], event: str, key: bytes) -> list[int]:
    """Whom a list in the order of arrival, looked through from its start, lets go."""
    concerned = [who for who, left in model.items() if key in left]
    told = []
    for who in concerned:
        model[who].discard(key)
        if not model[who]:
            del model[who]
            told.append(who)
            if event == "pushed":
                break
    return told


@given(steps)
def test_they_are_let_go_as_a_plain_list_would_do_it(steps: list[Step]) -> None:
    waiters, model = Waiters(), dict[int, set[bytes]]()
    for step in steps:
        match step:
            case "add", int(who), frozenset(keys):
                waiters.add(who, keys)
                model.pop(who, None)
                model[who] = set(keys)
            case "forget", int(who):
                waiters.forget(who)
                model.pop(who, None)
            case str(event), bytes(key):
                assert getattr(waiters, event)(key) == model_told(model, event, key)
        assert len(waiters) == len(model)
        assert waiters.pairs == sum(map(len, model.values()))


@given(st.dictionaries(people, st.frozensets(names, min_size=1)), st.lists(names, max_size=20))
def test_nobody_is_let_go_twice_and_nobody_is_forgotten(waiting: dict[int, frozenset[bytes]], changes: list[bytes]) -> None:
    waiters = Waiters()
    for who, keys in waiting.items():
        waiters.add(who, keys)
    told = [who for key in changes for who in waiters.changed(key)]
    assert len(told) == len(set(told))
    assert set(told) == {who for who, keys in waiting.items() if keys <= set(changes)}
    told += [who for key in (b"a", b"b", b"c") for who in waiters.changed(key)]
    assert sorted(told) == sorted(waiting)
    assert holds_nothing(waiters)


@given(st.lists(people, unique=True), st.integers(0, 8))
def test_pushed_values_go_to_those_who_came_first_one_each(waiting: list[int], pushes: int) -> None:
    waiters = Waiters()
    for who in waiting:
        waiters.add(who, [b"q"])
    assert [who for _ in range(pushes) for who in waiters.pushed(b"q")] == waiting[:pushes]
    assert waiters.changed(b"q") == waiting[pushes:]
    assert holds_nothing(waiters)
