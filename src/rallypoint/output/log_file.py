"""Log files, and what files and pipes have in common.

A log file never fails its caller: a full disk must stop neither a training run nor its lines on the console.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat

from rallypoint.base import report
from rallypoint.output.log_specs import LogFolder, open_log

__all__ = ["PIPE_BYTES", "LogFile", "enlarge_pipe", "pipe_size", "write_all"]

PIPE_BYTES = 1 << 20


class LogFile:
    """Appends to one file. With a size cap the file becomes ``<name>.1`` when it is full, in place of the one before it."""

    def __init__(self, path: str, max_bytes: int | None = None, folder: LogFolder | None = None) -> None:
        self._path = path
        self._folder = folder
        self._max_bytes = max_bytes
        self._is_capped = False
        self._fd = -1
        self._size = 0
        self._has_failed = False

    def open(self) -> LogFile:
        """Once; later calls change nothing."""
        if self._fd >= 0 or self._has_failed:
            return self
        try:
            self._open()
        except OSError as error:
            self._give_up(error)
        return self

    def write(self, block: bytes) -> None:
        if self._fd < 0:
            return
        try:
            self._write(block)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        self._fd = open_log(self._folder, self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        status = os.fstat(self._fd)
        self._size = status.st_size
        # Only a real file can be put aside: renaming a device would take it away from everybody.
        self._is_capped = self._max_bytes is not None and stat.S_ISREG(status.st_mode)

    def _write(self, block: bytes) -> None:
        if self._is_capped and self._max_bytes is not None:
            block = self._fill_files(block, self._max_bytes)
        write_all(self._fd, block)
        self._size += len(block)

    def _fill_files(self, block: bytes, max_bytes: int) -> bytes:
        """Write as many full files as the block makes, changing files at line ends where there are any; gives what is left."""
        while self._size + len(block) > max_bytes:
            room = max(0, max_bytes - self._size)
            line_end = block.rfind(b"\n", 0, room) + 1
            cut = line_end if line_end or self._size else room
            write_all(self._fd, block[:cut])
            block = block[cut:]
            self.close()
            self._put_aside()
            self._open()
        return block

    def _put_aside(self) -> None:
        if self._folder is None or not self._folder.holds(self._path):
            os.replace(self._path, f"{self._path}.1")
            return
        fd, name = self._folder.open_parent_of(self._path), os.path.basename(self._path)
        try:
            os.replace(name, f"{name}.1", src_dir_fd=fd, dst_dir_fd=fd)
        finally:
            os.close(fd)

    def _give_up(self, error: OSError) -> None:
        self.close()
        self._has_failed = True
        report.warn(
            f"{self._path} cannot be written: {error.strerror}. The workers go on, but this file gets no more of their output."
        )


def write_all(fd: int, block: bytes | memoryview) -> None:
    """Write everything, also to a descriptor that somebody else has made non-blocking."""
    left = memoryview(block)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()


def enlarge_pipe(fd: int) -> None:
    """Let whoever writes run ahead of whoever reads. The user's limit may forbid it, and a pipe works as it is."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        try:
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            return


def pipe_size(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) if hasattr(fcntl, "F_GETPIPE_SZ") else PIPE_BYTES
