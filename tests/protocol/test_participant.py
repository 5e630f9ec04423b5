"""One node's part in a job, and a few of them together: small runs of the protocol, step by step, without network or chance."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulation.script import Stage

from rallypoint.coordination.model import Compare, Delete, Read, Transaction, Watch
from rallypoint.protocol import job_records as job
from rallypoint.protocol import session
from rallypoint.protocol.generation import DRIFT, MARGIN_S, Policy
from rallypoint.protocol.participant import Former
from rallypoint.protocol.restarts import Purse, RestartPolicy
from rallypoint.protocol.verdict import NodeReport, WorkerFailure

PAIR = Policy(2, 2)
OPEN = Policy(2, 4, last_call_s=0.0, scale_up_window_s=0.3, ready_timeout_s=10.0, join_timeout_s=60.0)


def formed(*names: str, policy: Policy = OPEN, restarts: RestartPolicy | None = None) -> Stage:
    """These nodes, in their first generation; the first of them leads."""
    stage = Stage(policy, restarts)
    stage.join(*names)
    stage.pass_time(1.0)
    for name in names:
        assert stage.kinds(name) == ["Seated"]
    return stage


def signal(stage: Stage, number: int) -> job.Signal | None:
    value = stage.value(job.signal_key(number))
    return None if value is None else job.decode(job.Signal, value)


def closed(stage: Stage) -> job.Closed | None:
    value = stage.value(job.CLOSED)
    return None if value is None else job.decode(job.Closed, value)


class TestJoining:
    def test_what_a_node_asks_until_it_has_its_seat(self) -> None:
        """P22: so many requests, however many nodes there are."""
        stage = Stage(PAIR)
        stage.join("a", "b")
        stage.mute.add("b")
        stage.settle()
        asked = [stage.ask("b") for _ in range(4)]
        assert isinstance(asked[0], Transaction)
        assert asked[0].compares == (Compare(job.SETTINGS, "create", 0),)
        assert asked[1] == Read(job.DOWN)
        assert isinstance(asked[2], Watch)
        assert isinstance(asked[3], Transaction)
        assert [operation.key for operation in asked[3].then] == [job.node_key("b")]
        stage.settle()
        stage.tell("b")
        stage.ask("b")
        assert stage.kinds("b") == ["Seated"]
        assert stage.nodes["b"].next_request(stage.now) is None

    def test_all_hold_the_same_world(self) -> None:
        """P46."""
        stage = Stage(Policy(3, 3))
        stage.join("n10", "n2", "n1")
        stage.settle()
        seated = {name: stage.news(name)[0] for name in ("n10", "n2", "n1")}
        assert {name: one.seat.group_rank for name, one in seated.items()} == {"n1": 0, "n2": 1, "n10": 2}
        assert len({one.generation for one in seated.values()}) == 1
        generation = stage.generation()
        assert (generation.master_addr, generation.nodes, generation.world_size) == ("n1.example", 3, 6)

    def test_settings_that_differ_are_refused(self) -> None:
        """P19: by name, with both values, before the node is seen by anybody."""
        stage = Stage(PAIR)
        stage.join("a", "b")
        stage.settle()
        stage.settings = {"protocol": 2}
        stage.join("c")
        stage.settle()
        assert stage.news("c") == [session.Refused("{'protocol': 2} is not {'protocol': 1}")]
        assert stage.value(job.node_key("c")) is None

    def test_a_second_holder_of_a_rank_is_refused_when_a_lease_has_passed(self) -> None:
        stage = Stage(PAIR)
        stage.join("a", rank_hint=0, hint_is_explicit=True)
        stage.join("b", rank_hint=0, hint_is_explicit=True)
        stage.pass_time(PAIR.lease_s - 0.1)
        assert stage.kinds("b") == []
        stage.pass_time(0.2)
        assert stage.news("b") == [session.Refused("rank 0 is held by a at a.example, which lives")]
        stage.join("c", rank_hint=1, hint_is_explicit=True)
        stage.nodes["b"].leave()
        stage.settle()
        assert stage.seats() == {"a": 0, "c": 1}

    def test_who_waits_in_vain_is_told_so(self) -> None:
        stage = Stage(OPEN)
        stage.join("a")
        stage.pass_time(59.0)
        assert stage.kinds("a") == []
        stage.pass_time(2.0)
        assert stage.news("a") == [session.TimedOut("waited 60 s for enough nodes in vain")]

    def test_those_who_wait_hear_who_is_missing(self) -> None:
        """P19: every 10 s one line."""
        stage = Stage(OPEN.replace(min_nodes=3))
        stage.join("a", rank_hint=0)
        stage.join("b", rank_hint=2)
        stage.pass_time(25.0)
        lines = [one.text for one in stage.nodes["b"].take_news() if isinstance(one, session.Progress)]
        assert len(lines) == 2
        assert lines[-1] == "2 of 3 nodes; here: a, b; missing: rank 1"

    def test_who_watches_hears_it_sooner_and_until_when(self) -> None:
        """P19: also of who comes meanwhile; on the node that leads, and on another."""
        stage = Stage(OPEN.replace(min_nodes=4))
        stage.join("a", "b", looks_every_s=1.0)
        gives_up_at = stage.now + stage.policy.join_timeout_s
        for comes, names in (((), "a, b"), (("c",), "a, b, c")):
            stage.join(*comes)
            stage.pass_time(3.5)
            for name in ("a", "b"):
                found = [one for one in stage.nodes[name].take_news() if isinstance(one, session.Progress)]
                assert len(found) >= 3
                assert found[-1] == session.Progress(f"{2 + len(comes)} of 4 nodes; here: {names}", gives_up_at)

    def test_what_was_said_before_a_generation_is_not_said_of_the_next(self) -> None:
        """While one of them is still stopping its workers nothing new is said; the others hear nothing old."""
        stage = Stage(OPEN.replace(min_nodes=2))
        stage.join("a", "b", looks_every_s=1.0)
        stage.settle()
        stage.fail("a")
        stage.settle()
        stage.nodes["b"].take_news()
        stage.ready("b")
        stage.pass_time(3.0)
        assert [one for one in stage.nodes["b"].take_news() if isinstance(one, session.Progress)] == []


class TestFailing:
    def test_one_failure_stops_everybody_and_pays_once(self) -> None:
        """P14, P28: also when all others fail for it."""
        stage = formed("a", "b", "c")
        stage.fail("c")
        stage.fail("a", "Connection reset by peer")
        stage.settle()
        for name in ("a", "b", "c"):
            assert stage.kinds(name) == ["Regroup"]
        stage.fail("b", "Connection reset by peer")
        stage.settle()
        stage.ready("a", "b", "c")
        stage.settle()
        assert stage.generation().number == 2
        assert stage.generation().purse.failures == 1
        assert stage.generation().why.startswith("rank 0 (host c, pid 7): ValueError: bad luck; 2 victims (ranks 0)")
        assert stage.generation().why.endswith("; restart 1 of 3")

    def test_nobody_starts_before_everybody_has_stopped(self) -> None:
        stage = formed("a", "b", "c")
        stage.fail("c")
        stage.settle()
        stage.ready("a", "c")
        stage.pass_time(5.0)
        assert stage.generation().number == 1
        stage.ready("b")
        stage.settle()
        assert stage.generation().number == 2

    def test_the_budget_ends_the_job_with_a_verdict(self) -> None:
        """P12, P14: the same on every node."""
        stage = formed("a", "b", restarts=RestartPolicy(0))
        stage.fail("b")
        stage.settle()
        stage.ready("a", "b")
        stage.settle()
        ends = [one for name in ("a", "b") for one in stage.news(name) if isinstance(one, session.Ended)]
        assert [one.closed.kind for one in ends] == ["failed", "failed"]
        assert ends[0] == ends[1]
        verdict = ends[0].closed.verdict
        assert verdict is not None
        assert verdict.cause is not None
        assert verdict.cause.message == "ValueError: bad luck"

    def test_a_hopeless_exit_code_ends_the_job(self) -> None:
        """P15."""
        stage = formed("a", "b", restarts=RestartPolicy(3, no_retry_exit_codes=(42,)))
        stage.fail("b", exitcode=42)
        stage.settle()
        stage.ready("a", "b")
        stage.settle()
        found = closed(stage)
        assert found is not None
        assert "no restart can help" in found.why

    def test_m8_those_who_wait_for_the_back_off_hear_why(self) -> None:
        """m8: the true reason, and not that nobody is there."""
        stage = formed("a", "b", restarts=RestartPolicy(9, backoff_s=25.0, max_backoff_s=25.0))
        for _ in range(2):
            stage.fail("b")
            stage.settle()
            stage.ready("a", "b")
            stage.settle()
        stage.nodes["b"].take_news()
        stage.pass_time(15.0)
        (line,) = [one.text for one in stage.nodes["b"].take_news() if isinstance(one, session.Progress)]
        assert line.endswith("restart 2 of 9, after 25 s; here: a, b")

    def test_the_second_restart_waits(self) -> None:
        """P15: growing back-off."""
        stage = formed("a", "b", restarts=RestartPolicy(3, backoff_s=4.0))
        for number in (2, 3):
            stage.fail("b")
            stage.settle()
            stage.ready("a", "b")
            stage.settle()
            assert stage.generation().number == 2
            if number == 3:
                stage.pass_time(3.9)
                assert stage.generation().number == 2
                stage.pass_time(0.2)
        assert stage.generation().number == 3

    def test_a_generation_that_is_over_before_the_seat_was_found_is_stopped_too(self) -> None:
        stage = Stage(PAIR)
        stage.join("a", "b")
        stage.deaf.add("b")
        stage.settle()
        stage.fail("a")
        stage.settle()
        stage.deaf.clear()
        stage.settle()
        assert stage.kinds("b") == ["Seated", "Regroup"]
        stage.ready("a", "b")
        stage.settle()
        assert stage.seats() == {"a": 0, "b": 1}
        assert stage.generation().number == 2


class TestLosing:
    def test_the_next_in_line_leads(self) -> None:
        """P02: also when it is the leader that is lost."""
        stage = formed("a", "b", "c")
        stage.lose("a", "vouched")
        stage.settle()
        assert stage.leader() in ("b", "c")
        assert signal(stage, 1) == job.Signal(
            "loss", "node 0 (a, ranks 0-1) was lost: not heard of in time", stage.nodes[stage.leader()].record.name
        )
        stage.ready("b", "c")
        stage.pass_time(1.0)
        assert stage.generation().nodes == 2
        assert stage.seats() == {"a": 0, "b": 1, "c": 0}  # a does not know yet; b keeps its rank

    def test_a_new_leader_recounts_who_is_done(self) -> None:
        stage = formed("a", "b", "c")
        for name in ("a", "b"):
            stage.nodes[name].done()
        stage.settle()
        stage.lose("a")
        stage.settle()
        assert signal(stage, 1) is None
        stage.nodes["c"].done()
        stage.settle()
        found = closed(stage)
        assert found is not None
        assert found.kind == "finished"

    def test_a_new_leader_recounts_what_failed(self) -> None:
        """P14: the count survives any leader."""
        stage = formed("a", "b", "c")
        stage.fail("b")
        stage.settle()
        stage.nodes["a"].leave()
        stage.settle()
        stage.ready("b", "c")
        stage.pass_time(1.0)
        assert stage.generation().nodes == 2
        assert stage.generation().purse.departures + stage.generation().purse.failures + stage.generation().purse.losses == 1

    def test_a_leader_that_was_replaced_changes_nothing(self) -> None:
        stage = formed("a", "b", "c")
        stage.fail("c")
        stage.settle()
        stage.mute.add("a")
        stage.ready("a", "b", "c")
        stage.settle()
        stage.ask("a")  # that it is ready
        stage.tell("a")
        late = stage.nodes["a"].next_request(stage.now)
        assert isinstance(late, Transaction)
        assert late.compares[0].key == job.LEADER
        stage.lose("a")
        stage.settle()
        assert not stage.store.transact(late).succeeded

    def test_a_node_that_comes_back_takes_its_rank(self) -> None:
        """P27."""
        stage = formed("a", "b", "c")
        stage.lose("b")
        stage.settle()
        stage.join("b#2")
        stage.ready("a", "c")
        stage.pass_time(1.0)
        assert {name: rank for name, rank in stage.seats().items() if name != "b"} == {"a": 0, "b#2": 1, "c": 2}

    def test_one_that_keeps_dying_is_held_back(self) -> None:
        """Not for dying once; for a second after the second time."""
        stage = formed("a", "b", "c")
        for dead, new, is_seated in (("c", "c#2", True), ("c#2", "c#3", False)):
            stage.lose(dead)
            stage.settle()
            stage.join(new)
            stage.ready("a", "b")
            stage.pass_time(0.9)
            assert (new in stage.seats()) == is_seated
        assert stage.generation().nodes == 2
        stage.pass_time(0.2)
        stage.ready("a", "b")
        stage.settle()
        assert "c#3" in stage.seats()


class TestProof:
    """Nobody is replaced whose workers may run."""

    def test_v1_a_node_that_does_not_stop_is_told_that_the_others_go_on(self) -> None:
        """V1: and they go on when its fence is over, not before."""
        stage = formed("a", "b", "c")
        stage.fail("a")
        stage.settle()
        stage.ready("a", "b")
        stage.pass_time(OPEN.ready_timeout_s + 0.1)
        assert stage.nodes["c"].why_fenced == (
            "the others go on without this node: its workers had not stopped 10 s after generation 1 was over"
        )
        assert not stage.store.has_lease(stage.leases["c"])
        stage.pass_time(OPEN.fence_s)
        assert stage.generation().number == 1
        stage.pass_time(OPEN.fence_s * (DRIFT - 1) + MARGIN_S)
        assert (stage.generation().number, stage.generation().nodes) == (2, 2)
        assert "without node 2 (c, ranks 4-5), which did not stop in time" in stage.generation().why

    def test_a_leader_expels_itself_too(self) -> None:
        stage = formed("a", "b", "c")
        assert stage.leader() == "a"
        stage.fail("b")
        stage.settle()
        stage.ready("b", "c")
        stage.pass_time(OPEN.ready_timeout_s + 0.1)
        assert not stage.store.has_lease(stage.leases["a"])
        stage.mute.add("a")
        stage.pass_time(OPEN.fence_s - 0.5)
        assert stage.generation().number == 1
        stage.pass_time(1.0)
        assert (stage.generation().number, stage.generation().nodes) == (2, 2)

    def test_who_was_fenced_vouches_for_what_it_was(self) -> None:
        """M12: so that nobody waits for the rest of a long fence."""
        stage = formed("a", "b", policy=OPEN.replace(after_expiry_s=27.0))
        stage.lose("b")
        former = stage.nodes["b"].former
        assert former == Former("b", 1)
        stage.pass_time(26.0)
        assert stage.kinds("a") == ["Regroup"]
        stage.join("b#2", former=former, is_ready=False)
        stage.ready("a")
        stage.settle()
        assert stage.value(job.left_key(1, "b")) is None, "its workers may still run"
        stage.ready("b#2")
        stage.settle()
        assert (stage.generation().number, stage.generation().nodes) == (2, 2)

    def test_m12_a_member_that_is_back_within_its_fence_goes_on(self) -> None:
        """M12: under its id, with a new lease, and nobody is stopped."""
        stage = formed("a", "b", policy=OPEN.replace(after_expiry_s=27.0))
        for name in ("a", "b"):
            stage.store._end(stage.leases[name], "expired")
        stage.now += 5.0
        for name in ("a", "b"):
            stage.come_back(name)
            assert stage.nodes[name].is_returning
        stage.pass_time(60.0)
        assert [stage.nodes[name].is_returning for name in ("a", "b")] == [False, False]
        assert [stage.kinds(name) for name in ("a", "b")] == [[], []]
        assert stage.generation().number == 1
        assert stage.leader() in ("a", "b")

    def test_no_generation_is_formed_past_one_that_is_back(self) -> None:
        """The leader has not heard of it yet, but the store has."""
        stage = formed("a", "b", "c", policy=OPEN.replace(after_expiry_s=27.0))
        stage.lose("c")
        stage.deaf.discard("c")
        stage.mute.add("c")
        stage.pass_time(26.0)
        stage.ready("a", "b")
        stage.pass_time(1.5)
        assert stage.generation().number == 1
        stage.deaf.add("a")
        stage.mute.discard("c")
        stage.come_back("c")
        stage.settle()
        assert not stage.nodes["c"].is_returning
        stage.now += 5.0
        stage.mail["a"].clear()
        stage.settle()
        assert stage.generation().number == 1

    def test_who_is_back_too_late_does_not_return(self) -> None:
        stage = formed("a", "b", "c", policy=OPEN.replace(after_expiry_s=27.0))
        stage.lose("c")
        stage.pass_time(26.0)
        stage.ready("a", "b")
        stage.pass_time(2.0)
        assert stage.generation().number == 2
        stage.mute.clear()
        stage.deaf.clear()
        stage.come_back("c")
        stage.settle()
        assert stage.nodes["c"].is_returning
        assert stage.nodes["c"].why_fenced == "generation 2 was formed without this node"

    def test_m12_who_finds_nothing_left_of_its_generation_is_fenced(self) -> None:
        """M12: somebody has cleared the job meanwhile; asking again and again would not help."""
        stage = formed("a", "b", policy=OPEN.replace(after_expiry_s=27.0))
        stage.store._end(stage.leases["b"], "expired")
        stage.come_back("b")
        stage.store.transact(Transaction((), (Delete(job.GENERATION),)))
        stage.settle()
        assert "is not in the store any more" in stage.nodes["b"].why_fenced

    def test_m12_who_was_not_seated_yet_agrees_anew_on_the_settings(self) -> None:
        """M12: its place may be that of another job by now."""
        stage = Stage(PAIR)
        stage.join("a")
        stage.settle()
        stage.store._end(stage.leases["a"], "expired")
        stage.store.transact(Transaction((), (Delete(job.SETTINGS),)))
        stage.come_back("a")
        stage.settle()
        assert any(item.key == job.SETTINGS for item in stage.store.read("").items)

    def test_m12_who_asked_for_its_seat_with_a_lease_that_was_over_asks_again(self) -> None:
        """M12: the answer comes when it has a new lease, under which it has not said yet that it is ready."""
        stage = Stage(PAIR.replace(after_expiry_s=27.0))
        stage.join("a", "b")
        stage.mute.add("b")
        stage.settle()
        for _ in range(4):
            stage.ask("b")
        stage.settle()
        stage.tell("b")
        node = stage.nodes["b"]
        request = node.next_request(stage.now)
        assert isinstance(request, Transaction)
        answer = stage.store.transact(request)
        stage.store._end(stage.leases["b"], "expired")
        stage.come_back("b")
        node.replied(request, answer, stage.now)
        stage.mute.discard("b")
        stage.settle()
        assert stage.kinds("b") == ["Seated"]

    def test_whose_workers_were_killed_says_so(self) -> None:
        """Its warden ended them, and nobody else knows."""
        stage = formed("a", "b")
        stage.ready("b")
        stage.settle()
        found = signal(stage, 1)
        assert found is not None
        assert (found.kind, found.by) == ("loss", "b")
        stage.ready("a")
        stage.settle()
        assert (stage.generation().number, stage.generation().nodes) == (2, 2)


class TestShunning:
    def test_m13_a_node_whose_workers_keep_failing_is_left_out_for_longer_each_time(self) -> None:
        """M13: while the least number holds, with the reason for all to see."""
        stage = formed("a", "b", "c", restarts=RestartPolicy(100, backoff_s=0.0))
        for times in (1, 2):
            stage.fail("c")
            stage.settle()
            stage.ready("a", "b", "c")
            stage.settle()
            assert stage.generation().nodes == (3 if times == 1 else 2)
        assert stage.generation().why.endswith("left out, because their workers keep failing: c for 60 s")
        for shunned_s in (60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0):
            number = stage.generation().number
            stage.pass_time(shunned_s - 1.0)
            assert stage.generation().number == number
            stage.pass_time(2.0)
            stage.ready("a", "b")
            stage.settle()
            assert stage.generation().nodes == 3
            stage.fail("c")
            stage.settle()
            stage.ready("a", "b", "c")
            stage.settle()
            assert stage.generation().nodes == 2

    def test_it_is_taken_all_the_same_where_it_is_needed(self) -> None:
        stage = formed("a", "b", policy=OPEN.replace(min_nodes=2), restarts=RestartPolicy(100, backoff_s=0.0))
        for _ in range(5):
            stage.fail("b")
            stage.settle()
            stage.ready("a", "b")
            stage.settle()
            assert stage.generation().nodes == 2

    def test_failures_that_come_from_everywhere_are_nobodys_fault(self) -> None:
        stage = formed("a", "b", "c", restarts=RestartPolicy(100, backoff_s=0.0))
        for name in ("a", "b", "c") * 3:
            stage.fail(name)
            stage.settle()
            stage.ready("a", "b", "c")
            stage.settle()
            assert stage.generation().nodes == 3

    def test_another_leader_knows_it_too(self) -> None:
        stage = formed("a", "b", "c", "d", restarts=RestartPolicy(100, backoff_s=0.0))
        for _ in range(2):
            stage.fail("d")
            stage.settle()
            stage.ready("a", "b", "c", "d")
            stage.settle()
        assert stage.generation().nodes == 3
        stage.nodes["a"].leave()
        stage.settle()
        stage.ready("b", "c")
        stage.pass_time(1.0)
        assert stage.generation().nodes == 2
        assert "d" not in stage.seats()

    def test_a_good_run_is_a_new_beginning(self) -> None:
        stage = formed("a", "b", "c", restarts=RestartPolicy(100, backoff_s=0.0))
        for _ in range(3):
            stage.pass_time(700.0)
            stage.fail("c")
            stage.settle()
            stage.ready("a", "b", "c")
            stage.settle()
            assert stage.generation().nodes == 3

    def test_a_failure_before_a_good_run_counts_no_more(self) -> None:
        stage = formed("a", "b", "c", restarts=RestartPolicy(100, backoff_s=0.0))
        for passed_s, nodes in ((1.0, 3), (700.0, 3), (1.0, 2)):
            stage.pass_time(passed_s)
            stage.fail("c")
            stage.settle()
            stage.ready("a", "b", "c")
            stage.settle()
            assert stage.generation().nodes == nodes


class TestSickness:
    def test_m4_a_sick_node_leaves_and_the_others_go_on(self) -> None:
        """M4."""
        stage = formed("a", "b", "c")
        stage.nodes["c"].departing("c cannot run workers: too many open files", is_sick=True)
        stage.nodes["c"].leave()
        stage.settle()
        found = signal(stage, 1)
        assert found is not None
        assert found.kind == "sick"
        stage.ready("a", "b")
        stage.settle()
        assert (stage.generation().nodes, stage.generation().purse.departures) == (2, 1)

    def test_too_few_are_told_why_it_is_over(self) -> None:
        stage = formed("a", "b")
        stage.nodes["b"].departing("b cannot run workers: too many open files", is_sick=True)
        stage.nodes["b"].leave()
        stage.settle()
        stage.ready("a")
        stage.settle()
        found = closed(stage)
        assert found is not None
        assert (found.kind, found.why.partition(";")[0]) == ("failed", "b cannot run workers: too many open files")


class TestComingAndGoing:
    def test_a_joiner_makes_the_world_larger(self) -> None:
        """P45."""
        stage = formed("a", "b")
        stage.join("c")
        stage.pass_time(0.5)
        assert stage.kinds("a") == ["Regroup"]
        stage.ready("a", "b")
        stage.settle()
        assert stage.seats() == {"a": 0, "b": 1, "c": 2}
        assert stage.generation().purse.joins == 1

    def test_a_spare_waits_without_a_timeout_and_takes_over(self) -> None:
        """P26."""
        stage = formed("a", "b", policy=OPEN.replace(max_nodes=2))
        stage.join("spare")
        stage.pass_time(200.0)
        assert stage.kinds("spare") == []
        stage.lose("b", "vouched")
        stage.settle()
        stage.ready("a")
        stage.pass_time(1.0)
        assert {name: rank for name, rank in stage.seats().items() if name != "b"} == {"a": 0, "spare": 1}

    def test_who_departs_stops_the_others_at_once_and_is_not_waited_for(self) -> None:
        """P03: the others go on."""
        stage = formed("a", "b", "c")
        stage.nodes["c"].departing("c received SIGTERM")
        stage.settle()
        assert stage.kinds("a") == ["Regroup"]
        stage.ready("a", "b")
        stage.pass_time(1.0)
        assert stage.generation().number == 1  # its workers may still run
        stage.nodes["c"].leave()
        stage.settle()
        assert (stage.generation().nodes, stage.generation().purse.departures) == (2, 1)
        assert stage.nodes["c"].has_left

    def test_a_leader_that_leaves_hands_over_at_once(self) -> None:
        stage = formed("a", "b", "c")
        stage.nodes["a"].leave()
        stage.settle()
        assert stage.leader() in ("b", "c")

    def test_the_host_of_the_store_ends_the_job_for_all(self) -> None:
        """P04: with that reason."""
        stage = formed("a", "b")
        stage.nodes["a"].close("host_left", "a hosts the store and received SIGTERM")
        stage.nodes["a"].leave()
        stage.settle()
        (ended,) = stage.news("b")
        assert isinstance(ended, session.Ended)
        assert (ended.closed.kind, ended.closed.why) == ("host_left", "a hosts the store and received SIGTERM")

    def test_the_first_end_counts(self) -> None:
        stage = formed("a", "b")
        for name, kind in (("a", "closed"), ("b", "failed")):
            stage.nodes[name].close(kind, f"{name} said so")
        stage.settle()
        assert {stage.news(name)[0].closed.by for name in ("a", "b")} == {"a"}

    def test_success_takes_everybody(self) -> None:
        stage = formed("a", "b", "c")
        for name in ("a", "b"):
            stage.nodes[name].done()
        stage.pass_time(5.0)
        assert closed(stage) is None
        stage.join("late")
        stage.pass_time(5.0)
        assert signal(stage, 1) is None
        stage.nodes["c"].done()
        stage.settle()
        assert {tuple(stage.kinds(name)) for name in stage.nodes} == {("Ended",)}

    def test_a_failure_before_the_last_is_done_restarts_everybody(self) -> None:
        """P11: nobody waits at the end for those who failed."""
        stage = formed("a", "b")
        stage.nodes["a"].done()
        stage.settle()
        stage.fail("b")
        stage.settle()
        assert stage.kinds("a") == ["Regroup"]
        stage.ready("a", "b")
        stage.settle()
        assert stage.generation().number == 2
        assert closed(stage) is None

    def test_a_job_that_has_ended_stays_ended(self) -> None:
        stage = formed("a", "b")
        stage.nodes["a"].close("closed", "enough")
        stage.settle()
        stage.join("c")
        stage.settle()
        assert stage.kinds("c") == ["Ended"]


class TestMissing:
    def test_who_missed_changes_reads_everything_again(self) -> None:
        stage = formed("a", "b", "c")
        for name in ("a", "b"):
            stage.mail[name].clear()
        stage.deaf |= {"a", "b"}
        stage.fail("c")
        stage.settle()
        for name in ("a", "b"):
            stage.mail[name].clear()
            stage.nodes[name].look_again()
        stage.deaf.clear()
        stage.settle()
        assert [stage.kinds(name) for name in ("a", "b")] == [["Regroup"], ["Regroup"]]
        stage.ready("a", "b", "c")
        stage.settle()
        assert stage.generation().number == 2

    @pytest.mark.parametrize("lost", range(12))
    @pytest.mark.parametrize("is_done", [True, False], ids=["the answer", "the request"])
    def test_any_message_can_be_lost(self, lost: int, is_done: bool) -> None:
        """Whatever a node asked, it asks again if it hears nothing; whether it had been done or not."""
        stage = Stage(PAIR)
        stage.join("a", "b")
        asked = 0
        for _ in range(60):
            for name in ("a", "b"):
                request = stage.nodes[name].next_request(stage.now)
                if request is not None and name == "a" and asked == lost:
                    if is_done:
                        stage.serve(name, request)
                elif request is not None:
                    stage.ask(name, request)
                asked += request is not None and name == "a"
                stage.tell(name)
        assert stage.seats() == {"a": 0, "b": 1}
        assert stage.generation().number == 1


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["ask", "tell", "lose answer", "lose request"])), max_size=120))
def test_every_order_of_steps_leads_to_one_world(schedule: list[tuple[str, str]]) -> None:
    """P46: whoever asks when, is told when, and loses what: in the end all three sit in one generation, which never changed."""
    stage = Stage(Policy(3, 3))
    stage.join("a", "b", "c")
    for name, what in schedule:
        if what == "tell":
            stage.tell(name)
        elif (request := stage.nodes[name].next_request(stage.now)) is not None:
            if what == "ask":
                stage.ask(name, request)
            elif what == "lose answer" and not isinstance(request, Watch):
                stage.serve(name, request)
    stage.settle()
    assert stage.seats() == {"a": 0, "b": 1, "c": 2}
    (item,) = stage.store.read(job.GENERATION).items
    assert (stage.generation().number, item.create_revision) == (1, item.mod_revision)
    assert sum(one.leader is not None for one in stage.nodes.values()) == 1


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["fail a", "fail b", "fail c", "lose b", "lose c", "wait"]), max_size=8))
def test_purses_only_grow_and_numbers_count_up(story: list[str]) -> None:
    """P14: nothing that was spent is given back, whoever leads."""
    stage = formed("a", "b", "c", restarts=RestartPolicy(100, backoff_s=0.0))
    processes, last = dict.fromkeys("abc", 1), stage.generation()
    names = {"a": "a", "b": "b", "c": "c"}
    for what, _, who in (step.partition(" ") for step in story):
        if what == "fail" and stage.nodes[names[who]].seat is not None:
            stage.fail(names[who])
        elif what == "lose":
            stage.lose(names[who], "vouched")
            processes[who] += 1
            names[who] = f"{who}#{processes[who]}"
            stage.join(names[who])
        stage.settle()
        stage.ready(*(name for name in names.values() if stage.nodes[name].seat is not None and "Regroup" in stage.kinds(name)))
        stage.pass_time(10.0)
        now = stage.generation()
        assert now.number >= last.number
        assert all(
            getattr(now.purse, name) >= getattr(last.purse, name) for name in ("failures", "losses", "departures", "joins")
        )
        last = now


def speakers(stage: Stage) -> list[str]:
    return [name for name, node in stage.nodes.items() if node.speaks_for_job]


def test_of_a_job_that_has_ended_one_node_speaks() -> None:
    """The leader; whoever leads when it is gone; and who has ended the job in its place."""
    stage = formed("a", "b", "c", restarts=RestartPolicy(0))
    assert speakers(stage) == ["a"]
    stage.fail("b")
    stage.ready("a", "b", "c")
    stage.pass_time(1.0)
    assert speakers(stage) == ["a"]
    assert closed(stage) is not None

    stage = formed("a", "b", "c")
    stage.nodes["b"].close("host_left", "SIGTERM", 15)
    stage.settle()
    assert speakers(stage) == ["b"]

    stage = formed("a", "b", "c")
    del stage.nodes["a"]
    stage.store._end(stage.leases["a"], "expired")
    stage._deliver()
    for name in ("b", "c"):
        stage.nodes[name].done()
    stage.pass_time(1.0)
    assert len(speakers(stage)) == 1


@pytest.mark.parametrize(("is_hang", "kind"), [(False, "failure"), (True, "hang")])
def test_a_generation_says_what_it_came_after(is_hang: bool, kind: str) -> None:
    stage = formed("a", "b")
    assert stage.generation().after == ""
    failure = WorkerFailure(2, 0, "default", "b.example", 7, -9, "it hung: no heartbeat", 0.0, hung=is_hang)
    stage.nodes["b"].failed(NodeReport("b", failures=(failure,)))
    stage.settle()
    stage.ready("a", "b")
    stage.pass_time(1.0)
    assert (stage.generation().number, stage.generation().after) == (2, kind)
    stage.join("c")
    stage.pass_time(1.0)
    stage.ready("a", "b")
    stage.pass_time(1.0)
    assert (stage.generation().number, stage.generation().after) == (3, "join")
    stage.lose("c", "vouched")
    stage.pass_time(1.0)
    stage.ready("a", "b")
    stage.pass_time(30.0)
    assert (stage.generation().number, stage.generation().after) == (4, "loss")


def test_what_is_written_about_a_generation_is_bounded() -> None:
    """However long a worker's last words are."""
    stage = formed("a", "b")
    stage.fail("b", "x" * 1_000_000)
    stage.settle()
    found = signal(stage, 1)
    assert found is not None
    assert len(found.why) <= 500
    (failure,) = stage.store.read(job.failure_key(1, "")).items
    assert len(failure.value) < 16_384


def test_a_node_that_is_seated_has_nothing_more_to_say() -> None:
    """P22: while a generation runs, nobody writes anything."""
    stage = formed("a", "b")
    before = stage.store.revision
    stage.pass_time(100.0)
    assert stage.store.revision == before
    assert [stage.nodes[name].next_request(stage.now) for name in ("a", "b")] == [None, None]


class TestAsking:
    """What somebody from outside wants of nodes."""

    @staticmethod
    def ask(stage: Stage, node: str = "", what: job.Wish = "look") -> int:
        stage.put(job.ASKED, job.encode(job.Asked(what, node, "me")))
        return stage.store.revision

    def test_every_node_hears_it_once(self) -> None:
        stage = formed("a", "b")
        number = self.ask(stage)
        for name in ("a", "b"):
            assert stage.news(name) == [session.AskedFor(name, number, job.Asked("look", "", "me"))]
        stage.nodes["a"].look_again()
        stage.settle()
        assert stage.news("a") == []

    def test_a_job_that_was_stopped_is_stopped_for_whoever_comes_or_looks_later(self) -> None:
        """So that no node which was away, or was started anew, goes on alone."""
        stage = formed("a", "b")
        stage.put(job.STOP, job.encode(job.Stop("me")))
        stop = [session.AskedFor("a", 0, job.Asked("stop", "", "me"))]
        assert stage.news("a") == stop
        stage.nodes["a"].look_again()
        stage.settle()
        assert stage.news("a") == []
        stage.nodes["a"].ask_again()
        assert stage.news("a") == stop
        stage.join("c")
        stage.settle()
        assert stage.kinds("c") == ["AskedFor"]

    @pytest.mark.parametrize(("kind", "ends_as"), [("failed", "stopped"), ("host_left", "stopped"), ("finished", "finished")])
    def test_whatever_else_becomes_of_it_came_of_that(self, kind: job.ClosedKind, ends_as: str) -> None:
        """Workers fail because those of other nodes are stopped; but who has finished has finished."""
        stage = formed("a", "b")
        stage.put(job.STOP, job.encode(job.Stop("me")))
        stage.nodes["a"].close(kind, "somehow", 15)
        stage.settle()
        for name in ("a", "b"):
            *_, ended = stage.news(name)
            assert isinstance(ended, session.Ended)
            assert ended.closed.kind == ends_as
            assert ended.closed.why == ("me stopped the job" if ends_as == "stopped" else "somehow")

    def test_what_is_meant_for_one_is_heard_by_that_one(self) -> None:
        stage = formed("a", "b")
        self.ask(stage, "b", "leave")
        assert stage.kinds("a") == []
        assert stage.kinds("b") == ["AskedFor"]

    def test_what_was_asked_before_a_node_came_is_not_meant_for_it(self) -> None:
        """A node must not leave because others were told to, an hour ago."""
        stage = formed("a", "b")
        self.ask(stage, what="leave")
        stage.join("c")
        stage.settle()
        assert stage.kinds("c") == []

    @pytest.mark.parametrize("junk", [b"", b"[]", b'{"what": "dance", "node": "", "by": "me"}', b'{"what": "look"}'])
    def test_what_nobody_can_read_was_not_asked(self, junk: bytes) -> None:
        stage = formed("a", "b")
        stage.put(job.ASKED, junk)
        assert stage.kinds("a") == []

    def test_a_restart_that_was_asked_for_costs_nothing_and_says_why(self) -> None:
        stage = formed("a", "b")
        asked = job.Signal("asked", "a restart was asked for by me", "me")
        stage.put(job.signal_key(1), job.encode(asked))
        assert stage.news("a") == [session.Regroup("a restart was asked for by me", 1, is_failure=False)]
        stage.ready("a", "b")
        stage.pass_time(1.0)
        generation = stage.generation()
        assert (generation.number, generation.nodes, generation.purse) == (2, 2, Purse())
        assert generation.why == "a restart was asked for by me"


class TestFitness:
    def test_p29_all_are_told_why_a_node_waits_outside_and_it_is_let_in_when_it_is_fit(self) -> None:
        """P29"""
        stage = Stage(PAIR)
        stage.join("a")
        stage.join("b", unfit="gpu: GPU is lost")
        stage.pass_time(25.0)
        lines = [one.text for one in stage.nodes["a"].take_news() if isinstance(one, session.Progress)]
        assert lines[-1] == "1 of 2 nodes; here: a; not fit: b (gpu: GPU is lost)"
        stage.nodes["b"].judged("")
        stage.settle()
        assert stage.seats() == {"a": 0, "b": 1}

    def test_p29_a_member_that_is_unfit_after_a_failure_gives_its_seat_to_a_spare(self) -> None:
        """P29"""
        stage = formed("a", "b", policy=PAIR.replace(last_call_s=0.0))
        stage.join("s")
        stage.fail("b")
        stage.settle()
        stage.nodes["b"].judged("disk: full")
        stage.ready("a", "b")
        stage.settle()
        assert stage.seats() == {"a": 0, "s": 1}
        assert stage.kinds("b")[-1] == "Regroup"


class TestHopeless:
    NO_MODULE = "ModuleNotFoundError: No module named 'x'"

    def test_p15_those_that_run_hear_that_it_matters_whether_all_fail_so(self) -> None:
        """P15: they are given a moment then; a failure that may pass puts off no restart."""
        for message, matters in ((self.NO_MODULE, True), ("ValueError: bad luck", False)):
            stage = formed("a", "b")
            stage.fail("b", message)
            stage.settle()
            (heard,) = (one for one in stage.news("a") if isinstance(one, session.Regroup))
            assert heard.looks_hopeless is matters

    def test_p15_what_all_workers_met_ends_the_job_on_all_nodes_and_says_that_no_restart_helps(self) -> None:
        """P15"""
        stage = formed("a", "b")
        for name, ranks in (("a", (0, 1)), ("b", (2, 3))):
            failures = tuple(WorkerFailure(one, one % 2, "", name, 7, 1, self.NO_MODULE, 0.0) for one in ranks)
            stage.nodes[name].failed(NodeReport(name, 0, failures))
            stage.settle()
        stage.ready("a", "b")
        stage.settle()
        end = closed(stage)
        assert end is not None
        assert end.is_hopeless
        assert "all workers failed so" in end.why

    def test_p29_a_node_is_left_out_at_the_wish_of_its_worker_if_it_can_be_spared(self) -> None:
        """P29: that costs no restart; where it cannot be spared, it is a failure as any other."""
        for names, nodes, restarts in ((("a", "b", "c"), 2, 0), (("a", "b"), 2, 1)):
            stage = formed(*names)
            failure = WorkerFailure(2, 0, "", "b", 7, 1, "bad memory", 0.0, wish="exclude_node")
            stage.nodes["b"].failed(NodeReport("b", 0, (failure,)))
            stage.settle()
            stage.ready(*names)
            stage.settle()
            assert (stage.generation().nodes, stage.generation().purse.failures) == (nodes, restarts)
            assert ("node b is left out: bad memory; membership change 1" in stage.generation().why) == (restarts == 0)
            assert "keep failing" not in stage.generation().why
