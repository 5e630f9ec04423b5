"""The agent's end of the pages in which workers give signs of life: one page each, in one file that exists only in memory.

A worker opens the file by its path under /proc of the agent. So nothing is left behind on any disk, however the agent ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from rallypoint.hangs import pulse_page

__all__ = ["PulseBoard"]


class PulseBoard:
    """The pages of `size` workers. Whoever looks after `close` finds nothing there."""

    def __init__(self, size: int) -> None:
        self._fd = os.memfd_create("rallypoint-pulse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.truncate(self._fd, size * pulse_page.PAGE_BYTES)
        # A file that a worker made shorter would end whoever reads it.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._memory = mmap.mmap(self._fd, size * pulse_page.PAGE_BYTES)
        self._view = memoryview(self._memory)
        self._known: list[pulse_page.Pulse | None] = [None] * size
        for rank in range(size):
            self.clear(rank)

    def place(self, rank: int) -> str:
        """Where a worker finds its page."""
        return f"{rank * pulse_page.PAGE_BYTES}:/proc/{os.getpid()}/fd/{self._fd}"

    def clear(self, rank: int) -> None:
        """Forget what the worker of this rank said, for another that takes its place."""
        self._page(rank)[:] = pulse_page.blank()
        self._known[rank] = None

    def read(self, rank: int, now: float) -> pulse_page.Pulse | None:
        """What the worker says; None if it never said anything."""
        self._known[rank] = pulse_page.read(self._page(rank), now, self._known[rank])
        return self._known[rank]

    def read_all(self, now: float) -> list[pulse_page.Pulse]:
        """What those say that ever said anything."""
        try:
            found = [self.read(rank, now) for rank in range(len(self._known))]
        except ValueError:  # closed, while another thread was about to read
            found = list(self._known)
        return [pulse for pulse in found if pulse is not None]

    def _page(self, rank: int) -> memoryview:
        return self._view[rank * pulse_page.PAGE_BYTES : (rank + 1) * pulse_page.PAGE_BYTES]

    def close(self) -> None:
        if self._fd >= 0:
            self._view.release()
            self._memory.close()
            os.close(self._fd)
            self._fd = -1
