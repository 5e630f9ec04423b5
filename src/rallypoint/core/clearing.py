"""When what is left of a job in a store that outlives it may be deleted, so that a job of that name can begin anew."""

from __future__ import annotations

from rallypoint.core import job_records as job
from rallypoint.core.coordination import Compare, Delete, Snapshot, Transaction

__all__ = ["clearing"]

MOST_DELETED = 100  # in one transaction; a job keeps the seats and data of its latest generations only


def clearing(left: Snapshot) -> Transaction | None:
    """What deletes the rest of a job of which no node is alive: it has ended, or was killed as a whole. None: it is not so.

    Every node that is alive has a lease, with its record bound to it. Whoever begins anew writes the settings first, so that
    of two who come at once the second deletes nothing. Settings alone may be those of a node that is about to write its record,
    and records are never deleted here: one that has been written since we looked is that of a node that lives.
    """
    keys = {item.key for item in left.items}
    if keys <= {job.SETTINGS} or any(item.lease for item in left.items):
        return None
    groups = sorted({"/".join(key.split("/")[:2]) for key in keys})
    same = (Compare(job.SETTINGS, "mod", _changed_at(left, job.SETTINGS)), Compare(job.LEADER, "create", 0))
    return Transaction(same, tuple(Delete(group, is_prefix=True) for group in groups[:MOST_DELETED]))


def _changed_at(snapshot: Snapshot, key: str) -> int:
    return next((item.mod_revision for item in snapshot.items if item.key == key), 0)
