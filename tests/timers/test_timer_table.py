"""The table of timers, against a plain model of it."""

from __future__ import annotations

import math
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.timers.timer_table import CLOCK_STEP_S, TimerTable, first_of


class Request(NamedTuple):
    worker_id: int
    scope_id: str
    expiration_time: float


TIMES = st.one_of(st.integers(-2, 40).map(float), st.just(math.inf))
REQUESTS = st.builds(Request, st.integers(1, 4), st.sampled_from("abc"), TIMES)


def model_of(requests: list[Request]) -> dict[tuple[int, str], Request]:
    kept: dict[tuple[int, str], Request] = {}
    for one in requests:
        key = (one.worker_id, one.scope_id)
        if one.expiration_time < 0:
            kept.pop(key, None)
        else:
            kept[key] = one
    return kept


def table_of(requests: list[Request]) -> TimerTable:
    table = TimerTable()
    for one in requests:
        assert table.register(one)
    return table


def flat(expired: dict[int, list[Request]]) -> list[Request]:
    return [request for requests in expired.values() for request in requests]


@given(st.lists(REQUESTS), st.floats(0, 50), st.floats(0, 50))
def test_what_has_expired_is_what_was_not_released_in_time(requests: list[Request], now: float, later: float) -> None:
    table, kept = table_of(requests), model_of(requests)
    for moment in (now, later):
        assert sorted(flat(table.expired(moment))) == sorted(one for one in kept.values() if one.expiration_time <= moment)
        table.seconds_to_wait(moment, 10.0)
    assert table.workers() == {one.worker_id for one in kept.values()}


@given(st.lists(REQUESTS), st.sets(st.integers(1, 4)), st.floats(0, 50))
def test_forgotten_workers_have_no_timers(requests: list[Request], gone: set[int], now: float) -> None:
    table = table_of(requests)
    table.forget(gone)
    assert table.workers().isdisjoint(gone)
    assert set(table.expired(now)).isdisjoint(gone)
    assert len(table) == sum(one.worker_id not in gone for one in model_of(requests).values())


@given(st.lists(REQUESTS), st.lists(st.floats(0, 50), max_size=4), st.floats(0.1, 20))
def test_nobody_sleeps_past_an_expiration(requests: list[Request], looks: list[float], most_s: float) -> None:
    table, kept = table_of(requests), model_of(requests)
    for now in sorted(looks):
        wait_s = table.seconds_to_wait(now, most_s)
        assert 0 <= wait_s <= most_s
        assert not [one for one in kept.values() if now < one.expiration_time < now + wait_s - 1e-6]


@given(st.lists(REQUESTS), st.integers(0, 50))
def test_a_released_timer_wakes_at_most_once(requests: list[Request], now: int) -> None:
    """What has expired and could not be reaped is looked at again after the whole interval; it does not keep anybody awake."""
    table, kept = table_of(requests), model_of(requests)
    woken_at = now + table.seconds_to_wait(now, 1000.0)
    due = [one.expiration_time for one in kept.values() if one.expiration_time > woken_at]
    assert table.seconds_to_wait(woken_at, 1000.0) == min([1000.0, *(time - woken_at for time in due)])


@given(st.lists(REQUESTS), st.floats(-1e6, 1e6), st.integers(0, 50))
def test_a_step_of_the_clock_expires_nothing_and_saves_nobody(requests: list[Request], step_s: float, now: int) -> None:
    table = table_of(requests)
    table.follow_clocks(1000.0, 0.0)
    table.follow_clocks(1000.0 + step_s, 0.0)
    moved_s = step_s if abs(step_s) >= CLOCK_STEP_S else 0.0
    half_way = now + 0.5  # no timer expires there, so that rounding does not matter
    expected = [one for one in model_of(requests).values() if one.expiration_time <= half_way]
    assert sorted(flat(table.expired(half_way + moved_s))) == sorted(expected)


def test_slow_drift_adds_up() -> None:
    table = table_of([Request(1, "a", 100.0)])
    for second in range(11):
        table.follow_clocks(50.0 + second * 1.1, float(second))
    assert not table.expired(100.4)
    assert table.expired(101.1)


def test_a_full_table_takes_renewals_and_releases_but_nothing_new() -> None:
    table = TimerTable(limit=2)
    assert table.register(Request(1, "a", 1.0))
    assert table.register(Request(2, "a", 1.0))
    assert not table.register(Request(3, "a", 1.0))
    assert table.register(Request(1, "a", 5.0))
    assert table.register(Request(2, "a", -1))
    assert table.register(Request(3, "a", 1.0))
    assert len(table) == 2


def test_the_first_to_expire_decides() -> None:
    late, early = Request(1, "late", 9.0), Request(1, "early", 2.0)
    assert first_of([late, early]) is early
