"""What a leader makes of those who are not there when it begins to lead."""

from __future__ import annotations

import pytest

from rallypoint.coordination.model import Item
from rallypoint.protocol import job_records as job
from rallypoint.protocol.leader import Roster


@pytest.mark.parametrize(("has_said_so", "cause"), [(True, "deleted"), (False, "expired")])
def test_a_member_that_left_under_the_last_leader_is_not_taken_for_lost(has_said_so: bool, cause: str) -> None:
    """P04: nobody waits for the fence of a node that is known to have stopped its workers."""
    roster = Roster()
    if has_said_so:
        roster.load([Item(job.left_key(7, "a"), b"", 5, 5)], now=1.0)
    seats = [job.Seat(7, 42, name, rank, 2, rank, 2, rank, 2) for rank, name in enumerate(("node-a", "node-b"))]
    roster.begin(7, seats, ["a", "b"], now=1.0)
    assert roster.gone["a"].cause == cause
    assert roster.gone["b"].cause == "expired"
