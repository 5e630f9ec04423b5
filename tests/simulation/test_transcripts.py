"""What the simulator once found, written down step by step so that it stays found, whatever a seed means in years to come."""

from __future__ import annotations

import pytest
from tests.simulation.script import Stage

from rallypoint.coordination.model import Delete, Event, Get, Item, Put, Transaction
from rallypoint.protocol import job_records as job
from rallypoint.protocol.generation import Policy
from rallypoint.protocol.participant import Former
from rallypoint.protocol.restarts import Purse, RestartPolicy
from rallypoint.protocol.session import Regroup

TWO = Policy(2, 2)
TWO_TO_FOUR = Policy(2, 4, last_call_s=0.0, scale_up_window_s=0.3, ready_timeout_s=10.0)


def test_a_seat_is_looked_for_again_if_the_next_generation_comes_meanwhile() -> None:
    """A node asked for its seat in one generation while the next was posted, took that as looked at, and never sat down."""
    stage = Stage(Policy(1, 2, last_call_s=0.0))
    stage.join("a")
    stage.settle()
    stage.fail("a")
    stage.join("b")
    stage.mute.add("b")
    stage.settle()
    stage.ready("a")
    for _ in range(4):  # b agrees, reads, watches, says that it is ready
        stage.ask("b")
    request, answer = stage.serve("b")
    assert isinstance(request, Transaction)
    assert request.then == (Get(job.seat_key(1, stage.generation().attempt, "b")),)
    stage.settle()
    assert stage.generation().number == 2
    stage.tell("b")
    stage.nodes["b"].replied(request, answer, stage.now)
    stage.mute.clear()
    stage.settle()
    assert stage.seats() == {"a": 0, "b": 1}


def test_a_generation_is_not_formed_twice_when_the_answer_is_lost() -> None:
    """The leader saw its own generation, did not get the answer, and wrote it again; that deleted what had been said about it."""
    stage = Stage(TWO)
    stage.join("a", "b")
    stage.deaf.add("a")
    stage.mute.add("a")
    while (request := stage.nodes["a"].next_request(stage.now)) is not None:
        stage.ask("a", request)
    stage.settle()
    stage.tell("a")
    while stage.value(job.GENERATION) is None:
        request, answer = stage.serve("a")
        if stage.value(job.GENERATION) is None:
            stage.nodes["a"].replied(request, answer, stage.now)
    revision = stage.store.read(job.GENERATION).items[0].mod_revision
    stage.deaf.clear()
    stage.mute.clear()  # the answer never comes; the change does
    stage.settle()
    assert stage.store.read(job.GENERATION).items[0].mod_revision == revision
    assert stage.seats() == {"a": 0, "b": 1}


def test_what_the_leader_writes_is_written_again_if_it_was_lost() -> None:
    """The last node was done, the request that said so to all was lost, and the leader waited for something to happen."""
    stage = Stage(TWO)
    stage.join("a", "b")
    stage.settle()
    stage.mute.add("a")
    for name in ("a", "b"):
        stage.nodes[name].done()
    stage.settle()
    stage.ask("a")
    stage.tell("a")
    lost = stage.nodes["a"].next_request(stage.now)
    assert isinstance(lost, Transaction)
    assert stage.value(job.CLOSED) is None
    stage.mute.clear()
    stage.settle()
    assert b'"finished"' in (stage.value(job.CLOSED) or b"")


def test_a_failure_is_told_even_if_the_node_is_ready_again_before_it_can_be() -> None:
    """P28: workers failed while the store could not be reached, and were gone before it could; nobody ever learned it."""
    stage = Stage(TWO)
    stage.join("a", "b")
    stage.settle()
    stage.fail("b")
    stage.ready("b")
    assert stage.kinds("a") == ["Seated"]
    stage.settle()
    assert stage.kinds("a") == ["Regroup"]
    stage.ready("a")
    stage.settle()
    assert stage.generation().number == 2
    assert stage.generation().purse.failures == 1


def test_the_next_leader_knows_too_who_was_expelled() -> None:
    """It found nobody of that name, and would have waited for the rest of a lease only, which was long over."""
    stage = Stage(TWO_TO_FOUR)
    stage.join("a", "b", "c", "d")
    stage.pass_time(1.0)
    stage.fail("b")
    stage.settle()
    stage.ready("a", "b", "d")
    stage.pass_time(TWO_TO_FOUR.ready_timeout_s)
    assert stage.value(job.expelled_key("c")) is not None
    stage.lose("a", "vouched")
    stage.mute.add("c")
    stage.pass_time(TWO_TO_FOUR.fence_s)
    assert stage.generation().number == 1
    stage.pass_time(1.0)
    assert (stage.generation().number, stage.generation().nodes) == (2, 2)


def test_nobody_joins_whom_no_budget_would_pay_for() -> None:
    """A joiner was let in, which took one membership change more than there were, and ended the job."""
    stage = Stage(TWO_TO_FOUR, RestartPolicy(3, max_membership_changes=0))
    stage.join("a", "b")
    stage.pass_time(1.0)
    stage.join("c")
    stage.pass_time(5.0)
    assert stage.value(job.signal_key(1)) is None
    assert stage.value(job.CLOSED) is None
    assert "no membership changes are allowed" in stage.nodes["a"].leader.wait.why


def test_who_waited_comes_in_with_a_restart_that_was_asked_for() -> None:
    """No budget pays for it; it was asked to pay for the joiner, had nothing, and ended the job."""
    stage = Stage(TWO_TO_FOUR, RestartPolicy(3, max_joins=0))
    stage.join("a", "b")
    stage.pass_time(1.0)
    stage.join("c")
    stage.pass_time(5.0)
    assert "no joins are allowed (max_joins)" in stage.nodes["a"].leader.wait.why
    stage.put(job.signal_key(1), job.encode(job.Signal("asked", "a restart was asked for by me", "me")))
    for name in ("a", "b"):
        stage.nodes[name].ready(stage.now, 1000)
    stage.pass_time(2.0)
    generation = stage.generation()
    assert (generation.number, generation.nodes, generation.purse) == (2, 3, Purse())
    assert generation.why == "a restart was asked for by me"


def test_a_joiner_is_let_in_when_a_healthy_time_has_given_the_budget_back() -> None:
    """Nobody had looked again, as nothing happened at that moment."""
    stage = Stage(TWO_TO_FOUR, RestartPolicy(3, max_joins=1, healthy_after_s=60.0))
    stage.join("a", "b")
    stage.pass_time(1.0)
    stage.join("c")
    stage.pass_time(1.0)
    for name in ("a", "b"):
        stage.nodes[name].ready(stage.now, 1000)
    stage.pass_time(1.0)
    assert stage.generation().purse == Purse(joins=1)
    stage.join("d")
    stage.pass_time(50.0)
    assert stage.value(job.signal_key(2)) is None
    stage.pass_time(15.0)
    assert job.decode(job.Signal, stage.value(job.signal_key(2)) or b"").kind == "join"


def test_who_leaves_when_it_is_done_stops_nobody() -> None:
    """P03: a member that was done got SIGTERM, said that it departs, and everybody else was stopped for it."""
    stage = Stage(TWO)
    stage.join("a", "b")
    stage.settle()
    stage.nodes["b"].done()
    stage.settle()
    stage.nodes["b"].departing("SIGTERM")
    stage.settle()
    stage.nodes["b"].leave()
    stage.settle()
    assert stage.kinds("a") == ["Seated"]
    stage.nodes["a"].done()
    stage.settle()
    assert stage.kinds("a") == ["Ended"]
    assert b'"finished"' in (stage.value(job.CLOSED) or b"")


@pytest.mark.parametrize("cause", ["expired", "vouched"])
def test_a_lost_node_is_waited_for_until_it_has_surely_stopped(cause: str) -> None:
    """One for which its warden has vouched has stopped."""
    stage = Stage(TWO_TO_FOUR.replace(after_expiry_s=2.0))
    stage.join("a", "b", "c")
    stage.pass_time(1.0)
    stage.lose("c", cause)
    stage.settle()
    stage.ready("a", "b")
    stage.settle()
    assert stage.generation().number == (1 if cause == "expired" else 2)
    stage.pass_time(2.5)
    assert stage.generation().number == 2


def test_an_earlier_leaders_end_is_old_news() -> None:
    """The answer that made us leader overtook the change that told of our predecessor's end; that ended our term at once."""
    stage = Stage(TWO)
    stage.join("a", "b")
    stage.settle()
    leader = stage.nodes["a"].leader
    assert leader is not None
    stage.nodes["a"].see(Event(leader.term - 1, job.LEADER, None, "expired"), stage.now)
    assert stage.nodes["a"].leader is leader


def test_a_leader_ignores_what_is_older_than_what_it_read() -> None:
    """A node that had gone came back to life in the roster, by a change that was still on its way from an earlier watch."""
    stage = Stage(TWO)
    stage.join("a", "b")
    stage.settle()
    leader = stage.nodes["a"].leader
    assert leader is not None
    ghost = Item(job.node_key("ghost"), job.encode(stage.nodes["b"].record), 2, 2)
    leader.see(Event(2, ghost.key, ghost, "put"), stage.now)
    assert "ghost" not in leader.roster.nodes


def test_a_leader_that_has_nothing_to_do_sleeps() -> None:
    """It wanted to be woken at once, and again, when nothing about the waiting nodes had changed, and after the job's end."""
    stage = Stage(TWO)
    stage.join("a")
    for _ in range(5):
        stage.pass_time(10.0)
        wake_at = stage.nodes["a"].wake_at()
        assert wake_at is not None
        assert wake_at > stage.now
    stage.join("b")
    stage.settle()
    for name in ("a", "b"):
        stage.nodes[name].done()
    stage.settle()
    assert stage.kinds("a") == ["Seated", "Ended"]
    assert stage.nodes["a"].wake_at() is None


def test_a_second_attempt_in_the_same_term_begins_with_no_seats() -> None:
    """Whoever has to read everything again, because the store's memory is short, may draw up other seats than before."""
    stage = Stage(Policy(2, 3, last_call_s=0.0))
    stage.join("a", "b", "c", is_ready=False)
    stage.settle()
    stage.mute.add("a")
    stage.ready("a", "b", "c")
    stage.settle()
    stage.tell("a")
    while not stage.store.read("seats/").items:
        stage.ask("a")
    assert len(stage.store.read("seats/").items) == 2
    stage.nodes["a"].look_again()
    stage.lose("b", "deleted")
    stage.mute = {"b"}
    stage.settle()
    generation = stage.generation()
    assert len(stage.store.read(job.seats_of_attempt(1, generation.attempt)).items) == generation.nodes == 2
    assert stage.seats() == {"a": 0, "c": 1}


def test_operations_of_one_step_never_touch_a_key_twice() -> None:
    """The store refuses a change that puts a key which it deletes; forming clears old keys in the step that makes it count."""
    stage = Stage(TWO)
    stage.join("a", "b")
    seen = []
    for name in ("a", "b") * 40:
        if (request := stage.nodes[name].next_request(stage.now)) is not None:
            seen.append(stage.ask(name, request))
        for other in ("a", "b"):
            stage.tell(other)
    last = [one for one in seen if isinstance(one, Transaction) and any(op.key == job.GENERATION for op in one.then)]
    assert len(last) == 1
    puts = {op.key for op in last[0].then if isinstance(op, Put)}
    assert not any(key.startswith(op.key) for op in last[0].then if isinstance(op, Delete) for key in puts)


@pytest.mark.parametrize("goes_on", [False, True])
def test_who_was_done_and_fenced_learns_that_its_generation_is_over(goes_on: bool) -> None:
    """It stayed for the workers of the others, whose store it had, and for ever: in its new session it had no seat to lose."""
    stage = Stage(Policy(1, 4, last_call_s=0.0))
    stage.join("a", "b", "c")
    stage.pass_time(1.0)
    stage.nodes["b"].done()
    stage.settle()
    stage.lose("b")
    stage.join("b#2", is_ready=False, former=Former("b", 1))
    stage.pass_time(1.0)
    assert stage.kinds("b#2") == []
    stage.fail("c")
    stage.settle()
    if goes_on:
        stage.ready("a", "c")
        stage.pass_time(10.0)
        assert stage.generation().number == 2
    assert stage.nodes["b#2"].take_news() == [Regroup("rank 0 on c failed: ValueError: bad luck", 1)]
