"""The leader's decision: what is due, given who is here and what is known of the current generation."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.protocol.generation import (
    DRIFT,
    MARGIN_S,
    STOP_AHEAD_S,
    Conclude,
    Current,
    Decision,
    Expel,
    Form,
    GiveUp,
    Gone,
    Interrupt,
    Node,
    Policy,
    Seated,
    Wait,
    decide,
    usable,
)
from rallypoint.protocol.job_records import NOT_READY, NodeRecord, Signal

POLICY = Policy(2, 4, last_call_s=10.0, join_timeout_s=60.0, scale_up_window_s=0.3, ready_timeout_s=35.0)
STOP = Signal("failure", "rank 3 failed", "a")
FINISHED = Signal("finished", "all are done", "a")


def here(*ids: str, ready_after: int = 0, since: float = 0.0, held_until: float = 0.0, hint: int = -1) -> dict[str, Node]:
    """Nodes that are here, by their ids, in the order of their arrival."""
    return {
        one: Node(one, NodeRecord(one, "10.0.0.1", 1, "default", 2, ready_after, hint, hint >= 0), ord(one[0]), since, held_until)
        for one in ids
    }


def running(*members: str, signal: Signal | None = None, signal_at: float = 0.0, done: str = "", **gone: Gone) -> Current:
    return Current(1, {one: Seated(one, at) for at, one in enumerate(members)}, signal, signal_at, frozenset(done), gone)


def formed(decision: Decision) -> list[str]:
    assert isinstance(decision, Form), decision
    return [one.id for one in decision.order]


def wait(decision: Decision) -> Wait:
    assert isinstance(decision, Wait), decision
    return decision


@pytest.mark.parametrize(
    ("nodes", "policy", "expected"),
    [
        (1, POLICY, 0), (2, POLICY, 2), (4, POLICY, 4), (9, POLICY, 4),
        (5, Policy(2, 8, node_unit=2), 4), (1, Policy(1, 8, node_unit=2), 0), (3, Policy(3, 4, node_unit=2), 0),
        (0, Policy(1, 1), 0),
    ],
)  # fmt: skip
def test_how_many_nodes_a_generation_can_have(nodes: int, policy: Policy, expected: int) -> None:
    """P25: a multiple of the unit, P26: and at most the most."""
    assert usable(nodes, policy) == expected


class TestFirst:
    def test_too_few_wait_for_an_event_and_say_so(self) -> None:
        """P19: how many are here, of how many."""
        decision = wait(decide(here("a"), None, POLICY, 0.0))
        assert decision == Wait("1 of 2 nodes", None, is_gathering=True)

    def test_all_that_can_be_begin_at_once(self) -> None:
        assert formed(decide(here("d", "c", "b", "a"), None, POLICY, 0.0)) == ["a", "b", "c", "d"]

    def test_the_last_call_counts_from_the_latest_arrival(self) -> None:
        nodes = {**here("a"), **here("b", since=5.0)}
        assert wait(decide(nodes, None, POLICY, 14.9)).wake_at == 15.0
        assert formed(decide(nodes, None, POLICY, 15.0)) == ["a", "b"]

    def test_the_last_call_ends_with_the_join_timeout(self) -> None:
        nodes = {**here("a"), **here("b", since=58.0)}
        assert wait(decide(nodes, None, POLICY, 59.0)).wake_at == 60.0
        assert formed(decide(nodes, None, POLICY, 60.0)) == ["a", "b"]

    def test_who_is_not_ready_does_not_count(self) -> None:
        assert wait(decide({**here("a"), **here("b", ready_after=NOT_READY)}, None, POLICY, 99.0)).is_gathering

    def test_beyond_the_most_the_first_to_come_are_taken(self) -> None:
        """P26."""
        assert formed(decide(here("e", "d", "c", "b", "a"), None, POLICY, 0.0)) == ["a", "b", "c", "d"]

    def test_who_dies_too_often_is_waited_for_until_its_release(self) -> None:
        nodes = {**here("a"), **here("b", held_until=7.0)}
        assert wait(decide(nodes, None, POLICY, 1.0)).wake_at == 7.0
        assert formed(decide(nodes, None, POLICY, 17.0)) == ["a", "b"]

    def test_a_rank_has_one_holder(self) -> None:
        nodes = {**here("a", hint=0), **here("b", hint=0), **here("c", hint=1)}
        assert formed(decide(nodes, None, POLICY, 99.0)) == ["a", "c"]

    def test_the_unit_is_named_when_it_is_what_is_missing(self) -> None:
        assert "in multiples of 2" in wait(decide(here("a", "b", "c"), None, Policy(3, 4, node_unit=2), 99.0)).why


class TestRunning:
    def test_nothing_happens_while_nothing_does(self) -> None:
        assert decide(here("a", "b", ready_after=0), running("a", "b"), POLICY, 9.0) == Wait("generation 1 runs")

    @pytest.mark.parametrize(
        ("cause", "expected"),
        [
            ("expired", Interrupt("loss", "node b was lost: not heard of in time")),
            ("vouched", Interrupt("loss", "node b was lost: its agent was killed")),
            ("deleted", Interrupt("departure", "node b left")),
        ],
    )
    def test_a_node_that_is_gone_ends_it(self, cause: str, expected: Interrupt) -> None:
        """P02, P03: a dead node is acted on, and so is one that leaves."""
        assert decide(here("a"), running("a", "b", b=Gone("b", 1.0, cause)), POLICY, 9.0) == expected

    def test_m12_a_silent_node_may_come_back_until_shortly_before_its_fence(self) -> None:
        """M12: where a fence is longer than a lease the others could not go on sooner, so nobody is stopped sooner."""
        policy = POLICY.replace(after_expiry_s=27.0)
        current = running("a", "b", b=Gone("b", 10.0, "expired"))
        assert wait(decide(here("a"), current, policy, 11.0)).wake_at == 37.0 - STOP_AHEAD_S
        assert isinstance(decide(here("a"), current, policy, 37.0 - STOP_AHEAD_S), Interrupt)
        assert isinstance(decide(here("a"), running("a", "b", b=Gone("b", 10.0, "vouched")), policy, 11.0), Interrupt)

    def test_a_loss_beside_a_departure_is_a_loss(self) -> None:
        gone = {"b": Gone("b", 1.0, "deleted"), "c": Gone("c", 1.0, "vouched")}
        decision = decide(here("a"), running("a", "b", "c", **gone), POLICY, 9.0)
        assert isinstance(decision, Interrupt)
        assert decision.kind == "loss"

    def test_the_loss_of_one_that_is_done_is_no_loss(self) -> None:
        current = running("a", "b", done="b", b=Gone("b", 1.0, "expired"))
        assert decide(here("a"), current, POLICY, 9.0) == Wait("1 of 2 nodes are done")

    def test_when_all_are_done_it_is_over(self) -> None:
        assert decide(here("a"), running("a", "b", done="ab"), POLICY, 9.0) == Conclude()

    def test_joiners_are_gathered_for_a_moment(self) -> None:
        """P25: one joiner does not restart everyone at once."""
        nodes = {**here("a", "b"), **here("c", since=5.0)}
        assert wait(decide(nodes, running("a", "b"), POLICY, 5.1)).wake_at == 5.3
        assert decide(nodes, running("a", "b"), POLICY, 5.3) == Interrupt("join", "c joins; from 2 to 3 nodes")

    def test_a_stream_of_joiners_puts_it_off_only_so_long(self) -> None:
        policy = POLICY.replace(max_nodes=9)
        nodes = {**here("a", "b"), **here("c", since=5.0), **here("d", since=7.9)}
        assert wait(decide(nodes, running("a", "b"), policy, 7.95)).wake_at == pytest.approx(8.0)
        assert isinstance(decide(nodes, running("a", "b"), policy, 8.0), Interrupt)

    def test_nobody_is_waited_for_when_the_most_is_reached(self) -> None:
        """P45: the larger world begins at once."""
        nodes = {**here("a", "b"), **here("c", "d", since=5.0)}
        assert decide(nodes, running("a", "b"), POLICY, 5.0) == Interrupt("join", "c, d joins; from 2 to 4 nodes")

    def test_a_full_world_has_spares(self) -> None:
        """P26."""
        nodes = here("a", "b", "c", "d", "e")
        assert decide(nodes, running("a", "b", "c", "d"), POLICY, 99.0).why == "generation 1 runs with all 4 nodes; 1 are spare"

    def test_a_joiner_that_does_not_make_a_unit_waits(self) -> None:
        policy = POLICY.replace(node_unit=2)
        assert decide(here("a", "b", "c"), running("a", "b"), policy, 99.0) == Wait("generation 1 runs")

    def test_nobody_joins_once_a_member_is_done(self) -> None:
        assert decide(here("a", "b", "c"), running("a", "b", done="a"), POLICY, 99.0) == Wait("1 of 2 nodes are done")

    def test_a_joiner_that_is_held_back_is_considered_when_it_is_released(self) -> None:
        nodes = {**here("a", "b"), **here("c", held_until=50.0)}
        assert decide(nodes, running("a", "b"), POLICY, 9.0) == Wait("generation 1 runs", 50.0)
        assert isinstance(decide(nodes, running("a", "b"), POLICY, 50.0), Interrupt)


class TestRegroup:
    def test_live_members_are_waited_for(self) -> None:
        nodes = {**here("a", ready_after=1), **here("b", ready_after=0)}
        decision = wait(decide(nodes, running("a", "b", signal=STOP, signal_at=100.0), POLICY, 101.0))
        assert decision == Wait("1 nodes are stopping their workers: b", 135.0)

    def test_v1_who_is_not_ready_in_time_is_expelled_and_its_fence_waited_for(self) -> None:
        """V1: a live node that has not stopped is never replaced while its workers may run."""
        nodes = {**here("a", "c", ready_after=1), **here("b", ready_after=0)}
        decision = decide(nodes, running("a", "b", "c", signal=STOP, signal_at=100.0), POLICY, 135.0)
        assert isinstance(decision, Expel)
        assert [node.id for node in decision.nodes] == ["b"]
        assert decision.why == "its workers had not stopped 35 s after generation 1 was over"
        expelled = running("a", "b", "c", signal=STOP, signal_at=100.0, b=Gone("b", 135.1, "expelled"))
        ends_at = 135.1 + POLICY.fence_s * DRIFT + MARGIN_S
        assert wait(decide(here("a", "c", ready_after=1), expelled, POLICY, 135.2)).wake_at == pytest.approx(ends_at)
        assert formed(decide(here("a", "c", ready_after=1), expelled, POLICY, ends_at + 0.01)) == ["a", "c"]

    def test_a_sick_node_ends_a_job_only_if_too_few_are_left(self) -> None:
        """M4."""
        sick = Signal("sick", "c cannot run workers: too many open files", "c")
        current = running("a", "b", "c", signal=sick, c=Gone("c", 0.0, "deleted"))
        assert formed(decide(here("a", "b", ready_after=1), current, POLICY, 9.0)) == ["a", "b"]
        decision = decide(here("a", ready_after=1), current, POLICY, 9.0)
        assert decision == GiveUp("c cannot run workers: too many open files; 1 of 2 nodes are left, too few to go on")

    def test_who_is_shunned_is_left_out_as_long_as_the_others_are_enough(self) -> None:
        """M13."""
        shunned = {one: node.replace(shunned_until=50.0) for one, node in here("c", ready_after=1).items()}
        current = running("a", "b", "c", signal=STOP, signal_at=1.0)
        assert formed(decide({**here("a", "b", ready_after=1), **shunned}, current, POLICY, 9.0)) == ["a", "b"]
        assert formed(decide({**here("a", ready_after=1), **shunned}, current, POLICY, 9.0)) == ["a", "c"]
        runs = decide({**here("a", "b"), **shunned}, running("a", "b"), POLICY, 9.0)
        assert runs == Wait("generation 1 runs; left out for now, because their workers keep failing: c", 50.0, is_gathering=True)
        assert isinstance(decide({**here("a", "b"), **shunned}, running("a", "b"), POLICY, 50.5), Interrupt)

    def test_who_is_unfit_gets_no_seat_however_few_the_others_are(self) -> None:
        """P29: not at first, not after a failure, and not as a joiner; a spare does."""
        unfit = {
            one: node.replace(record=node.record.replace(unfit="gpu: lost")) for one, node in here("a", ready_after=1).items()
        }
        assert formed(decide({**unfit, **here("b", "c", "d", "e")}, None, POLICY, 9.0)) == ["b", "c", "d", "e"]
        assert wait(decide({**unfit, **here("b")}, None, POLICY, 99.0)).why == "1 of 2 nodes"
        stopped = running("a", "b", signal=STOP, signal_at=1.0)
        assert formed(decide({**unfit, **here("b", ready_after=1), **here("s")}, stopped, POLICY, 9.0)) == ["s", "b"]
        assert wait(decide({**unfit, **here("b", ready_after=1)}, stopped, POLICY, 9.0)).why == "1 of 2 nodes"
        assert wait(decide({**unfit, **here("b", "c")}, running("b", "c"), POLICY, 9.0)).is_gathering
        full = POLICY.replace(max_nodes=2)
        said = wait(decide({**unfit, **here("b", "c", "s")}, running("b", "c"), full, 9.0))
        assert (said.why, said.is_gathering) == ("generation 1 runs with all 2 nodes; 1 are spare", True)

    @pytest.mark.parametrize(
        ("cause", "wait_s"),
        [("expired", 27.0 * DRIFT + MARGIN_S), ("expelled", 30.0 * DRIFT + MARGIN_S), ("vouched", 0.0), ("deleted", 0.0)],
    )
    def test_the_lost_are_waited_for_as_long_as_they_may_run(self, cause: str, wait_s: float) -> None:
        policy = POLICY.replace(after_expiry_s=27.0)
        current = running("a", "b", "c", signal=STOP, signal_at=100.0, c=Gone("c", 101.0, cause))
        nodes = here("a", "b", ready_after=1)
        if wait_s:
            assert wait(decide(nodes, current, policy, 101.0 + 0.9 * wait_s)).wake_at == pytest.approx(101.0 + wait_s)
        assert formed(decide(nodes, current, policy, 101.0 + 1.001 * wait_s)) == ["a", "b"]

    def test_one_that_is_back_under_another_number_is_waited_for_too(self) -> None:
        """The new process says nothing about the workers of the old one, which may be cut off on another machine."""
        current = running("a", "b", signal=STOP, b=Gone("b", 101.0, "expired"))
        assert isinstance(decide(here("a", "b2", ready_after=1), current, POLICY, 101.2), Wait)
        assert formed(decide(here("a", "b2", ready_after=1), current, POLICY, 101.4)) == ["a", "b2"]

    def test_joiners_and_spares_take_the_places_of_the_lost(self) -> None:
        """P26: a spare takes over on a loss. P27: the others keep their ranks."""
        current = running("a", "b", "c", signal=STOP, b=Gone("b", 0.0, "deleted"))
        nodes = {**here("a", "c", ready_after=1), **here("spare")}
        assert formed(decide(nodes, current, POLICY, 9.0)) == ["a", "spare", "c"]

    def test_too_few_wait(self) -> None:
        current = running("a", "b", signal=STOP, b=Gone("b", 0.0, "deleted"))
        assert wait(decide(here("a", ready_after=1), current, POLICY, 9.0)).why == "1 of 2 nodes"

    def test_after_the_end_there_is_nothing_to_decide(self) -> None:
        assert decide(here("a", "b", ready_after=1), running("a", "b", signal=FINISHED), POLICY, 9.0) == Wait(
            "generation 1 has finished"
        )


# Whatever the leader knows.


def records(name: str) -> st.SearchStrategy[NodeRecord]:
    about = st.tuples(st.sampled_from([NOT_READY, 0, 1]), st.integers(-1, 4), st.booleans())
    return about.map(lambda drawn: NodeRecord(name, "h", 1, "default", 1, *drawn))


@st.composite
def situations(draw: st.DrawFn) -> tuple[dict[str, Node], Current | None, Policy, float]:
    least = draw(st.integers(1, 5))
    policy = Policy(
        least,
        least + draw(st.integers(0, 4)),
        draw(st.sampled_from([1, 1, 2, 3])),
        last_call_s=draw(st.floats(0, 30)),
        after_expiry_s=draw(st.sampled_from([0.0, 27.0])),
    )
    now = draw(st.floats(0, 100))
    ids = [f"n{number}" for number in range(draw(st.integers(0, 9)))]
    members = ids[: draw(st.integers(0, len(ids)))]
    present = [one for one in ids if draw(st.booleans())]
    nodes = {
        one: Node(one, draw(records(one)), arrival, draw(st.floats(0, 100)), draw(st.sampled_from([0.0, 50.0])))
        for arrival, one in enumerate(present)
    }
    if not members:
        return nodes, None, policy, now
    causes = st.sampled_from(["expired", "expelled", "vouched", "deleted"])
    gone = {one: Gone(one, draw(st.floats(0, 100)), draw(causes)) for one in members if one not in present}
    done = frozenset(one for one in members if draw(st.integers(0, 3)) == 0)
    signal = draw(st.sampled_from([None, STOP, FINISHED]))
    current = Current(1, {one: Seated(one, at) for at, one in enumerate(members)}, signal, draw(st.floats(0, 100)), done, gone)
    return nodes, current, policy, now


@given(situations())
def test_whatever_is_formed_is_allowed(situation: tuple[dict[str, Node], Current | None, Policy, float]) -> None:
    """Between min and max, a multiple of the unit, of nodes that are here and ready, and only of them."""
    nodes, current, policy, now = situation
    decision = decide(nodes, current, policy, now)
    if not isinstance(decision, Form):
        return
    ids = [one.id for one in decision.order]
    assert len(set(ids)) == len(ids)
    assert policy.min_nodes <= len(ids) <= policy.max_nodes
    assert len(ids) % policy.node_unit == 0
    assert all(nodes[one].is_ready and nodes[one].held_until <= now for one in ids)
    explicit = [nodes[one].record.rank_hint for one in ids if nodes[one].record.hint_is_explicit]
    assert len(set(explicit)) == len(explicit)
    if current is not None:
        assert current.signal is not None
        assert current.signal.is_stop
        assert all(nodes[one].record.ready_after >= 1 for one in ids if one in current.members)


@given(situations())
def test_nothing_is_formed_while_anybody_may_run_workers(
    situation: tuple[dict[str, Node], Current | None, Policy, float],
) -> None:
    nodes, current, policy, now = situation
    if current is None or not isinstance(decide(nodes, current, policy, now), Form):
        return
    assert all(nodes[one].record.ready_after >= 1 for one in current.members if one in nodes)
    for gone in current.gone.values():
        fence_left_s = {"expired": policy.after_expiry_s, "expelled": policy.lease_s + policy.after_expiry_s}
        assert gone.cause not in fence_left_s or now >= gone.at + fence_left_s[gone.cause] + MARGIN_S


@given(situations())
def test_a_wait_ends_later_or_by_an_event(situation: tuple[dict[str, Node], Current | None, Policy, float]) -> None:
    """And at the time that it names the decision is another one, so that nobody is woken for nothing."""
    nodes, current, policy, now = situation
    decision = decide(nodes, current, policy, now)
    if isinstance(decision, Wait):
        assert decision.why
        if decision.wake_at is not None:
            assert math.isfinite(decision.wake_at)
            assert decision.wake_at > now
            assert decide(nodes, current, policy, decision.wake_at) != decision


@given(situations())
def test_only_a_running_generation_is_interrupted(situation: tuple[dict[str, Node], Current | None, Policy, float]) -> None:
    nodes, current, policy, now = situation
    decision = decide(nodes, current, policy, now)
    if isinstance(decision, Interrupt | Conclude):
        assert current is not None
        assert current.signal is None
    if isinstance(decision, Interrupt) and decision.kind == "join":
        assert current is not None
        assert not current.done
    if isinstance(decision, Conclude):
        assert current is not None
        assert current.done == current.members.keys()
