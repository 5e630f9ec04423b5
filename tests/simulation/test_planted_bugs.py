"""The simulator is tested by bugs on purpose: a rule that is broken must be seen to be broken, within 2,000 seeds."""

from __future__ import annotations

import pytest
from tests.simulation.cluster import Failure, simulate
from tests.simulation.planted import BUGS

MOST_SEEDS = 2000

# Where each was found the last time. It only saves time: when the simulator changes, its seeds mean something else.
FOUND_AT = {
    "decision_not_repeated_when_it_was_lost": 119,
    "departs_although_it_is_done": 174,
    "done_is_bound_to_the_lease": 105,
    "fence_counted_from_the_answer": 942,
    "formed_twice_after_a_lost_answer": 139,
    "joiner_after_a_done": 30,
    "leader_writes_without_its_term": 1006,
    "lease_lives_on_when_it_is_lost": 253,
    "leaves_before_the_workers_are_gone": 51,
    "licence_outlives_its_session": 62,
    "licence_renewed_without_a_seat": 36,
    "looks_for_its_seat_once": 23,
    "no_recount_of_failures": 42,
    "no_recount_of_who_is_done": 49,
    "seats_of_any_attempt": 118,
    "signal_not_compared": 385,
    "stays_after_the_end_of_the_job": 55,
    "waits_for_a_seat_after_the_end": 106,
    "watch_begins_with_the_next_change": 28,
    "watch_resumed_one_too_late": 374,
    "workers_killed_and_nobody_told": 163,
}


def find(bug: str) -> Failure | None:
    """The first seed that breaks down over this bug."""
    for seed in (FOUND_AT.get(bug, 0), *range(MOST_SEEDS)):
        try:
            simulate(seed, bug)
        except Failure as failure:
            return failure
    return None


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    failure = find(bug)
    assert failure is not None, f"{bug} was not found in {MOST_SEEDS} seeds"
    assert f"--bug {bug}" in str(failure)


def test_there_are_enough_of_them() -> None:
    assert len(BUGS) >= 35


def test_nothing_stays_planted() -> None:
    """After a bug was looked for, the same seed is as sound as before."""
    assert find("generation_before_seats") is not None
    assert simulate(0)["seeds"] == 1
