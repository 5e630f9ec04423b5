"""When an agent counts as alive and ready, phase by phase."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.health.rules import Limits, judge, judge_progress
from rallypoint.story.phases import DONE, LOST, PHASES, RUNNING, STARTING, STOPPING, WAITING, Ledger

LIMITS = Limits(60.0, starting_s=60.0, stopping_s=40.0)


def ledger(phase: str, since: float = 1000.0) -> Ledger:
    return Ledger(phase, since, dict.fromkeys(PHASES, 0.0))


@pytest.mark.parametrize(
    ("phase", "age_s", "progress_age_s", "alive", "ready"),
    [
        (STARTING, 119.0, None, True, False),
        (STARTING, 121.0, None, False, False),
        (STOPPING, 99.0, None, True, False),
        (STOPPING, 101.0, None, False, False),
        (WAITING, 100_000.0, None, True, False),
        (WAITING, 500.0, 600.0, True, False),  # the progress of workers that are not there any more
        (RUNNING, 0.0, None, True, True),
        (RUNNING, 100_000.0, None, True, True),  # those who give no signs are not judged by them
        (RUNNING, 500.0, 60.0, True, True),
        (RUNNING, 500.0, 61.0, False, False),
        (RUNNING, 500.0, 501.0, True, True),  # of the generation before: this one may take its time for the first step
        (DONE, 100_000.0, 50.0, True, False),
    ],
)
def test_p30_each_phase_has_its_own_measure(
    phase: str, age_s: float, progress_age_s: float | None, alive: bool, ready: bool
) -> None:
    now = 1000.0 + age_s
    health = judge(ledger(phase), "", None if progress_age_s is None else now - progress_age_s, LIMITS, now)
    assert (health.alive, health.ready) == (alive, ready)


def test_it_says_why() -> None:
    assert judge(ledger(WAITING), "2 of 4 nodes are here", None, LIMITS, 1012.2).why == "waiting for 12 s: 2 of 4 nodes are here"
    assert judge(ledger(STARTING), "", None, LIMITS, 1200.0).why == "starting for 200 s; this should take 60 s at most"
    assert judge(ledger(RUNNING), "", 1100.0, LIMITS, 1200.0).why == (
        "running for 200 s; the last sign of progress is 100 s old, and 60 s are allowed"
    )
    assert judge_progress(-5.0, 60.0).why == "the last sign of progress is 0 s old"


times = st.floats(0.0, 1e6)


@given(st.sampled_from([*PHASES, DONE]), times, st.none() | times, times, times)
def test_properties(phase: str, since: float, progress_at: float | None, now: float, later_s: float) -> None:
    health = judge(ledger(phase, since), "why", progress_at, LIMITS, now)
    assert health.ready == (phase == RUNNING and health.alive)
    assert health.why.startswith(phase)
    if phase in (WAITING, DONE, LOST):
        assert health.alive
    if not health.alive:  # only a new phase, or progress, can bring it back
        assert not judge(ledger(phase, since), "why", progress_at, LIMITS, now + later_s).alive
