"""When processes are started to wait for the places of workers: once nobody is in their way, and not again and again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.defaults import STANDBY_AFTER_S
from rallypoint.processes import standby_rules
from rallypoint.processes.standby_rules import MOST_LOSSES, NOT_CALLED_S, Known, Start, TellNobodyCalls, Wait, decide

BOTH = frozenset({0, 1})
ONE = frozenset({1})
NONE: frozenset[int] = frozenset()
READY = Known(10.0, ready_at=20.0)
DUE = 20.0 + STANDBY_AFTER_S


@pytest.mark.parametrize(
    ("known", "now", "due"),
    [
        (Known(), 0.0, Wait()),
        (Known(10.0, BOTH, BOTH), 10.0, Wait(10.0 + NOT_CALLED_S)),
        (Known(10.0, BOTH, BOTH), 10.0 + NOT_CALLED_S, TellNobodyCalls()),
        (Known(10.0, BOTH, BOTH, has_told=True), 1000.0, Wait()),
        (Known(10.0, ONE, ONE), 1000.0, TellNobodyCalls()),
        (Known(10.0, NONE, ONE), 1000.0, Wait()),  # it has ended: the group will
        (READY, 20.0, Wait(DUE)),
        (READY, DUE, Start()),
        (READY.replace(has_standby=True), DUE, Wait()),
        (READY.replace(losses=MOST_LOSSES - 1), DUE, Start()),
        (READY.replace(losses=MOST_LOSSES), DUE, Wait()),
    ],
)
def test_what_is_due(known: Known, now: float, due: object) -> None:
    assert decide(known, now) == due


def test_the_life_of_a_group_and_of_the_next() -> None:
    known = standby_rules.started(standby_rules.begin(Known(), [0, 1]), 1.0)
    known = standby_rules.heard(known, 1, True, 2.0)
    assert known.ready_at is None
    known = standby_rules.heard(known, 0, True, 5.0)
    assert known.ready_at == 5.0
    known = standby_rules.taken(known.replace(has_standby=True))
    known = standby_rules.started(standby_rules.begin(known, []), 9.0)
    assert decide(known, 9.0) == Wait(9.0 + STANDBY_AFTER_S), "they were on standby, so they have called it"
    known = standby_rules.lost(known.replace(has_standby=True), 20.0)
    assert decide(known, 20.0) == Wait(20.0 + STANDBY_AFTER_S)
    assert decide(standby_rules.lost(known, 30.0), 1000.0) == Wait()
    assert not standby_rules.will_retry(standby_rules.lost(Known(), 1.0, is_for_good=True))


steps = st.lists(st.tuples(st.sampled_from(["begin", "ready", "gone", "take", "lose", "look"]), st.integers(0, 2)), max_size=30)


@given(steps)
def test_none_is_started_too_soon_or_twice_and_no_look_is_missed(done: list[tuple[str, int]]) -> None:
    """Whoever looks when it is told to finds something due then, and nothing due that it did not do."""
    known, now, called = Known(), 0.0, {0, 1, 2}
    for kind, rank in done:
        now += 1.0
        if kind == "begin":
            known, called = standby_rules.started(standby_rules.begin(known, range(3)), now), set()
        elif kind in ("ready", "gone") and rank in known.silent:
            known = standby_rules.heard(known, rank, kind == "ready", now)
            called |= {rank} if kind == "ready" else set()
        elif kind == "take":
            known = standby_rules.taken(known)
        elif kind == "lose" and known.has_standby:
            known = standby_rules.lost(known, now)
        elif kind == "look":
            due = decide(known, now)
            if isinstance(due, Wait) and due.until is not None:
                assert due.until > now
                now = due.until
                due = decide(known, now)
                assert not isinstance(due, Wait)
            if due == Start():
                assert called == {0, 1, 2}
                assert not known.has_standby
                known = known.replace(has_standby=True)
            elif due == TellNobodyCalls():
                assert len(called) < 3
                known = known.replace(has_told=True)
            assert isinstance(decide(known, now + 1e9), Wait)
    assert known.losses <= MOST_LOSSES
