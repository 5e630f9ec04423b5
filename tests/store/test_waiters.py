"""Who is let go by which change: a table, and the promises that hold for any sequence of changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.store.values import Waiters

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
