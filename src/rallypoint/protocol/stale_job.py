"""When what is left of a job in a store that outlives it may be deleted, so that a job of that name can begin anew."""

from __future__ import annotations

import json
from contextlib import suppress

from rallypoint.base.records import Value
from rallypoint.coordination.model import Compare, Delete, Snapshot, Transaction
from rallypoint.protocol import job_records as job
from rallypoint.protocol.generation import DRIFT, MARGIN_S

__all__ = ["MayReturn", "clearing"]

MOST_DELETED = 100  # in one transaction; a job keeps the seats and data of its latest generations only


class MayReturn(Value):
    """Nobody holds a lease, but so many members of the last generation may be back, or run workers, for so long at most."""

    nodes: int
    for_s: float


def clearing(left: Snapshot, silent_s: float = 0.0) -> Transaction | MayReturn | None:
    """What deletes the rest of a job of which no node is alive: it has ended, or was killed as a whole. None: it is not so.

    Every node that is alive has a lease, with its record bound to it; or its lease has run out, and its fence has not: then
    it goes on when the store is back. So a job that was not ended is over when it has been seen without leases, and without any
    change, for `silent_s`, longer than its fence. Who returns at the last moment makes the transaction fail.

    Whoever begins anew writes the settings first, so that of two who come at once the second deletes nothing. Settings alone may
    be those of a node that is about to write its record, and records are never deleted here: one that has been written since we
    looked is that of a node that lives.
    """
    keys = {item.key for item in left.items}
    if keys <= {job.SETTINGS} or any(item.lease for item in left.items):
        return None
    members = 0 if job.CLOSED in keys else _members_that_have_not_left(left)
    for_s = _fence_s(left) * DRIFT + MARGIN_S - silent_s
    if members and for_s > 0:
        return MayReturn(members, for_s)
    groups = sorted({"/".join(key.split("/")[:2]) for key in keys})
    same = (
        Compare(job.SETTINGS, "mod", _changed_at(left, job.SETTINGS)),
        Compare(job.LEADER, "create", 0),
        Compare(job.RETURNED, "mod", _changed_at(left, job.RETURNED)),
    )
    return Transaction(same, tuple(Delete(group, is_prefix=True) for group in groups[:MOST_DELETED]))


def _members_that_have_not_left(left: Snapshot) -> int:
    """How many there are of the generation that counts; none if nobody can read it."""
    with suppress(ValueError):
        generation = job.decode(job.Generation, _value(left, job.GENERATION))
        seats = job.seats_of_attempt(generation.number, generation.attempt)
        keys = {item.key for item in left.items}
        ids = [key.removeprefix(seats) for key in keys if key.startswith(seats)]
        return sum(job.left_key(generation.number, node_id) not in keys for node_id in ids)
    return 0


def _fence_s(left: Snapshot) -> float:
    with suppress(ValueError, TypeError, KeyError):
        return max(0.0, float(json.loads(_value(left, job.SETTINGS))["fence_s"]))
    return 0.0


def _value(snapshot: Snapshot, key: str) -> bytes:
    return next((item.value for item in snapshot.items if item.key == key), b"")


def _changed_at(snapshot: Snapshot, key: str) -> int:
    return next((item.mod_revision for item in snapshot.items if item.key == key), 0)
