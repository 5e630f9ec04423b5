"""Leases: when they end, absences of whoever looks at them, and long random histories."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.coordination.keyspace import AWAY_S, LOOK_EVERY_S, Leases

TTL_S = 3.0


def ended(leases: Leases, until: float) -> list[tuple[float, int]]:
    """Everything that ends until then, with a loop that looks when it is told to."""
    found = []
    while (now := leases.look_at()) is not None and now <= until:
        for number in leases.due(now):
            found.append((round(now, 6), number))
            leases.end(number)
        leases.check()
    return found


def granted(count: int = 1, ttl_s: float = TTL_S, now: float = 100.0) -> Leases:
    leases = Leases()
    assert [leases.grant(ttl_s, now) for _ in range(count)] == list(range(1, count + 1))
    return leases


def test_there_is_nothing_to_look_at_without_leases() -> None:
    leases = Leases()
    assert (leases.look_at(), leases.due(50.0), leases.look_at(), len(leases)) == (None, [], None, 0)


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan")])
def test_a_lease_must_live_for_a_time(ttl_s: float) -> None:
    with pytest.raises(ValueError, match="live for a time"):
        Leases().grant(ttl_s, 0.0)


def test_a_lease_ends_when_its_time_is_over_and_its_number_is_not_used_again() -> None:
    leases = granted()
    assert ended(leases, 102.9) == []
    assert ended(leases, 200.0) == [(103.0, 1)]
    assert (leases.renew(1, 103.0), leases.look_at(), leases.grant(TTL_S, 103.0)) == (False, None, 2)


def test_a_renewed_lease_runs_from_then_on() -> None:
    leases = granted(2)
    ended(leases, 102.0)
    assert leases.renew(1, 102.0)
    assert ended(leases, 200.0) == [(103.0, 2), (105.0, 1)]


def test_a_renewal_that_was_there_before_anybody_looked_counts() -> None:
    leases = granted()
    ended(leases, 102.8)
    assert leases.renew(1, 103.2), "over since 103, but nobody has ended it"
    assert ended(leases, 200.0) == [(106.2, 1)]


# --- absences --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("away_s", [0.6, 2.0, 3600.0])
def test_an_absence_extends_all_leases_by_its_length(away_s: float) -> None:
    """A host that was stopped takes nobody for dead when it goes on."""
    leases = granted()
    ended(leases, 101.0)
    assert leases.due(101.0 + away_s) == []
    assert ended(leases, 9999.0) == [(103.0 + away_s, 1)]


def test_a_loop_that_is_a_little_late_was_not_away() -> None:
    leases = granted()
    ended(leases, 102.8)
    assert leases.due(102.75 + AWAY_S) == [1]


def test_an_absence_is_not_given_to_those_who_were_renewed_after_it() -> None:
    """Else a node that died just after a long absence would be taken for alive as long again."""
    leases = granted(2)
    ended(leases, 101.0)
    leases.renew(1, 3600.0)
    assert leases.due(3600.1) == []
    assert ended(leases, 9999.0) == [(3602.0, 2), (3603.0, 1)]


def test_time_without_leases_is_no_absence_of_anybody() -> None:
    leases = granted()
    ended(leases, 200.0)
    leases.grant(TTL_S, 1000.0)
    assert ended(leases, 9999.0) == [(1003.0, 2)]


# --- histories -------------------------------------------------------------------------------------------------------------

steps = st.lists(st.tuples(st.sampled_from(["grant", "renew", "end", "look"]), st.integers(1, 6), st.integers(0, 9)), max_size=80)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_a_loop_that_looks_in_time_ends_each_lease_at_its_end(story: list[tuple[str, int, int]]) -> None:
    """Against a dictionary of ends, for a loop that is never away: it looks every 0.1 s, or more often."""
    leases, now = Leases(), 0.0
    model: dict[int, float] = {}
    ttls: dict[int, float] = {}
    for what, number, pause in story:
        for _ in range(pause):
            now += 0.1
            over = sorted((end, one) for one, end in model.items() if end <= now)
            assert leases.due(now) == [one for _, one in over]
            for _, one in over:
                leases.end(one)
                del model[one]
        match what:
            case "grant":
                model[leases.grant(0.2 * number, now)] = now + 0.2 * number
                ttls[len(ttls) + 1] = 0.2 * number
            case "renew" if leases.renew(number, now) or number in model:
                model[number] = now + ttls[number]
            case "end":
                leases.end(number)
                model.pop(number, None)
        leases.check()
        assert len(leases) == len(model)
        look_at = leases.look_at()
        assert (look_at is None) == (not model)
        assert look_at is None or look_at <= min(model.values()) + 1e-9
        assert look_at is None or look_at <= now + LOOK_EVERY_S


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(0.01, 5.0)), max_size=40))
def test_nobody_ends_within_its_time_of_being_heard_whatever_the_loop_does(story: list[tuple[bool, float]]) -> None:
    """The owner's side of the promise: a renewal that was answered is good for the whole time to live."""
    leases, now, heard_at = granted(now=0.0), 0.0, 0.0
    for renews, pause_s in story:
        now += pause_s
        if renews and leases.renew(1, now):
            heard_at = now
        for number in leases.due(now):
            leases.end(number)
            assert now >= heard_at + TTL_S - 1e-9
        leases.check()
