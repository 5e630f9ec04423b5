"""One session at the store: whether it goes on, until when workers may run by it, and what its end means."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.coordination.fence import Connection, Fence, GiveUp, Hold
from rallypoint.protocol import job_records as job
from rallypoint.protocol.generation import Policy
from rallypoint.protocol.participant import Former, Joining, Participant
from rallypoint.protocol.restarts import Purse, RestartPolicy
from rallypoint.protocol.session import NO_LICENCE, Ending, Patience, Tenure

SEAT = job.Seat(3, 7, "a", 0, 2, 0, 8, 0, 8)
BEFORE = Former("a#1", 2)
WELL = Connection(valid_until=103.0)


def tenure(seat: job.Seat | None = SEAT, is_returning: bool = False, expelled: str = "") -> Tenure:
    record = job.NodeRecord("a", "a.example", 0, "default", 2, job.NOT_READY)
    participant = Participant(Joining("a#2", 1, record, {}, lambda _, __: None, Policy(1, 2), RestartPolicy(3), BEFORE))
    participant.seat, participant.is_returning = seat, is_returning
    if expelled:
        participant.board.expelled["a#2"] = expelled
    return Tenure(participant, Patience(lease_s=3.0, store_timeout_s=30.0, refusal_timeout_s=3.0))


@pytest.mark.parametrize(
    ("connection", "now", "verdict"),
    [
        (WELL, 100.0, Hold(103.0)),
        (WELL, 103.0, Fence),
        (Connection(103.0, unreachable_since=99.0), 100.0, Hold(103.0)),
        (Connection(math.inf, unreachable_since=99.0), 129.0, GiveUp),
        (Connection(math.inf, unreachable_since=99.0, refused_since=99.0), 102.0, GiveUp),
    ],
)
def test_the_silence_of_the_store_is_judged_by_the_fence(connection: Connection, now: float, verdict: object) -> None:
    found = tenure().judge(connection, now)
    assert found == verdict or type(found) is verdict


def test_what_the_others_did_counts_however_well_the_store_answers() -> None:
    found = tenure(expelled="it did not stop").judge(WELL, 100.0)
    assert found == Fence("the others go on without this node: it did not stop")


def test_who_is_not_confirmed_to_be_back_in_time_is_fenced() -> None:
    returning = tenure()
    assert returning.returns_until(110.0) == 110.0
    returning.participant.come_back(lease=2)
    new_lease = Connection(valid_until=120.0)
    assert returning.judge(new_lease, 109.0) == Hold(120.0)
    assert returning.judge(new_lease, 110.0) == Fence("the coordination store did not confirm in time that this node is back")


def test_time_to_return_is_counted_once_until_the_return_is_confirmed() -> None:
    returning = tenure()
    assert returning.returns_until(110.0) == 110.0
    returning.participant.come_back(lease=2)
    assert returning.returns_until(115.0) == 110.0
    returning.participant.is_returning = False
    assert returning.returns_until(140.0) == 140.0


@pytest.mark.parametrize(("seat", "is_returning", "until"), [(None, False, NO_LICENCE), (SEAT, False, 103.0), (SEAT, True, None)])
def test_until_when_workers_may_run(seat: job.Seat | None, is_returning: bool, until: float | None) -> None:
    assert tenure(seat, is_returning).licence_until(103.0) == until


@given(st.booleans(), st.booleans(), st.floats(0, 1e6))
def test_no_licence_goes_beyond_what_the_store_vouches_for(has_seat: bool, is_returning: bool, valid_until: float) -> None:
    until = tenure(SEAT if has_seat else None, is_returning).licence_until(valid_until)
    assert until is None or until <= valid_until
    assert has_seat or until == NO_LICENCE


def test_who_had_a_seat_ends_its_workers_and_is_vouched_for_by_the_next_session() -> None:
    assert tenure().end(100.0) == Ending(Former("a#2", 3), had_seat=True, was_stopping=False)
    stopping = tenure()
    stopping.participant._stopped = SEAT.generation
    assert stopping.end(100.0).was_stopping


def test_who_is_replaced_is_known_not_to_be_waited_for() -> None:
    assert tenure(expelled="it did not stop").end(100.0).was_replaced
    assert not tenure().end(100.0).was_replaced


def test_what_the_store_knew_is_remembered_as_old_as_it_is() -> None:
    """The last generation that we know of counts, also if we have had no seat in it; what was spent has grown older."""
    one = tenure()
    assert one.end(100.0).memory is None
    purse = Purse(2, losses=1, recent_ages_s=(3.0,))
    one.participant.board.generation, one.participant.board.generation_at = job.Generation(3, 7, 2, 8, "", 0, "", purse), 90.0
    assert one.end(100.0).memory == job.Memory(3, 2, "a", job.NO_SEAT, purse.replace(recent_ages_s=(13.0,)))
    one.participant._last_seat = SEAT
    memory = one.end(100.0).memory
    assert memory is not None
    assert memory.group_rank == 0


def test_who_had_none_passes_on_what_it_had_to_vouch_for() -> None:
    assert tenure(seat=None).end(100.0) == Ending(BEFORE, had_seat=False, was_stopping=False)
