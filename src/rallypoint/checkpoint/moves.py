"""Which snapshots go from which node to which. Pure.

Each node keeps copies for the one before it: node 1 for node 0, node 2 for node 1, and node 0 for the last. When a generation
begins, every node tells what it holds, its own and others'; the first node finds the newest moment of which the snapshots of all
ranks are somewhere, and says who has what is missing elsewhere. So one node reads what all have told, and the others one line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rallypoint.base.json_text import from_json, read_count, read_fields, read_list, read_text, whole
from rallypoint.base.records import Value
from rallypoint.checkpoint.layout import Moment, newest_common

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Holding", "Inventory", "Plan", "decode_inventory", "decode_plan", "encode", "partner_of", "plan_moves"]

Holding = tuple[int, int, int]  # a rank, and the generation and step of its snapshot

MOST = 100_000  # ranks, or snapshots, in one message
TEXT_BYTES = 500
NUMBERS = 2**62


class Inventory(Value):
    """What a node tells: where its snapshots can be had, with which key, whose they are to be, and which it holds."""

    host: str
    port: int
    key: str
    ranks: tuple[int, ...]
    holds: tuple[Holding, ...]


class Plan(Value):
    """From which moment all go on, and, by rank, the nodes that have what its own node lacks for that."""

    moment: Moment | None
    moves: Mapping[int, tuple[int, ...]]


def partner_of(node: int, nodes: int) -> int | None:
    """Who keeps copies for this node."""
    return (node + 1) % nodes if nodes > 1 else None


def plan_moves(inventories: Sequence[Inventory]) -> Plan:
    homes = {rank: node for node, one in enumerate(inventories) for rank in one.ranks}
    owners: dict[int, dict[Moment, list[int]]] = {rank: {} for rank in homes}
    for node, one in enumerate(inventories):
        for rank, *moment in one.holds:
            if rank in owners:
                owners[rank].setdefault((moment[0], moment[1]), []).append(node)
    newest = newest_common([list(moments) for moments in owners.values()])
    if newest is None:
        return Plan(None, {})
    return Plan(newest, {rank: tuple(owners[rank][newest]) for rank, home in homes.items() if home not in owners[rank][newest]})


# --- as it is told ---------------------------------------------------------------------------------------------------------


def encode(told: Inventory | Plan) -> bytes:
    match told:
        case Inventory(host, port, key, ranks, holds):
            fields: dict[str, Any] = {"host": host, "port": port, "key": key, "ranks": list(ranks), "holds": list(holds)}
        case Plan(moment, moves):
            fields = {"moment": moment, "moves": list(moves.items())}
    return json.dumps(fields).encode()


def decode_inventory(data: bytes) -> Inventory:
    """ValueError: it is none."""
    text = partial(read_text, TEXT_BYTES)
    readers: dict[str, Callable[[object], object]] = {
        "host": text,
        "port": read_count,
        "key": text,
        "ranks": partial(read_list, MOST, read_count),
        "holds": partial(read_list, MOST, _read_holding),
    }
    return Inventory(**read_fields(from_json(data), readers))


def decode_plan(data: bytes) -> Plan:
    """ValueError: it is none."""
    fields = read_fields(from_json(data), {"moment": _read_moment, "moves": partial(read_list, MOST, _read_move)})
    return Plan(fields["moment"], dict(fields["moves"]))


_read_number = whole(-NUMBERS, NUMBERS - 1, "must be an integer of 62 bits")


def _read_moment(value: object) -> Moment | None:
    if value is None:
        return None
    generation, step = read_list(2, _read_number, value)
    return generation, step


def _read_holding(value: object) -> Holding:
    rank, generation, step = read_list(3, _read_number, value)
    return rank, generation, step


def _read_move(value: object) -> tuple[int, tuple[int, ...]]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("must be a rank and a list of nodes")
    return read_count(value[0]), read_list(MOST, read_count, value[1])
