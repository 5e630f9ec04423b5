"""Waking a thread that waits in ``poll``."""

from __future__ import annotations

import os

__all__ = ["WakeFd"]


class WakeFd:
    """Readable from when it is set until it is cleared; may be set from any thread, as often as one likes."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def set(self) -> None:
        if self._fd >= 0:
            os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
