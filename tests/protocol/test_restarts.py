"""Restart budgets: who pays for which end of a generation, and when the job gives up."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.defaults import EARLY_FAILURE_S as EARLY_S
from rallypoint.protocol.restarts import (
    AGES_MAX,
    CAUSES,
    DOUBTFUL_ERRORS,
    HOPELESS_ERRORS,
    HOPELESS_IN_A_ROW,
    LASTING_S,
    Again,
    Ended,
    Failure,
    GiveUp,
    Purse,
    RestartPolicy,
    judge,
    matters_if_shared,
)

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


OWN_LIMITS = [
    ("lost", "losses", "max_node_losses", "node b", "lost node b", "node loss", "node losses"),
    ("departed", "departures", "max_departures", "node b", "node b left", "departure", "departures"),
    ("preempted", "preemptions", "max_preemptions", "node b", "node b left after notice", "preemption", "preemptions"),
    ("joined", "joins", "max_joins", "node b", "node b joined", "join", "joins"),
]


@pytest.mark.parametrize(("how", "counter", "limit", "who", "what", "one", "several"), OWN_LIMITS)
def test_each_change_of_members_can_have_a_limit_of_its_own(
    how: str, counter: str, limit: str, who: str, what: str, one: str, several: str
) -> None:
    """P14: which no other change counts against."""
    ended, others = Ended(**{how: ("b",)}), {name: 9 for _, name, *_ in OWN_LIMITS if name != counter}
    two, none = RestartPolicy(0, **{limit: 2}), RestartPolicy(0, **{limit: 0})
    last = again(two, Purse(**{**others, counter: 1}), ended)
    assert last.purse == Purse(**{**others, counter: 2})
    assert last.why.endswith(f"{one} 2 of 2")
    assert judge(two, last.purse, ended) == GiveUp(f"{what}; all 2 {several} are used up ({limit})")
    assert judge(none, Purse(), ended) == GiveUp(f"{what}; no {several} are allowed ({limit})")


def test_a_preemption_is_never_charged_to_what_bounds_other_changes() -> None:
    """P17: nor to restarts, whatever else happened while the node had notice; and it is counted."""
    nothing = RestartPolicy(0, max_membership_changes=0, max_departures=0, max_node_losses=0, max_joins=0, max_hangs=0)
    purse = Purse()
    for number in range(1, 6):
        ended = FAILED.replace(preempted=("c",), joined=("d",))
        answer = again(nothing, purse, ended)
        assert answer == Again(Purse(preemptions=number), 0.0, "preemption", f"node c left after notice; preemption {number}")
        purse = answer.purse
    lost_too = judge(nothing, purse, Ended(lost=("b",), preempted=("c",)))
    assert lost_too == GiveUp("lost node b; no node losses are allowed (max_node_losses)")


@pytest.mark.parametrize(
    ("codes", "said"),
    [((42,), "exited with code 42"), ((1, -signal.SIGSEGV), "was ended by SIGSEGV"), ((1, -63), "was ended by signal 63")],
)
def test_an_exit_code_that_can_never_succeed_is_not_retried(codes: tuple[int, ...], said: str) -> None:
    """P15: nor when a lost node would have paid."""
    policy = RestartPolicy(3, no_retry_exit_codes=(42, -signal.SIGSEGV, -63))
    why = f"rank 3 failed; a worker {said}, which no restart can help (no-retry exit codes)"
    assert judge(policy, Purse(), FAILED.replace(failed_exit_codes=codes, lost=("b",))) == GiveUp(why, is_hopeless=True)


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


# --- what cannot succeed ---------------------------------------------------------------------------------------------------

NO_MODULE = "ModuleNotFoundError: No module named 'flash_attn'"


def failed(message: str, exitcode: int = 1, place: str = "train.py:3", everywhere: bool = True, **more: Any) -> Ended:
    cause = Failure(more.pop("rank", 3), exitcode, message, place, everywhere, more.pop("is_hang", False))
    return Ended(failed_exit_codes=(exitcode,), failure="rank 3 failed", cause=cause, after_s=more.pop("after_s", 2.0), **more)


@pytest.mark.parametrize(
    ("exitcode", "message", "place"),
    [
        (1, NO_MODULE, "train.py:3 in <module>"),
        (1, "ModuleNotFoundError: No module named 'myapp.connection'", ""),
        (1, "ImportError: cannot import name 'Timeout' from 'lib' (/lib.py)", ""),
        (1, "SyntaxError: invalid syntax", ""),
        (1, "NameError: name 'lr' is not defined", ""),
        (2, "exited with code 2 and left no traceback", "train.py: error: unrecognized arguments: --learning-rate #"),
        (2, "exited with code 2 and left no traceback", "Error: No such option: --lr"),
        (127, "exited with code 127 and left no traceback", "sh: nosuch: not found"),
    ],
)
def test_what_all_workers_meet_in_the_program_itself_is_not_retried(exitcode: int, message: str, place: str) -> None:
    """P15"""
    ruling = judge(RestartPolicy(3), Purse(), failed(message, exitcode, place))
    why = "rank 3 failed; all workers failed so, 2.0 s after their start: no restart can help (--retry-hopeless tries)"
    assert ruling == GiveUp(why, is_hopeless=True)
    for harmless in (failed(message, exitcode, place, everywhere=False), failed(message, exitcode, place, step=0),
                     failed(message, exitcode, place, after_s=EARLY_S + 1)):  # fmt: skip
        assert isinstance(judge(RestartPolicy(3), Purse(), harmless), Again)
    assert isinstance(judge(RestartPolicy(3, retry_hopeless=True), Purse(), failed(message, exitcode, place)), Again)
    without_restarts = judge(RestartPolicy(0), Purse(), failed(message, exitcode, place))
    assert without_restarts == GiveUp("rank 3 failed; no restarts were asked for (--max-restarts)")


@pytest.mark.parametrize(
    ("exitcode", "message"),
    [
        (1, "ConnectionRefusedError: [Errno 111] Connection refused"),
        (1, "torch.distributed.DistNetworkError: The client socket has timed out after 60s, trying to connect to (n0, 29500)"),
        (1, "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1333, remote process exited"),
        (1, "RuntimeError: [enforce fail at gloo/transport/tcp/device.cc:84] rv != -1. unable to resolve address for: n0"),
        (1, "RuntimeError: CUDA error: out of memory"),
        (1, "OSError: [Errno 5] Input/output error: '/data/shard0'"),
        (1, "FileNotFoundError: [Errno 2] No such file or directory: '/data/shard0'"),
        (1, "ImportError: /nfs/libx.so: cannot open shared object file: Stale file handle"),
        (1, "ImportError: libx.so: failed to map segment from shared object"),
        (1, "TypeError: 'NoneType' object is not subscriptable"),
        (1, "ValueError: no batch"),
        (1, "exited with code 1 and left no traceback"),
        (2, "exited with code 2 and left no traceback"),
        (-9, "Signal 9 (SIGKILL) received by PID 7"),
        (-11, "ImportError: it says, but a signal ended it"),
        (1, "my.ImportError: of the program's own"),
    ],
)
def test_what_may_pass_is_retried_whoever_meets_it_and_however_often(exitcode: int, message: str) -> None:
    """P15: a network that is away strikes all workers at once, and that is no reason to give up."""
    purse = Purse()
    for number in range(1, 10):
        answer = again(RestartPolicy(20), purse, failed(message, exitcode))
        purse = answer.purse
        assert answer.why.startswith(f"rank 3 failed; restart {number} of 20")


def test_the_same_error_of_the_program_again_and_again_is_given_up() -> None:
    """P15: the others may be slower, and be stopped before they come to it; whichever rank is the first."""
    first = again(RestartPolicy(9), Purse(), failed(NO_MODULE, everywhere=False, rank=0))
    second = again(RestartPolicy(9), first.purse, failed(NO_MODULE, everywhere=False, rank=2))
    third = failed(NO_MODULE, everywhere=False, rank=0)
    why = "rank 3 failed; 3 attempts in a row ended so at their start: no restart can help (--retry-hopeless tries)"
    assert judge(RestartPolicy(9), second.purse, third) == GiveUp(why, is_hopeless=True)
    other = again(RestartPolicy(9), second.purse, failed("ValueError: x", everywhere=False))
    assert isinstance(judge(RestartPolicy(9), other.purse, third), Again)
    late = again(RestartPolicy(9), second.purse, failed(NO_MODULE, everywhere=False, after_s=EARLY_S + 1))
    assert late.purse.streak == 0


def test_how_early_a_failure_has_to_be_can_be_said() -> None:
    """P15: 0 switches all rules off that compare attempts."""
    early, late, never = (RestartPolicy(3, early_s=early_s) for early_s in (10.0, 9.0, 0.0))
    ended = failed(NO_MODULE, after_s=9.5)
    assert isinstance(judge(early, Purse(), ended), GiveUp)
    assert isinstance(judge(late, Purse(), ended), Again)
    assert isinstance(judge(never, Purse(), failed(NO_MODULE, after_s=0.1)), Again)


# --- errors about values ---

BAD_ARGUMENT = "KeyError: 'learning_rate'"


def test_an_error_about_a_value_that_all_workers_repeat_is_given_up() -> None:
    """P15: the second time, if it has lasted; whichever rank came first, and however many were seen to fail the first time."""
    first = again(RestartPolicy(9), Purse(), failed(BAD_ARGUMENT, everywhere=False, rank=0))
    second = failed(BAD_ARGUMENT, rank=2, ran_s=LASTING_S)
    why = (
        "rank 3 failed; 2 attempts in a row, over 30 s, ended so at their start, this one in all workers: no restart can help"
        " (--retry-hopeless tries)"
    )
    assert judge(RestartPolicy(9), first.purse, second) == GiveUp(why, is_hopeless=True)
    for harmless in (
        second.replace(ran_s=LASTING_S - 0.1), second.replace(step=0), second.replace(after_s=EARLY_S + 1),
        failed(BAD_ARGUMENT, everywhere=False, ran_s=99.0), failed(BAD_ARGUMENT, place="train.py:4", ran_s=99.0),
        failed("KeyError: 'lr'", ran_s=99.0), failed(BAD_ARGUMENT, exitcode=3, ran_s=99.0),
    ):  # fmt: skip
        assert isinstance(judge(RestartPolicy(9), first.purse, harmless), Again), harmless
    assert isinstance(judge(RestartPolicy(9, retry_hopeless=True), first.purse, second), Again)


def test_one_that_fails_quickly_is_tried_until_it_has_lasted() -> None:
    """P15: a start of two seconds is cheap, and what a network does to all workers passes."""
    purse, tries = Purse(), 0
    while isinstance(answer := judge(RestartPolicy(99), purse, failed(BAD_ARGUMENT, ran_s=2.0 + tries)), Again):
        purse, tries = answer.purse, tries + 1
    assert answer.is_hopeless
    assert (tries, purse.repeats) == (6, 6)
    other = again(RestartPolicy(99), purse, failed("ValueError: x"))
    assert (other.purse.repeats, other.purse.repeats_s) == (1, 0.0)


@pytest.mark.parametrize(
    "message",
    [
        "TypeError: 'NoneType' object is not subscriptable",
        "AttributeError: 'NoneType' object has no attribute 'shape'",
        "ValueError: the server sent no configuration",
        "ValueError: unknown url type: ''",
        "AssertionError: NCCL 2.19 or later is needed",
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/shard0'",
        "torch.distributed.DistStoreError: timed out waiting for clients",
        "exited with code 1 and left no traceback",
    ],
)
def test_what_somebody_else_may_be_to_blame_for_is_never_given_up(message: str) -> None:
    """P15: however long it lasts, and in all workers."""
    purse = Purse()
    for _ in range(9):
        purse = again(RestartPolicy(9), purse, failed(message, ran_s=600.0)).purse


def test_it_is_known_when_it_matters_who_else_fails_so() -> None:
    """P15: workers are given a moment to fail by themselves only where that can make a difference."""
    place, purse = "train.py:3", Purse()
    assert matters_if_shared(1, NO_MODULE, place, "")
    assert not matters_if_shared(1, BAD_ARGUMENT, place, "")
    purse = again(RestartPolicy(9), purse, failed(BAD_ARGUMENT, rank=7)).purse
    assert matters_if_shared(1, BAD_ARGUMENT, place, purse.streak_of)
    assert not matters_if_shared(1, BAD_ARGUMENT, "train.py:4", purse.streak_of)
    assert not matters_if_shared(1, "ValueError: x", place, purse.streak_of)


def test_a_limit_for_failures_of_one_rank_at_one_place() -> None:
    """P15: only where it is asked for; an attempt that made a step, or another rank, begins the count anew."""
    policy = RestartPolicy(9, max_same_failures=2)
    first = again(policy, Purse(), failed("ValueError: shard 7", everywhere=False))
    ruling = judge(policy, first.purse, failed("ValueError: shard 8", everywhere=False))
    assert ruling == GiveUp("rank 3 failed; 2 attempts in a row ended so (max_same_failures=2)", is_hopeless=True)
    for another in (failed("ValueError: shard 7", rank=4), failed("ValueError: shard 7", step=1),
                    failed("ValueError: shard 7", place="data.py:9")):  # fmt: skip
        assert again(policy, first.purse, another).purse.streak <= 1


def test_restarts_without_progress_are_counted_from_the_furthest_step() -> None:
    """P15: being resumed from a checkpoint and failing short of where the job was is no progress."""
    policy, purse = RestartPolicy(99, max_no_progress=2), Purse()
    for step in (10, 9, 20, 20):
        purse = again(policy, purse, failed("ValueError", everywhere=False, step=step)).purse
    ruling = judge(policy, purse, failed("ValueError", everywhere=False))
    why = "rank 3 failed; the last 2 attempts have not come past step 20 (--max-no-progress 2)"
    assert ruling == GiveUp(why, is_hopeless=True)
    assert again(policy, purse, failed("ValueError", step=21)).purse.fruitless == 0
    assert again(RestartPolicy(99), purse, failed("ValueError")).purse.fruitless == 2
    purse = Purse()
    for _ in range(5):  # workers that tell of no step are not judged by any
        purse = again(policy, purse, failed("ValueError")).purse


def test_a_worker_can_say_that_no_restart_will_help() -> None:
    """P15: also when a lost node would have paid, and where no restart was asked for."""
    said = failed("no such data set", no_retry="rank 3: no such data set", lost=("b",))
    ruling = GiveUp("rank 3 failed; rank 3: no such data set: no restart can help", is_hopeless=True)
    assert judge(RestartPolicy(3), Purse(), said) == judge(RestartPolicy(0, retry_hopeless=True), Purse(), said) == ruling


def test_a_node_that_is_left_out_at_its_workers_wish_costs_no_restart() -> None:
    """P29"""
    ended = failed("gpu 3 has bad memory", excluded=("b",))
    answer = again(RestartPolicy(0), Purse(), ended)
    assert (answer.purse, answer.kind) == (Purse(departures=1), "departure")
    assert answer.why == "node b is left out: gpu 3 has bad memory; membership change 1"
    assert isinstance(judge(RestartPolicy(3, max_membership_changes=0), Purse(), ended), GiveUp)


def test_hangs_can_have_a_budget_of_their_own() -> None:
    """P15"""
    hang = failed("it hung: asleep for 60 s", -9, everywhere=False, is_hang=True)
    assert again(RestartPolicy(1), Purse(), hang).purse.failures == 1
    policy = RestartPolicy(0, max_hangs=1)
    answer = again(policy, Purse(), hang)
    assert (answer.purse.hangs, answer.purse.failures, answer.why) == (1, 0, "rank 3 failed; restart 1 of 1 after a hang")
    assert judge(policy, answer.purse, hang) == GiveUp("rank 3 failed; the one restart after a hang is used up")
    assert judge(RestartPolicy(9, max_hangs=0), Purse(), hang) == GiveUp("rank 3 failed; a hang is not retried (max_hangs)")


def test_a_healthy_hour_can_give_the_budget_back() -> None:
    """P15: the count that workers are told goes on; only what is left, and the back-off, begin anew."""
    policy = RestartPolicy(2, healthy_after_s=3600.0)
    purse = again(policy, again(policy, Purse(), FAILED).purse, FAILED).purse
    assert isinstance(judge(policy, purse, FAILED.replace(after_s=3599.0)), GiveUp)
    answer = again(policy, purse, FAILED.replace(after_s=3600.0))
    assert (answer.purse.failures, answer.purse.forgiven, answer.delay_s) == (3, 2, 0.0)
    assert answer.why == "rank 3 failed; restart 1 of 2"
    assert isinstance(judge(RestartPolicy(2), purse, FAILED.replace(after_s=1e6)), GiveUp)  # for the whole job, as torchrun's


def test_it_gives_back_what_was_spent_on_nodes_too_whatever_ended_it() -> None:
    """P15"""
    policy = RestartPolicy(2, healthy_after_s=3600.0, max_node_losses=1, max_joins=0)
    spent = Purse(2, 1, 2, 3, hangs=4, preemptions=5)
    assert isinstance(judge(policy, spent, Ended(lost=("b",), after_s=3599.0)), GiveUp)
    answer = again(policy, spent, Ended(lost=("b",), after_s=3600.0))
    assert answer.purse == Purse(2, 1, forgiven=2)
    assert isinstance(judge(policy, Purse(), Ended(joined=("b",), after_s=1e6)), GiveUp)


def test_the_page_on_failures_tells_what_is_decided_here() -> None:
    """P15: who pays for which end, and what is not retried."""
    page = (Path(__file__).parents[2] / "docs" / "failures.md").read_text()
    for cause, counter, limit in CAUSES:
        assert counter in Purse.__annotations__
        assert limit in RestartPolicy.__annotations__
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {cause} |"))
        assert limit in row.replace("--max-restarts", "max_restarts")
    assert [name for name in (*HOPELESS_ERRORS, *DOUBTFUL_ERRORS) if f"`{name}`" not in page] == []
    assert f"within {EARLY_S:g} s" in page
    assert f"{LASTING_S:g} s or more" in page
    assert HOPELESS_IN_A_ROW == 3  # "Three attempts in a row"


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
    max_node_losses=st.none() | st.integers(0, 3),
    max_departures=st.none() | st.integers(0, 3),
    max_preemptions=st.none() | st.integers(0, 3),
    max_joins=st.none() | st.integers(0, 3),
)
ENDS = st.builds(
    Ended, st.lists(st.sampled_from([1, 1, 1, -9, 42]), max_size=2).map(tuple), st.just("x"), NODES, NODES, NODES, SECONDS,
    preempted=NODES,
)  # fmt: skip
COUNTERS = ("failures", "losses", "departures", "joins", "preemptions")
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
        spent = [getattr(answer.purse, counter) - getattr(purse, counter) for counter in COUNTERS]
        assert sum(spent) == (answer.kind != "none")
        assert min(spent) == 0
        assert 0 <= answer.delay_s <= (policy.max_backoff_s if answer.kind == "failure" else 0)
        if answer.kind == "failure":
            paid.append(now)
            recent = [at for at in paid if not policy.window_s or at >= now - policy.window_s]
            assert len(recent) <= policy.max_restarts
            assert ended.lost == ended.departed == ended.preempted == ()
        purse, changes = answer.purse, sum(list(answer.purse)[1:4])
        assert policy.max_membership_changes is None or changes <= policy.max_membership_changes
        for _, counter, limit in CAUSES:
            most = getattr(policy, limit)
            assert counter in ("failures", "hangs") or most is None or getattr(purse, counter) <= most
        assert len(purse.recent_ages_s) <= min(policy.max_restarts, AGES_MAX)
    assert purse.failures == len(paid)


@given(POLICIES, st.builds(Purse, st.integers(0, 9), recent_ages_s=st.lists(SECONDS, max_size=5).map(tuple)), ENDS)
def test_more_time_never_makes_it_worse(policy: RestartPolicy, purse: Purse, ended: Ended) -> None:
    soon, late = judge(policy, purse, ended), judge(policy, purse, ended.replace(ran_s=ended.ran_s + 100.0))
    if isinstance(soon, Again):
        assert isinstance(late, Again)
        assert late.delay_s <= soon.delay_s
