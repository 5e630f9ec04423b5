"""The agent as a state machine: the whole table, and what holds for any story that a shell can tell it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.protocol.agent_machine import (
    Abandon,
    Action,
    CouldNotStop,
    Done,
    Drain,
    Drained,
    Draining,
    Failed,
    Fenced,
    Finish,
    Gathering,
    Initialize,
    JobEnded,
    Joined,
    LostTrack,
    Observation,
    PeersWaiting,
    Regroup,
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
from rallypoint.protocol.restarts import Again, Ended, GiveUp, Purse, RestartPolicy, judge

AGAIN = Again(Purse(failures=1), 2.5, "failure", "restart 1 of 3, after 2.5 s")
GIVE_UP = GiveUp("all 3 restarts are used up")

STATES: dict[str, State] = {
    "Gathering": Gathering("the run begins"),
    "Starting": Starting(1, 3),
    "Running": Running(),
    "Restarting": Stopping("rank 1 failed", then_restart=True),
    "Failing": Stopping("rank 1 failed", then_restart=False),
    "Draining": Draining(),
    "Success": Done(True, "all workers succeeded"),
    "Failure": Done(False, "rank 1 failed"),
}

OBSERVATIONS: dict[str, Observation] = {
    "Joined": Joined(1, 3),
    "Started": Started(),
    "Succeeded": Succeeded(),
    "Failed, again": Failed("rank 1 failed", AGAIN),
    "Failed, give up": Failed("rank 1 failed", GIVE_UP),
    "Failed, no ruling": Failed("rank 1 failed", None),
    "Regroup": Regroup("rank 5 of another node failed"),
    "Fenced": Fenced("the store has been silent for 3 s"),
    "Job succeeded": JobEnded("succeeded", "all nodes are done"),
    "Job failed": JobEnded("failed", "all restarts are used up"),
    "Job closed": JobEnded("closed", "another node closed it"),
    "Peers": PeersWaiting(2),
    "No peers": PeersWaiting(0),
    "Stopped": Stopped(),
    "Drained": Drained(),
    "CouldNotStop": CouldNotStop("pid 7 did not end"),
    "LostTrack": LostTrack("the workers are UNKNOWN"),
    "Signalled": Signalled("SIGTERM"),
}

ENDS = {"CouldNotStop": "Failure Abandon", "LostTrack": "Failure Abandon", "Signalled": "Failure Abandon"}
ENDS_WAITING = {"Job succeeded": "Success Finish", "Job failed": "Failure Finish", "Job closed": "Failure Finish", **ENDS}

# State -> observation -> next state and action; what a row does not name, its default covers.
TABLE: dict[str, tuple[str, dict[str, str]]] = {
    "Gathering": ("Gathering Proceed", {"Joined": "Starting Proceed", "Started": "Running Watch", **ENDS_WAITING}),
    "Starting": ("Starting Proceed", {"Started": "Running Watch", "Fenced": "Restarting Restart", **ENDS_WAITING}),
    "Running": (
        "Running Watch",
        {
            "Succeeded": "Draining Drain",
            "Failed, again": "Restarting Restart",
            "Failed, give up": "Failing Stop",
            "Failed, no ruling": "Restarting Restart",
            "Peers": "Restarting Restart",
            "Regroup": "Restarting Restart",
            "Fenced": "Restarting Restart",
            "Job failed": "Failing Stop",
            **ENDS,
        },
    ),
    "Restarting": (
        "Restarting Proceed",
        {"Joined": "Starting Proceed", "Started": "Running Watch", "Stopped": "Gathering Proceed", **ENDS_WAITING},
    ),
    "Failing": ("Failure Finish", ENDS),
    "Draining": (
        "Draining Drain",
        {
            "Drained": "Success Finish",
            "Regroup": "Restarting Restart",
            "Fenced": "Success Finish",
            "Job succeeded": "Success Finish",
            "Job failed": "Failure Finish",
            "Job closed": "Success Finish",
            **ENDS,
        },
    ),
    "Success": ("Success Finish", ENDS),
    "Failure": ("Failure Finish", ENDS),
}

CASES = [(state, seen, row.get(seen, default)) for state, (default, row) in TABLE.items() for seen in OBSERVATIONS]

counts = st.integers(0, 5)
words = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=20)
rulings = st.one_of(
    st.none(),
    st.builds(GiveUp, words),
    st.builds(Again, st.just(Purse()), st.floats(0, 30), st.just("failure"), words),
)
observations = st.one_of(
    st.builds(Joined, counts, counts),
    st.builds(Started),
    st.builds(Succeeded),
    st.builds(Failed, words, rulings),
    st.builds(Regroup, words),
    st.builds(Fenced, words),
    st.builds(JobEnded, st.sampled_from(["succeeded", "failed", "closed"]), words),
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
    if isinstance(state, Done):
        return "Success" if state.succeeded else "Failure"
    return type(state).__name__


# --- the table -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "seen", "expected"), CASES, ids=[f"{state}-{seen}" for state, seen, _ in CASES])
def test_every_state_has_an_answer_to_every_observation(state: str, seen: str, expected: str) -> None:
    after, action = step(STATES[state], OBSERVATIONS[seen])
    if state == "Starting" and seen == "Joined":
        assert after == Starting(1, 3)
    assert f"{name_of(after)} {type(action).__name__}" == expected
    assert action.why
    if isinstance(action, Finish):
        assert isinstance(after, Done)
        assert action.succeeded == after.succeeded


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
        (
            Failed("rank 3 (pid 9) failed: boom", AGAIN),
            "rank 3 (pid 9) failed: boom; restarting all workers (restart 1 of 3, after",
        ),
        (Failed("boom", GIVE_UP), "boom; all 3 restarts are used up"),
        (Failed("boom", None), "boom; the workers of all nodes are stopped"),
        (PeersWaiting(4), "4 nodes waiting to join"),
        (Regroup("node b was lost"), "node b was lost"),
        (Fenced("the store is silent"), "the store is silent"),
        (JobEnded("failed", "rank 5 failed for good"), "rank 5 failed for good"),
    ],
)
def test_the_reason_has_the_numbers(seen: Observation, words: str) -> None:
    _, action = step(Running(), seen)
    assert words in action.why


def test_the_reason_of_a_failed_run_outlives_the_stop() -> None:
    stopping, stop = step(Running(), Failed("rank 1 failed", GIVE_UP))
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
    state, _ = step(Running(), Failed("boom", AGAIN))
    seen_states = []
    for seen in (Stopped(), Joined(0, 1), Started()):
        state, action = step(state, seen)
        seen_states.append(type(state))
        assert not isinstance(action, Restart | Initialize)
    assert seen_states == [Gathering, Starting, Running]


def test_a_failure_that_is_ours_to_rule_on_spends_a_restart_and_waits() -> None:
    """P15: the pause grows with each restart; how long it is comes with the ruling."""
    _, action = step(Running(), Failed("boom", AGAIN))
    assert isinstance(action, Restart)
    assert (action.restarts_spent, action.delay_s, action.at_once) == (1, 2.5, False)


@pytest.mark.parametrize("seen", [Failed("boom", None), Regroup("elsewhere"), PeersWaiting(1)])
def test_where_the_job_rules_the_agent_spends_nothing_and_keeps_its_grace(seen: Observation) -> None:
    _, action = step(Running(), seen)
    assert isinstance(action, Restart)
    assert (action.restarts_spent, action.delay_s, action.at_once) == (0, 0.0, False)


def test_the_fence_leaves_no_grace() -> None:
    state, action = step(Running(), Fenced("silent for 3 s"))
    assert state == Stopping("silent for 3 s", True)
    assert action == Restart("silent for 3 s", 0, at_once=True)


def test_a_node_that_is_done_begins_anew_when_another_fails() -> None:
    state, action = step(Draining(), Regroup("rank 5 failed"))
    assert state == Stopping("rank 5 failed", True)
    assert action == Restart("rank 5 failed", 0)


def test_the_loss_of_a_node_that_is_done_is_no_loss() -> None:
    state, _ = step(Draining(), Fenced("the store is gone"))
    assert isinstance(state, Done)
    assert state.succeeded
    assert "the store is gone" in state.why


@pytest.mark.parametrize("state", [Gathering("x"), Starting(0, 2), Running(), Stopping("x", True), Draining()])
def test_a_job_that_failed_is_never_a_success_here(state: State) -> None:
    for _ in range(3):
        state, action = step(state, JobEnded("failed", "all restarts are used up"))
        assert not isinstance(action, Restart | Initialize)
    assert state == Done(False, "all restarts are used up")


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
def test_a_restart_is_spent_only_for_a_failure_with_the_leave_to_try_again(state: State, seen: Observation) -> None:
    _, action = step(state, seen)
    if not isinstance(action, Restart):
        return
    may_stop = Running if not isinstance(seen, Fenced) else Running | Starting
    assert isinstance(state, may_stop) or (isinstance(state, Draining) and isinstance(seen, Regroup))
    ruling = seen.ruling if isinstance(seen, Failed) else None
    assert not isinstance(ruling, GiveUp)
    assert action.restarts_spent == (1 if isinstance(ruling, Again) else 0)
    assert action.delay_s == (ruling.delay_s if isinstance(ruling, Again) else 0.0)
    assert action.at_once == isinstance(seen, Fenced)
    assert isinstance(seen, Failed | Regroup | Fenced) or (isinstance(seen, PeersWaiting) and seen.nodes > 0)


@settings(deadline=None)
@given(states, observations)
def test_nothing_is_started_once_stopping_or_done_and_only_a_regroup_leads_back_from_draining(
    state: State, seen: Observation
) -> None:
    after, action = step(state, seen)
    if isinstance(state, Stopping | Done):
        assert not is_start(action)
    if isinstance(state, Draining):
        assert is_start(action) == isinstance(seen, Regroup)
        assert isinstance(after, Draining | Done) != isinstance(seen, Regroup)
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
        assert isinstance(state, Draining | Done) or (isinstance(seen, JobEnded) and seen.how == "succeeded")


@settings(deadline=None)
@given(states, words)
def test_workers_never_outlive_the_fence(state: State, why: str) -> None:
    """Only in Starting and Running are there workers that nobody is stopping yet."""
    _, action = step(state, Fenced(why))
    assert isinstance(action, Restart) == isinstance(state, Starting | Running)
    assert not isinstance(action, Restart) or action.at_once


@settings(deadline=None)
@given(states, st.lists(observations, max_size=30))
def test_no_story_leads_back_from_the_end(state: State, story: list[Observation]) -> None:
    draining = done = False
    for seen in story:
        draining = draining and not isinstance(seen, Regroup)
        state, action = step(state, seen)
        assert not (is_start(action) and (draining or done))
        draining = draining or isinstance(state, Draining)
        done = done or isinstance(state, Done)
        assert isinstance(state, Done) or not done
        assert isinstance(state, Draining | Done) or not draining


class Shell:
    """A shell that performs what it is told and tells the truth about it; what the workers do is drawn."""

    def __init__(self, data: st.DataObject, max_restarts: int, is_alone: bool) -> None:
        self.data = data
        self.policy = RestartPolicy(max_restarts)
        self.purse = Purse()
        self.is_alone = is_alone
        self.spent = 0
        self.failures_seen = 0
        self.elsewhere_left = 3  # joins, losses and failures elsewhere
        self.looks_left = 20
        self.starts = 0

    def perform(self, action: Action) -> Observation:
        match action:
            case Initialize():
                self.starts += 1
                return Started()
            case Restart(_, spent):
                self.spent += spent
                self.starts += 1
                refused = CouldNotStop("stuck") if self.is_alone else JobEnded("failed", "all restarts are used up")
                return self.data.draw(st.sampled_from([Started(), refused]))
            case Stop():
                return self.data.draw(st.sampled_from([Stopped(), CouldNotStop("stuck")]))
            case Drain():
                return self.drain()
        return self.look()

    def drain(self) -> Observation:
        kinds: list[Observation] = [Drained(), Signalled("SIGTERM")]
        if not self.is_alone:
            kinds += [JobEnded("succeeded", "all are done"), Fenced("silent")]
        if self.elsewhere_left > 0 and not self.is_alone:
            kinds.append(Regroup("a failure elsewhere"))
        seen = self.data.draw(st.sampled_from(kinds))
        self.elsewhere_left -= isinstance(seen, Regroup)
        return seen

    def look(self) -> Observation:
        self.looks_left -= 1
        may_fail = self.is_alone or self.looks_left > 0  # among others nothing but the job ends a row of failures
        kinds = ["succeeded"] + ["failed"] * may_fail + ["quiet"] * (self.looks_left > 0)
        kinds += ["elsewhere"] * (self.elsewhere_left > 0)
        match self.data.draw(st.sampled_from(kinds)):
            case "succeeded":
                return Succeeded()
            case "failed":
                return Failed("boom", self.rule())
            case "elsewhere":
                self.elsewhere_left -= 1
                others = [PeersWaiting(1)] if self.is_alone else [Regroup("a node joined"), Fenced("silent")]
                return self.data.draw(st.sampled_from(others))
        return PeersWaiting(0)

    def rule(self) -> Again | GiveUp | None:
        self.failures_seen += 1
        if not self.is_alone:
            return None
        ruling = judge(self.policy, self.purse, Ended(failed_exit_codes=(1,)))
        self.purse = ruling.purse if isinstance(ruling, Again) else self.purse
        return ruling


@settings(deadline=None)
@given(st.data(), st.integers(0, 4), st.booleans())
def test_an_honest_shell_always_comes_to_an_end_within_its_budget(data: st.DataObject, max_restarts: int, is_alone: bool) -> None:
    """Alone, the agent keeps the budget; among others it spends nothing by itself, and the job ends the run."""
    shell = Shell(data, max_restarts, is_alone)
    state, action = begin()
    most_actions = 2 * (shell.looks_left + max_restarts + shell.elsewhere_left) + 10
    for _ in range(most_actions):
        if isinstance(action, Finish | Abandon):
            break
        state, action = step(state, shell.perform(action))
    assert isinstance(state, Done)
    assert shell.spent == shell.purse.failures <= max_restarts
    assert shell.starts <= 1 + shell.failures_seen + 3
    if is_alone:
        assert shell.starts <= 1 + shell.spent + 3
        assert shell.failures_seen - shell.spent in (0, 1)
    if state.succeeded and is_alone:
        assert shell.failures_seen == shell.spent
