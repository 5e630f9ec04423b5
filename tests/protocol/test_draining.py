"""When a node has to leave: tables of what is decided, any order in which workers and agents may act, whole nodes by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulation.script import Stage

from rallypoint.protocol import draining, session
from rallypoint.protocol import job_records as job
from rallypoint.protocol.draining import Drain, Go, GoAtOnce, Stay, WorkerDrain
from rallypoint.protocol.generation import Policy
from rallypoint.protocol.job_records import NO_STEP, NodeDrain, Notice, Ruling
from rallypoint.protocol.restarts import Purse, RestartPolicy

LEAVES, STAYS = NodeDrain(True, False, 41), NodeDrain(False, False, 40)
SAVED = {"a": STAYS.replace(has_saved=True), "b": LEAVES.replace(has_saved=True)}
NOTICE = Notice("SIGTERM was received", "b", 30.0)
LEAVING = Drain("SIGTERM was received", True, 100.0, 130.0)


# --- of all nodes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("busy", "told", "known", "expected"),
    [
        pytest.param("ab", {}, None, (NO_STEP, False), id="nobody has told anything"),
        pytest.param("ab", {"b": LEAVES}, None, (NO_STEP, False), id="not all have"),
        pytest.param("ab", {"a": STAYS.replace(step=NO_STEP), "b": LEAVES}, None, (NO_STEP, False), id="not all have asked"),
        pytest.param("ab", {"a": STAYS, "b": LEAVES}, None, (42, False), id="the step after the highest"),
        pytest.param("ab", {"a": STAYS, "b": LEAVES.replace(step=60)}, (42, False), (42, False), id="what is ruled stays"),
        pytest.param("ab", SAVED, (42, False), (42, True), id="all have saved"),
        pytest.param("ab", {**SAVED, "a": STAYS}, (42, False), (42, False), id="one has not"),
        pytest.param("ab", {one: saved.replace(step=NO_STEP) for one, saved in SAVED.items()}, None, (NO_STEP, True),
                     id="they save whenever they like"),
        pytest.param("b", {"b": LEAVES}, None, (42, False), id="who is done is not waited for"),
        pytest.param("", {"b": LEAVES}, None, (NO_STEP, True), id="all are done"),
        pytest.param("ab", {**SAVED, "c": STAYS}, (42, False), (42, True), id="who is no member does not count"),
        pytest.param("abc", SAVED, (42, True), (42, True), id="complete is complete"),
    ],
)  # fmt: skip
def test_what_holds_for_all(
    busy: str, told: dict[str, NodeDrain], known: tuple[int, bool] | None, expected: tuple[int, bool]
) -> None:
    assert draining.rule(set(busy), told, Ruling(*known) if known else None) == Ruling(*expected)


@pytest.mark.parametrize(
    ("is_host", "usable", "why"),
    [(False, 1, ""), (False, 0, "node n1 had notice to leave, and fewer than 2 would be left; all workers have saved"),
     (True, 5, "node n1 had notice to leave, and the coordination store leaves with it; all workers have saved")],
)  # fmt: skip
def test_whether_the_job_goes_on(is_host: bool, usable: int, why: str) -> None:
    assert draining.why_over({"b": LEAVES.replace(is_host=is_host)}, {"b": "n1"}, usable, 2) == why


# --- of one node -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drain", "now", "expected"),
    [
        pytest.param(LEAVING, 101.0, Stay, id="there is time"),
        pytest.param(LEAVING, 130.0, GoAtOnce, id="there is none left"),
        pytest.param(LEAVING.replace(is_hurried=True), 101.0, GoAtOnce, id="there was a second notice"),
        pytest.param(LEAVING.replace(ruling=Ruling(42, True)), 101.0, Go, id="all have saved"),
        pytest.param(LEAVING.replace(ruling=Ruling(42, True), is_hurried=True), 131.0, Go, id="all have saved, just in time"),
        pytest.param(LEAVING.replace(is_leaving=False), 200.0, Stay, id="another leaves"),
        pytest.param(LEAVING.replace(is_leaving=False, ruling=Ruling(42, True)), 101.0, Stay, id="another leaves now"),
    ],
)
def test_when_a_node_leaves(drain: Drain, now: float, expected: type) -> None:
    assert type(draining.decide(drain, now)) is expected


def test_a_notice_is_the_second_one_only_after_a_moment() -> None:
    first = draining.hear_notice(None, "SIGTERM", 30.0, 100.0)
    assert (first.ends_at, first.is_leaving, first.is_hurried) == (130.0, True, False)
    assert draining.hear_notice(first, "SIGTERM", 30.0, 100.4) == first
    assert draining.hear_notice(first, "SIGUSR1", 30.0, 100.5).is_hurried


def test_who_hears_of_anothers_notice_first_may_have_its_own() -> None:
    told = draining.hear_elsewhere(None, NOTICE, 100.0)
    assert (told.ends_at, told.is_leaving) == (130.0, False)
    own = draining.hear_notice(told, "SIGUSR1", 90.0, 110.0)
    assert (own.ends_at, own.is_leaving, own.is_hurried) == (130.0, True, False)
    assert draining.hear_elsewhere(own, NOTICE, 120.0) == own


def test_what_a_node_tells_of_its_workers() -> None:
    asked, saved = WorkerDrain(7), WorkerDrain(9, True, True)
    assert draining.summarize([asked, saved], True, False) == NodeDrain(True, False, 9, False)
    assert draining.summarize([saved, saved], False, True) == NodeDrain(False, True, 9, True)
    assert draining.summarize([saved, WorkerDrain()], False, False).step == NO_STEP
    assert not draining.may_report(100.0, 100.005)
    assert draining.may_report(100.0, 100.02)
    assert draining.next_look_at(LEAVING.replace(is_leaving=False, ruling=Ruling(3, True)), 100.0) is None


# --- every order -----------------------------------------------------------------------------------------------------------


class Workers:
    """Workers of several nodes, each of which asks before every step; in step with each other if they train in parallel."""

    def __init__(self, sizes: list[int], in_step: bool, ahead: list[int]) -> None:
        self.node_of = [node for node, size in enumerate(sizes) for _ in range(size)]
        self.in_step = in_step
        self.passed = [0 if in_step else ahead[one % len(ahead)] for one in range(len(self.node_of))]  # so many steps
        self.asked = [passed - 1 for passed in self.passed]
        self.saved_at: dict[int, int] = {}
        self.save_at = [0] * len(sizes)  # as the page has it: 0, -1 for waiting, or one more than the step
        self.told: dict[str, NodeDrain] = {}
        self.ruling: Ruling | None = None

    def enabled(self) -> list[Callable[[], None]]:
        able: list[Callable[[], None]] = []
        for one, node in enumerate(self.node_of):
            if self.asked[one] < self.passed[one]:
                if not self.in_step or self.passed[one] <= min(self.passed):
                    able.append(lambda one=one: self.ask(one))  # type: ignore[misc]
            elif self.save_at[node] != -1 and one not in self.saved_at:
                able.append(lambda one=one: self.go_on(one))  # type: ignore[misc]
        for node in range(len(self.save_at)):
            if self.save_at[node] == 0:
                able.append(lambda node=node: self.hold(node))  # type: ignore[misc]
            elif str(node) not in self.told and all(self.asked[one] >= 0 for one in self.of(node)):
                able.append(lambda node=node: self.report(node))  # type: ignore[misc]
            elif self.save_at[node] == -1 and self.ruling is not None and self.ruling.step != NO_STEP:
                able.append(lambda node=node: self.release(node))  # type: ignore[misc]
        return able

    def of(self, node: int) -> list[int]:
        return [one for one, its in enumerate(self.node_of) if its == node]

    def ask(self, one: int) -> None:
        self.asked[one] = self.passed[one]

    def go_on(self, one: int) -> None:
        """The answer to what it has asked last, from the page as it is now."""
        step, save_at = self.asked[one], self.save_at[self.node_of[one]]
        if save_at > 0 and step + 1 >= save_at:
            self.saved_at[one] = step
        self.passed[one] += 1

    def hold(self, node: int) -> None:
        self.save_at[node] = -1

    def report(self, node: int) -> None:
        told = [WorkerDrain(self.asked[one]) for one in self.of(node)]
        self.told[str(node)] = draining.summarize(told, node == 0, False)
        self.ruling = draining.rule({str(one) for one in range(len(self.save_at))}, self.told, self.ruling)

    def release(self, node: int) -> None:
        assert self.ruling is not None
        self.save_at[node] = self.ruling.step + 1


@settings(max_examples=300)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.booleans(),
    st.lists(st.integers(0, 20), min_size=1, max_size=4),
    st.lists(st.integers(0, 1000), max_size=200),
)
def test_p17_all_save_at_the_same_step_in_whatever_order(
    sizes: list[int], in_step: bool, ahead: list[int], choices: list[int]
) -> None:
    """P17: nobody has passed it, and nobody waits for ever, also where workers wait for each other within a step."""
    workers = Workers(sizes, in_step, ahead)
    for choice in choices:
        if able := workers.enabled():
            able[choice % len(able)]()
    turn = 0
    while len(workers.saved_at) < len(workers.node_of):
        able = workers.enabled()
        assert able, "all wait"
        able[turn % len(able)]()
        turn += 1
        assert turn < 20_000, "some wait for ever"
    assert len(set(workers.saved_at.values())) == 1


# --- whole nodes -----------------------------------------------------------------------------------------------------------


def running(policy: Policy, *names: str) -> Stage:
    stage = Stage(policy)
    stage.join(*names)
    stage.pass_time(1.0)
    for name in names:
        assert stage.kinds(name) == ["Seated"]
    return stage


THREE = Policy(1, 3, last_call_s=0.0, scale_up_window_s=0.0)


def tell(stage: Stage, leaving: str, step: int, has_saved: bool, *names: str) -> None:
    for name in names:
        stage.nodes[name].drains(1, NodeDrain(name in leaving, False, step, has_saved))
    stage.settle()


def test_all_nodes_hear_of_a_notice_and_of_the_step() -> None:
    stage = running(THREE, "a", "b", "c")
    stage.nodes["b"].noticed(1, NOTICE)
    stage.settle()
    assert [stage.news(name) for name in "abc"] == [[session.Noticed(1, NOTICE)]] * 3
    tell(stage, "b", 5, False, "a", "c")
    assert [stage.news(name) for name in "abc"] == [[]] * 3
    tell(stage, "b", 9, False, "b")
    assert [stage.news(name) for name in "abc"] == [[session.Ruled(1, Ruling(10, False))]] * 3
    tell(stage, "b", 10, True, "a", "b", "c")
    assert [stage.news(name) for name in "abc"] == [[session.Ruled(1, Ruling(10, True))]] * 3


def test_the_first_notice_counts_and_nobody_joins_meanwhile() -> None:
    stage = running(THREE, "a", "b")
    stage.nodes["b"].noticed(1, NOTICE)
    stage.nodes["a"].noticed(1, NOTICE.replace(by="a"))
    stage.join("late")
    stage.pass_time(5.0)
    heard = {name: stage.news(name) for name in "ab"}
    assert heard["a"] == heard["b"] == [heard["a"][0]]
    assert stage.value(job.signal_key(1)) is None


def test_another_leader_goes_on_with_what_was_told() -> None:
    stage = running(THREE, "a", "b", "c")
    leader = next(name for name in "abc" if stage.nodes[name].leader is not None)
    others = [name for name in "abc" if name != leader]
    stage.nodes[others[0]].noticed(1, NOTICE)
    stage.settle()
    tell(stage, others[0], 5, False, *"abc")
    for name in others:
        assert session.Ruled(1, Ruling(6, False)) in stage.news(name)
    stage.nodes[others[0]].look_again()
    stage.nodes[others[1]].look_again()
    tell(stage, others[0], 6, True, *"abc")
    for name in others:
        assert stage.news(name) == [session.Ruled(1, Ruling(6, True))]


def test_a_job_of_which_too_few_would_be_left_ends_when_all_have_saved() -> None:
    stage = running(Policy(2, 2), "a", "b")
    stage.nodes["b"].noticed(1, NOTICE)
    stage.settle()
    tell(stage, "b", 5, True, "a")
    assert stage.value(job.CLOSED) is None
    tell(stage, "b", 5, True, "b")
    closed = job.decode(job.Closed, stage.value(job.CLOSED) or b"")
    assert (closed.kind, closed.why) == (
        "preempted", "node b had notice to leave, and fewer than 2 would be left; all workers have saved",
    )  # fmt: skip


@pytest.mark.parametrize("vanishes", [False, True])
def test_p17_it_is_charged_to_no_budget_of_others(vanishes: bool) -> None:
    """P17: whether the node leaves as it should or is switched off before it can."""
    stage = Stage(THREE, RestartPolicy(0, max_membership_changes=0, max_departures=0, max_node_losses=0))
    stage.join("a", "b")
    stage.pass_time(1.0)
    stage.nodes["b"].noticed(1, NOTICE)
    tell(stage, "b", NO_STEP, False, "b")
    if vanishes:
        stage.lose("b")
        stage.pass_time(THREE.fence_s)
    else:
        stage.nodes["b"].departing("it left")
        stage.nodes["b"].leave()
    stage.settle()
    stage.nodes["a"].ready(stage.now, 1000)
    stage.pass_time(2.0)
    generation = stage.generation()
    assert (generation.number, generation.after, generation.purse) == (2, "preemption", Purse(preemptions=1))
    assert generation.why == "node 1 (b, ranks 2-3) left after notice; preemption 1"


def test_the_next_generation_knows_nothing_of_it() -> None:
    stage = running(THREE, "a", "b")
    stage.nodes["b"].noticed(1, NOTICE)
    stage.settle()
    tell(stage, "b", 5, True, "a", "b")
    stage.nodes["b"].departing("it left")
    stage.settle()
    stage.nodes["b"].leave()
    stage.nodes["a"].ready(stage.now, 1000)
    stage.pass_time(2.0)
    assert stage.generation().number == 2
    assert stage.value(job.notice_key(1)) is None
    assert stage.value(job.ruling_key(1)) is None
    assert stage.nodes["a"].board.notice() is None
