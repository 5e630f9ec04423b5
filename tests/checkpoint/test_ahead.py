"""Slots that a process on standby has mapped while their worker still writes to them: of use, or let go, and never changed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoint.test_slots import PLENTY, Array, save_and_be_killed, state_of

from rallypoint.checkpoint import ahead as module
from rallypoint.checkpoint import slots
from rallypoint.checkpoint.ahead import Ahead, Mapped
from rallypoint.checkpoint.layout import BODY_AT, MARK_BYTES
from rallypoint.checkpoint.rooms import NAME_AT, NO_NAME, clear_room, make_room, room_of
from rallypoint.checkpoint.slots import Slots

ROOM_BYTES = 1 << 14
SIZES = [10, 2 * ROOM_BYTES, 5 * ROOM_BYTES]


class Node:
    """The memory of two workers, one that runs and the process on standby for it.

    Whenever a file becomes smaller, some of its pages are others from then on: how often that was, and how often it had been when
    somebody mapped the file, is counted here apart from rooms and their names.
    """

    def __init__(self, stack: contextlib.ExitStack) -> None:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        truncate = os.ftruncate
        self.shelves = [[os.memfd_create("slot") for _ in range(2)] for _ in range(2)]
        for fd in (fd for shelf in self.shelves for fd in shelf):
            stack.callback(os.close, fd)
        self.cuts: dict[int, int] = {}
        self.seen: dict[int, int] = {}  # by what is mapped, how often its file had been cut

        def cut(fd: int, size: int) -> None:
            status = os.fstat(fd)
            self.cuts[status.st_ino] = self.cuts.get(status.st_ino, 0) + (size < status.st_size)
            truncate(fd, size)

        class Noted(Mapped):
            def __init__(noted, fd: int, room: Any, flags: int = 0) -> None:
                self.seen[id(noted)] = self.cuts.get(os.fstat(fd).st_ino, 0)
                super().__init__(fd, room, flags)

        patch.setattr(slots, "ROOM_BYTES", ROOM_BYTES)
        patch.setattr(os, "ftruncate", cut)
        patch.setattr(module, "Mapped", Noted)
        self.step = 0
        self.worker = self.new_worker(0)
        self.ahead = Ahead([os.dup(fd) for fd in self.shelves[0]])
        stack.callback(self.ahead.hand_over)

    def new_worker(self, shelf: int, mapped: list[Mapped] | None = None) -> Slots:
        return Slots(self.shelves[shelf], PLENTY, rank=0, world=1, mapped=mapped or [])

    def save(self, size: int) -> None:
        self.step += 1
        self.worker.save(self.step, state_of(self.step, size))

    def look(self) -> None:
        before = [os.pread(fd, os.fstat(fd).st_size, 0) for fd in self.shelves[0]]
        self.ahead.look()
        assert [os.pread(fd, os.fstat(fd).st_size, 0) for fd in self.shelves[0]] == before, "nothing is changed"

    def break_off(self, slot: int) -> None:
        """Somebody was killed while it made other room."""
        fd = self.shelves[0][slot]
        os.pwrite(fd, bytes(MARK_BYTES), 0)
        os.pwrite(fd, NO_NAME, NAME_AT)
        os.ftruncate(fd, ROOM_BYTES)

    def do(self, action: tuple[str, int]) -> None:
        kind, number = action
        match kind:
            case "save":
                self.save(SIZES[number])
            case "look":
                self.look()
            case "clear":
                clear_room(self.shelves[0][number % 2])
            case "fetch":
                make_room(self.shelves[0][number % 2], BODY_AT + SIZES[number])
            case "break off":
                self.break_off(number % 2)

    def check_successor(self, shelf: int) -> None:
        """What was mapped in vain is let go; what is used is what the file consists of; and all is as for anybody else."""
        successor = self.new_worker(shelf, self.ahead.hand_over())
        for slot, mapped in successor._mapped.items():
            inode = os.fstat(self.shelves[shelf][slot]).st_ino
            assert mapped.room.inode == inode
            assert self.seen[id(mapped)] == self.cuts.get(inode, 0), "its pages are those of the file"
        fresh = self.new_worker(shelf)
        assert successor.moments() == fresh.moments()
        for moment in fresh.moments():
            assert successor.load(moment, copy=True) == fresh.load(moment, copy=True) == state_of(moment[1], self.size_of(moment))
        for size in SIZES:
            self.step += 1
            successor.save(self.step, state_of(self.step, size))
            assert fresh.load((1, self.step), copy=True) == state_of(self.step, size)

    def size_of(self, moment: tuple[int, int]) -> int:
        return len(self.new_worker(0).load(moment, copy=True)["weights"][0].content)


actions = st.tuples(st.sampled_from(["save", "save", "look", "look", "look", "clear", "fetch", "break off"]), st.integers(0, 2))


@given(st.lists(actions, max_size=12), st.sampled_from([0, 0, 1]))
def test_whatever_happened_before_its_turn(done: list[tuple[str, int]], shelf: int) -> None:
    with contextlib.ExitStack() as stack:
        node = Node(stack)
        for action in done:
            node.do(action)
        node.check_successor(shelf)


@pytest.fixture
def node() -> Any:
    with contextlib.ExitStack() as stack:
        yield Node(stack)


def look_all(node: Node) -> None:
    while node.ahead.look():
        pass


def test_what_was_mapped_ahead_is_what_is_used(node: Node) -> None:
    for _ in range(3):
        node.save(SIZES[1])
    look_all(node)
    mapped = node.ahead.hand_over()
    assert len(mapped) == 2
    successor = node.new_worker(0, mapped)
    view = successor.load((1, 3), copy=False)["weights"][0].content
    assert any(memoryview(one.memory).obj is memoryview(view).obj for one in mapped), "it is not mapped again"
    successor.save(4, state_of(4, SIZES[1]))
    assert set(successor._mapped.values()) == set(mapped), "nor to save"
    assert bytes(view[:4]) == bytes([3] * 4), "and the view is that of step 3, which is kept still"


@pytest.mark.parametrize("change", ["save", "clear", "other worker"])
def test_what_changes_while_it_is_mapped_is_not_used(node: Node, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at its name and the mapping; the turn comes before the next look."""
    node.save(SIZES[2])
    populate: Callable[..., Any] = Mapped.__init__

    def interrupted(mapped: Mapped, fd: int, room: Any, flags: int) -> None:
        if change == "save":
            node.save(SIZES[0])
            node.save(SIZES[0])
        elif change == "clear":
            clear_room(node.shelves[0][0])
        populate(mapped, fd, room, flags)

    monkeypatch.setattr(Mapped, "__init__", interrupted)
    node.ahead.look()
    mapped = node.ahead.hand_over()
    assert not node.new_worker(1 if change == "other worker" else 0, mapped)._mapped


def test_a_worker_killed_at_any_line_of_a_save_that_takes_other_room_leaves_what_can_be_taken_over(node: Node) -> None:
    """Here the process on standby looks at what the killed one has left, and has looked before."""
    line, was_killed, seen = 0, True, set()
    while was_killed:
        line += 1
        for fd in node.shelves[0]:
            clear_room(fd)
        node.worker = node.new_worker(0)
        for step in (1, 2):
            node.worker.save(step, state_of(step, SIZES[2]))
        look_all(node)
        was_killed = save_and_be_killed(node.worker, line, SIZES[0])  # of a small state: the room is given back
        successor = node.new_worker(0, list(node.ahead._mapped.values()))
        seen.add((len(successor._mapped), len(successor.moments())))
        for slot, mapped in successor._mapped.items():
            assert mapped.room == room_of(node.shelves[0][slot])
            assert mapped.room.is_settled
        for _, step in successor.moments():
            assert successor.load((1, step), copy=True) == state_of(step, SIZES[2] if step < 3 else SIZES[0])
        look_all(node)
    assert seen >= {(2, 2), (1, 1), (1, 2)}


def test_one_that_cannot_be_mapped_costs_nothing_but_the_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    node.save(SIZES[0])
    monkeypatch.setattr(Mapped, "__init__", refuse)
    assert node.ahead.look()
    assert not node.ahead.look(), "it is not tried again"
    monkeypatch.undo()
    node.check_successor(0)


def test_views_outlive_what_was_mapped(node: Node) -> None:
    node.save(SIZES[1])
    look_all(node)
    successor = node.new_worker(0, node.ahead.hand_over())
    view = successor.load((1, 1), copy=False)["weights"][0]
    for step in range(2, 5):
        successor.save(step, state_of(step, SIZES[2]))
    assert len(view.content) == SIZES[1]
    assert isinstance(view, Array)


@pytest.mark.parametrize("call", ["ftruncate", "posix_fallocate", "urandom"])
def test_a_room_that_was_not_finished_has_no_name(node: Node, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def be_killed(*_: Any) -> None:
        raise KeyboardInterrupt

    node.save(SIZES[1])
    fd = node.shelves[0][0]
    assert room_of(fd).is_settled
    monkeypatch.setattr(os, call, be_killed)
    with pytest.raises(KeyboardInterrupt):
        make_room(fd, SIZES[2])
    assert not room_of(fd).is_settled
