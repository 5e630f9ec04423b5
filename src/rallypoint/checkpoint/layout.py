"""How a snapshot lies in memory, and which one counts. Pure.

Each worker has two slots, files in memory, and three if copies go to another node. A slot begins with a page that holds its mark;
the rest is the snapshot: what was pickled, then the buffers, each on a boundary. The mark is taken away before the first byte of
a slot is changed and put there after the last, so a worker that is killed at any moment leaves the others as they were, and in
this one a whole one or none.

A snapshot counts only if every rank of the world has one of the same step, made in the same generation: what a generation saved
after the step that the next one begins from is of no use any more, though that one saves the same steps again.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from rallypoint.base.records import Value

__all__ = [
    "BODY_AT", "MARK_BYTES", "NO_MARK", "Begun", "Mark", "Moment", "Place", "Shares", "newest_common", "place_parts", "read_mark",
    "read_place", "share_out", "slot_to_write", "write_mark", "write_place",
]  # fmt: skip

BODY_AT = 4096
BOUNDARY = 64  # as numerical libraries like it
_MAGIC = b"RALLYCK2"
_FIELDS = struct.Struct("<8sQqqIIQQ")
_SUM = struct.Struct("<I")
MARK_BYTES = _FIELDS.size + _SUM.size
NO_MARK = bytes(MARK_BYTES)
JOB = 2**32  # so many generations no job has

Moment = tuple[int, int]  # a generation, and a step that was saved in it; the newest is the greatest


class Mark(Value):
    """What is in a slot: the snapshot of this rank after this step. `count` tells which of two was made later."""

    count: int
    generation: int
    step: int
    rank: int
    world: int
    head_bytes: int
    body_bytes: int

    @property
    def moment(self) -> Moment:
        return self.generation, self.step

    def of_earlier_job(self) -> Mark:
        """As it counts in another job, whose generations are all newer."""
        return self.replace(generation=self.generation - JOB)


class Begun(Value):
    """What all ranks of a generation have agreed to begin from; None: from nothing that was saved."""

    generation: int
    at: Moment | None


class Place(Value):
    """What a worker is told: the numbers of its slots' files, how much they may take together, and its line to the agent."""

    files: tuple[int, ...]
    most_bytes: int
    line: int | None


class Shares(Value):
    """How a node's memory is divided: what each worker has for its slots, and what copies of others' snapshots have in all."""

    each_bytes: int
    slots: int
    guest_bytes: int

    @property
    def largest_bytes(self) -> int:
        """So much a snapshot can be that a worker saves again and again."""
        return self.each_bytes // self.slots


def share_out(most_bytes: int, workers: int, has_copies: bool) -> Shares:
    """With copies half of it is for those of another node, and a third slot for the snapshot that is on its way there."""
    each_bytes = most_bytes // (2 * workers if has_copies else workers)
    return Shares(each_bytes, 3 if has_copies else 2, most_bytes - workers * each_bytes)


def write_place(place: Place) -> str:
    return f"{','.join(map(str, place.files))}:{place.most_bytes}:{'' if place.line is None else place.line}"


def read_place(text: str) -> Place:
    files, most_bytes, line = text.split(":")
    return Place(tuple(map(int, files.split(","))), int(most_bytes), int(line) if line else None)


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


def slot_to_write(marks: Sequence[Mark | None], rank: int, world: int, begun: Begun | None = None) -> int:
    """One without a snapshot that could still count for this rank; else the oldest."""
    useless = [slot for slot, mark in enumerate(marks) if mark is None or not _may_count(mark, rank, world, begun)]
    if useless:
        return useless[0]
    return min(range(len(marks)), key=lambda slot: marks[slot].count)  # type: ignore[union-attr]  # there are only marks here


def _may_count(mark: Mark, rank: int, world: int, begun: Begun | None) -> bool:
    if (mark.rank, mark.world) != (rank, world):
        return False
    return begun is None or mark.generation == begun.generation or mark.moment == begun.at


def newest_common(moments_by_rank: Sequence[Sequence[Moment]]) -> Moment | None:
    """The newest of which all ranks have a snapshot; None if there is none."""
    common = set.intersection(*map(set, moments_by_rank)) if moments_by_rank else set()
    return max(common, default=None)


def place_parts(head_bytes: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each buffer begins behind a head of that length, from the start of the body, and how long the whole is."""
    places, end = [], head_bytes
    for size in sizes:
        begin = -(-end // BOUNDARY) * BOUNDARY
        places.append(begin)
        end = begin + size
    return places, end
