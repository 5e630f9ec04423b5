"""Pauses grow, stay below the longest, and differ between those who wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.backoff import Backoff, jittered


@given(st.integers(0, 10_000), st.floats(0.001, 1.0), st.floats(1.0, 60.0))
def test_a_pause_is_in_the_upper_half_of_what_it_may_be(failures: int, first_s: float, longest_s: float) -> None:
    backoff = Backoff(first_s, longest_s)
    backoff.failures = failures
    most_s = longest_s if failures > 20 else min(longest_s, first_s * 2**failures)
    assert most_s / 2 <= backoff.next_s() <= most_s
    assert backoff.failures == failures + 1


def test_no_two_pauses_are_the_same() -> None:
    assert len({jittered(1.0) for _ in range(100)}) == 100
