"""The agent as a state machine: the whole table, and what holds for any story that a shell can tell it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.core.agent import (
    Abandon,
    Action,
    CouldNotStop,
    Done,
    Drain,
    Drained,
    Draining,
    Failed,
    Finish,
    Gathering,
    Initialize,
    Joined,
    LostTrack,
    Observation,
    PeersWaiting,
    Restart,
    Running,
    Signalled,
    Started,
    Starting,
    State,
    Stop,
    Stopped,
    Stopping,
    Succeeded,
    begin,
    step,
)

STATES: dict[str, State] = {
    "Gathering": Gathering("the run begins"),
    "Starting": Starting(1, 3),
    "Running": Running(),
    "Restarting": Stopping("rank 1 failed", then_restart=True),
    "Failing": Stopping("rank 1 failed", then_restart=False),
    "Draining": Draining(),
    "Done": Done(True, "all workers succeeded"),
}

OBSERVATIONS: dict[str, Observation] = {
    "Joined": Joined(1, 3),
    "Started": Started(),
    "Succeeded": Succeeded(),
    "Failed, 1 left": Failed("rank 1 failed", 1, 3),
    "Failed, 0 left": Failed("rank 1 failed", 0, 3),
    "Peers": PeersWaiting(2),
    "No peers": PeersWaiting(0),
    "Stopped": Stopped(),
    "Drained": Drained(),
    "CouldNotStop": CouldNotStop("pid 7 did not end"),
    "LostTrack": LostTrack("the workers are UNKNOWN"),
    "Signalled": Signalled("SIGTERM"),
}

ENDS = {"CouldNotStop": "Done Abandon", "LostTrack": "Done Abandon", "Signalled": "Done Abandon"}

# State -> observation -> next state and action; what a row does not name, its default covers.
TABLE: dict[str, tuple[str, dict[str, str]]] = {
    "Gathering": ("Gathering Proceed", {"Joined": "Starting Proceed", "Started": "Running Watch", **ENDS}),
    "Starting": ("Starting Proceed", {"Started": "Running Watch", **ENDS}),
    "Running": (
        "Running Watch",
        {
            "Succeeded": "Draining Drain",
            "Failed, 1 left": "Restarting Restart",
            "Failed, 0 left": "Failing Stop",
            "Peers": "Restarting Restart",
            **ENDS,
        },
    ),
    "Restarting": (
        "Restarting Proceed",
        {"Joined": "Starting Proceed", "Started": "Running Watch", "Stopped": "Gathering Proceed", **ENDS},
    ),
    "Failing": ("Done Finish", ENDS),
    "Draining": ("Draining Drain", {"Drained": "Done Finish", **ENDS}),
    "Done": ("Done Finish", ENDS),
}

CASES = [(state, seen, row.get(seen, default)) for state, (default, row) in TABLE.items() for seen in OBSERVATIONS]

counts = st.integers(0, 5)
words = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=20)
observations = st.one_of(
    st.builds(Joined, counts, counts),
    st.builds(Started),
    st.builds(Succeeded),
    st.builds(Failed, words, counts, counts),
    st.builds(PeersWaiting, counts),
    st.builds(Stopped),
    st.builds(CouldNotStop, words),
    st.builds(Drained),
    st.builds(LostTrack, words),
    st.builds(Signalled, words),
)
states = st.one_of(
    st.builds(Gathering, words),
    st.builds(Starting, counts, counts),
    st.builds(Running),
    st.builds(Stopping, words, st.booleans()),
    st.builds(Draining),
    st.builds(Done, st.booleans(), words),
)


def name_of(state: State) -> str:
    if isinstance(state, Stopping):
        return "Restarting" if state.then_restart else "Failing"
    return type(state).__name__


# --- the table -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "seen", "expected"), CASES, ids=[f"{state}-{seen}" for state, seen, _ in CASES])
def test_every_state_has_an_answer_to_every_observation(state: str, seen: str, expected: str) -> None:
    after, action = step(STATES[state], OBSERVATIONS[seen])
    if state == "Starting" and seen == "Joined":
        assert after == Starting(1, 3)
    assert f"{name_of(after)} {type(action).__name__}" == expected
    assert action.why


def test_a_run_begins_with_the_rendezvous() -> None:
    state, action = begin()
    assert isinstance(state, Gathering)
    assert isinstance(action, Initialize)
    assert action.why


def test_what_a_node_learns_at_the_rendezvous_is_in_the_state_and_in_the_words() -> None:
    state, action = step(Gathering("x"), Joined(2, 5))
    assert state == Starting(2, 5)
    assert "2 of 5" in action.why


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (Failed("rank 3 (pid 9) failed: boom", 3, 3), "rank 3 (pid 9) failed: boom; restarting all workers (restart 1 of 3)"),
        (Failed("boom", 1, 3), "restart 3 of 3"),
        (Failed("boom", 0, 3), "boom; all 3 restart(s) are used up"),
        (Failed("boom", 0, 0), "boom; no restarts were asked for (--max-restarts)"),
        (PeersWaiting(4), "4 node(s) wait to join"),
    ],
)
def test_the_reason_has_the_numbers(seen: Observation, words: str) -> None:
    _, action = step(Running(), seen)
    assert words in action.why


def test_the_reason_of_a_failed_run_outlives_the_stop() -> None:
    stopping, stop = step(Running(), Failed("rank 1 failed", 0, 2))
    done, finish = step(stopping, Stopped())
    assert isinstance(done, Done)
    assert not done.succeeded
    assert isinstance(finish, Finish)
    assert done.why == finish.why == stop.why


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_signal_ends_the_agent_from_any_state(state: State) -> None:
    after, action = step(state, Signalled("SIGUSR1"))
    assert after == Done(False, "SIGUSR1 was received")
    assert action == Abandon("SIGUSR1 was received")


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_workers_that_could_not_be_stopped_are_never_restarted(state: State) -> None:
    """P10: the pid is named, and nothing is started again on this host."""
    after, action = step(state, CouldNotStop("pid 4711 did not end"))
    assert after == Done(False, "pid 4711 did not end")
    assert action == Abandon("pid 4711 did not end")


def test_a_shell_that_restarts_as_one_action_may_report_only_the_last_part() -> None:
    stopping, _ = step(Running(), PeersWaiting(1))
    assert isinstance(step(stopping, Started())[0], Running)


def test_a_shell_that_restarts_may_report_every_part() -> None:
    state, _ = step(Running(), Failed("boom", 1, 1))
    seen_states = []
    for seen in (Stopped(), Joined(0, 1), Started()):
        state, action = step(state, seen)
        seen_states.append(type(state))
        assert not isinstance(action, Restart | Initialize)
    assert seen_states == [Gathering, Starting, Running]


# --- properties ------------------------------------------------------------------------------------------------------------


def is_start(action: Action) -> bool:
    return isinstance(action, Initialize | Restart)


@settings(deadline=None)
@given(states, observations)
def test_every_answer_says_why(state: State, seen: Observation) -> None:
    after, action = step(state, seen)
    assert isinstance(after, State)
    assert isinstance(action, Action)
    assert action.why


@settings(deadline=None)
@given(states, observations)
def test_a_restart_is_spent_only_when_a_failure_causes_it(state: State, seen: Observation) -> None:
    _, action = step(state, seen)
    if isinstance(action, Restart):
        assert isinstance(state, Running)
        assert action.restarts_spent == (1 if isinstance(seen, Failed) else 0)
        if isinstance(seen, Failed):
            assert seen.restarts_left > 0
        else:
            assert isinstance(seen, PeersWaiting)
            assert seen.nodes > 0


@settings(deadline=None)
@given(states, observations)
def test_nothing_is_started_once_stopping_draining_or_done(state: State, seen: Observation) -> None:
    after, action = step(state, seen)
    if isinstance(state, Stopping | Draining | Done):
        assert not is_start(action)
    if isinstance(state, Draining | Done):
        assert isinstance(after, Draining | Done)
    if isinstance(state, Done):
        assert isinstance(after, Done)
        assert isinstance(action, Finish | Abandon)


@settings(deadline=None)
@given(states, observations)
def test_the_action_fits_the_state_that_it_leads_to(state: State, seen: Observation) -> None:
    after, action = step(state, seen)
    assert isinstance(action, Finish | Abandon) == isinstance(after, Done)
    assert isinstance(action, Drain) == isinstance(after, Draining)
    if isinstance(action, Restart):
        assert after == Stopping(action.why, True)
    if isinstance(action, Stop):
        assert after == Stopping(action.why, False)
    if isinstance(action, Finish) and action.succeeded:
        assert isinstance(state, Draining | Done)


@settings(deadline=None)
@given(states, st.lists(observations, max_size=30))
def test_no_story_leads_back_from_the_end(state: State, story: list[Observation]) -> None:
    draining = done = False
    for seen in story:
        state, action = step(state, seen)
        assert not (is_start(action) and (draining or done))
        draining = draining or isinstance(state, Draining)
        done = done or isinstance(state, Done)
        assert isinstance(state, Done) or not done
        assert isinstance(state, Draining | Done) or not draining


class Shell:
    """A shell that performs what it is told and tells the truth about it; what the workers do is drawn."""

    def __init__(self, data: st.DataObject, max_restarts: int) -> None:
        self.data = data
        self.max_restarts = self.left = max_restarts
        self.failures_seen = 0
        self.joiners_left = 3
        self.looks_left = 20
        self.starts = 0

    def perform(self, action: Action) -> Observation:
        match action:
            case Initialize():
                self.starts += 1
                return Started()
            case Restart(_, spent):
                self.left -= spent
                self.starts += 1
                return self.data.draw(st.sampled_from([Started(), CouldNotStop("stuck")]))
            case Stop():
                return self.data.draw(st.sampled_from([Stopped(), CouldNotStop("stuck")]))
            case Drain():
                return self.data.draw(st.sampled_from([Drained(), Signalled("SIGTERM")]))
        return self.look()

    def look(self) -> Observation:
        self.looks_left -= 1
        kinds = ["succeeded", "failed"] + ["quiet"] * (self.looks_left > 0) + ["joiner"] * (self.joiners_left > 0)
        match self.data.draw(st.sampled_from(kinds)):
            case "succeeded":
                return Succeeded()
            case "failed":
                self.failures_seen += 1
                return Failed("boom", self.left, self.max_restarts)
            case "joiner":
                self.joiners_left -= 1
                return PeersWaiting(1)
        return PeersWaiting(0)


@settings(deadline=None)
@given(st.data(), st.integers(0, 4))
def test_an_honest_shell_always_comes_to_an_end_within_its_budget(data: st.DataObject, max_restarts: int) -> None:
    shell = Shell(data, max_restarts)
    state, action = begin()
    most_actions = 2 * (shell.looks_left + max_restarts + shell.joiners_left) + 10
    for _ in range(most_actions):
        if isinstance(action, Finish | Abandon):
            break
        state, action = step(state, shell.perform(action))
    assert isinstance(state, Done)
    assert 0 <= shell.left <= max_restarts
    assert max_restarts - shell.left <= shell.failures_seen
    assert shell.starts <= 1 + (max_restarts - shell.left) + 3
    if state.succeeded:
        assert shell.failures_seen == max_restarts - shell.left
