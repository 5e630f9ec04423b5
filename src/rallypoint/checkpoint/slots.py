"""The slots of one worker, as that sees them: files in the agent's memory, mapped here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rallypoint.base import environment
from rallypoint.checkpoint.ahead import Mapped, adopt
from rallypoint.checkpoint.devices import Carrier, DevicePart, Ferry
from rallypoint.checkpoint.layout import (
    BODY_AT,
    MARK_BYTES,
    NO_MARK,
    Begun,
    Mark,
    Moment,
    place_parts,
    read_mark,
    slot_to_write,
    write_mark,
)
from rallypoint.checkpoint.pages import map_file
from rallypoint.checkpoint.rooms import make_room, room_of
from rallypoint.checkpoint.trees import Part, put_together, take_apart
from rallypoint.errors import CheckpointMemoryError, UsageError

__all__ = ["Slots", "begin_write", "finish_write"]

ROOM_BYTES = 1 << 20  # a slot has a multiple of this: a snapshot that grows a little needs no other room


class Slots:
    """Where snapshots of this rank are written and read; `most_bytes` is for all slots together."""

    def __init__(
        self, fds: Sequence[int], most_bytes: int, rank: int, world: int, generation: int = 1, mapped: Sequence[Mapped] = ()
    ) -> None:
        """`mapped` was ahead of its time; what of it is in these files is used."""
        self._fds, self._most_bytes, self._rank, self._world, self._generation = fds, most_bytes, rank, world, generation
        self._begun: Begun | None = None  # once that is known
        self._mapped = adopt(mapped, fds)  # by slot, for good: where tensors on devices are saved

    def marks(self) -> list[Mark | None]:
        return [read_mark(os.pread(fd, MARK_BYTES, 0)) for fd in self._fds]

    def moments(self) -> list[Moment]:
        """Those of which this rank has a snapshot, made in a world like this one."""
        return [mark.moment for mark in self.marks() if mark is not None and self._is_ours(mark)]

    def _is_ours(self, mark: Mark) -> bool:
        return (mark.rank, mark.world) == (self._rank, self._world)

    def begin_from(self, moment: Moment | None) -> None:
        """All ranks have agreed on it; other snapshots of earlier generations are of no use any more."""
        self._begun = Begun(self._generation, moment)

    # --- writing -----------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Any) -> None:
        self.begin_save(step, state)()

    def begin_save(self, step: int, state: Any) -> Callable[[], None]:
        """What is on devices is on its way; the snapshot is complete when what this returns has been called."""
        head, parts = take_apart(state)
        places, size = place_parts(len(head), [part.size for part in parts])
        marks = self.marks()
        slot = slot_to_write(marks, self._rank, self._world, self._begun)
        self._make_room(slot, BODY_AT + size)
        count = max((one.count for one in marks if one), default=0) + 1
        mark = Mark(count, self._generation, step, self._rank, self._world, len(head), size)
        has_device = any(isinstance(part, DevicePart) for part in parts)
        view = self._pin(slot).memory if has_device else self._view(slot, BODY_AT + size)
        begin_write(view, head, parts, places)
        return partial(finish_write, view, mark, parts)

    def _pin(self, slot: int) -> Mapped:
        """The whole slot, mapped for good and known to the driver."""
        mapped = self._held(slot)
        if mapped is None:
            mapped = self._mapped[slot] = Mapped(self._fds[slot], room_of(self._fds[slot]))
        mapped.register(_torch())
        return mapped

    def _held(self, slot: int) -> Mapped | None:
        """The slot as it is mapped for good, if it is that and has not got another room meanwhile."""
        mapped = self._mapped.get(slot)
        if mapped is not None and mapped.room != room_of(self._fds[slot]):
            self._let_go(slot)
            return None
        return mapped

    def _let_go(self, slot: int) -> None:
        mapped = self._mapped.pop(slot, None)
        if mapped is not None:
            mapped.close()

    def _view(self, slot: int, size: int) -> memoryview:
        """The beginning of a slot."""
        mapped = self._held(slot)
        fd = self._fds[slot]
        return (map_file(fd, max(size, os.fstat(fd).st_size)) if mapped is None else mapped.memory)[:size]

    def _make_room(self, slot: int, size: int) -> None:
        """Refused while nothing is lost. What is reserved here cannot be missing in the middle of a copy."""
        sizes = [os.fstat(fd).st_size for fd in self._fds]
        here, room = sizes.pop(slot), -(-size // ROOM_BYTES) * ROOM_BYTES
        if room + sum(max(other, room) for other in sizes) > self._most_bytes:
            raise CheckpointMemoryError(
                f"a snapshot of rank {self._rank} takes {size:,} bytes, and {len(self._fds)} are kept; --checkpoint-memory leaves"
                f" {self._most_bytes:,} bytes to each worker"
            )
        if size <= here <= 2 * room:
            return
        self._let_go(slot)
        try:
            make_room(self._fds[slot], room)
        except OSError as error:
            raise CheckpointMemoryError(f"there is no memory for a snapshot of {size:,} bytes: {error.strerror}") from error

    # --- reading -----------------------------------------------------------------------------------------------------------

    def load(self, moment: Moment, copy: bool, device: Any = None) -> Any:
        """The state as it was then, of which there is a snapshot; where that was saved more than once, the last."""
        marks = [(slot, mark) for slot, mark in enumerate(self.marks()) if mark is not None]
        kept = [(slot, mark) for slot, mark in marks if self._is_ours(mark) and mark.moment == moment]
        slot, mark = max(kept, key=lambda one: one[1].count)
        body = self._view(slot, BODY_AT + mark.body_bytes)[BODY_AT:]
        carrier = None if device is None else self._carrier(slot, device, body)
        try:
            return put_together(body[: mark.head_bytes], body, place_parts, copy, carrier)
        finally:
            if carrier is not None:
                carrier.close()

    def _carrier(self, slot: int, device: Any, body: memoryview) -> Carrier | Ferry:
        mapped = self._held(slot)
        if mapped is not None and mapped.is_registered:
            return Ferry(_torch(), device, body)
        return Carrier(_torch(), device, partial(_read, self._fds[slot]))


def _torch() -> Any:
    torch = environment.imported_torch()
    if torch is None:
        raise UsageError("to put tensors on a device, import torch before checkpoint.load()")
    return torch


def _read(fd: int, target: memoryview, begin: int) -> None:
    """Read, and not mapped: for a slot that is new to this process, the kernel would map each of its pages by itself."""
    while target:
        count = os.preadv(fd, [target], BODY_AT + begin)
        target, begin = target[count:], begin + count


# In this order: whoever is killed within it, or between the two, leaves a slot without a mark, or a whole snapshot.


def begin_write(memory: memoryview, head: bytes, parts: Sequence[Part | DevicePart], places: Sequence[int]) -> None:
    memory[:MARK_BYTES] = NO_MARK
    body = memory[BODY_AT:]
    body[: len(head)] = head
    for part, begin in zip(parts, places, strict=True):
        part.copy_to(body[begin : begin + part.size])


def finish_write(memory: memoryview, mark: Mark, parts: Sequence[Part | DevicePart]) -> None:
    for part in parts:
        part.wait()
    memory[:MARK_BYTES] = write_mark(mark)
