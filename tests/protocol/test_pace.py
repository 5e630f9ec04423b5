"""Who is slower than the others, on whichever node, by what workers tell of their steps: noise is none, and news is told once."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.hangs import pulse_page
from rallypoint.hangs.pulse import PulseMapping
from rallypoint.protocol.pace import (
    GATHER_S,
    LEAST_STEPS,
    LOOK_S,
    LOOKS,
    SLOW,
    TOLD_MAX,
    Comparison,
    Effort,
    JobPace,
    NodePace,
    Pace,
    Scores,
    Slow,
    compare,
    decode_job,
    decode_node,
    encode_job,
    encode_node,
    follow,
    is_other,
    measure,
    pause_of,
    scores,
    slow_ones,
    told_of,
)


def paces(*step_s: float, steps: int = 50) -> list[Pace]:
    return [Pace(rank, one, steps) for rank, one in enumerate(step_s)]


@pytest.mark.parametrize(
    ("step_s", "slow"),
    [
        ((0.1, 0.1, 0.1, 0.2), [3]),
        ((0.1, 0.2), [1]),
        ((0.1,), []),
        ((), []),
        ((0.1, 0.11, 0.12, 0.1), []),
        ((0.10, 0.12, 0.14, 0.16, 0.18), []),  # ranks differ that much
        ((0.3, 0.1, 0.1, 0.1, 0.2, 0.1), [0, 4]),
        ((0.0001, 0.0009), []),
        ((0.1, 0.1, 0.1, 0.124), []),
    ],
)
def test_who_is_clearly_slower(step_s: tuple[float, ...], slow: list[int]) -> None:
    assert [one.rank for one in slow_ones(paces(*step_s))] == slow


def test_the_first_steps_tell_nothing() -> None:
    assert slow_ones(paces(0.1, 0.9, steps=LEAST_STEPS - 1)) == ()


def busy(*shares: float | None, step_s: tuple[float, ...] = ()) -> list[Pace]:
    """Ranks that take equally long, or nearly, and are busy for these shares of a step."""
    return [Pace(rank, step_s[rank] if step_s else 0.1, 50, share) for rank, share in enumerate(shares)]


@pytest.mark.parametrize(
    ("told", "slow"),
    [
        (busy(0.3, 0.3, 0.98, 0.3), [2]),
        (busy(0.3, 0.98), [1]),
        (busy(0.3, 0.3, 0.98, 0.3, step_s=(0.1, 0.11, 0.105, 0.1)), [2]),
        (busy(1.0, 1.0, 1.0, 1.0), []),  # who waits keeps a processor busy too
        (busy(1.0, 1.0, 0.3, 1.0), []),  # as it is also if one is slow because it waits for a disk
        (busy(0.1, 0.1, 0.5, 0.1), []),  # it waits itself
        (busy(0.3, 0.3, 0.98, None), []),
        (busy(0.3, 0.5, 0.9, 0.7), []),  # ranks differ that much
        (busy(0.0, 0.0, 0.9, 0.0), [2]),
        (busy(0.3, 0.3, 0.98, 0.3, step_s=(0.2, 0.1, 0.1, 0.1)), [0]),  # they do not wait for each other: that one is late
    ],
)
def test_whom_the_others_wait_for_in_every_step(told: list[Pace], slow: list[int]) -> None:
    assert [one.rank for one in slow_ones(told)] == slow


def test_how_it_is_told() -> None:
    [slow] = slow_ones(paces(0.1, 0.1, 0.3))
    assert slow == Slow(2, 0.3, 0.1)
    assert slow.text == "takes 3.0 times as long for a step as the median (0.3 s, not 0.1 s)"
    [slow] = slow_ones(busy(0.25, 0.25, 1.0))
    assert slow == Slow(2, 0.1, 0.025, holds_up=True)
    assert slow.text == (
        "is busy for 4.0 times as long in each step as the median (0.1 s, not 0.025 s), and the others seem to wait for it"
    )


def test_nobody_is_named_for_one_bad_moment() -> None:
    [slow] = slow_ones(paces(0.1, 0.1, 0.3))
    seen, named = follow({}, [slow])
    assert named == ()
    assert follow(seen, []) == ({}, ())
    seen, named = follow(seen, [slow])
    assert named == (slow,)
    assert follow(seen, [slow])[1] == (slow,)
    assert LOOKS == 2


def test_effort_is_that_of_enough_whole_steps() -> None:
    first = measure(None, 10.0, 5, 1.0)
    assert first == Effort(10.0, 5, 1.0)
    assert measure(first, 12.0, 5 + LEAST_STEPS - 1, 2.0) == first
    assert measure(first, 20.0, 25, 6.0) == Effort(20.0, 25, 6.0, 0.5, 0.5)
    assert measure(first, 20.0, 25, 60.0).share == 1.0
    assert measure(first, 20.0, 25, None) == Effort(20.0, 25, None, 0.5)  # it cannot be seen
    assert measure(first, 20.0, 2, 0.1) == Effort(20.0, 2, 0.1)  # another worker has taken its place


# --- over the whole job ----------------------------------------------------------------------------------------------------


def node(name: str, first: int, *step_s: float) -> NodePace:
    return NodePace(name, tuple(Pace(first + place, one, 50) for place, one in enumerate(step_s)))


def test_one_rank_a_node_is_enough_and_the_node_is_named() -> None:
    found = compare([node("a", 0, 0.1), node("b", 1, 0.4)])
    assert found == JobPace(0.1, (Slow(1, 0.4, 0.1, node="b"),))
    assert compare([node("a", 0, 0.1)]) is None
    many = compare([node(f"n{rank}", rank, 0.1 if rank < 90 else 0.5) for rank in range(120)])
    assert many is not None
    assert [one.rank for one in many.slow] == list(range(90, 106))
    assert many.more == 14


def test_the_scores_of_a_node_are_by_the_median_of_the_job() -> None:
    job = JobPace(0.1, (Slow(3, 0.05, 0.01, holds_up=True, node="b"),))
    assert scores(paces(0.1, 0.2), job) == Scores({0: 1.0, 1: 2.0}, 1.0)
    assert scores([Pace(3, 0.1, 50)], job) == Scores({3: 5.0}, 5.0)
    assert scores(paces(0.1, 0.2), None) == Scores({0: 1.0, 1: 2.0})
    assert scores(paces(0.1), None) == scores(paces(0.1, 0.2, steps=LEAST_STEPS - 1), job) == Scores({})


def test_a_node_tells_only_what_is_new() -> None:
    before = told_of("a", busy(0.3, 0.9))
    assert [one.rank for one in before.workers] == [0, 1]
    assert not is_other(before, told_of("a", busy(0.35, 0.85, step_s=(0.105, 0.095))))
    assert is_other(before, told_of("a", busy(0.3, 0.9, step_s=(0.1, 0.12))))
    assert is_other(before, told_of("a", busy(0.3, 0.7)))
    assert is_other(before, told_of("a", busy(0.3, None)))
    assert is_other(before, told_of("a", busy(0.3)))
    assert is_other(None, before)
    assert told_of("a", paces(0.1, steps=LEAST_STEPS - 1)) == NodePace("a", ())
    assert not is_other(None, NodePace("a", ()))


def test_all_nodes_together_do_not_keep_the_leader_busy() -> None:
    assert pause_of(2) == pause_of(1000) == LOOK_S
    assert pause_of(10_000) == 50.0


@given(
    st.lists(st.tuples(st.floats(1e-9, 1e6), st.none() | st.floats(0.0, 1.0)), max_size=3 * TOLD_MAX),
    st.text(max_size=400),
)
def test_what_is_told_is_bounded_and_read_as_it_was(ranks: list[tuple[float, float | None]], name: str) -> None:
    told = told_of(name, [Pace(rank, step_s, 50, share) for rank, (step_s, share) in enumerate(ranks)])
    data = encode_node(told)
    assert decode_node(data) == told
    assert len(data) < 10_000
    slowest = max(ranks, key=lambda one: one[0] * (one[1] or 1.0), default=None)
    assert slowest is None or any(ranks[one.rank] == slowest for one in told.workers)
    found = compare([told])
    assert found is None or decode_job(encode_job(found)) == found


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b'{"node": "a", "workers": [{"rank": 0, "step_s": 0, "steps": 9, "busy": null}]}', b'{"node": 1, "workers": []}',
     b'{"node": "a", "workers": [{"rank": 0, "step_s": 0.1, "steps": 9, "busy": 1.5}]}'],
)  # fmt: skip
def test_what_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"must|Expecting"):
        decode_node(data)
    with pytest.raises(ValueError, match=r"must|Expecting"):
        decode_job(data)


class Leading:
    """A leader's comparison, and what is posted of it."""

    def __init__(self) -> None:
        self.comparison, self.posted, self.told, self.times = Comparison(), b"", dict[str, NodePace](), 0

    def hear(self, *nodes: NodePace) -> None:
        self.told.update({one.node: one for one in nodes})
        self.times += len(nodes)

    def look(self, now: float, generation: int = 1) -> JobPace | None:
        found = self.comparison.next(generation, self.told, self.times, self.posted, now)
        self.posted = found or self.posted
        return None if found is None else decode_job(found)


def test_who_is_slow_is_posted_once_it_lasts_and_again_when_it_changes() -> None:
    leading = Leading()
    assert leading.look(0.0) is None
    assert leading.comparison.look_at is None  # while nobody tells anything, nobody wakes
    leading.hear(node("a", 0, 0.1))
    assert leading.look(10.0) is None
    leading.hear(node("b", 1, 0.4))
    assert leading.look(10.0 + GATHER_S) == JobPace(0.1)  # the median, and nobody yet
    assert leading.look(11.0 + LOOK_S) == JobPace(0.1, (Slow(1, 0.4, 0.1, node="b"),))
    for at in (22.0, 40.0, 1000.0):
        assert leading.look(at) is None
    assert leading.comparison.look_at is None
    leading.hear(node("b", 1, 0.41))
    assert leading.look(1001.0) is None
    assert leading.look(1002.0) is None  # so little is no news
    leading.hear(node("b", 1, 0.1))
    assert leading.look(1007.0 + LOOK_S) is None  # for others that tell something now
    assert leading.look(1008.0 + LOOK_S) == JobPace(0.1)


def test_what_was_posted_and_is_not_there_is_posted_again() -> None:
    leading = Leading()
    leading.hear(node("a", 0, 0.1), node("b", 1, 0.1))
    assert leading.look(0.0) is None
    assert leading.look(GATHER_S) == JobPace(0.1)
    leading.posted = b""
    assert leading.look(GATHER_S + LOOK_S) == JobPace(0.1)


def test_another_generation_is_compared_anew() -> None:
    leading = Leading()
    leading.hear(node("a", 0, 0.1), node("b", 1, 0.4))
    assert leading.look(0.0) is None
    assert leading.look(1.0) == JobPace(0.1)
    leading.posted = b""
    assert leading.look(20.0, generation=2) is None
    found = leading.look(21.0, generation=2)
    assert found == JobPace(0.1)


# --- measured by the worker ------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.01, 0.0124), min_size=2, max_size=40), st.integers(2, 20))
def test_noise_is_none_and_what_stands_out_is_found(step_s: list[float], times: int) -> None:
    """Whatever is within a quarter is nothing; one that takes several times as long as all others is found, whichever it is."""
    assert slow_ones(paces(*step_s)) == ()
    alike = paces(*[0.01] * len(step_s), 0.01 * times)
    assert [one.rank for one in slow_ones(alike)] == ([len(step_s)] if times >= SLOW else [])


def test_a_worker_measures_its_own_steps() -> None:
    """The first interval is left out, steps that were skipped share theirs, and going back to a checkpoint measures nothing."""
    memory = mmap.mmap(-1, pulse_page.PAGE_BYTES)
    memory[:] = pulse_page.blank()
    page = PulseMapping(memory, lambda: None)
    page.claim(1.0)
    now = 10.0
    for step in range(5):
        page.tell_step(step, now)
        now += 20.0 if step == 0 else 0.5
    read = pulse_page.read(memoryview(memory), now)
    assert read is not None
    assert (read.step, read.step_s, read.steps) == (4, 0.5, 4)
    page.tell_step(8, now + 1.5)  # four steps in two seconds
    page.tell_step(2, now + 60.0)
    read = pulse_page.read(memoryview(memory), now + 60.0)
    assert read is not None
    assert (read.step, read.step_s, read.steps) == (2, 0.5, 5)
    page.claim(now)
    read = pulse_page.read(memoryview(memory), now)
    assert read is not None
    assert (read.step_s, read.steps) == (None, 0)
