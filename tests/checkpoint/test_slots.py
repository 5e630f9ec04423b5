"""Snapshots in memory: what comes out is what went in, whenever the worker was killed."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from rallypoint.checkpoint import slots as module
from rallypoint.checkpoint.layout import BODY_AT, MARK_BYTES, Mark, newest_common, place_parts, read_mark
from rallypoint.checkpoint.slots import ROOM_BYTES, Slots, begin_write, finish_write
from rallypoint.checkpoint.trees import put_together, take_apart
from rallypoint.errors import CheckpointMemoryError

PLENTY = 1 << 30


class Array:
    """As numpy's, so far as pickle is concerned: its memory is handed out and not copied."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __reduce_ex__(self, protocol: int) -> Any:
        return Array, (pickle.PickleBuffer(self.content),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Array) and bytes(other.content) == bytes(self.content)

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture
def fds() -> Iterator[list[int]]:
    made = [os.memfd_create("slot") for _ in range(2)]
    yield made
    for fd in made:
        os.close(fd)


def state_of(step: int, size: int = 100_000) -> dict[str, Any]:
    return {"step": step, "weights": [Array(bytes([step % 256]) * size), Array(b""), Array(bytearray(b"x" * step))], "name": "é"}


def steps_of(slots: Slots) -> list[int]:
    return [step for _, step in slots.moments()]


def test_the_two_latest_are_kept(fds: list[int]) -> None:
    slots = Slots(fds, PLENTY, rank=1, world=2)
    assert steps_of(slots) == []
    for step in range(5):
        slots.save(step, state_of(step))
        assert sorted(steps_of(slots)) == [one for one in (step - 1, step) if one >= 0]
        for moment in slots.moments():
            assert slots.load(moment, copy=True) == state_of(moment[1])


def test_what_was_saved_behind_the_beginning_of_a_generation_is_not_mixed_with_it(fds: list[int]) -> None:
    """This rank had saved 7, another had not: all begin again from 6, and save 7 anew."""
    before = Slots(fds, PLENTY, rank=0, world=2, generation=3)
    before.save(6, "6 of 3")
    before.save(7, "7 of 3")
    after = Slots(fds, PLENTY, rank=0, world=2, generation=4)
    newest = newest_common([after.moments(), [(3, 5), (3, 6)]])
    assert newest == (3, 6)
    after.begin_from(newest)
    after.save(7, "7 of 4")
    assert sorted(after.moments()) == [(3, 6), (4, 7)], "what it began from is kept until all can have the next"
    assert after.load((3, 6), copy=True) == "6 of 3"
    assert newest_common([after.moments(), [(3, 6), (3, 7)]]) == (3, 6), "two that took the same step apart from each other"
    after.save(8, "8 of 4")
    assert sorted(after.moments()) == [(4, 7), (4, 8)]


def test_a_save_that_nobody_has_waited_for_is_none(fds: list[int]) -> None:
    slots = Slots(fds, PLENTY, rank=0, world=1)
    slots.save(1, state_of(1))
    finish = slots.begin_save(2, state_of(2))
    assert steps_of(slots) == [1]
    finish()
    assert sorted(steps_of(slots)) == [1, 2]
    assert slots.load((1, 2), copy=True) == state_of(2)


def test_of_two_of_the_same_step_the_last_counts(fds: list[int]) -> None:
    slots = Slots(fds, PLENTY, rank=0, world=1)
    for text in ("once", "twice", "again"):
        slots.save(1, text)
        assert slots.load((1, 1), copy=True) == text


def test_others_see_only_what_is_theirs(fds: list[int]) -> None:
    Slots(fds, PLENTY, rank=1, world=2).save(7, state_of(7))
    assert steps_of(Slots(fds, PLENTY, rank=1, world=2)) == [7]
    assert steps_of(Slots(fds, PLENTY, rank=0, world=2)) == []
    assert steps_of(Slots(fds, PLENTY, rank=1, world=3)) == []


def test_a_copy_is_the_programs_own_and_a_view_is_not(fds: list[int]) -> None:
    slots = Slots(fds, PLENTY, rank=0, world=1)
    slots.save(1, {"a": Array(bytearray(b"1234"))})
    copy, view = slots.load((1, 1), copy=True)["a"].content, slots.load((1, 1), copy=False)["a"].content
    memoryview(copy)[:] = b"----"
    assert slots.load((1, 1), copy=True) == {"a": Array(b"1234")}
    memoryview(view)[:] = b"5678"
    assert slots.load((1, 1), copy=True) == {"a": Array(b"5678")}


def test_states_may_grow_and_shrink(fds: list[int]) -> None:
    slots = Slots(fds, PLENTY, rank=0, world=1)
    for step, size in enumerate([10, 5 * ROOM_BYTES, 20, 3 * ROOM_BYTES, 0, 1]):
        slots.save(step, state_of(step, size))
        assert slots.load((1, step), copy=True) == state_of(step, size)
    assert sum(os.fstat(fd).st_size for fd in fds) <= 4 * ROOM_BYTES, "what is not needed any more is given back"


def test_too_much_is_refused_and_nothing_lost(fds: list[int]) -> None:
    slots = Slots(fds, 4 * ROOM_BYTES, rank=3, world=4)
    slots.save(1, state_of(1))
    slots.save(2, state_of(2))
    with pytest.raises(CheckpointMemoryError, match=r"rank 3 takes 3,\d+,\d+ bytes, and 2 are kept; --checkpoint"):
        slots.save(3, state_of(3, 3 * ROOM_BYTES))
    assert sorted(steps_of(slots)) == [1, 2]
    assert slots.load((1, 2), copy=True) == state_of(2)
    assert isinstance(CheckpointMemoryError(""), MemoryError)


def test_memory_that_the_system_does_not_have_is_told(fds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots(fds, PLENTY, rank=0, world=1)
    slots.save(1, state_of(1))

    def refuse(fd: int, begin: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "posix_fallocate", refuse)
    with pytest.raises(CheckpointMemoryError, match="there is no memory for a snapshot of"):
        slots.save(2, state_of(2))
    assert steps_of(slots) == [1]


def test_what_cannot_be_pickled_costs_nothing(fds: list[int]) -> None:
    slots = Slots(fds, PLENTY, rank=0, world=1)
    slots.save(1, state_of(1))
    slots.save(2, state_of(2))
    with pytest.raises((pickle.PicklingError, AttributeError)):
        slots.save(3, {"f": lambda: None})
    assert sorted(steps_of(slots)) == [1, 2]


# --- killed in the middle --------------------------------------------------------------------------------------------------


class Stores:
    """Memory that remembers each store into it, in order; `begin` is where this view of it begins."""

    def __init__(self, log: list[tuple[int, bytes]], begin: int = 0) -> None:
        self._log, self._begin = log, begin

    def __getitem__(self, part: slice) -> Stores:
        return Stores(self._log, self._begin + (part.start or 0))

    def __setitem__(self, part: slice, content: Any) -> None:
        self._log.append((self._begin + (part.start or 0), bytes(content)))


def test_killed_after_any_store_there_is_the_old_snapshot_the_new_one_or_none(fds: list[int]) -> None:
    """Byte by byte: no order within one store is taken for granted but that from front to back."""
    old, new = state_of(1, 50), state_of(2, 60)
    log: list[tuple[int, bytes]] = []
    head, parts = take_apart(new)
    places, size = place_parts(len(head), [part.size for part in parts])
    begin_write(Stores(log), head, parts, places)  # type: ignore[arg-type]
    finish_write(Stores(log), Mark(2, 1, 2, 0, 1, len(head), size), parts)  # type: ignore[arg-type]
    Slots(fds, PLENTY, rank=0, world=1).save(1, old)
    memory = bytearray(os.pread(fds[0], ROOM_BYTES, 0))
    seen = set()
    for at, content in log:
        for offset, byte in enumerate(content):
            memory[at + offset] = byte
            mark = read_mark(bytes(memory[:MARK_BYTES]))
            if mark is None:
                seen.add(None)
                continue
            seen.add(mark.step)
            body = memoryview(memory)[BODY_AT : BODY_AT + mark.body_bytes]
            assert put_together(body[: mark.head_bytes], body, place_parts) == (old if mark.step == 1 else new)
    assert seen >= {2, None}
    assert mark is not None
    assert mark.step == 2


def save_and_be_killed(slots: Slots, line: int, size: int = 100_000) -> bool:
    """A child that is killed before the line of ours with this number, counted in the order in which they run; whether it was."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal count
            if "checkpoint" not in frame.f_code.co_filename:
                return None
            if event == "line":
                count += 1
                if count == line:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        slots.save(3, state_of(3, size))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_process_killed_at_any_line_of_a_save_leaves_whole_snapshots(fds: list[int]) -> None:
    slots = Slots(fds, PLENTY, rank=0, world=1)
    line, was_killed, seen = 0, True, set()
    while was_killed:
        line += 1
        for step in (1, 2):
            slots.save(step, state_of(step))
        was_killed = save_and_be_killed(slots, line)
        steps = frozenset(steps_of(slots))
        seen.add(steps)
        assert steps in ({1, 2}, {2}, {2, 3})
        for step in steps:
            assert slots.load((1, step), copy=True) == state_of(step)
    assert line > 20
    assert seen == {frozenset({1, 2}), frozenset({2}), frozenset({2, 3})}
