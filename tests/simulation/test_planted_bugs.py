"""The simulator is tested by bugs on purpose: a rule that is broken must be seen to be broken, within 2,000 seeds."""

from __future__ import annotations

import pytest
from tests.simulation.cluster import Failure, simulate
from tests.simulation.planted import BUGS

MOST_SEEDS = 2000

# Where each was found the last time. It only saves time: when the simulator changes, its seeds mean something else.
FOUND_AT = {
    "absence_of_the_store_not_forgiven": 9,
    "decision_not_repeated_when_it_was_lost": 2,
    "fence_counted_from_the_answer": 1509,
    "leader_writes_without_its_term": 819,
    "signal_not_compared": 723,
    "watch_resumed_one_too_late": 212,
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
    assert len(BUGS) >= 12


def test_nothing_stays_planted() -> None:
    """After a bug was looked for, the same seed is as sound as before."""
    assert find("generation_before_seats") is not None
    assert simulate(0)["seeds"] == 1
