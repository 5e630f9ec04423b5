"""Ranks from membership: every node computes the same ranks from the same list, so none has to be sent.

Nodes stand in the order of their group ranks. Global ranks count workers over all nodes in that order. Role ranks count them over
the nodes of the same role only. Nodes may have different roles and different numbers of workers.

Invariants: global ranks are 0..world-1, each once; role ranks are 0..role world-1, each once within the role; the ranks of one
node are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.base.records import Value

__all__ = ["Member", "WorkerRanks", "assign"]


class Member(Value):
    """What ranks depend on at one node; its group rank is its place in the list."""

    role: str
    local_world_size: int


class WorkerRanks(Value):
    local_rank: int
    global_rank: int
    role_rank: int
    world_size: int
    role_world_size: int


def assign(members: Sequence[Member], group_rank: int) -> tuple[WorkerRanks, ...]:
    """The ranks of the workers of the node at `group_rank`."""
    me = members[group_rank]
    first_global = _count(members[:group_rank])
    first_in_role = _count(members[:group_rank], me.role)
    world_size, role_world_size = _count(members), _count(members, me.role)
    return tuple(
        WorkerRanks(local, first_global + local, first_in_role + local, world_size, role_world_size)
        for local in range(me.local_world_size)
    )


def _count(members: Sequence[Member], role: str | None = None) -> int:
    return sum(member.local_world_size for member in members if role is None or member.role == role)
