"""The server's end of the named pipe that workers write their timer requests to.

Whoever may open the pipe may write anything to it. Only whole lines of a limited length are looked at, only requests
that could come from a worker are made of them, and the rest is passed over.
"""

from __future__ import annotations

import json
import math
import os
import signal
import stat

from rallypoint.errors import UsageError
from rallypoint.timers.file_timer import LINE_MAX, FileTimerRequest

__all__ = ["RequestLines", "TimerPipe", "check_timer_file", "parse_request"]

CHUNK_BYTES = 65536
CHUNKS_MAX = 16  # at one go, so that a flood of requests does not keep timers from expiring
PID_MAX = 2**22  # no Linux has more
TIME_MAX = 1e12


def check_timer_file(path: str) -> None:
    """UsageError if the server could not have its pipe there."""
    name = f"TORCHELASTIC_TIMER_FILE={path}"
    folder = os.path.dirname(path) or "."
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"{name}: no named pipe can be made there: {folder} is no folder that can be written to") from None
        return
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None
    if not stat.S_ISFIFO(mode):
        raise UsageError(f"{name}: this exists and is no named pipe; remove it, or name a file that does not exist")
    if _has_reader(path, name):
        raise UsageError(f"{name}: another process reads this named pipe already; every agent of a host needs one of its own")


def _has_reader(path: str, name: str) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except PermissionError:
        raise UsageError(f"{name}: this named pipe belongs to another user") from None
    except OSError:  # nobody reads it, or it has just gone
        return False
    return True


class TimerPipe:
    """A new named pipe, for this user only, in the place of an old one that nobody reads."""

    def __init__(self, path: str) -> None:
        check_timer_file(path)
        if os.path.lexists(path):
            os.unlink(path)
        os.mkfifo(path, 0o600)
        self._path = path
        self._lines = RequestLines()
        # Opened for writing too: without a writer the pipe would be at its end, and poll would never wait.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def read_requests(self) -> list[FileTimerRequest]:
        """What has come so far, without waiting."""
        lines: list[bytes] = []
        for _ in range(CHUNKS_MAX):
            try:
                lines += self._lines.feed(os.read(self._fd, CHUNK_BYTES))
            except BlockingIOError:
                break
        return [request for request in map(parse_request, lines) if request is not None]

    def close(self) -> None:
        """Close and remove it, unless somebody has put another in its place."""
        mine = os.fstat(self._fd)
        os.close(self._fd)
        try:
            found = os.lstat(self._path)
            if (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino):
                os.unlink(self._path)
        except FileNotFoundError:
            pass


class RequestLines:
    """Cuts a stream into lines, and passes over those that are too long, however long they are."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are whole now."""
        *lines, rest = (self._rest + data).split(b"\n")
        if self._skipping and lines:
            del lines[0]
            self._skipping = False
        self._skipping = self._skipping or len(rest) > LINE_MAX
        self._rest = b"" if self._skipping else rest
        return [line for line in lines if len(line) < LINE_MAX]


def parse_request(line: bytes) -> FileTimerRequest | None:
    """The request that a line holds, or None. The start of one that was never completed may stand before it."""
    start = line.rfind(b'{"version"')  # within a text of JSON the quotes would have backslashes before them
    try:
        match json.loads(line[max(0, start) :]):
            case {"pid": int(pid), "scope_id": str(scope), "expiration_time": int() | float() as time, "signal": int(number)}:
                request = FileTimerRequest(pid, scope, time, number)
                return request if _is_possible(request) else None
    except (ValueError, RecursionError):
        pass
    return None


def _is_possible(request: FileTimerRequest) -> bool:
    """Process 1 is no worker, and 0 and what is below it would be groups of processes."""
    time = request.expiration_time
    return 1 < request.worker_id <= PID_MAX and (abs(time) <= TIME_MAX or time == math.inf) and 0 <= request.signal < signal.NSIG
