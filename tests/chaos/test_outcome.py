"""What came of a fault, by how the job stands since; and how that is summed up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.chaos.jobs import make_node

from rallypoint.chaos.faults import read_fault
from rallypoint.chaos.outcome import (
    BACK_S,
    ENDED,
    LOST,
    QUIET_S,
    RECOVERED,
    STEADY_S,
    UNHARMED,
    End,
    Outcome,
    Standing,
    Trial,
    judge,
    median,
    outcome_text,
    stands,
    table,
)

BEFORE = Standing(10.0, "running", 4, 1, 3, 2, 0.0)
KILLED = Trial(1, read_fault("kill rank 1"), 10.0, BEFORE, expects_change=True)
STOPPED = Trial(2, read_fault("stop node 1 for 8s"), 10.0, BEFORE, held_until_s=18.0)
PATIENCE_S = 60.0


def now(at_s: float, phase: str = "running", generation: int = 5, since_s: float = 0.0, **more: object) -> Standing:
    return BEFORE.replace(at_s=at_s, phase=phase, generation=generation, running_since_s=since_s, **more)


@pytest.mark.parametrize(
    ("trial", "standing", "kind", "after_s"),
    [
        (KILLED, now(10.5, "stopping", 4), None, 0.0),
        (KILLED, now(11.5, since_s=11.3), None, 0.0),  # it may fail at its start
        (KILLED, now(12.4, since_s=11.3, restarts=2), RECOVERED, 1.3),
        (KILLED, now(20.0, generation=4), None, 0.0),  # it has not been noticed yet
        (KILLED, now(70.1, generation=4), UNHARMED, 60.1),
        (KILLED, now(69.9, "waiting"), None, 0.0),
        (KILLED, now(70.1, "waiting"), LOST, 60.1),
        (KILLED, now(70.1, ""), LOST, 60.1),
        (KILLED, now(12.0, "", end=End("the job has ended")), ENDED, 2.0),
        (STOPPED, now(17.0, since_s=14.0), None, 0.0),
        (STOPPED, now(18.5, since_s=14.0), None, 0.0),
        (STOPPED, now(19.1, since_s=14.0), RECOVERED, 4.0),
        (STOPPED, now(21.0, generation=6, since_s=18.4), RECOVERED, 8.4),
        (STOPPED, now(30.0, nodes=1, since_s=14.0), None, 0.0),  # the node comes back, sooner or later
        (STOPPED, now(18.1 + BACK_S, nodes=1, since_s=14.0), RECOVERED, 4.0),
        (STOPPED, now(18.0 + QUIET_S - 0.1, generation=4), None, 0.0),
        (STOPPED, now(18.0 + QUIET_S, generation=4), UNHARMED, 8.0 + QUIET_S),
        (STOPPED, now(18.0 + PATIENCE_S, "stopping"), LOST, 8.0 + PATIENCE_S),
    ],
)
def test_what_came_of_it(trial: Trial, standing: Standing, kind: str | None, after_s: float) -> None:
    found = judge(trial, standing, PATIENCE_S)
    assert (found.kind if found else None) == kind
    if found:
        assert found.after_s == pytest.approx(after_s)


@given(
    st.floats(10.0, 1000.0), st.sampled_from(["running", "stopping", ""]), st.integers(4, 6), st.integers(1, 3), st.floats(0, 999)
)
def test_sooner_or_later_something_is_said_and_never_before_it_is_over(
    at_s: float, phase: str, generation: int, nodes: int, since_s: float
) -> None:
    for trial in (KILLED, STOPPED):
        standing = now(at_s, phase, generation, min(since_s, at_s), nodes=nodes)
        found = judge(trial, standing, PATIENCE_S)
        if at_s < trial.over_s:
            assert found is None
        if at_s >= trial.over_s + PATIENCE_S and (at_s - standing.running_since_s >= STEADY_S or phase != "running"):
            assert found is not None


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (Outcome(RECOVERED, KILLED.fault, 1.3, now(12.0, restarts=2), restarts=1),
         "recovered after 1.30 s, into generation 5 of 2 nodes, restart 2 of 3"),
        (Outcome(RECOVERED, STOPPED.fault, 8.4, now(21.0), undone_s=0.4),
         "recovered after 8.40 s, 0.40 s after it was undone, into generation 5 of 2 nodes"),
        (Outcome(UNHARMED, STOPPED.fault, 12.0, now(21.0, generation=4)), "unharmed: generation 4 runs on"),
        (Outcome(LOST, KILLED.fault, 120.0, now(130.0, "waiting")), "not recovered within 2 min 0 s: it is waiting"),
        (Outcome(LOST, KILLED.fault, 120.0, now(130.0, "")), "not recovered within 2 min 0 s: nobody answers"),
        (Outcome(ENDED, KILLED.fault, 0.5, now(10.5, end=End("the job has ended with exit code 1: rank 1 failed"))),
         "the job has ended with exit code 1: rank 1 failed, 0.50 s after the fault"),
    ],
)  # fmt: skip
def test_it_is_said_in_one_line(outcome: Outcome, text: str) -> None:
    assert outcome_text(outcome) == text


def test_a_spare_says_nothing_of_those_that_run() -> None:
    spare = make_node(2, node_rank=None, generation=0, phase="waiting")
    found = stands([make_node(0, phase_s=4.0, nodes=2), make_node(1, phase_s=3.0, nodes=2, restarts=1), spare], 10.0)
    assert (found.phase, found.generation, found.nodes, found.restarts, found.running_since_s) == ("running", 3, 2, 1, 7.0)
    assert stands([make_node(0), make_node(1, phase="stopping")], 10.0).phase == "stopping"
    assert not stands([], 10.0).is_running
    assert stands([spare], 10.0).phase == "waiting"


def test_the_table_counts_what_came_of_each_kind() -> None:
    recovered = [Outcome(RECOVERED, KILLED.fault, after_s, now(20.0), restarts=1) for after_s in (1.0, 9.0, 2.0)]
    others = [
        Outcome(UNHARMED, STOPPED.fault, 12.0, now(30.0)),
        Outcome(ENDED, STOPPED.fault, 1.0, now(31.0, end=End("the job has finished", is_good=True))),
        Outcome(LOST, STOPPED.fault, 60.0, now(90.0, "waiting")),
    ]
    assert table([*others, *recovered]).splitlines() == [
        "FAULT  GIVEN  RECOVERED  UNHARMED  NOT  MEDIAN     MAX  RESTARTS",
        "kill       3          3         -    -  2.00 s  9.00 s         3",
        "stop       3          -         2    1       -       -         -",
        "all        6          3         2    1  2.00 s  9.00 s         3",
    ]
    assert [one.is_good for one in others] == [True, True, False]
    assert len(table(recovered).splitlines()) == 2
    assert [median([3.0]), median([1.0, 2.0])] == [3.0, 1.5]
