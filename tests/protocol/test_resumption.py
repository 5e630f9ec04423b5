"""A store that was started anew: what nodes remember takes the place of what it has lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulation.script import Stage

from rallypoint.protocol import job_records as job
from rallypoint.protocol.generation import Form, Node, Past, Policy, Seated, Wait, decide
from rallypoint.protocol.job_records import NO_SEAT, Memory, NodeRecord
from rallypoint.protocol.restarts import Purse, RestartPolicy
from rallypoint.protocol.resumption import past_of, spent

POLICY = Policy(1, 4, last_call_s=10.0, join_timeout_s=60.0, lease_s=3.0)
OVER_S = 3.0 * 1.01 + 0.3  # after the store was read first, no licence of the last one is left


def memory(number: int = 7, rank: int = 0, nodes: int = 3, purse: Purse | None = None, strikes: tuple[str, ...] = ()) -> Memory:
    return Memory(number, nodes, f"node{rank}", rank, purse or Purse(), strikes)


def here(*names: str, since: float = 100.0) -> dict[str, Node]:
    return {
        name: Node(name, NodeRecord(name, "10.0.0.1", 1, "default", 2, 0), at, since) for at, name in enumerate(names, start=1)
    }


# --- what is remembered ----------------------------------------------------------------------------------------------------


def test_the_newest_memory_is_the_past() -> None:
    told = {"a": memory(6, 0), "b": memory(7, 1), "c": memory(7, 2), "d": memory(7, NO_SEAT)}
    members = {"b": Seated("node1", 1), "c": Seated("node2", 2)}
    assert past_of(told, 0, 100.0, POLICY) == Past(7, 3, members, 100.0 + OVER_S)


@pytest.mark.parametrize("known", [7, 8])
def test_what_the_store_knows_itself_is_no_past(known: int) -> None:
    assert past_of({"a": memory(7)}, known, 100.0, POLICY) is None


def test_nobody_who_remembers_is_no_past() -> None:
    assert past_of({}, 0, 100.0, POLICY) is None


def test_what_is_spent_is_what_any_account_says() -> None:
    told = {"a": memory(6, purse=Purse(9)), "b": memory(7, purse=Purse(2, losses=1)), "c": memory(7, purse=Purse(2, losses=1))}
    assert spent(told, 0, Purse()) == Purse(2, 1)
    assert spent(told, 3, Purse(0, joins=4)) == Purse(2, 1, joins=4)
    assert spent(told, 7, Purse(1)) == Purse(1)


purses = st.builds(Purse, *[st.integers(0, 9)] * 4, st.lists(st.floats(0, 100), max_size=3).map(tuple))


@given(purses, purses)
def test_no_account_is_forgotten(one: Purse, other: Purse) -> None:
    most = one.most(other)
    for counted in ("failures", "losses", "departures", "joins"):
        assert getattr(most, counted) == max(getattr(one, counted), getattr(other, counted))
    assert len(most.recent_ages_s) == max(len(one.recent_ages_s), len(other.recent_ages_s))
    assert one.most(one) == one


# --- what is decided -------------------------------------------------------------------------------------------------------


PAST = Past(7, 3, {"b": Seated("node1", 1), "c": Seated("node2", 2)}, 103.33)


def test_nothing_is_formed_while_workers_of_the_last_store_may_run() -> None:
    """Not even with all nodes that there may be; who has not come back may be cut off."""
    waits = decide(here("host", "b", "c", "d"), None, POLICY, 103.3, PAST)
    assert isinstance(waits, Wait)
    assert waits.wake_at == 103.33
    assert waits.why == "workers of generation 7 may run on nodes that have not come back, for another 0.0 s"


def test_as_many_as_before_are_waited_for_and_sit_where_they_sat() -> None:
    formed = decide(here("host", "c", "b"), None, POLICY, 103.4, PAST)
    assert isinstance(formed, Form)
    assert [node.id for node in formed.order] == ["host", "b", "c"]


def test_if_fewer_come_back_the_last_call_counts_from_the_latest_arrival() -> None:
    nodes = {**here("host"), **here("b", since=102.0)}
    waits = decide(nodes, None, POLICY, 111.9, PAST)
    assert isinstance(waits, Wait)
    assert waits.wake_at == 112.0
    assert isinstance(decide(nodes, None, POLICY, 112.0, PAST), Form)


def test_fewer_than_the_minimum_wait_for_others() -> None:
    waits = decide(here("host"), None, POLICY.replace(min_nodes=2), 150.0, PAST)
    assert isinstance(waits, Wait)
    assert waits.why == "1 of 2 nodes"


@given(st.integers(0, 6), st.integers(1, 8), st.floats(0, 20), st.integers(1, 3), st.integers(3, 5))
def test_whenever_it_is_formed_the_past_is_over(count: int, nodes: int, after_s: float, least: int, most: int) -> None:
    policy = POLICY.replace(min_nodes=least, max_nodes=most)
    past = PAST.replace(nodes=nodes)
    decision = decide(here(*(f"n{at}" for at in range(count))), None, policy, 100.0 + after_s, past)
    if isinstance(decision, Form):
        assert 100.0 + after_s >= past.over_at
        assert least <= len(decision.order) <= most
    else:
        assert isinstance(decision, Wait)
        assert decision.wake_at is None or decision.wake_at > 100.0 + after_s


# --- how it goes on --------------------------------------------------------------------------------------------------------


def lost(names: str = "abc", policy: Policy = POLICY) -> dict[str, Memory]:
    """What is remembered of a job with these nodes, of which one has failed once; the first was the host, and is dead."""
    stage = Stage(policy.replace(last_call_s=0.0), RestartPolicy(3, window_s=100.0))
    stage.join(*names)
    stage.pass_time(1.0)
    stage.fail("c")
    stage.settle()
    stage.ready(*names)
    stage.pass_time(1.0)
    assert stage.generation().number == 2
    told = {name: node.memory(stage.now + 5.0) for name, node in stage.nodes.items() if name != "a"}
    return {name: one for name, one in told.items() if one is not None}


def anew(policy: Policy = POLICY) -> Stage:
    return Stage(policy, RestartPolicy(3, window_s=100.0))


def test_the_job_goes_on_where_it_was() -> None:
    """P04: numbers, budgets and ranks; the loss of the host is one membership change, and costs no restart."""
    stage, told = anew(), lost()
    stage.join("a#2")
    stage.settle()
    for name in "cb":
        stage.join(f"{name}#2", memory=told[name])
    stage.pass_time(OVER_S - 0.1)
    assert stage.value(job.GENERATION) is None
    stage.pass_time(0.2)
    generation = stage.generation()
    assert (generation.number, generation.nodes) == (3, 3)
    assert (generation.purse.failures, generation.purse.losses) == (1, 1)
    assert stage.seats() == {"a#2": 0, "b#2": 1, "c#2": 2}
    assert generation.why == "lost node (the host of the coordination store); membership change 1"
    assert not stage.store.read(job.MEMORIES).items


def test_what_was_spent_has_grown_older_meanwhile() -> None:
    stage, told = anew(), lost()
    (age_s,) = told["b"].purse.recent_ages_s
    assert age_s >= 5.0
    stage.join("a#2", "b#2", "c#2", memory=told["b"])
    stage.pass_time(OVER_S)
    assert stage.generation().purse.recent_ages_s == (age_s,)


def test_who_remembers_too_late_for_the_first_generation_still_has_its_say() -> None:
    """All that is not known in time is no reason to use a number, or to spend a restart, twice."""
    stage, told = anew(POLICY.replace(last_call_s=0.0)), lost()
    stage.join("a#2")
    stage.pass_time(1.0)
    assert stage.generation().number == 1
    stage.join("b#2", memory=told["b"])
    stage.pass_time(1.0)
    stage.ready("a#2")
    stage.pass_time(OVER_S)
    assert stage.generation().number == 3
    assert stage.generation().purse.failures == 1
    assert not stage.store.read("seats/1.").items


def test_who_knows_no_more_than_the_store_says_nothing() -> None:
    stage, told = anew(), lost()
    stage.join("a#2", "b#2", memory=told["b"])
    stage.pass_time(15.0)
    assert stage.generation().number == 3
    stage.join("c#2", memory=told["c"])
    stage.settle()
    assert not stage.store.read(job.MEMORIES).items


def test_a_leader_that_has_missed_a_memory_forms_nothing() -> None:
    stage, told = anew(Policy(2, 2)), lost()
    stage.join("a#2", "x")
    for name in ("x", "a#2") * 20:  # all but what makes the generation count
        request = stage.nodes[name].next_request(stage.now)
        if request is not None and any(getattr(one, "key", "") == job.GENERATION for one in getattr(request, "then", ())):
            break
        if request is not None:
            stage.ask(name, request)
        for other in ("a#2", "x"):
            stage.tell(other)
    stage.deaf.add(name)
    stage.join("b#2", memory=told["b"])
    stage.mute.add(name)
    stage.settle()
    stage.mute.clear()
    stage.ask(name, request)
    assert stage.value(job.GENERATION) is None
    stage.deaf.clear()
    stage.pass_time(OVER_S)
    assert stage.generation().number == 3


def test_a_budget_of_membership_changes_holds_for_hosts_too() -> None:
    stage = Stage(POLICY, RestartPolicy(3, max_membership_changes=0))
    told = lost()
    stage.join("a#2", "b#2", "c#2", memory=told["b"])
    stage.pass_time(OVER_S)
    closed = job.decode(job.Closed, stage.value(job.CLOSED) or b"")
    assert closed.why == "lost node (the host of the coordination store); no membership changes are allowed"


def test_a_memory_that_cannot_be_read_is_none() -> None:
    """It comes from the network like all else."""
    stage = anew(POLICY.replace(last_call_s=0.0))
    stage.put(job.memory_key("evil"), b'{"number": "seven"}')
    stage.join("a#2")
    stage.pass_time(1.0)
    assert stage.generation().number == 1
