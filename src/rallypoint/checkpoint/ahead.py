"""Slots that are mapped before they are used: by a worker for its next saves, and by a process on standby for the turn to come.

To make ten gigabytes known to a GPU's driver takes a second. A process on standby has that done when its turn comes: it is given
the files of the worker whose place it would take, while that one still writes to them. This is safe, because

- it writes nothing: to map a file, and to have its pages pinned, changes none of them. What is mapped is handed out only when the
  agent has given this process its place, which it does after all workers before are gone;
- whether a slot holds a snapshot, and which, is told by its mark as ever, and that is read from the file, then and not before;
- what is mapped is used only for a file that this worker is given then, and only if that still has the room (`rooms`) that it had
  before it was mapped: so what a device reads or writes is what the file consists of. Else, as where another rank came to this
  worker or a snapshot grew at the last moment, it is let go, and the worker goes on as one that never was on standby.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence

from rallypoint.base import environment
from rallypoint.checkpoint.devices import Registered
from rallypoint.checkpoint.pages import map_file
from rallypoint.checkpoint.rooms import Room, room_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Ahead", "Mapped", "adopt"]

_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


class Mapped:
    """A whole room, mapped for good, and made known to the driver where that is wanted. Whoever has a view keeps it mapped."""

    def __init__(self, fd: int, room: Room, flags: int = 0) -> None:
        """OSError: it is smaller by now, or there is no memory for it."""
        self.room = room
        self.memory = map_file(fd, room.size, flags)
        self._registered: Registered | None = None

    @property
    def is_registered(self) -> bool:
        return self._registered is not None and self._registered.is_known

    def register(self, torch: Any) -> None:
        if self._registered is None:
            self._registered = Registered(torch, self.memory)

    def close(self) -> None:
        if self._registered is not None:
            self._registered.close()
            self._registered = None


class Ahead:
    """The slots of another process. Nothing is written to them, and nothing of them is read but their sizes and names."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._fds = list(fds)
        self._mapped: dict[int, Mapped] = {}

    def look(self) -> bool:
        """Map one that can be mapped, or let go of one that is not any more what it was; False if there was nothing to do."""
        for fd in self._fds:
            room, mapped = room_of(fd), self._mapped.get(fd)
            if mapped is not None and mapped.room != room:
                self._mapped.pop(fd).close()
                return True
            if mapped is None and room.is_settled:
                self._map(fd, room)
                return True
        return False

    def _map(self, fd: int, room: Room) -> None:
        try:
            mapped = Mapped(fd, room, _POPULATE)
        except OSError:  # there is not enough memory, or it has changed: the worker will see
            self._fds.remove(fd)
            os.close(fd)
            return
        torch = environment.imported_torch()
        if torch is not None and torch.cuda.is_initialized():  # the program has a device; it is not for us to choose one
            mapped.register(torch)
        self._mapped[fd] = mapped  # if it has changed meanwhile, the next look shows that

    def hand_over(self) -> list[Mapped]:
        """This process is the worker now, or will never be: nothing is held here any more."""
        for fd in self._fds:
            os.close(fd)
        mapped, self._fds, self._mapped = list(self._mapped.values()), [], {}
        return mapped


def adopt(mapped: Iterable[Mapped], fds: Sequence[int]) -> dict[int, Mapped]:
    """Those that these slots still consist of, by slot; the others are let go."""
    slots = {room_of(fd): slot for slot, fd in enumerate(fds)}
    found: dict[int, Mapped] = {}
    for one in mapped:
        if one.room.is_settled and one.room in slots:
            found[slots[one.room]] = one
        else:
            one.close()
    return found
