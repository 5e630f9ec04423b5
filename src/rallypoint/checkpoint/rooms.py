"""The room of a slot: the pages of memory that it has, and the name by which they are known again.

A slot's file gets another size when snapshots do. Some of its pages may be others then, and a device to which the old ones were
made known goes on to use those. So each room has a name, which is drawn when the room is made, and taken away before anything is
changed: who finds the same name in the same file twice has had the same pages all the time between. A process that is killed in
the middle leaves a room without a name.
"""

from __future__ import annotations

import os

from rallypoint.base.records import Value
from rallypoint.checkpoint.layout import BODY_AT, MARK_BYTES, NO_MARK
from rallypoint.checkpoint.pages import use_large_pages

__all__ = ["Room", "clear_room", "make_room", "room_of"]

NAME_AT, NAME_BYTES = 512, 16  # behind the mark
NO_NAME = bytes(NAME_BYTES)
assert MARK_BYTES <= NAME_AT < NAME_AT + NAME_BYTES <= BODY_AT


class Room(Value):
    inode: int
    size: int
    name: bytes

    @property
    def is_settled(self) -> bool:
        return self.name != NO_NAME


def room_of(fd: int) -> Room:
    name = os.pread(fd, NAME_BYTES, NAME_AT)
    status = os.fstat(fd)
    return Room(status.st_ino, status.st_size, name.ljust(NAME_BYTES, b"\0"))


def make_room(fd: int, size: int) -> None:
    """For a snapshot that is not there yet; what is there is lost. OSError: there is no memory, and the slot is empty."""
    os.pwrite(fd, NO_MARK, 0)
    os.pwrite(fd, NO_NAME, NAME_AT)
    try:
        os.ftruncate(fd, size)
        use_large_pages(fd, size)
        os.posix_fallocate(fd, 0, size)
    except OSError:
        clear_room(fd)
        raise
    os.pwrite(fd, os.urandom(NAME_BYTES), NAME_AT)


def clear_room(fd: int) -> None:
    os.ftruncate(fd, 0)
