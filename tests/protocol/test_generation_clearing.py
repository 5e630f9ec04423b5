"""When the rest of a job may go, and what of it."""

from __future__ import annotations

import pytest

from rallypoint.coordination.model import Compare, Delete, Item, Snapshot, Transaction
from rallypoint.protocol import job_records as job
from rallypoint.protocol.generation import MayReturn, clearing
from rallypoint.protocol.restarts import Purse


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
    assert isinstance(transaction, Transaction)
    assert transaction.compares == (
        Compare(job.SETTINGS, "mod", 5),
        Compare(job.LEADER, "create", 0),
        Compare(job.RETURNED, "mod", 0),
    )
    assert transaction.then == tuple(Delete(key, is_prefix=True) for key in ("data/1.1", "down/closed", job.SETTINGS))


def test_without_settings_they_must_still_be_missing() -> None:
    transaction = clearing(snapshot("down/closed"))
    assert isinstance(transaction, Transaction)
    assert transaction.compares[0] == Compare(job.SETTINGS, "mod", 0)


# --- members that may come back --------------------------------------------------------------------------------------------

FENCE_S = 30.0
SEATED = ("a", "b")


def running(*more: str, settings: bytes = b'{"fence_s": 30.0}') -> Snapshot:
    """What is left of a job whose nodes have lost their leases in the middle of generation 2, and `more` keys."""
    generation = job.encode(job.Generation(2, 7, 2, 2, "here", 1, "", Purse()))
    values = {
        job.SETTINGS: settings,
        job.GENERATION: generation,
        job.RETURNED: b"a",
        **{job.seat_key(2, 7, one): b"x" for one in SEATED},
        job.seat_key(3, 9, "c"): b"x",
        **dict.fromkeys(more, b"x"),
    }
    return Snapshot(9, tuple(Item(key, value, 3, 5) for key, value in sorted(values.items())))


def test_m12_nothing_goes_while_members_may_come_back_within_their_fence() -> None:
    """M12: the store was away, all leases have run out, and somebody new is quicker than those who will be back."""
    found = clearing(running())
    assert isinstance(found, MayReturn)
    assert found.nodes == 2
    assert FENCE_S < found.for_s < FENCE_S + 1.0
    still = clearing(running(), FENCE_S)
    assert isinstance(still, MayReturn)
    assert 0 < still.for_s < 1.0


def test_m12_who_returns_at_the_last_moment_keeps_the_job() -> None:
    """M12: all who return change one key, and the transaction that would clear the job compares it."""
    transaction = clearing(running(), FENCE_S + 1.0)
    assert isinstance(transaction, Transaction)
    assert Compare(job.RETURNED, "mod", 5) in transaction.compares


def test_members_that_have_left_are_not_waited_for() -> None:
    one, both = [[job.left_key(2, member) for member in members] for members in (SEATED[:1], SEATED)]
    found = clearing(running(*one))
    assert isinstance(found, MayReturn)
    assert found.nodes == 1
    assert isinstance(clearing(running(*both)), Transaction)


def test_those_who_left_an_earlier_generation_are() -> None:
    assert isinstance(clearing(running(*(job.left_key(1, one) for one in SEATED))), MayReturn)


def test_nobody_comes_back_to_a_job_that_was_ended() -> None:
    assert isinstance(clearing(running(job.CLOSED)), Transaction)


@pytest.mark.parametrize(
    "settings", [b"", b"[]", b"{}", b'{"fence_s": "soon"}', b"[" * 100_000], ids=lambda data: repr(data[:12])
)
def test_settings_that_nobody_can_read_keep_a_job_for_the_margin_only(settings: bytes) -> None:
    found = clearing(running(settings=settings))
    assert isinstance(found, MayReturn)
    assert found.for_s < 1.0
