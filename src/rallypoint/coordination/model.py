"""The words in which a job talks to its coordination store, whichever engine that is: etcd v3's, cut to what a job needs.

A store holds *items*: keys (text) with values (bytes). Every change of the store has a *revision*, a number that only grows; an
item knows the revision that created it and the one that changed it last. A *transaction* compares such revisions and then, as
one change, does one of two lists of operations. An item may be bound to a *lease* and is deleted when that ends. A *watch* tells
all changes under a prefix, in their order, from a given revision on.

These are values only. `coordination.keyspace` is what they mean, `coordination.engine` is how an engine offers them.
"""

from __future__ import annotations

from rallypoint.base.records import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    Target = Literal["create", "mod"]
    Cause = Literal["put", "deleted", "expired", "vouched"]

__all__ = [
    "Compare", "Delete", "EndLease", "Event", "Get", "Item", "Operation", "Outcome", "Put", "Read", "Request", "Snapshot",
    "Transaction", "Watch",
]  # fmt: skip


class Item(Value):
    """A key, its value, and the revisions that created and last changed it; `lease` is 0 where it is bound to none."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


class Compare(Value):
    """True if the item at `key` was created, or last changed, at exactly this revision; 0 stands for: there is none."""

    key: str
    target: Target
    revision: int


class Put(Value):
    key: str
    value: bytes
    lease: int = 0


class Delete(Value):
    """Deletes one key, or everything whose key begins with it."""

    key: str
    is_prefix: bool = False


class Get(Value):
    """Reads one key; what is there goes into the outcome's `items`."""

    key: str


class EndLease(Value):
    """Ends somebody's lease, and with it all that is bound to it: its owner's keepalives are not taken any more."""

    lease: int


Operation = Put | Delete | Get | EndLease


class Transaction(Value):
    """If all of `compares` hold, `then`, else `otherwise`."""

    compares: tuple[Compare, ...]
    then: tuple[Operation, ...]
    otherwise: tuple[Operation, ...] = ()


class Outcome(Value):
    """What became of a transaction: whether its comparisons held, the store's revision after it, and what its Gets found.

    `items` has one entry for each Get of the list that was done, in their order; None where there was no such key.
    """

    succeeded: bool
    revision: int
    items: tuple[Item | None, ...] = ()


class Snapshot(Value):
    """All items under a prefix, ordered by key, as they were at `revision`."""

    revision: int
    items: tuple[Item, ...]


class Event(Value):
    """One change. `item` is None when the key was deleted; `cause` says how: by a transaction ("deleted"), because its lease
    ran out in silence or was ended by another ("expired"), or because somebody who must know has testified that all processes of
    its owner are gone ("vouched"). A closed connection is silence: a reset may be seen by one side only.
    """

    revision: int
    key: str
    item: Item | None
    cause: Cause


class Read(Value):
    """Asks for all items under a prefix; answered by a Snapshot."""

    prefix: str


class Watch(Value):
    """Asks for all changes under a prefix from this revision on; answered by None, and by Events."""

    prefix: str
    from_revision: int


Request = Transaction | Read | Watch
