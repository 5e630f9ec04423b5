"""Why a key has gone. etcd does not say whether a transaction deleted it, or the end of the lease that it was bound to.

But a lease ends with all its keys at one revision. So the engine binds a key of its own to each lease, which no transaction
deletes: if that is still there at the revision at which another key of the lease went, a transaction has deleted that one; if it
is gone too, the lease has run out. An owner who gives its lease back binds that key to something else first, so
that what goes then counts as deleted. Where nobody can tell any more, because etcd has forgotten that revision, the lease
counts as run out, which makes the others wait and does no harm.
"""

from __future__ import annotations

from rallypoint.core.coordination import Event
from rallypoint.store.coordination import UnreachableError
from rallypoint.store.etcd_errors import EtcdError
from rallypoint.store.etcd_gateway import Caller
from rallypoint.store.etcd_words import OPERATIONS, Change, Words, counts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from rallypoint.core.coordination import Cause

    Loss = tuple[int, int]  # of a lease, at a revision

__all__ = ["events_of"]

TXN = "/v3/kv/txn"
ASK_S = 5.0


def events_of(changes: list[Change], words: Words, caller: Caller, now: float) -> list[Event]:
    """The changes, with their causes; asks the cluster where it has to."""
    losses = sorted({(change.lease, change.revision) for change in changes if change.item is None and change.lease})
    were_deleted: set[Loss] = set()
    for first in range(0, len(losses), OPERATIONS):
        were_deleted |= _deleted(losses[first : first + OPERATIONS], words, caller, now + ASK_S)
    return [Event(change.revision, change.key, change.item, _cause(change, were_deleted)) for change in changes]


def _cause(change: Change, were_deleted: set[Loss]) -> Cause:
    if change.item is not None:
        return "put"
    if change.lease is None:
        return "expired"
    return "deleted" if not change.lease or (change.lease, change.revision) in were_deleted else "expired"


def _deleted(losses: Iterable[Loss], words: Words, caller: Caller, deadline: float) -> set[Loss]:
    """Those at whose revision the lease still had its own key."""
    asked = list(losses)
    try:
        answer = caller.call(TXN, words.were_bound(asked), deadline)
    except (EtcdError, UnreachableError):
        return set()
    return {loss for loss, count in zip(asked, counts(answer.fields), strict=False) if count}
