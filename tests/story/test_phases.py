"""The ledger of phases: every second is in one of them, and only what was run can be lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.protocol import agent_machine
from rallypoint.story import phases

changes = st.lists(
    st.tuples(st.sampled_from([*phases.PHASES[:4], phases.DONE]), st.floats(0.0, 1e6), st.none() | st.floats(-1e6, 2e6))
)


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        (agent_machine.Gathering("the run begins"), phases.WAITING),
        (agent_machine.Starting(0, 1), phases.STARTING),
        (agent_machine.Running(), phases.RUNNING),
        (agent_machine.Stopping("rank 0 failed", True), phases.STOPPING),
        (agent_machine.Draining(), phases.WAITING),
        (agent_machine.Done(True, "all workers succeeded"), phases.STOPPING),
    ],
)
def test_every_state_has_a_phase(state: agent_machine.State, phase: str) -> None:
    assert phases.phase_of(state) == phase


def test_what_was_run_after_the_last_checkpoint_is_lost() -> None:
    ledger = phases.enter(phases.open_ledger(10.0), phases.RUNNING, 11.0)
    stopped = phases.enter(ledger, phases.STOPPING, 21.0, kept_until=15.0)
    assert stopped == phases.Ledger(phases.STOPPING, 21.0, {**stopped.seconds, "starting": 1.0, "running": 4.0, "lost": 6.0})
    assert phases.enter(ledger, phases.WAITING, 21.0).seconds["running"] == 10.0
    assert phases.totals(stopped, 22.5)["stopping"] == 1.5


def test_a_checkpoint_of_an_earlier_generation_keeps_nothing_of_this_one() -> None:
    ledger = phases.enter(phases.open_ledger(10.0), phases.RUNNING, 11.0)
    assert phases.enter(ledger, phases.STOPPING, 12.0, kept_until=3.0).seconds["lost"] == 1.0


def test_work_is_kept_by_success_alone() -> None:
    assert phases.keeps_work(agent_machine.Draining())
    assert not phases.keeps_work(agent_machine.Stopping("rank 0 failed", True))
    assert not phases.keeps_work(agent_machine.Done(False, "SIGTERM was received"))


@given(changes)
def test_the_seconds_add_up_to_the_time_until_the_run_is_done(steps: list[tuple[str, float, float | None]]) -> None:
    ledger, now, counted = phases.open_ledger(0.0), 0.0, 0.0
    for phase, lasted_s, kept_until in steps:
        now += lasted_s
        counted += lasted_s if ledger.phase != phases.DONE else 0.0
        ledger = phases.enter(ledger, phase, now, kept_until)
    assert min(ledger.seconds.values()) >= 0
    assert sum(phases.totals(ledger, now).values()) == pytest.approx(counted)
