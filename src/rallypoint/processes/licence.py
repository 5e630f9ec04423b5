"""Until when workers may run: a page of memory that an agent writes and its warden reads, whatever becomes of the agent.

The others of a job take a node for dead when they have not heard of it for too long, and start workers in its place. By then its
own must be gone, also if its agent was stopped, or hangs. So the agent writes down until when its workers may run, with each
word of its store anew, and the warden, which has nothing else to do, kills them when that time is over. Nothing is sent, nobody
waits, and neither side can hold up the other.

The agent leaves a second thing there: the *testimony*, by which the warden tells the store, once the agent is dead and everything
below the warden is too, that nobody has to wait for this node.

Times are of ``time.monotonic()``, which all processes of a machine share. The time stands there twice, so that one that is only
half written is seen as such. The page is a file in memory that is read and written, not mapped: so there is nothing that a fork
inherits but a file descriptor, and that is closed in it.

With the testimony the others go on at once, instead of waiting until the node has surely stopped; see `coordination.testimony`.
"""

from __future__ import annotations

import array
import marshal
import os
import time

TYPE_CHECKING = False  # the warden imports this, and is to start without the cost of importing typing
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.coordination.engine import Testimony

__all__ = ["FOREVER", "Licence", "read_testimony", "read_until"]

FOREVER = float("inf")  # math.inf, without the cost of importing it

_UNTIL_BYTES = 16
_TESTIMONY_AT = 64
_PAGE_BYTES = 4096
_TRIES = 50
_PAUSE_S = 0.0005  # a writer that lost its processor in the middle of 16 bytes


class Licence:
    """The agent's side. `extend` and `entrust` never wait; one thread calls them, and another passes on `fileno`."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("rally-licence", os.MFD_CLOEXEC)
        _open_licences.add(self)
        os.ftruncate(self._fd, _PAGE_BYTES)
        self.extend(FOREVER)  # from here on no write needs memory: all of it is one page
        self.entrust(None)

    def extend(self, until: float) -> None:
        """Workers may run until then. 0.0: not at all. math.inf: without a limit, as at the start.

        The warden looks when workers are started, and when the time that it knows of is over: who has begun without a limit
        is given one with the next start, and a time that is set back counts from when the one before is over.
        """
        os.pwrite(self._fd, array.array("d", [until, until]).tobytes(), 0)

    def entrust(self, testimony: Testimony | None) -> None:
        """What the warden needs to testify that all of this node's processes are gone; None: it is to be silent."""
        body = marshal.dumps(None if testimony is None else testimony.fields())
        if _TESTIMONY_AT + len(body) > _PAGE_BYTES:
            raise ValueError(f"a testimony of {len(body)} bytes does not fit the page")
        os.pwrite(self._fd, body, _TESTIMONY_AT)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            _open_licences.discard(self)
            os.close(self._fd)
            self._fd = -1


_open_licences: set[Licence] = set()


def _close_in_fork() -> None:
    """A fork is somebody's worker, or the warden that forks workers: none of them may write its own licence."""
    for licence in list(_open_licences):
        licence.close()


os.register_at_fork(after_in_child=_close_in_fork)


# The warden's side.


def read_until(fd: int) -> float:
    """Until when workers may run; 0.0 for a page that stays half written, which a writer does not leave behind."""
    for _ in range(_TRIES):
        times = array.array("d", os.pread(fd, _UNTIL_BYTES, 0))
        if len(times) == 2 and times[0] == times[1]:
            return times[0]
        time.sleep(_PAUSE_S)
    return 0.0


def read_testimony(fd: int) -> tuple[Any, ...] | None:
    """The fields of the testimony, once nobody can write any more; None if there is none."""
    fields: tuple[Any, ...] | None = marshal.loads(os.pread(fd, _PAGE_BYTES, _TESTIMONY_AT))
    return fields
