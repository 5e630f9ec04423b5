"""A generation under construction: its steps, and that only the last of them can be seen by others."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.coordination.model import Delete, Operation, Put
from rallypoint.protocol import job_records as job
from rallypoint.protocol.generation import Form, Node
from rallypoint.protocol.leader import SEATS_PER_TRANSACTION, Forming
from rallypoint.protocol.restarts import Purse

PURSE = Purse(1, 2, 3, 4, (0.5,))
NUMBER, ATTEMPT = 7, 42


def form(count: int, workers: int = 2) -> Form:
    order = tuple(
        Node(f"id{rank}", job.NodeRecord(f"node{rank}", f"10.0.0.{rank}", 29500 + rank, "default", workers, 6), rank, 0.0)
        for rank in range(count)
    )
    return Form(order, "they are here")


def forming(count: int, number: int = NUMBER) -> Forming:
    return Forming(number, ATTEMPT, form(count), PURSE, "a worker failed", follows=number - 1)


def all_steps(attempt: Forming) -> list[list[Operation]]:
    """What each transaction does, until the last has succeeded."""
    steps = [attempt.operations()]
    while not attempt.advance():
        steps.append(attempt.operations())
    return steps


def puts(operations: list[Operation]) -> dict[str, bytes]:
    return {operation.key: operation.value for operation in operations if isinstance(operation, Put)}


def cleared(operations: list[Operation]) -> list[str]:
    return [operation.key for operation in operations if isinstance(operation, Delete) and operation.is_prefix]


def test_three_steps_make_a_small_generation() -> None:
    clear, seats, last = all_steps(forming(2))
    assert clear == [Delete("seats/7.", is_prefix=True)]
    assert seats == [
        Put("seats/7.42/id0", job.encode(job.Seat(7, 42, "node0", 0, 2, 0, 4, 0, 4))),
        Put("seats/7.42/id1", job.encode(job.Seat(7, 42, "node1", 1, 2, 2, 4, 2, 4))),
    ]
    generation = job.Generation(7, 42, 2, 4, "10.0.0.0", 29500, "a worker failed", PURSE)
    assert last == [
        Put("down/generation", job.encode(generation)),
        *(Delete(prefix, True) for prefix in ("up/failures/", "up/hangs/", "up/pace/", "up/done/", "up/left/", "up/memories/")),
        *(Delete(prefix, True) for prefix in ("up/drain/", "down/signal/", "down/inquiry/", "down/pace/", "down/expelled/")),
        *(Delete(prefix, True) for prefix in ("down/drain/", "data/", "shown/", "seats/6.")),
    ]


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(1, [1]), (99, [99]), (100, [100]), (101, [100, 1]), (200, [100, 100]), (250, [100, 100, 50])],
)
def test_p22_seats_are_written_100_at_a_time(count: int, sizes: list[int]) -> None:
    first, *middle, last = all_steps(forming(count))
    assert [len(puts(step)) for step in middle] == sizes
    assert (puts(first), list(puts(last))) == ({}, [job.GENERATION])
    written = [key for step in middle for key in puts(step)]
    assert written == [job.seat_key(NUMBER, ATTEMPT, f"id{rank}") for rank in range(count)]


def test_the_seats_of_250_nodes_are_those_of_one_world() -> None:
    _, *middle, last = all_steps(forming(250))
    seats = [job.decode(job.Seat, value) for step in middle for value in puts(step).values()]
    generation = job.decode(job.Generation, puts(last)[job.GENERATION])
    assert [(seat.group_rank, seat.first_rank) for seat in seats] == [(rank, 2 * rank) for rank in range(250)]
    assert {seat.world_size for seat in seats} == {500}
    assert {(seat.generation, seat.attempt) for seat in seats} == {(generation.number, generation.attempt)}
    assert (generation.nodes, generation.world_size) == (250, 500)


def test_rank_0_is_where_workers_meet() -> None:
    order = form(3).order[::-1]
    *_, last = all_steps(Forming(1, ATTEMPT, Form(order, ""), PURSE, "", follows=0))
    generation = job.decode(job.Generation, puts(last)[job.GENERATION])
    assert (generation.master_addr, generation.master_port) == ("10.0.0.2", 29502)


@pytest.mark.parametrize("count", [1, 250])
def test_a_step_that_did_not_succeed_is_asked_for_again(count: int) -> None:
    attempt = forming(count)
    is_last = False
    while not is_last:
        assert attempt.operations() == attempt.operations()
        is_last = attempt.advance()


def test_the_members_are_those_who_have_seats_in_the_order_of_their_ranks() -> None:
    seats, ids = forming(250).members()
    assert ids == [f"id{rank}" for rank in range(250)]
    assert [(seat.name, seat.group_rank) for seat in seats] == [(f"node{rank}", rank) for rank in range(250)]


@settings(max_examples=60)
@given(st.integers(1, 450), st.integers(1, 120))
def test_only_the_last_step_makes_it_count(count: int, number: int) -> None:
    """P46: nothing that a node looks at is touched before, and the last step does not take back what it or others gave."""
    *before, last = all_steps(forming(count, number))
    assert all(len(step) <= SEATS_PER_TRANSACTION for step in before)
    touched = [key for step in before for key in (*puts(step), *cleared(step))]
    assert all(key.startswith(job.seats_of_generation(number)) for key in touched)
    written = [key for step in (*before, last) for key in puts(step)]
    assert len(written) == len(set(written)) == count + 1
    assert not [key for key in written for prefix in cleared(last) if key.startswith(prefix)]


@given(st.integers(1, 120))
def test_p16_the_last_step_clears_away_what_belonged_to_the_generation_before(number: int) -> None:
    prefixes = tuple(cleared(all_steps(forming(1, number + 1))[-1]))
    old = [job.failure_key(number, "n"), job.done_key(number, "n"), job.signal_key(number), job.seat_key(number, 3, "n")]
    kept = [job.SETTINGS, job.STATUS, job.LEADER, job.CLOSED, job.node_key("n"), job.refusal_key("n")]
    assert all(key.startswith(prefixes) for key in old)
    assert not any(key.startswith(prefixes) for key in kept)
