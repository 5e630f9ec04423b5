"""How a snapshot lies in memory, and which one counts. Pure.

Each worker has two slots, files in memory. A slot begins with a page that holds its mark; the rest is the snapshot: what was
pickled, then the buffers, each on a boundary. The mark is taken away before the first byte of a slot is changed and put there
after the last, so a worker that is killed at any moment leaves the other slot as it was, and in this one a whole one or none.

A snapshot counts only if every rank of the world has one of the same step.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from rallypoint.base.records import Value

__all__ = ["BODY_AT", "MARK_BYTES", "NO_MARK", "Mark", "newest_common", "place_parts", "read_mark", "slot_to_write", "write_mark"]

BODY_AT = 4096
BOUNDARY = 64  # as numerical libraries like it
_MAGIC = b"RALLYCK1"
_FIELDS = struct.Struct("<8sQqIIQQ")
_SUM = struct.Struct("<I")
MARK_BYTES = _FIELDS.size + _SUM.size
NO_MARK = bytes(MARK_BYTES)


class Mark(Value):
    """What is in a slot: the snapshot of this rank after this step. `count` tells which of two is newer."""

    count: int
    step: int
    rank: int
    world: int
    head_bytes: int
    body_bytes: int


def write_mark(mark: Mark) -> bytes:
    fields = _FIELDS.pack(_MAGIC, *mark)
    return fields + _SUM.pack(zlib.crc32(fields))


def read_mark(page: bytes) -> Mark | None:
    """None: there is no snapshot, or not yet, or not any more."""
    fields, rest = page[: _FIELDS.size], page[_FIELDS.size : MARK_BYTES]
    if len(rest) < _SUM.size or _SUM.unpack(rest)[0] != zlib.crc32(fields):
        return None
    magic, *values = _FIELDS.unpack(fields)
    return Mark(*values) if magic == _MAGIC else None


def slot_to_write(marks: Sequence[Mark | None], rank: int, world: int) -> int:
    """One without a snapshot that could still count for this rank; else the older one."""
    useless = [slot for slot, mark in enumerate(marks) if mark is None or (mark.rank, mark.world) != (rank, world)]
    if useless:
        return useless[0]
    return min(range(len(marks)), key=lambda slot: marks[slot].count)  # type: ignore[union-attr]  # there are only marks here


def newest_common(steps_by_rank: Sequence[Sequence[int]]) -> int | None:
    """The newest step that all ranks have; None if there is none."""
    common = set.intersection(*map(set, steps_by_rank)) if steps_by_rank else set()
    return max(common, default=None)


def place_parts(head_bytes: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each buffer begins behind a head of that length, from the start of the body, and how long the whole is."""
    places, end = [], head_bytes
    for size in sizes:
        begin = -(-end // BOUNDARY) * BOUNDARY
        places.append(begin)
        end = begin + size
    return places, end
