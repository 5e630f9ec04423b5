"""The simulator is tested by bugs on purpose: a rule that is broken must be seen to be broken, within 2,000 seeds."""

from __future__ import annotations

import pytest
from tests.simulation.cluster import Failure, simulate
from tests.simulation.planted import BUGS

MOST_SEEDS = 2000

# Where each was found the last time. It only saves time: when the simulator changes, its seeds mean something else.
FOUND_AT = {
    "absence_of_the_store_not_forgiven": 55,
    "complete_when_some_have_saved": 7,
    "decision_not_repeated_when_it_was_lost": 262,
    "departs_although_it_is_done": 105,
    "done_is_bound_to_the_lease": 60,
    "fence_counted_from_the_answer": 1662,
    "formed_while_workers_of_the_lost_store_may_run": 68,
    "joiner_after_a_done": 24,
    "joiner_without_a_budget": 36,
    "leader_writes_without_its_term": 16,
    "lease_counted_from_the_next_keepalive": 12,
    "lease_forgotten_by_a_break": 3,
    "lease_lives_on_when_it_is_lost": 49,
    "leaves_before_the_workers_are_gone": 50,
    "licence_outlives_its_session": 192,
    "licence_renewed_without_a_seat": 18,
    "licence_renewed_without_a_word_of_the_store": 70,
    "loss_of_the_host_not_counted": 3,
    "lost_answer_taken_for_success": 3,
    "memory_heard_before_the_first_generation_only": 522,
    "memory_lost_by_a_session_without_a_generation": 144,
    "never_fenced": 12,
    "new_store_taken_for_the_old_one": 3,
    "no_recount_of_failures": 16,
    "no_recount_of_who_is_done": 6,
    "number_used_again_in_the_new_store": 3,
    "preemption_is_charged_as_a_departure": 229,
    "purse_forgotten_with_the_store": 3,
    "ranks_forgotten_with_the_store": 3,
    "report_forgotten_when_ready": 18,
    "seats_of_any_attempt": 220,
    "signal_not_compared": 164,
    "step_that_a_worker_may_have_passed": 7,
    "testimony_before_the_workers_are_gone": 9,
    "v2_the_fence_waits_for_the_main_thread": 11,
    "v5_the_warden_holds_no_licence": 13,
    "vouches_for_itself_too_early": 29,
    "waits_for_a_seat_after_the_end": 126,
    "watch_begins_with_the_next_change": 28,
    "watch_resumed_one_too_late": 28,
    "watches_forgotten_by_a_break": 18,
    "what_was_said_between_sessions_is_lost": 13,
    "who_was_ready_is_not_in_its_next_session": 14,
    "workers_killed_and_nobody_told": 76,
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
    assert len(BUGS) >= 56


def test_nothing_stays_planted() -> None:
    """After a bug was looked for, the same seed is as sound as before."""
    assert find("generation_before_seats") is not None
    assert simulate(0)["seeds"] == 1
