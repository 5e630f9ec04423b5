"""When the rest of a job may go, and what of it."""

from __future__ import annotations

import pytest

from rallypoint.core import job_records as job
from rallypoint.core.clearing import clearing
from rallypoint.core.coordination import Compare, Delete, Item, Snapshot


def snapshot(*keys: str, leased: str = "") -> Snapshot:
    return Snapshot(9, tuple(Item(key, b"x", 3, 5, 7 if key == leased else 0) for key in keys))


@pytest.mark.parametrize(
    "left",
    [
        snapshot(),
        snapshot(job.SETTINGS),
        snapshot(job.SETTINGS, "down/closed", "up/nodes/a", leased="up/nodes/a"),
        snapshot(job.LEADER, leased=job.LEADER),
    ],
    ids=["nothing", "somebody begins", "a node lives", "a leader lives"],
)
def test_nothing_goes_while_somebody_may_live(left: Snapshot) -> None:
    assert clearing(left) is None


def test_what_the_dead_left_goes_as_a_whole_unless_somebody_has_begun_anew() -> None:
    transaction = clearing(snapshot("data/1.1/k", "data/1.1/l", "down/closed", job.SETTINGS))
    assert transaction is not None
    assert transaction.compares == (Compare(job.SETTINGS, "mod", 5), Compare(job.LEADER, "create", 0))
    assert transaction.then == tuple(Delete(key, is_prefix=True) for key in ("data/1.1", "down/closed", job.SETTINGS))


def test_without_settings_they_must_still_be_missing() -> None:
    transaction = clearing(snapshot("down/closed"))
    assert transaction is not None
    assert transaction.compares[0] == Compare(job.SETTINGS, "mod", 0)
