"""The worker's side of timers over a named pipe: a request is one line of JSON.

``{"version": 1, "pid": 4711, "scope_id": "step", "expiration_time": 1794765084.01, "signal": 9}``

A line of at most PIPE_BUF bytes is written in one piece, whoever else writes, so requests of any number of workers can go through
one pipe.
"""

from __future__ import annotations

import json
import os
import select
import signal as signals
import time

from rallypoint.base.json_text import clip
from rallypoint.timers.interface import RELEASED, TimerClient, TimerRequest

__all__ = ["LINE_MAX", "FileTimerClient", "FileTimerRequest", "describe_expiry"]

LINE_MAX = 4096  # bytes, PIPE_BUF on Linux
ROOM_WAIT_S = 1.0  # as long as the server may take to make room in the pipe
SCOPE_SHOWN_BYTES = 200


class FileTimerRequest(TimerRequest):
    """A request with the signal that the worker gets when the timer expires; with 0 it gets none, and the event is all."""

    __slots__ = ("acquired_at", "signal", "version")

    def __init__(self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0) -> None:
        super().__init__(worker_pid, scope_id, expiration_time)
        self.version = 1
        self.signal = signal
        self.acquired_at: float | None = None  # by the wall clock of the server that took it in

    @property
    def worker_pid(self) -> int:
        return int(self.worker_id)

    def to_json(self) -> str:
        """The request as it goes through the pipe, without the end of the line."""
        return json.dumps(
            {
                "version": self.version,
                "pid": self.worker_pid,
                "scope_id": self.scope_id,
                "expiration_time": self.expiration_time,
                "signal": int(self.signal),
            }
        )

    def _as_tuple(self) -> tuple[object, ...]:
        return (*super()._as_tuple(), self.signal)


def describe_expiry(request: FileTimerRequest) -> str:
    """Why its worker was reaped, on one line."""
    scope = clip(request.scope_id, SCOPE_SHOWN_BYTES)
    if request.acquired_at is None:
        return f"timer {scope} expired"
    limit_s = round(request.expiration_time - request.acquired_at, 1)  # a little less than asked for: the way here took some time
    return f"timer {scope} expired after {limit_s:.12g} s"


class FileTimerClient(TimerClient):
    """Timers of the calling process, known by its id, that are kept by whoever reads the named pipe at `file_path`.

    When such a timer expires, the process gets `signal`. BrokenPipeError if nobody reads the pipe.
    """

    def __init__(self, file_path: str, signal: int = signals.SIGKILL) -> None:
        self._file_path = file_path
        self.signal = signal

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self._send(FileTimerRequest(os.getpid(), scope_id, expiration_time, self.signal))

    def release(self, scope_id: str) -> None:
        self._send(FileTimerRequest(os.getpid(), scope_id, RELEASED))

    def _send(self, request: FileTimerRequest) -> None:
        line = request.to_json().encode() + b"\n"
        if len(line) > LINE_MAX:
            raise RuntimeError(f"FileTimerRequest larger than {LINE_MAX} bytes is not supported: {line[:200].decode()}...")
        fd = self._open()
        try:
            self._write(fd, line, time.monotonic() + ROOM_WAIT_S)
        finally:
            os.close(fd)

    def _open(self) -> int:
        """The pipe's end. A server makes it before anybody is told of it: one that is not there is gone, and not waited for."""
        try:
            return os.open(self._file_path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise _unavailable() from error

    def _write(self, fd: int, line: bytes, until: float) -> None:
        """The line, in one piece; a pipe that is full for the moment is waited for."""
        room = select.poll()
        room.register(fd, select.POLLOUT)
        while True:
            try:
                os.write(fd, line)
                return
            except BlockingIOError as error:
                if time.monotonic() >= until:
                    raise _unavailable() from error
            except BrokenPipeError as error:
                raise _unavailable() from error
            room.poll(max(0.0, until - time.monotonic()) * 1000)


def _unavailable() -> BrokenPipeError:
    return BrokenPipeError("Could not send the FileTimerRequest because FileTimerServer is not available.")
