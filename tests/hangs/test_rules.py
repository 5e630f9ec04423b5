"""Limits by phase, who is to blame, and that a family of processes is still only if nothing shows that it does something."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.errors import UsageError
from rallypoint.hangs.pulse_page import Pulse
from rallypoint.hangs.rules import (
    IDLE_CPU_S,
    IDLE_CPU_SHARE,
    HangLimits,
    Sample,
    Stillness,
    Suspect,
    activity,
    blame,
    follow,
    is_clear,
    is_verdict_due,
    limit_of,
    longest_pause,
    may_be_elsewhere,
    parse_hang_timeout,
    place_of,
    progress_of,
    regain,
    shown,
    standing_of,
    verdict_time,
)

LIMITS = HangLimits(60.0, {"checkpoint": 600.0, "starting": 900.0})


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("60", HangLimits(60.0, {})),
        ("0.5", HangLimits(0.5, {})),
        (
            " 60 , starting = 900,checkpoint=600,exiting=300 ",
            HangLimits(60.0, {"starting": 900.0, "checkpoint": 600.0, "exiting": 300.0}),
        ),
        ("0", None),
        ("", None),
    ],
)
def test_limits_are_read(text: str, limits: HangLimits | None) -> None:
    assert parse_hang_timeout(text) == limits


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("soon", "'soon'"),
        ("-1", "'-1'"),
        ("nan", "'nan'"),
        ("inf", "'inf'"),
        ("60,", "name=seconds"),
        ("60,70", "'70'"),
        ("60,=5", "'=5'"),
        ("60,load=", "''"),
        ("60,load=0", "'0'"),
        ("60,load=1,load=2", "'load' twice"),
        ("60,running=5", "'running' twice"),
        ("starting=5", "'starting=5'"),
        ("0,starting=5", "'0'"),
        ("60," + "x" * 65 + "=5", "64 bytes"),
    ],
)
def test_rubbish_is_named(text: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_hang_timeout(text)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("phase", "given_s", "limit_s"),
    [
        ("running", None, 60.0),
        ("checkpoint", None, 600.0),
        ("checkpoint", 30.0, 30.0),
        ("download", None, None),
        ("starting", None, 900.0),
        ("exiting", None, None),
    ],
)
def test_each_phase_has_its_limit(phase: str, given_s: float | None, limit_s: float | None) -> None:
    """P30: where no limit is given, only running has one."""
    assert limit_of(Pulse(1, phase, given_s, 0.0, None, None, None), LIMITS) == limit_s


@given(st.floats(0.001, 1e6))
def test_looks_are_often_enough_to_find_a_hang_in_time(limit_s: float) -> None:
    assert 0.05 <= longest_pause(HangLimits(limit_s, {})) <= 0.5


@given(st.floats(0, 1000), st.floats(0, 1000), st.floats(0, 1000))
def test_lost_time_is_given_back_and_no_more(sign_at: float, gap_s: float, late_s: float) -> None:
    planned_at = sign_at + gap_s
    now = planned_at + late_s
    silent_s = now - regain(sign_at, planned_at, now)
    assert -1e-9 <= silent_s <= gap_s + 0.5 + 1e-9


SUSPECTS = st.lists(
    st.builds(
        Suspect,
        st.integers(0, 20),
        st.floats(0, 5),
        st.booleans(),
        st.none() | st.integers(0, 3),
        st.none() | st.sampled_from(["a", "b", "c"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda one: one.local_rank,
)


@given(SUSPECTS, st.randoms())
def test_somebody_is_blamed_whatever_the_order(suspects: list[Suspect], random: object) -> None:
    blamed = blame(suspects)
    assert blamed
    assert set(blamed) <= set(suspects)
    assert blame(reversed(suspects)) == blamed
    assert {one.is_stopped for one in blamed} == {any(one.is_stopped for one in suspects)}
    if not blamed[0].is_stopped:
        assert len(blamed) == 1
        if all(one.step is not None for one in suspects):
            assert blamed[0].step == min(one.step or 0 for one in suspects)


def test_all_that_are_stopped_are_blamed() -> None:
    stopped = [Suspect(1, 5.0, True, 9), Suspect(2, 4.0, True, 9)]
    assert set(blame([Suspect(0, 1.0, False, 1), *stopped])) == set(stopped)


def test_the_fewest_steps_go_before_the_longest_silence() -> None:
    assert blame([Suspect(0, 1.0, step=5), Suspect(1, 2.0, step=4)])[0].local_rank == 1


def test_one_that_stands_elsewhere_is_blamed_though_the_others_were_overdue_first() -> None:
    waiting = [Suspect(rank, 1.0, standing="wait") for rank in range(3)]
    assert blame([*waiting, Suspect(3, 1.5, standing="loop", is_overdue=False)])[0].local_rank == 3


def test_without_evidence_only_one_that_is_overdue_is_blamed() -> None:
    assert blame([Suspect(0, 1.0, is_overdue=False), Suspect(1, 2.0)])[0].local_rank == 1


def test_a_step_that_is_not_known_cannot_be_compared() -> None:
    assert blame([Suspect(0, 1.0), Suspect(1, 2.0, step=4)])[0].local_rank == 0


def test_who_stands_elsewhere_goes_before_the_longest_silence() -> None:
    suspects = [Suspect(rank, float(rank), step=3, standing="loop" if rank == 2 else "wait") for rank in range(4)]
    assert blame(suspects)[0].local_rank == 2
    assert blame(suspects[1:3])[0].local_rank == 1  # of two, either stands elsewhere
    assert blame([*suspects, Suspect(4, 9.0, step=3, standing="elsewhere")])[0].local_rank == 0


def test_who_stands_elsewhere_with_more_steps_waits() -> None:
    suspects = [Suspect(rank, float(rank), step=3 if rank else 4, standing="wait" if rank else "loop") for rank in range(4)]
    assert blame(suspects)[0].local_rank == 1


@pytest.mark.parametrize(
    ("phase", "limit_s", "limits", "expected"),
    [
        ("running", None, None, 90.0),
        ("checkpoint", None, None, 100.0),
        ("checkpoint", 60.0, None, 100.0),
        ("checkpoint", 9.0, None, 90.0),
        ("checkpoint", None, HangLimits(5.0, {"checkpoint": 60.0}), 100.0),
        ("checkpoint", None, HangLimits(5.0, {"checkpoint": 9.0}), 90.0),
        ("exiting", None, HangLimits(5.0, {}), 90.0),
    ],
)
def test_silence_that_is_allowed_is_progress(
    phase: str, limit_s: float | None, limits: HangLimits | None, expected: float
) -> None:
    """P30: a long checkpoint does not make the agent unhealthy."""
    pulse = Pulse(owner=1, phase=phase, limit_s=limit_s, announced_at=80.0, sign_at=90.0, step=3, checkpoint_at=None)
    assert progress_of(pulse, limits, now=100.0) == expected


def test_who_never_gave_a_sign_made_no_progress() -> None:
    pulse = Pulse(owner=1, phase="starting", limit_s=None, announced_at=80.0, sign_at=None, step=None, checkpoint_at=None)
    assert progress_of(pulse, None, now=100.0) is None


@pytest.mark.parametrize(
    ("suspects", "expected"),
    [
        ([Suspect(0, 1.0)], False),
        ([Suspect(0, 1.0, step=3), Suspect(1, 2.0, step=3)], False),
        ([Suspect(0, 1.0, step=3), Suspect(1, 2.0, step=4)], True),
        ([Suspect(0, 1.0, is_stopped=True), Suspect(1, 2.0)], True),
        ([Suspect(0, 1.0, standing="a"), Suspect(1, 2.0, standing="b")], True),
        ([Suspect(0, 1.0, standing="a"), Suspect(1, 2.0, standing="a")], False),
    ],
)
def test_whether_anything_tells_the_silent_apart(suspects: list[Suspect], expected: bool) -> None:
    assert is_clear(suspects) == expected


def test_the_verdict_waits_a_little_for_those_who_may_have_begun_to_wait_first() -> None:
    assert verdict_time(None, overdue=0, now=10.0) is None
    at = verdict_time(None, overdue=1, now=10.0)
    assert at is not None
    assert 10.0 < at < 11.0
    assert verdict_time(at, overdue=2, now=10.2) == at, "it is not put off by the next one"
    assert verdict_time(at, overdue=0, now=10.3) is None, "who gives a sign again is not judged"


@pytest.mark.parametrize(
    ("verdict_at", "overdue", "now", "expected"),
    [(None, 0, 10.0, False), (10.4, 1, 10.0, False), (10.4, 1, 10.4, True), (10.4, 3, 10.0, True)],
)
def test_when_it_is_said_who_hangs(verdict_at: float | None, overdue: int, now: float, expected: bool) -> None:
    assert is_verdict_due(verdict_at, overdue, workers=3, now=now) == expected


@pytest.mark.parametrize(
    ("suspects", "workers", "has_other_nodes", "expected"),
    [
        ([Suspect(0, 1.0)], 1, True, True),
        ([Suspect(0, 1.0)], 1, False, False),
        ([Suspect(0, 1.0)], 2, True, False),
        ([Suspect(0, 1.0, step=3), Suspect(1, 1.0, step=4)], 2, True, False),
    ],
)
def test_all_here_may_wait_for_one_elsewhere(
    suspects: list[Suspect], workers: int, has_other_nodes: bool, expected: bool
) -> None:
    assert may_be_elsewhere(suspects, workers, has_other_nodes) == expected


BASE = Sample(at=100.0, members=frozenset({(7, 1)}), cpu_s=5.0, io_bytes=1000, states=frozenset("S"), ready=frozenset())
STILL = Stillness(BASE)
LATER = BASE.replace(at=110.0)


def test_what_does_nothing_is_still() -> None:
    assert activity(STILL, LATER) == ""
    assert follow(STILL, LATER).since == 100.0


@pytest.mark.parametrize(
    "change",
    [
        {"cpu_s": 5.0 + IDLE_CPU_S + 10 * IDLE_CPU_SHARE + 0.01},
        {"cpu_s": 4.0},
        {"io_bytes": 1001},
        {"io_bytes": None},
        {"members": frozenset({(7, 1), (8, 1)})},
        {"members": frozenset({(7, 2)})},
        {"states": frozenset("SD")},
        {"states": frozenset("t")},
    ],
)
def test_whatever_it_does_shows(change: dict[str, object]) -> None:
    seen = LATER.replace(**change)
    assert activity(STILL, seen)
    assert follow(STILL, seen).since == 110.0


def test_background_threads_do_not_show() -> None:
    assert activity(STILL, LATER.replace(cpu_s=5.0 + 10 * IDLE_CPU_SHARE)) == ""


def test_a_thread_met_ready_once_is_a_background_thread_and_twice_one_that_gets_no_processor() -> None:
    once = follow(STILL, LATER.replace(at=105.0, ready=frozenset({7}), states=frozenset("SR")))
    assert once.since == 100.0
    assert follow(once, LATER.replace(at=106.0)).since == 100.0  # seen in passing, without its threads
    assert activity(once, LATER.replace(ready=frozenset({8}))) == ""
    assert activity(once, LATER.replace(ready=frozenset({7, 8})))


def test_what_a_debugger_holds_is_not_stopped() -> None:
    assert LATER.replace(states=frozenset("ST")).is_stopped
    assert not LATER.replace(states=frozenset("tT")).is_stopped


SAMPLES = st.builds(
    lambda gap, cpu, io, state: (gap, cpu, io, state),
    st.floats(0.05, 1),
    st.sampled_from([0.0, 0.0, 0.0001, 0.3]),
    st.sampled_from([0, 0, 0, 10]),
    st.sampled_from("SSSSTD"),
)


@given(st.lists(SAMPLES, min_size=1, max_size=40))
def test_it_is_still_since_its_last_activity_and_never_longer(steps: list[tuple[float, float, int, str]]) -> None:
    """The time since which it is called still never lies before something that plainly was done."""
    still, seen, last_plain = follow(None, BASE), BASE, BASE.at
    for gap, cpu, io, state in steps:
        seen = seen.replace(at=seen.at + gap, cpu_s=seen.cpu_s + cpu, io_bytes=(seen.io_bytes or 0) + io, states=frozenset(state))
        if cpu >= 0.3 or io or state == "D":
            last_plain = seen.at
        still = follow(still, seen)
        assert still.since >= last_plain
        assert still.since <= seen.at
    idle = seen
    for _ in range(5):
        idle = idle.replace(at=idle.at + 1, states=frozenset("S"))
        after = follow(still, idle)
        assert after.since == still.since  # and from then on it stays still
        still = after


# Frames as the libraries leave them, the innermost first.
IN_A_COLLECTIVE = [
    ("barrier (/job/train.py:12)", "main (/job/train.py:40)"),
    (
        "all_reduce (/v/site-packages/torch/distributed/distributed_c10d.py:2806)",
        "wrapper (/v/torch/distributed/c10d_logger.py:81)",
    ),
    (
        "_is_ready (/v/rallypoint/store/tcp_store.py:248)",
        "wait (/v/rallypoint/store/tcp_store.py:149)",
        "all_gather (/job/t.py:3)",
    ),
    ("wait (/v/torch/distributed/distributed_c10d.py:99)", "main (/job/train.py:9)"),
    ("batch_isend_irecv (/v/torch/distributed/distributed_c10d.py:2600)",),
    ("reduce_scatter_tensor (/v/torch/distributed/distributed_c10d.py:4000)",),
    ("_all_gather_base (/v/x.py:1)",),
    ("all_to_all_single (/v/x.py:1)",),
    ("broadcast_object_list (/v/x.py:1)",),
    ("Allreduce (/job/mpi.py:3)",),
    ("epoll_wait (libc.so.6)", "gloo::transport::tcp::UnboundBuffer::waitRecv (libtorch_cpu.so)", "step (/job/t.py:4)"),
    ("ncclGroupEnd (libnccl.so.2)",),
    ("PMPI_Barrier (libmpi.so.40)", "main (/job/t.py:4)"),
]
NOT_IN_A_COLLECTIVE = [
    ("load (/job/data.py:12)", "main (/job/train.py:40)"),
    ("gather (/job/statistics.py:3)",),
    ("reduce (/usr/lib/python3.11/functools.py:3)",),
    ("wait (/usr/lib/python3.11/threading.py:320)", "get (/usr/lib/python3.11/queue.py:171)"),
    ("broadcaster (/job/train.py:4)",),
    ("barriers_of (/job/train.py:4)",),
    ("select (/usr/lib/python3.11/selectors.py:415)", "recv (/job/net.py:1)"),
]


@pytest.mark.parametrize(
    ("frames", "expected"),
    [*((one, "collective") for one in IN_A_COLLECTIVE), *((one, "elsewhere") for one in NOT_IN_A_COLLECTIVE), ((), "unknown")],
)
def test_a_collective_is_known_by_the_names_of_its_functions(frames: tuple[str, ...], expected: str) -> None:
    assert place_of(frames) == expected


def test_what_is_shown_begins_with_the_collective_and_is_the_same_wherever_the_program_lies() -> None:
    deep = (
        "poll (/a/x.py:1)",
        "wait (/a/x.py:2)",
        "barrier (/a/t.py:3)",
        "main (/a/t.py:4)",
        "run (/a/t.py:5)",
        "go (/a/t.py:6)",
    )
    assert shown(deep) == "barrier (t.py:3) < main (t.py:4) < run (t.py:5)"
    assert shown(("load (/a/t.py:3)",)) == "load (t.py:3)"
    there = tuple(frame.replace("/a/", "/home/of/b/") for frame in deep)
    assert standing_of(deep) == standing_of(there) != standing_of(deep[1:])
    assert standing_of(()) == ""
