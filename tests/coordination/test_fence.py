"""What follows when the store does not answer: hold on, kill the workers, or give up; each at its time and not before."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.coordination.fence import Connection, Fence, GiveUp, HeldLease, Hold, NotReached, judge, judge_joining

STORE_TIMEOUT_S, REFUSAL_TIMEOUT_S = 60.0, 5.0
NEVER = math.inf

SILENT = "the coordination store has not answered for 60 s (timed out)"
REFUSED = "the coordination store has refused connections for 5 s (timed out)"
FENCED = "lost the coordination store: timed out"


def connection(valid_until: float, unreachable_since: float | None = None, refused_since: float | None = None) -> Connection:
    return Connection(valid_until, unreachable_since, refused_since, "timed out")


@pytest.mark.parametrize(
    ("known", "now", "expected"),
    [
        (connection(103.0), 100.0, Hold(103.0)),
        (connection(103.0), 102.999, Hold(103.0)),
        (connection(103.0), 103.0, Fence(FENCED)),
        (connection(103.0), 500.0, Fence(FENCED)),
        (connection(103.0, 100.5), 101.0, Hold(103.0)),
        (connection(103.0, 100.5, 100.5), 102.0, Hold(103.0)),
        (connection(NEVER), 1e9, Hold(NEVER)),
        (connection(NEVER, 100.0), 159.9, Hold(160.0)),
        (connection(NEVER, 100.0), 160.0, GiveUp(SILENT)),
        (connection(NEVER, 100.0, 130.0), 134.9, Hold(135.0)),
        (connection(NEVER, 100.0, 130.0), 135.0, GiveUp(REFUSED)),
        (connection(NEVER, 100.0, 158.0), 170.0, GiveUp(SILENT)),
        (connection(NEVER, 100.0, 130.0), 170.0, GiveUp(REFUSED)),
        (connection(NEVER, None, 130.0), 135.0, GiveUp(REFUSED)),
        (connection(160.0, 100.0), 160.0, Fence(FENCED)),
        (connection(150.0, 100.0, 130.0), 135.0, GiveUp(REFUSED)),
    ],
    ids=[
        "all is well",
        "the last moment of a lease",
        "a lease may be over",
        "a lease is long over",
        "broken, but the lease goes on",
        "refused, but the lease goes on",
        "no lease yet, and all is well",
        "no lease yet, and silence",
        "silence for too long",
        "no lease yet, and refused",
        "P07: refused for too long, which takes less time",
        "silence is over first, though it is refused",
        "what was over first is told",
        "refused only",
        "workers go first",
        "a lease does not help where nobody listens",
    ],
)
def test_what_follows(known: Connection, now: float, expected: Hold | Fence | GiveUp) -> None:
    assert judge(known, STORE_TIMEOUT_S, REFUSAL_TIMEOUT_S, now) == expected


@pytest.mark.parametrize("known", [Connection(0.0), Connection(NEVER, 0.0), Connection(NEVER, None, 0.0)])
def test_who_has_heard_of_no_trouble_says_that_nobody_answers(known: Connection) -> None:
    verdict = judge(known, STORE_TIMEOUT_S, REFUSAL_TIMEOUT_S, 100.0)
    assert isinstance(verdict, Fence | GiveUp)
    assert verdict.why.rstrip(")").endswith("no answer")


TIMES = st.floats(0.0, 1000.0)
LENGTHS = st.floats(0.1, 100.0)
CONNECTIONS = st.builds(Connection, TIMES | st.just(NEVER), st.none() | TIMES, st.none() | TIMES)


@settings(max_examples=300)
@given(CONNECTIONS, LENGTHS, LENGTHS, TIMES)
def test_nothing_happens_before_its_time_and_everything_at_it(
    known: Connection, store_timeout_s: float, refusal_timeout_s: float, now: float
) -> None:
    """No workers run once the lease may be over, whatever else is true."""
    verdict = judge(known, store_timeout_s, refusal_timeout_s, now)
    assert isinstance(verdict, Fence) == (now >= known.valid_until)
    if isinstance(verdict, GiveUp):
        silent = known.unreachable_since is not None and now >= known.unreachable_since + store_timeout_s
        refused = known.refused_since is not None and now >= known.refused_since + refusal_timeout_s
        assert silent or refused
    if isinstance(verdict, Hold):
        assert verdict.wake_at > now
        assert judge(known, store_timeout_s, refusal_timeout_s, math.nextafter(verdict.wake_at, now)) == verdict
        assert verdict.wake_at == NEVER or judge(known, store_timeout_s, refusal_timeout_s, verdict.wake_at) != verdict


@given(CONNECTIONS, LENGTHS, LENGTHS, TIMES, TIMES)
def test_time_alone_does_not_mend_anything(
    known: Connection, store_timeout_s: float, refusal_timeout_s: float, now: float, later: float
) -> None:
    """Fence is the last word: a node that has given up has workers to kill too, once its lease is over."""
    order = [Hold, GiveUp, Fence]
    first, second = (judge(known, store_timeout_s, refusal_timeout_s, at) for at in sorted((now, later)))
    assert order.index(type(first)) <= order.index(type(second))


NOT_REACHED = NotReached("the coordination store at a:29400 was not reached within 60 s: timed out")
GONE = GiveUp(
    "the coordination store at a:29400 is gone: its host has refused connections for 5 s; the agent there has ended or was"
    " killed, and the job ends with it"
)


@pytest.mark.parametrize(
    ("refused_since", "is_known", "now", "expected"),
    [
        (None, False, 159.9, Hold(160.0)),
        (None, False, 160.0, NOT_REACHED),
        (None, True, 160.0, NOT_REACHED),
        (130.0, True, 134.9, Hold(135.0)),
        (130.0, True, 135.0, GONE),
        (130.0, False, 135.0, Hold(160.0)),
        (130.0, True, 160.0, NOT_REACHED),
    ],
)
def test_who_joins_waits_for_a_host_that_it_has_never_seen(
    refused_since: float | None, is_known: bool, now: float, expected: object
) -> None:
    tried = connection(NEVER, 100.0, refused_since)
    assert judge_joining("a:29400", tried, is_known, STORE_TIMEOUT_S, REFUSAL_TIMEOUT_S, now) == expected


# --- the lease by itself ---------------------------------------------------------------------------------------------------


def test_a_lease_counts_from_when_the_answered_keepalive_was_sent() -> None:
    lease = HeldLease(7, 3.0, asked_at=100.0)
    assert (lease.valid_until(), lease.keep_at, lease.silent_since) == (103.0, 101.0, math.inf)
    lease.note_sent(101.0)
    lease.note_sent(102.0)
    assert (lease.valid_until(), lease.keep_at, lease.silent_since) == (103.0, 103.0, 101.0)
    lease.note_answer(101.0, is_kept=True)
    assert lease.valid_until() == 104.0
    lease.note_sent(102.4)
    lease.note_break()
    assert (lease.valid_until(), lease.silent_since) == (104.0, math.inf), "a reset may be seen by this side only"
    lease.note_answer(102.6, is_kept=True)
    assert lease.valid_until() == 105.6
    lease.note_answer(103.0, is_kept=False)
    assert lease.is_lost
    assert lease.valid_until() == -math.inf
    assert lease.renewed_until() == 105.6, "who is told that its lease is over was not renewed by that"
    lease.give_back()
    assert lease.renewed_until() == -math.inf
