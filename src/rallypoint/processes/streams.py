"""The stream pump: one thread that carries the workers' output from their pipes to log files and to the console.

One thread for all workers, because then no two lines can mix, and because it sleeps in one ``poll`` until there is
something to carry: no interval, no wake-up without a reason. A block goes to its log file as it comes, byte for byte; the
console gets whole lines.

The thread holds the baton at all times but in ``poll`` and while the console takes its time. Whoever closes the pump and
has waited long enough takes the baton, finishes the log files in the thread's place, and revokes it: a thread that comes
back from a console which nobody read finds that, and ends.
"""

from __future__ import annotations

import fcntl
import os
import select
import threading
import time
from collections import deque
from typing import NamedTuple

from rallypoint.errors import UsageError
from rallypoint.processes.console import Baton, Console, Revoked, SharedConsole, Speaker, console_writer
from rallypoint.processes.line_relay import LineCutter, matching_lines
from rallypoint.processes.log_file import LogFile
from rallypoint.processes.log_specs import Std

__all__ = ["Route", "StreamPump", "console_writer"]

READ_BYTES = 256 * 1024
PIPE_BYTES = 1 << 20
TAKE_OVER_TIMEOUT_S = 1.0  # for a thread that is writing to log files, on a file system that does not answer


class Route(NamedTuple):
    """Where one stream of one worker goes, besides being remembered."""

    local_rank: int
    stream: Std
    log_file: str = ""
    console: Console | None = None
    prefix: str = ""
    filters: tuple[str, ...] = ()
    filtered_file: str = ""


class _Stream:
    """One pipe, where it leads, and what is remembered of it."""

    def __init__(self, route: Route, fd: int, log: LogFile | None, filtered: LogFile | None) -> None:
        self.route = route
        self.fd = fd
        self.log = log
        self.filtered = filtered
        self.prefix = route.prefix.encode()
        self.needles = tuple(needle.encode() for needle in route.filters)
        self.speaker = Speaker(route.console, self.prefix, route.stream) if route.console else None
        self.cutter = LineCutter()
        self.tail = b""
        self.drained = threading.Event()

    def remember(self, block: bytes, tail_bytes: int) -> None:
        if len(block) < tail_bytes:
            block = self.tail + block
        self.tail = block[-tail_bytes:] if tail_bytes else b""


class StreamPump:
    """``open`` a pipe for each stream, ``start``, tell it which ``worker_ended``, and ``close`` it."""

    def __init__(self, tail_bytes: int, max_log_bytes: int | None = None) -> None:
        if max_log_bytes is not None and max_log_bytes < 1:
            raise UsageError(f"max_log_bytes must be at least 1, not {max_log_bytes}")
        self._tail_bytes = tail_bytes
        self._max_log_bytes = max_log_bytes
        self._baton = Baton()
        self._console = SharedConsole(self._baton)
        self._streams: list[_Stream] = []  # all there ever were, so that their tails can be asked for
        self._open: dict[int, _Stream] = {}  # by the end that we read
        self._files: dict[str, LogFile] = {}
        self._ended_ranks: deque[int] = deque()
        self._poll = select.poll()
        self._wake_fds: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def open(self, route: Route) -> int:
        """A pipe for this stream: the end that the worker writes to, which the caller hands on and then closes."""
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        _enlarge_pipe(write_fd)
        with self._baton.held():
            filtered = self._file(route.filtered_file) if route.filters else None
            stream = _Stream(route, read_fd, self._file(route.log_file), filtered)
            self._streams.append(stream)
            self._open[read_fd] = stream
            self._poll.register(read_fd, select.POLLIN)
        self._wake()
        return write_fd

    def start(self) -> None:
        self._wake_fds = os.pipe()
        for fd in self._wake_fds:
            os.set_blocking(fd, False)
        self._poll.register(self._wake_fds[0], select.POLLIN)
        self._wake()  # for workers that have ended before
        self._thread = threading.Thread(target=self._run, name="rallypoint-streams", daemon=True)
        self._thread.start()

    def worker_ended(self, local_rank: int) -> None:
        """Nothing more is expected of this worker: carry what it has left, although its children may keep the pipe open."""
        self._ended_ranks.append(local_rank)
        self._wake()

    def wait_drained(self, local_rank: int, timeout_s: float) -> bool:
        """Wait until everything that this worker wrote has arrived where it goes."""
        deadline = time.monotonic() + timeout_s
        return all(stream.drained.wait(max(0.0, deadline - time.monotonic())) for stream in self._of_rank(local_rank))

    def tail(self, local_rank: int, stream: Std) -> str:
        """The last that this worker wrote to this stream."""
        tails = [candidate.tail for candidate in self._of_rank(local_rank) if candidate.route.stream == stream]
        return tails[-1].decode(errors="replace") if tails else ""

    def quiet_interrupts(self) -> None:
        """From now on, tracebacks that end in KeyboardInterrupt are not shown; the log files and the tails still have them."""
        self._console.hides_interrupts = True

    def close(self, timeout_s: float) -> bool:
        """Carry what is left, to the console for at most `timeout_s`, and release everything; says whether all was shown."""
        self._is_closing = True
        self._wake()
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._console.is_silent = self._thread.is_alive()
        with self._baton.held(TAKE_OVER_TIMEOUT_S) as got_it:
            if got_it and not self._baton.is_revoked:
                self._finish_all()
                for file in self._files.values():
                    file.close()
                self._baton.is_revoked = True
        return got_it and not self._console.is_silent

    def _of_rank(self, local_rank: int) -> list[_Stream]:
        return [stream for stream in self._streams if stream.route.local_rank == local_rank]

    def _file(self, path: str) -> LogFile | None:
        """One for each path: the filtered lines of all ranks go to the same one."""
        if path and path not in self._files:
            self._files[path] = LogFile(path, self._max_log_bytes).open()
        return self._files.get(path)

    def _wake(self) -> None:
        if self._wake_fds is None or self._baton.is_revoked:
            return
        try:
            os.write(self._wake_fds[1], b"!")
        except BlockingIOError:
            return  # enough is there to wake it

    # Everything below is done with the baton held: by the thread, and at the end also by whoever closes the pump.

    def _run(self) -> None:
        _keep_freed_memory()
        with self._baton.held():
            try:
                while not self._is_closing:
                    self._step()
                self._finish_all()
            except Revoked:
                return
            finally:
                self._close_wake_fds()

    def _step(self) -> None:
        with self._baton.laid_down():
            ready = self._poll.poll()
        for fd, _ in ready:
            if fd in self._open:
                self._carry_block(self._open[fd])
            elif self._wake_fds is not None and fd == self._wake_fds[0]:
                os.read(fd, READ_BYTES)
        while self._ended_ranks:
            local_rank = self._ended_ranks.popleft()
            for stream in self._of_rank(local_rank):
                self._finish(stream)

    def _carry_block(self, stream: _Stream) -> int:
        """Carry what one read gives; its size, which is 0 where there is nothing to read now."""
        try:
            block = os.read(stream.fd, READ_BYTES)
        except BlockingIOError:
            return 0
        if not block:
            self._end(stream)
            return 0
        if stream.log is not None:
            stream.log.write(block)
        stream.remember(block, self._tail_bytes)
        if stream.speaker is not None or stream.filtered is not None:
            self._carry_lines(stream, stream.cutter.feed(block))
        return len(block)

    def _carry_lines(self, stream: _Stream, lines: bytes) -> None:
        if stream.filtered is not None:
            stream.filtered.write(matching_lines(lines, stream.needles, stream.prefix))
        if stream.speaker is not None:
            self._console.show(stream.speaker, lines)

    def _finish(self, stream: _Stream) -> None:
        """Carry what is in the pipe. The worker has left no more than the pipe holds; what its children add may never end."""
        left = _pipe_size(stream.fd) if stream.fd >= 0 else 0
        while left > 0 and (count := self._carry_block(stream)):
            left -= count
        self._end(stream)

    def _finish_all(self) -> None:
        for stream in self._streams:
            self._finish(stream)

    def _end(self, stream: _Stream) -> None:
        if stream.fd >= 0:
            del self._open[stream.fd]
            self._poll.unregister(stream.fd)
            os.close(stream.fd)
            stream.fd = -1
            self._carry_lines(stream, stream.cutter.rest())
            if stream.speaker is not None:
                self._console.end(stream.speaker)
        stream.drained.set()

    def _close_wake_fds(self) -> None:
        """Only the thread closes them, since it may be just about to wait for them."""
        for fd in self._wake_fds or ():
            os.close(fd)
        self._wake_fds = None


def _keep_freed_memory() -> None:
    """Make the C library keep what one block frees for the next one.

    It returns freed memory to the system at once, until it has seen a program free a piece as large as this; and then getting
    it back, page by page, costs four times as much as all the rest of what is done to a block.
    """
    bytes(PIPE_BYTES)


def _enlarge_pipe(fd: int) -> None:
    """Let the worker run ahead of us. The user's limit may forbid it, and the pipe works as it is."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        try:
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            return


def _pipe_size(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) if hasattr(fcntl, "F_GETPIPE_SZ") else PIPE_BYTES
