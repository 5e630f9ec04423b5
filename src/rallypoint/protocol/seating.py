"""Who sits where: from the nodes that take part, and where they sat before, to an order, and from the order to ranks.

A node keeps its group rank from one generation to the next as long as the world has such a rank. A node that was started anew
takes the rank that its name had. Rank hints are honoured: an explicit one before all else, one that was found in the
environment where nobody sits. Whoever has none of these fills the gaps, in the natural order of names: node2 before node10.

Invariants: group ranks are 0..n-1, each once; global ranks are 0..world-1, each once, and follow group ranks; ranks within a role
likewise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from rallypoint.base.records import Value
from rallypoint.protocol.job_records import NodeRecord, Seat

__all__ = ["Candidate", "Seated", "arrange", "natural", "preferred", "seats"]

_LAST = 1 << 31


class Candidate(Value):
    """A node that could take part; `arrival` orders nodes by when they came."""

    id: str
    record: NodeRecord
    arrival: int


class Seated(Value):
    """Where a node sat, and under which name."""

    name: str
    group_rank: int


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts numbers inside names as numbers."""
    parts = re.split(r"([0-9]+)", name)
    return tuple((0, len(number := part.lstrip("0")), number) if part.isdecimal() else (1, 0, part) for part in parts if part)


def preferred(candidates: Iterable[Candidate], before: Mapping[str, Seated]) -> list[Candidate]:
    """The candidates, those first who are to take part when there is no room for all: members, then by hint, then by arrival."""

    def key(one: Candidate) -> tuple[int, int, int]:
        seat = before.get(one.id)
        if seat is not None:
            return 0, seat.group_rank, one.arrival
        return (1, _hint(one), one.arrival) if one.record.hint_is_explicit else (2, 0, one.arrival)

    return sorted(candidates, key=key)


def arrange(chosen: Sequence[Candidate], before: Mapping[str, Seated]) -> list[Candidate]:
    """The chosen nodes in the order of their group ranks."""
    places: dict[int, Candidate] = {}
    placed: set[str] = set()
    for wish in (_explicit_hints(chosen), _old_places(chosen, before), _found_hints(chosen)):
        for one in chosen:
            rank = wish.get(one.id, -1)
            if one.id not in placed and 0 <= rank < len(chosen) and rank not in places:
                places[rank] = one
                placed.add(one.id)
    waiting = [one for one in chosen if one.id not in placed]
    waiting.sort(key=lambda one: (_hint(one), natural(one.record.name), one.arrival))
    rest = iter(waiting)
    return [places[rank] if rank in places else next(rest) for rank in range(len(chosen))]


def _hint(one: Candidate) -> int:
    return one.record.rank_hint if one.record.rank_hint >= 0 else _LAST


def _explicit_hints(chosen: Sequence[Candidate]) -> dict[str, int]:
    return {one.id: one.record.rank_hint for one in chosen if one.record.hint_is_explicit}


def _found_hints(chosen: Sequence[Candidate]) -> dict[str, int]:
    return {one.id: one.record.rank_hint for one in chosen if one.record.rank_hint >= 0 and not one.record.hint_is_explicit}


def _old_places(chosen: Sequence[Candidate], before: Mapping[str, Seated]) -> dict[str, int]:
    """Where each sat; a new process sits where its name did, if that process is gone."""
    wishes = {one.id: before[one.id].group_rank for one in chosen if one.id in before}
    left: dict[str, list[int]] = {}
    for node_id, seat in before.items():
        if node_id not in wishes:
            left.setdefault(seat.name, []).append(seat.group_rank)
    for one in sorted(chosen, key=lambda one: one.arrival):
        places = left.get(one.record.name)
        if one.id not in wishes and places:
            places.sort()
            wishes[one.id] = places.pop(0)
    return wishes


def seats(generation: int, attempt: int, order: Sequence[Candidate]) -> dict[str, Seat]:
    """The seat of each node, given all of them in the order of their group ranks."""
    world_size = sum(one.record.workers for one in order)
    role_sizes: dict[str, int] = {}
    for one in order:
        role_sizes[one.record.role] = role_sizes.get(one.record.role, 0) + one.record.workers
    found: dict[str, Seat] = {}
    first_rank, first_in_role = 0, dict.fromkeys(role_sizes, 0)
    for group_rank, one in enumerate(order):
        role, workers = one.record.role, one.record.workers
        found[one.id] = Seat(
            generation,
            attempt,
            one.record.name,
            group_rank,
            len(order),
            first_rank,
            world_size,
            first_in_role[role],
            role_sizes[role],
        )
        first_rank += workers
        first_in_role[role] += workers
    return found
