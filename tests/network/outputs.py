"""Where an agent's words go: a console that nobody reads, and a disk that hangs."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from tests.network.machines import sh

__all__ = ["Console", "Disk"]

FREEZE, THAW = 0xC0045877, 0xC0045878  # FIFREEZE, FITHAW
DISK_BYTES = 16 << 20


class Disk:
    """A file system of its own for a machine's logs. While it is frozen, whoever writes to it waits, and cannot be killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        image = folder.with_suffix(".image")
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        folder.mkdir()
        sh("mkfs.ext4", "-q", "-F", str(image))
        sh("mount", "-o", "loop", str(image), str(folder))

    def freeze(self) -> None:
        self._order(FREEZE)

    def thaw(self) -> None:
        with contextlib.suppress(OSError):  # it was not frozen
            self._order(THAW)

    def remove(self) -> None:
        self.thaw()
        sh("umount", str(self.folder))

    def _order(self, order: int) -> None:
        fd = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, order, 0)
        finally:
            os.close(fd)


class Console:
    """An agent's stderr: a pipe that is read here, or, while it is blocked, full and read by nobody."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read, False)
        self.is_blocked = False

    def block(self) -> None:
        self.is_blocked = True
        fd = os.open(f"/proc/self/fd/{self._read}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        for size in (4096, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(fd, bytes(size))
        os.close(fd)

    def release(self, output: Path) -> None:
        """There is room again."""
        self.is_blocked = False
        self.drain(output)

    def drain(self, output: Path) -> None:
        if self.is_blocked:
            return
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._read, 65536):
                with output.open("ab") as file:
                    file.write(data.replace(b"\0", b""))

    def close(self) -> None:
        os.close(self._read)
