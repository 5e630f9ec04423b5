"""Who hangs, as all nodes find out together: the function that names them, and how the nodes come to be asked and told (P30)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulation.script import Stage

from rallypoint.protocol import job_records as job
from rallypoint.protocol import session
from rallypoint.protocol.generation import Policy
from rallypoint.protocol.inquiry import (
    ACCUSED_MAX,
    COLLECTIVE,
    ELSEWHERE,
    GROUPS_MAX,
    INQUIRY_S,
    UNKNOWN,
    Inquiry,
    Statement,
    Witness,
    accuse,
    decode_inquiry,
    decode_statement,
    encode_inquiry,
    encode_statement,
    grouped,
)

NODES = 250
WAITS = Witness(((0, 3),), COLLECTIVE, "barrier (t.py:9)", "aa", is_silent=True, is_overdue=True, silent_s=60.0)
STANDS = WAITS.replace(place=ELSEWHERE, where="load (t.py:3)", standing="bb")
STILL = WAITS.replace(place=UNKNOWN, where="asleep in futex", standing="asleep in futex")


def job_of(odd: Witness, rest: Witness, at: int = 777) -> list[Statement]:
    """A thousand ranks on many nodes, of which one is odd."""
    told = []
    for node in range(NODES):
        ranks = range(4 * node, 4 * node + 4)
        workers = [(odd if rank == at else rest).replace(ranks=((rank, rank),)) for rank in ranks]
        told.append(Statement(f"n{node}", f"/logs/{node}/stacks.txt", *grouped(workers)))
    return told


@pytest.mark.parametrize(
    ("odd", "rest", "why"),
    [
        (STANDS, WAITS, "not in the collective in which ranks 0-776, 778-999 wait: barrier (t.py:9)"),
        (STANDS.replace(is_silent=False), WAITS, "not in the collective in which"),  # it is busy elsewhere
        (STANDS.replace(step=9), WAITS.replace(step=8), "not in the collective in which"),  # it left the loop ahead of the others
        (WAITS.replace(is_stopped=True, place=UNKNOWN), WAITS, "stopped by a signal"),
        (WAITS.replace(step=7), WAITS.replace(step=8), "at step 7, behind ranks 0-776, 778-999"),
        (STANDS, STANDS.replace(standing="cc", where="step (t.py:8)"), "elsewhere than ranks 0-776, 778-999: step (t.py:8)"),
        (STILL.replace(standing="running"), STILL, "elsewhere than"),  # nobody has Python stacks
        (STANDS, STANDS.replace(is_silent=False, is_overdue=False), "ranks 0-776, 778-999 go on"),
        (WAITS.replace(standing="dd", where="gather (t.py:4)"), WAITS, "elsewhere than"),  # in another collective
    ],
)
def test_the_one_of_a_thousand_is_named(odd: Witness, rest: Witness, why: str) -> None:
    found = accuse(job_of(odd, rest))
    [accused] = found.accused
    assert (accused.node, accused.ranks, accused.stacks) == ("n194", ((777, 777),), "/logs/194/stacks.txt")
    assert found.why.startswith(why)
    assert (found.is_certain, found.heard, found.unnamed) == (True, NODES, 0)


def test_who_never_came_is_named_by_what_the_library_has_recorded_whatever_the_stacks_look_like() -> None:
    """All stand at the same place but one, which is elsewhere for a good reason; a node far away has been told of another."""
    told = job_of(STANDS, WAITS.replace(place=UNKNOWN), at=5)
    told[0] = told[0].replace(absent=((777, 778), (5000, 5000)), absent_why="never came to collective 6")
    found = accuse(told)
    assert [(one.node, one.ranks) for one in found.accused] == [("n194", ((777, 778),))]
    assert (found.why, found.is_certain) == ("never came to collective 6", True)


def test_what_was_recorded_of_ranks_that_nobody_has_is_left_out() -> None:
    told = job_of(STANDS, WAITS)
    told[0] = told[0].replace(absent=((5000, 5000),), absent_why="never came to collective 6")
    assert accuse(told).why.startswith("not in the collective")


def test_a_record_of_too_many_pieces_is_left_out_of_what_is_sent() -> None:
    scattered = Statement("n", "", (WAITS,), 0, tuple((2 * rank, 2 * rank) for rank in range(40)), "why")
    assert decode_statement(encode_statement(scattered)) == scattered.replace(absent=(), absent_why="")


def test_where_nothing_tells_them_apart_one_is_named_and_that_is_said() -> None:
    found = accuse(job_of(WAITS.replace(silent_s=61.0), WAITS))
    assert [one.ranks for one in found.accused] == [((776, 776),)]  # of those alike on its node
    assert not found.is_certain
    assert found.why == f"nothing tells the workers of {NODES} nodes apart"


def test_those_that_are_merely_busy_elsewhere_are_not_to_blame_beside_one_that_is_silent() -> None:
    told = job_of(STANDS, WAITS)
    told[3] = told[3].replace(workers=(STANDS.replace(ranks=((12, 15),), is_silent=False, is_overdue=False),))
    assert [one.ranks for one in accuse(told).accused] == [((777, 777),)]


@pytest.mark.parametrize(
    ("workers", "ranks"),
    [
        ([WAITS, STANDS], [1]),  # two workers: one waits for the other
        ([STANDS, STANDS.replace(standing="cc")], []),
        ([STANDS, STANDS, STANDS.replace(standing="cc")], [2]),
        ([STANDS, STANDS, STANDS.replace(standing="cc"), STANDS.replace(standing="dd")], []),
        ([WAITS, STANDS, STANDS, STANDS], [0]),  # a collective that only few are in tells nothing
        ([STANDS.replace(step=3), STANDS.replace(step=-1)], []),  # who tells no step is not behind
        ([STANDS, STILL.replace(standing="")], []),
    ],
)
def test_small_jobs(workers: list[Witness], ranks: list[int]) -> None:
    told = [Statement(f"n{rank}", "", (one.replace(ranks=((rank, rank),)),)) for rank, one in enumerate(workers)]
    found = accuse(told)
    assert [one.ranks[0][0] for one in found.accused if found.is_certain] == ranks


WITNESSES = st.builds(
    Witness,
    ranks=st.integers(0, 5000).map(lambda rank: ((rank, rank),)),
    place=st.sampled_from((COLLECTIVE, ELSEWHERE, UNKNOWN)),
    where=st.text(max_size=400),
    standing=st.text(max_size=90),
    step=st.integers(-1, 3),
    phase=st.sampled_from(("running", "silent", "checkpoint")),
    is_stopped=st.booleans(),
    is_silent=st.booleans(),
    is_overdue=st.booleans(),
    silent_s=st.floats(0, 1e6),
)
WORKERS = st.lists(WITNESSES, min_size=1, max_size=80, unique_by=lambda one: one.ranks)


@given(st.lists(WORKERS, min_size=1, max_size=4), st.randoms())
def test_it_is_the_same_in_any_order_and_always_somebody_who_is_there(nodes: list[list[Witness]], random: object) -> None:
    told = [Statement(f"n{node}", "/a", *grouped(workers)) for node, workers in enumerate(nodes)]
    found = accuse(told)
    told.reverse()
    assert accuse(told) == found
    there = {one.ranks[0] for workers in nodes for one in workers}
    assert 1 <= len(found.accused) <= ACCUSED_MAX
    for one in found.accused:
        assert all((rank, rank) in there for first, last in one.ranks for rank in range(first, last + 1))
    again = decode_inquiry(encode_inquiry(Inquiry("n0", found)))
    assert again.finding is not None
    assert [one.ranks for one in again.finding.accused] == [one.ranks for one in found.accused]


@given(WORKERS)
def test_a_statement_is_bounded_and_counts_all(workers: list[Witness]) -> None:
    told = Statement("n" * 300, "/" + "x" * 700, *grouped(workers))
    data = encode_statement(told)
    assert len(data) < 16 * 1024
    assert len(told.workers) <= GROUPS_MAX
    read = decode_statement(data)
    assert read.workers == told.workers
    assert sum(last - first + 1 for one in read.workers for first, last in one.ranks) + read.unnamed == len(workers)


@pytest.mark.parametrize(
    "change",
    [{"ranks": []}, {"ranks": [[3, 1]]}, {"place": "home"}, {"step": "1"}, {"where": "\x1b"}, {"silent_s": None}, {"x": 1}],
)
def test_what_nobody_can_read_is_refused(change: dict[str, object]) -> None:
    found = json.loads(encode_statement(Statement("n", "", (WAITS,))))
    found["workers"][0].update(change)
    with pytest.raises(ValueError, match="workers: "):
        decode_statement(json.dumps(found).encode())


# --- among nodes -----------------------------------------------------------------------------------------------------------


def formed(*names: str) -> Stage:
    stage = Stage(Policy(2, 4, last_call_s=0.0, scale_up_window_s=0.3, ready_timeout_s=10.0, join_timeout_s=60.0))
    stage.join(*names)
    stage.pass_time(1.0)
    assert [stage.kinds(name) for name in names] == [["Seated"]] * len(names)
    return stage


def inquiries(stage: Stage, name: str) -> list[Inquiry]:
    return [decode_inquiry(one.inquiry) for one in stage.news(name) if isinstance(one, session.Inquired)]


def declare(stage: Stage, name: str, *workers: Witness) -> None:
    stage.nodes[name].declare(stage.generation().number, Statement(name, "", *grouped(workers)))


def test_one_node_that_speaks_has_all_others_asked_and_all_hear_the_same() -> None:
    stage = formed("a", "b", "c")
    declare(stage, "b", WAITS.replace(ranks=((2, 3),)))
    stage.settle()
    for name in ("a", "b", "c"):
        assert inquiries(stage, name) == [Inquiry("b")]
    declare(stage, "a", WAITS.replace(ranks=((0, 1),)))
    stage.settle()
    assert inquiries(stage, "a") == []  # c is still to be heard
    declare(stage, "c", WAITS.replace(ranks=((4, 4),)), STANDS.replace(ranks=((5, 5),)))
    stage.settle()
    for name in ("a", "b", "c"):
        [told] = inquiries(stage, name)
        assert told.finding is not None
        assert [(one.node, one.ranks) for one in told.finding.accused] == [("c", ((5, 5),))]
    assert stage.value(job.signal_key(1)) is None  # it is for the node of the accused to act


def test_who_does_not_answer_holds_nobody_up() -> None:
    stage = formed("a", "b", "c")
    declare(stage, "a", WAITS.replace(ranks=((0, 1),)))
    stage.pass_time(INQUIRY_S - 0.1)
    assert inquiries(stage, "a") == [Inquiry("a")]
    stage.pass_time(0.2)
    [told] = inquiries(stage, "b")[1:]
    assert told.finding is not None
    assert told.finding.heard == 1


def test_a_new_leader_carries_the_inquiry_on() -> None:
    stage = formed("a", "b", "c")
    leader = stage.leader()
    others = [name for name in ("a", "b", "c") if name != leader]
    declare(stage, others[0], STANDS)
    stage.settle()
    stage.lose(leader)
    stage.settle()
    declare(stage, others[1], WAITS.replace(ranks=((4, 5),)))
    stage.pass_time(2.0)
    told = inquiries(stage, others[0])
    is_over = stage.value(job.signal_key(1)) is not None  # the loss of a node ends a generation, whoever hangs in it
    assert told[-1].finding is not None or is_over


def test_the_next_generation_begins_without_it() -> None:
    stage = formed("a", "b")
    declare(stage, "a", WAITS)
    stage.settle()
    stage.fail("b")
    stage.settle()
    stage.ready("a", "b")
    stage.pass_time(1.0)
    assert stage.generation().number == 2
    assert stage.store.read("up/hangs/").items == ()
    assert stage.store.read("down/inquiry/").items == ()
    stage.nodes["a"].take_news()
    late = Statement("a", "", (WAITS,))
    stage.nodes["a"].declare(1, late)  # of the one before
    stage.pass_time(2.0)
    assert stage.store.read("up/hangs/").items == ()


@pytest.mark.parametrize("junk", [b"", b"[]", b'{"by": 3, "finding": null}'])
def test_what_a_stranger_writes_there_stops_nobody(junk: bytes) -> None:
    stage = formed("a", "b")
    stage.put(job.inquiry_key(1), junk)
    stage.put(job.hang_key(1, "a"), junk)
    declare(stage, "b", WAITS)
    stage.pass_time(2.0)
    stage.fail("b")
    stage.settle()
    stage.ready("a", "b")
    stage.pass_time(1.0)
    assert stage.generation().number == 2
