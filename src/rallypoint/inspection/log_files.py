"""Reading log files that are being written: in blocks, in order, and on into the next file when one is full.

With ``--log-max-size``, a file that is full becomes ``<name>.1``, in place of the one before it, and a new one begins. Whoever
reads holds the file that it reads open, so that it knows it by its identity whatever its name is by now; what was put aside
since, and is still there, it reads before the newest one. Only if two files are filled between two looks has one of them been
overwritten unread, and nobody can tell.
"""

from __future__ import annotations

import math
import os
import stat
from collections import deque
from collections.abc import Iterator

from rallypoint.inspection.log_lines import Cutter, Lane, Mark

TYPE_CHECKING = False
if TYPE_CHECKING:
    import re

    from rallypoint.inspection.log_times import Clock

__all__ = ["Tap"]

BLOCK_BYTES = 1 << 18
LEAST_BLOCK_BYTES = 16 << 10
ALL_BLOCKS_BYTES = 64 << 20  # of all files that are merged at once
PUT_ASIDE = ".1"
_NOBODY = (0, 0)


class _Chain:
    """One log file and its successors under the same name."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = self._before = -1  # what is being read, and the file before that

    def close(self) -> None:
        _close(self._fd)
        _close(self._before)
        self._fd = self._before = -1

    def read(self, size: int) -> bytes:
        """The next bytes; nothing if there are none now."""
        while True:
            block = os.read(self._fd, size) if self._fd >= 0 else b""
            if block:
                return block
            if not self._go_on():
                return b""

    def size(self) -> int:
        """Of all that is there under the name."""
        found = [_look(self.path + PUT_ASIDE), _look(self.path)]
        return sum(one.st_size for one in found if one is not None)

    def _go_on(self) -> bool:
        """At the end of a file: whether there is more to read, perhaps in the next one."""
        newest = _look(self.path)
        if self._fd >= 0 and newest is not None and _identity(newest) == _identity_of(self._fd):
            if os.lseek(self._fd, 0, os.SEEK_CUR) <= newest.st_size:
                return False
            os.lseek(self._fd, 0, os.SEEK_SET)  # somebody has emptied it
            return newest.st_size > 0
        older, newer = self._open_both()
        present = _identity_of(self._fd)
        if older >= 0 and _identity_of(older) not in (present, _identity_of(self._before)):
            _close(newer)
            following = older
        else:
            _close(older)
            following = newer
        if following < 0:
            return False
        if self._fd >= 0 and os.lseek(self._fd, 0, os.SEEK_CUR) < os.fstat(self._fd).st_size:
            _close(following)  # it got its last lines after we had come to its end, and before it was put aside
            return True
        _close(self._before)
        self._before, self._fd = self._fd, following
        return True

    def _open_both(self) -> tuple[int, int]:
        """The file that was put aside and the newest one, of the same moment."""
        while True:
            older, newer = _open(self.path + PUT_ASIDE), _open(self.path)
            found = _look(self.path + PUT_ASIDE)
            if (_identity(found) if found is not None else _NOBODY) == _identity_of(older):
                return older, newer
            _close(older)
            _close(newer)

    def seek_tail(self, count: int, pattern: re.Pattern[bytes] | None) -> int:
        """Begin with the last so many lines in which the pattern is found; how many there are."""
        self.close()
        older, newer = self._open_both()
        offset, found = _tail(newer, count, pattern) if newer >= 0 else (0, 0)
        if found < count and older >= 0:
            _close(newer)
            offset, more = _tail(older, count - found, pattern)
            self._fd, found = older, found + more
        else:
            self._fd, self._before = newer, older
        if self._fd >= 0:
            os.lseek(self._fd, offset, os.SEEK_SET)
        return found


class Tap:
    """The lines of one stream of one worker, as they come."""

    def __init__(self, path: str, mark: Mark) -> None:
        self.mark = mark
        self.has_news = False  # by the last reading
        self.read_bytes = 0
        self._is_left_out = False
        self._chain = _Chain(path)
        self._cutter = Cutter()
        self._lane: Lane | None = None

    def close(self) -> None:
        self._chain.close()

    def size(self) -> int:
        """How many bytes there are at present; none where all is left out."""
        return 0 if self._is_left_out else self._chain.size()

    @property
    def written_us(self) -> int:
        found = _look(self._chain.path)
        return found.st_mtime_ns // 1000 if found is not None else 0

    def seek_tail(self, count: int, pattern: re.Pattern[bytes] | None = None) -> int:
        self._is_left_out = count <= 0
        return self._chain.seek_tail(count, pattern)

    def lane(self, is_last: bool, is_over: bool, beside: int) -> Lane:
        """What has been written since the last time. The last time, its end is a line too, be it whole or not; and where nobody
        writes any more, that is all. Else it is no more than there is now: who writes faster than we read must let us end.
        """
        clock: Clock | None = self._lane.clock if self._lane is not None else None
        size = max(LEAST_BLOCK_BYTES, min(BLOCK_BYTES, ALL_BLOCKS_BYTES // max(beside, 1)))
        self._lane = Lane(self.mark, self._blocks(size, is_last, is_over), self.written_us, clock)
        return self._lane

    def _blocks(self, size: int, is_last: bool, is_over: bool) -> Iterator[bytes]:
        self.has_news = False
        left = math.inf if is_over else max(self._chain.size(), size)
        while left > 0 and (block := self._chain.read(size)):
            self.has_news = True
            left -= len(block)
            self.read_bytes += len(block)
            if lines := self._cutter.feed(block):
                yield lines
        if is_last and (rest := self._cutter.rest()):
            yield rest


def _tail(fd: int, count: int, pattern: re.Pattern[bytes] | None) -> tuple[int, int]:
    """Where the last so many lines begin, and how many they are."""
    size = os.fstat(fd).st_size
    if count <= 0:
        return size, 0
    return _last_lines(fd, size, count) if pattern is None else _last_matches(fd, count, pattern)


def _last_lines(fd: int, size: int, count: int) -> tuple[int, int]:
    found, at = 0, size
    while at > 0:
        begin = max(0, at - LEAST_BLOCK_BYTES)
        block = os.pread(fd, at - begin, begin)
        end = len(block) - (at == size and block.endswith(b"\n"))  # the newline at the end begins no line
        while (end := block.rfind(b"\n", 0, end)) >= 0:
            found += 1
            if found == count:
                return begin + end + 1, found
        at = begin
    return 0, found + (size > 0)


def _last_matches(fd: int, count: int, pattern: re.Pattern[bytes]) -> tuple[int, int]:
    places: deque[int] = deque(maxlen=count)
    cutter, at, read = Cutter(), 0, 0
    while True:
        block = os.pread(fd, BLOCK_BYTES, read)
        read += len(block)
        for line in (cutter.feed(block) if block else cutter.rest()).split(b"\n")[:-1]:
            if pattern.search(line):
                places.append(at)
            at += len(line) + 1
        if not block:
            return (places[0] if places else read), len(places)


def _open(path: str) -> int:
    """A descriptor of a regular file, or -1."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return -1
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return -1


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _look(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _identity_of(fd: int) -> tuple[int, int]:
    return _identity(os.fstat(fd)) if fd >= 0 else _NOBODY
