"""Who is slower than the others, by what workers tell of their steps: noise is none, and everybody is told of once."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.hangs import pulse_page
from rallypoint.hangs.pace import LEAST_STEPS, LOOKS, SLOW, Pace, Slow, follow, slow_ones, slowness
from rallypoint.hangs.pulse import PulseMapping


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
    assert slowness(paces(0.1, 0.2)) == {0: 1.0, 1: 2.0}


def test_it_is_told_once_and_not_for_one_bad_moment() -> None:
    [slow] = slow_ones(paces(0.1, 0.1, 0.3))
    assert slow == Slow(2, 0.3, 0.1)
    assert slow.text == "takes 3.0 times as long for a step as the median (0.3 s, not 0.1 s)"
    seen, told = follow({}, [slow])
    assert told == ()
    assert follow(seen, []) == ({}, ())  # it was a moment
    seen, told = follow(seen, [slow])
    assert told == (slow,)
    for found in ([slow], [], [slow], [slow]):
        seen, told = follow(seen, found)
        assert told == ()


@given(st.lists(st.floats(0.01, 0.0124), min_size=2, max_size=40), st.integers(2, 20))
def test_noise_is_none_and_what_stands_out_is_found(step_s: list[float], times: int) -> None:
    """Whatever is within a quarter is nothing; one that takes several times as long as all others is found, whichever it is."""
    assert slow_ones(paces(*step_s)) == ()
    alike = paces(*[0.01] * len(step_s), 0.01 * times)
    assert [one.rank for one in slow_ones(alike)] == ([len(step_s)] if times >= SLOW else [])
    assert LOOKS > 1


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
