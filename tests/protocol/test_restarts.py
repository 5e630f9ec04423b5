"""Restart budgets: who pays for which end of a generation, and when the job gives up."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.protocol.restarts import AGES_MAX, Again, Ended, GiveUp, Purse, RestartPolicy, judge

FAILED = Ended(failed_exit_codes=(1,), failure="rank 3 failed")


def again(policy: RestartPolicy, purse: Purse, ended: Ended) -> Again:
    answer = judge(policy, purse, ended)
    assert isinstance(answer, Again), answer
    return answer


def test_failures_pay_until_the_budget_is_used_up() -> None:
    """P14: one count for the job. P15: growing back-off, none before the first restart."""
    policy = RestartPolicy(3)
    story, answer = [], judge(policy, Purse(), FAILED)
    while isinstance(answer, Again):
        story.append((answer.purse.failures, answer.delay_s, answer.why))
        answer = judge(policy, answer.purse, FAILED)
    assert story == [
        (1, 0.0, "rank 3 failed; restart 1 of 3"),
        (2, 1.0, "rank 3 failed; restart 2 of 3, after 1 s"),
        (3, 2.0, "rank 3 failed; restart 3 of 3, after 2 s"),
    ]
    assert answer == GiveUp("rank 3 failed; all 3 restarts are used up")


def test_without_restarts_the_first_failure_ends_the_job() -> None:
    assert judge(RestartPolicy(0), Purse(), FAILED) == GiveUp("rank 3 failed; no restarts were asked for (--max-restarts)")


@pytest.mark.parametrize(
    ("ended", "purse", "kind", "why"),
    [
        (Ended(), Purse(), "none", "nobody failed, left or joined"),
        (Ended(failure="workers failed on a"), Purse(), "none", "workers failed on a"),
        (Ended(joined=("d",)), Purse(joins=1), "join", "node d joined; membership change 1"),
        (FAILED.replace(joined=("d",)), Purse(1), "failure", "rank 3 failed; restart 1 of 3"),
        (FAILED.replace(departed=("c",)), Purse(departures=1), "departure", "node c left; membership change 1"),
        (
            FAILED.replace(lost=("b",), departed=("c",), joined=("d",)),
            Purse(losses=1),
            "loss",
            "lost node b; membership change 1",
        ),
        (Ended(lost=tuple("abcdefgh")), Purse(losses=1), "loss", "lost nodes a, b, c, d and 4 more; membership change 1"),
    ],
)
def test_one_purse_pays_for_each_end(ended: Ended, purse: Purse, kind: str, why: str) -> None:
    """P14: failures, membership changes and departures are counted apart; victims of a lost node spend no restart."""
    assert judge(RestartPolicy(3), Purse(), ended) == Again(purse, 0.0, kind, why)


def test_membership_changes_have_a_budget_of_their_own_that_joins_losses_and_departures_share() -> None:
    policy = RestartPolicy(0, max_membership_changes=3)
    purse = again(policy, Purse(), Ended(lost=("b",))).purse
    purse = again(policy, purse, Ended(joined=("b",))).purse
    last = again(policy, purse, Ended(departed=("c",)))
    assert (last.purse, last.why) == (Purse(0, 1, 1, 1), "node c left; membership change 3 of 3")
    assert judge(policy, last.purse, Ended(joined=("c",))) == GiveUp("node c joined; all 3 membership changes are used up")


def test_no_membership_change_may_be_allowed_at_all() -> None:
    policy = RestartPolicy(3, max_membership_changes=0)
    assert judge(policy, Purse(), Ended(lost=("b",))) == GiveUp("lost node b; no membership changes are allowed")
    assert isinstance(judge(policy, Purse(), FAILED), Again)


@pytest.mark.parametrize(
    ("codes", "said"),
    [((42,), "exited with code 42"), ((1, -signal.SIGSEGV), "was ended by SIGSEGV"), ((1, -63), "was ended by signal 63")],
)
def test_an_exit_code_that_can_never_succeed_is_not_retried(codes: tuple[int, ...], said: str) -> None:
    """P15: nor when a lost node would have paid."""
    policy = RestartPolicy(3, no_retry_exit_codes=(42, -signal.SIGSEGV, -63))
    why = f"rank 3 failed; a worker {said}, which no restart can help (no-retry exit codes)"
    assert judge(policy, Purse(), FAILED.replace(failed_exit_codes=codes, lost=("b",))) == GiveUp(why)


def test_backoff_is_capped_and_can_be_switched_off() -> None:
    policy = RestartPolicy(10_000)
    delays = [again(policy, Purse(failures=failures), FAILED).delay_s for failures in (0, 1, 2, 5, 6, 9_999)]
    assert delays == [0.0, 1.0, 2.0, 16.0, 30.0, 30.0]
    assert again(policy.replace(backoff_s=0.0), Purse(failures=9), FAILED).delay_s == 0.0


def test_old_failures_are_forgiven() -> None:
    """P15: a budget over a time window, and a back-off that starts anew with it."""
    policy = RestartPolicy(2, window_s=60.0)
    purse = again(policy, Purse(), FAILED).purse
    second = again(policy, purse, FAILED.replace(ran_s=50.0))
    assert (second.purse.recent_ages_s, second.delay_s) == ((50.0, 0.0), 1.0)
    assert second.why == "rank 3 failed; restart 2 of 2 within 60 s, after 1 s"
    exactly = judge(policy, second.purse, FAILED.replace(ran_s=10.0))
    assert exactly == GiveUp("rank 3 failed; all 2 restarts within 60 s are used up")
    third = again(policy, second.purse, FAILED.replace(ran_s=10.5))
    assert (third.purse, third.delay_s) == (Purse(3, recent_ages_s=(10.5, 0.0)), 1.0)
    assert again(policy, third.purse, FAILED.replace(ran_s=1000.0)).delay_s == 0.0


def test_failures_grow_older_through_generations_that_others_paid_for() -> None:
    policy = RestartPolicy(1, window_s=60.0)
    purse = again(policy, Purse(), FAILED).purse
    for ended in (Ended(lost=("b",), ran_s=20.0), Ended(joined=("b",), ran_s=20.0), Ended(ran_s=20.0)):
        purse = again(policy, purse, ended).purse
    assert purse.recent_ages_s == (60.0,)
    assert isinstance(judge(policy, purse, FAILED), GiveUp)
    assert isinstance(judge(policy, purse, FAILED.replace(ran_s=1.0)), Again)


def test_a_window_never_holds_more_than_the_purse_can_remember() -> None:
    policy = RestartPolicy(1000, window_s=60.0)
    purse = Purse()
    for _ in range(AGES_MAX):
        purse = again(policy, purse, FAILED).purse
    assert judge(policy, purse, FAILED) == GiveUp("rank 3 failed; all 64 restarts within 60 s are used up")


def test_what_is_said_is_bounded() -> None:
    names = tuple("n" * 1000 + str(number) for number in range(1000))
    for ended in (Ended(lost=names), FAILED.replace(failure="f" * 10_000), FAILED.replace(failed_exit_codes=(1,) * 10_000)):
        assert len(again(RestartPolicy(1), Purse(), ended).why) < 700


# --- properties ------------------------------------------------------------------------------------------------------------

SECONDS = st.integers(0, 2_000).map(lambda quarters: quarters / 4)  # exact in binary, so that sums are exact too
NODES = st.lists(st.sampled_from("abc"), max_size=2).map(tuple)
POLICIES = st.builds(
    RestartPolicy,
    st.integers(0, 5),
    st.sampled_from([(), (42,)]),
    SECONDS,
    SECONDS,
    st.just(0.0) | SECONDS,
    st.none() | st.integers(0, 10),
)
ENDS = st.builds(
    Ended, st.lists(st.sampled_from([1, 1, 1, -9, 42]), max_size=2).map(tuple), st.just("x"), NODES, NODES, NODES, SECONDS
)
FAILURES = st.builds(Ended, st.just((1,)), ran_s=SECONDS)


@given(POLICIES, st.lists(ENDS | FAILURES, max_size=40))
def test_budgets_hold_in_every_story(policy: RestartPolicy, ends: list[Ended]) -> None:
    """P14: never more than max_restarts paid failures in any window, nor more membership changes than allowed."""
    purse, now, paid = Purse(), 0.0, []
    for ended in ends:
        now += ended.ran_s
        answer = judge(policy, purse, ended)
        assert answer.why
        if isinstance(answer, GiveUp):
            continue  # and whoever asks again all the same gets no more
        spent = [after - before for before, after in zip(list(purse)[:4], list(answer.purse)[:4], strict=True)]
        assert sum(spent) == (answer.kind != "none")
        assert min(spent) == 0
        assert 0 <= answer.delay_s <= (policy.max_backoff_s if answer.kind == "failure" else 0)
        if answer.kind == "failure":
            paid.append(now)
            recent = [at for at in paid if not policy.window_s or at >= now - policy.window_s]
            assert len(recent) <= policy.max_restarts
            assert ended.lost == ended.departed == ()
        purse, changes = answer.purse, sum(list(answer.purse)[1:4])
        assert policy.max_membership_changes is None or changes <= policy.max_membership_changes
        assert len(purse.recent_ages_s) <= min(policy.max_restarts, AGES_MAX)
    assert purse.failures == len(paid)


@given(POLICIES, st.builds(Purse, st.integers(0, 9), recent_ages_s=st.lists(SECONDS, max_size=5).map(tuple)), ENDS)
def test_more_time_never_makes_it_worse(policy: RestartPolicy, purse: Purse, ended: Ended) -> None:
    soon, late = judge(policy, purse, ended), judge(policy, purse, ended.replace(ran_s=ended.ran_s + 100.0))
    if isinstance(soon, Again):
        assert isinstance(late, Again)
        assert late.delay_s <= soon.delay_s
