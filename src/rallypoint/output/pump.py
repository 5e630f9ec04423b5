"""The stream pump: one thread that carries the workers' output from their pipes to log files and to the console.

One thread for all workers, because then no two lines can mix, and because it sleeps in one ``poll`` until there is
something to carry: no interval, no wake-up without a reason. A block goes to its log file as it comes, byte for byte; its
whole lines go on to the console, which has a thread of its own. The files are opened by this thread too: if their disk hangs, so
does it, and whoever stops the workers leaves it behind.

A part of a line goes on when its worker has been silent for a moment: it may be a prompt, or a progress bar. Not so where a
full buffer has cut the line, which is how a program prints into a pipe: then the rest will come, however late.

The methods are for one caller; nothing that the thread uses is changed by it, except by queues. Of the pipe that wakes
the thread the caller owns one end and the thread the other, so that neither can meet a descriptor which is already gone.
"""

from __future__ import annotations

import math
import os
import select
import stat
import threading
import time
from collections import deque

from rallypoint.base import report
from rallypoint.errors import UsageError
from rallypoint.output.console import (
    PIPE_BYTES,
    ConsoleRelay,
    Floor,
    LineCutter,
    Speaker,
    enlarge_pipe,
    is_stuck,
    matching_lines,
    pipe_size,
    write_all,
)
from rallypoint.output.log_specs import LogFolder, Std, open_log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.output.outlets import Route

__all__ = ["LogFile", "StreamPump"]

READ_BYTES = 512 * 1024
LAST_BLOCKS_TIMEOUT_S = 1.0  # for log files, when the console has used up its time
STUCK_AFTER_S = 1.0  # in one write to a log file
LOOK_S = 0.05
NAP_S = 0.004  # for which many small writes are left to gather, so that they cost one read
NAP_BYTES = 1 << 15  # more than this at once is not small, and the pipe may be full
SILENCE_S = 0.1  # after which a part of a line is shown
BUFFER_BYTES = 4096  # no program has a smaller buffer for its stdout: what was written at once and is smaller was not cut by one


class LogFile:
    """Appends to one file. With a size cap the file becomes ``<name>.1`` when it is full, in place of the one before it.

    It never fails its caller: a full disk must stop neither a training run nor its lines on the console.
    """

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


class _Stream:
    """One pipe, where it leads, and what is remembered of it."""

    def __init__(self, route: Route, fd: int, log: LogFile | None, filtered: LogFile | None) -> None:
        self.route = route
        self.fd = fd
        self.log = log
        self.filtered = filtered
        self.prefix = os.fsencode(route.prefix)  # as it came from the command line, which need not be valid text
        self.needles = tuple(os.fsencode(needle) for needle in route.filters)
        self.carried = threading.Event()  # all of it was read and put into the log file
        self.drained = threading.Event()  # and it was shown
        self.speaker: Speaker | None = None
        if route.console is not None:
            self.speaker = Speaker(route.console, self.prefix, route.stream, self.drained, route.is_inherited)
            if route.json_fields:
                from rallypoint.output.json_lines import JsonLines

                self.speaker.prefixer = JsonLines(route.json_fields, route.keeps_objects)
        self.cutter = LineCutter()
        self.filter_cutter = LineCutter()
        self.tail = b""
        self._block_at = 0.0
        self._is_cut = False

    def remember(self, block: bytes, tail_bytes: int) -> None:
        if len(block) < tail_bytes:
            block = self.tail + block
        self.tail = block[-tail_bytes:] if tail_bytes else b""

    @property
    def has_no_reader(self) -> bool:
        """Ours is gone, so the worker is to find its own gone, as if it had inherited ours."""
        return self.route.is_inherited and self.speaker is not None and self.speaker.write is None

    def has_partial_line(self, block: bytes, now: float) -> bool:
        """Whether this block, which came now, ends in a part of a line that somebody meant to be seen. stderr has no buffer.

        A large one that found no room in the pipe comes in pieces, of which the last may be small.
        """
        is_next_piece = self._is_cut and now < self._block_at + SILENCE_S
        self._block_at, self._is_cut = now, self.route.stream == Std.OUT and (len(block) >= BUFFER_BYTES or is_next_piece)
        return self.cutter.is_holding and not self._is_cut and not self.route.json_fields


class StreamPump:
    """``attach`` a pipe for each stream, ``start``, tell it which ``worker_ended``, and ``close`` it."""

    def __init__(self, tail_bytes: int, max_log_bytes: int | None = None, folder: LogFolder | None = None) -> None:
        if max_log_bytes is not None and max_log_bytes < 1:
            raise UsageError(f"max_log_bytes must be at least 1, not {max_log_bytes}")
        self._tail_bytes = tail_bytes
        self._max_log_bytes = max_log_bytes
        self._folder = folder
        self._console = ConsoleRelay()
        self._floor = Floor(self._console)
        self._streams: list[_Stream] = []  # all there ever were, so that their tails can be asked for
        self._files: dict[str, LogFile] = {}
        self._opened: deque[_Stream] = deque()  # not yet taken over by the thread
        self._ended: deque[_Stream] = deque()
        self._open: dict[int, _Stream] = {}  # the thread's own: by the descriptor that it reads
        self._partial: dict[_Stream, float] = {}  # when to show the part of a line that it holds, the earliest first
        self._poll = select.poll()
        self._carried_at = 0.0
        self._wake_read_fd = self._wake_write_fd = -1
        self._is_closing = False
        self._writing_since: float | None = None
        self._has_made_wait = False
        self._thread = threading.Thread(target=self._run, name="rallypoint-streams", daemon=True)

    def attach(self, route: Route, read_fd: int) -> None:
        """Carry this stream from this pipe; the end is ours from now on."""
        log = self._file(route.log_file)
        filtered = self._file(route.filtered_file) if route.filters else None
        os.set_blocking(read_fd, False)
        if log is not None:  # much is expected; for a few lines of stderr the pages are better left to others
            enlarge_pipe(read_fd)
        stream = _Stream(route, read_fd, log, filtered)
        self._streams.append(stream)
        self._opened.append(stream)
        self._wake()

    def start(self) -> None:
        self._wake_read_fd, self._wake_write_fd = os.pipe()
        os.set_blocking(self._wake_write_fd, False)
        self._poll.register(self._wake_read_fd, select.POLLIN)
        self._thread.start()
        self._wake()

    def worker_ended(self, local_rank: int) -> None:
        """Nothing more is expected of this worker: carry what it has left, although its children may keep the pipe open."""
        self._ended.extend(self._of_rank(local_rank))
        self._wake()

    def wait_drained(self, local_rank: int, timeout_s: float) -> bool:
        """Wait until everything that this worker wrote has arrived where it goes; not for what is stuck."""
        return self._wait_for([stream.drained for stream in self._of_rank(local_rank)], timeout_s)

    def wait_carried(self, local_rank: int, timeout_s: float) -> bool:
        """Wait until everything that this worker wrote is known here, shown or not."""
        return self._wait_for([stream.carried for stream in self._of_rank(local_rank)], timeout_s)

    def _wait_for(self, events: list[threading.Event], timeout_s: float) -> bool:
        """Whoever has waited in vain once does not wait again: with many workers it would add up."""
        deadline = time.monotonic() + (0.0 if self._has_made_wait else timeout_s)
        for event in events:
            while not event.wait(max(0.0, min(LOOK_S, deadline - time.monotonic()))):
                if time.monotonic() >= deadline or self._is_stuck():
                    self._has_made_wait = self._has_made_wait or timeout_s > 0
                    return False
        return True

    def _is_stuck(self) -> bool:
        """Whether the console, or the disk with the log files, takes nothing at present."""
        since = self._writing_since
        return is_stuck() or (since is not None and time.monotonic() - since > STUCK_AFTER_S)

    def tail(self, local_rank: int, stream: Std) -> str:
        """The last that this worker wrote to this stream."""
        tails = [candidate.tail for candidate in self._of_rank(local_rank) if candidate.route.stream == stream]
        return tails[-1].decode(errors="replace") if tails else ""

    def quiet_interrupts(self) -> None:
        """From now on, tracebacks that end in KeyboardInterrupt are not shown; the log files and the tails still have them."""
        self._console.hides_interrupts = True

    def close(self, timeout_s: float) -> bool:
        """Carry what is left, for at most `timeout_s`, and release everything; says whether all of it arrived.

        What the console has not taken by then it may still take later.
        """
        deadline = time.monotonic() + timeout_s
        if self._thread.ident is None:
            if not self._streams:
                return True
            self.start()
        if self._wake_write_fd >= 0:
            self._is_closing = True
            self._wake()
        while self._thread.is_alive() and time.monotonic() < deadline and not self._is_stuck():
            self._thread.join(max(0.0, min(LOOK_S, deadline - time.monotonic())))
        has_shown_all = not self._thread.is_alive() and self._console.wait_shown(max(0.0, deadline - time.monotonic()))
        self._console.hurry()
        self._thread.join(LAST_BLOCKS_TIMEOUT_S)
        if self._wake_write_fd >= 0 and not self._thread.is_alive():
            os.close(self._wake_write_fd)
            os.close(self._wake_read_fd)
            self._wake_write_fd = -1
        return has_shown_all and not self._thread.is_alive()

    def _of_rank(self, local_rank: int) -> list[_Stream]:
        return [stream for stream in self._streams if stream.route.local_rank == local_rank]

    def _file(self, path: str) -> LogFile | None:
        """One for each path: the filtered lines of all ranks go to the same one."""
        if path and path not in self._files:
            self._files[path] = LogFile(path, self._max_log_bytes, self._folder)
        return self._files.get(path)

    def _wake(self) -> None:
        if self._wake_write_fd >= 0:
            try:
                os.write(self._wake_write_fd, b"!")
            except BlockingIOError:
                return  # enough is there to wake it

    # What follows is done by the thread.

    def _run(self) -> None:
        _keep_freed_memory()
        while self._step():
            pass
        for stream in self._streams:
            self._finish(stream)
            self._end(stream)
        for file in self._files.values():
            file.close()

    def _step(self) -> bool:
        """Carry what there is; False when the pump is being closed."""
        is_open = True
        ready = [fd for fd, _ in self._poll.poll(self._patience_ms())]
        self._show_partial_lines(ready)
        carried = 0
        for fd in ready:
            if fd == self._wake_read_fd:
                os.read(fd, READ_BYTES)
                is_open = not self._is_closing
            else:
                carried += self._carry_block(self._open[fd])
        self._nap_after(carried)
        ended = [self._ended.popleft() for _ in range(len(self._ended))]  # first: whoever ended had been opened before
        while self._opened:
            stream = self._opened.popleft()
            self._open_files(stream)
            self._open[stream.fd] = stream
            self._poll.register(stream.fd, select.POLLIN)
        for stream in ended:
            self._finish(stream)
        return is_open

    def _nap_after(self, carried: int) -> None:
        """Where one block follows the other at once, and none is large, a program writes line by line, as Python does."""
        now = time.monotonic()
        if 0 < carried < NAP_BYTES and now < self._carried_at + 2 * NAP_S:
            time.sleep(NAP_S)
            now += NAP_S
        if carried:
            self._carried_at = now

    def _patience_ms(self) -> float | None:
        """Until somebody has been silent, or has waited, for long enough."""
        wake_at = min(next(iter(self._partial.values()), math.inf), self._floor.due_at)
        return None if wake_at == math.inf else max(0.0, wake_at - time.monotonic()) * 1000 + 1

    def _show_partial_lines(self, ready: list[int]) -> None:
        """Of those who have been silent; who has just spoken, as is seen in `ready`, may have ended the line."""
        now = time.monotonic()
        for stream in [stream for stream, due_at in self._partial.items() if due_at <= now and stream.fd not in ready]:
            del self._partial[stream]
            if stream.speaker is not None and not (self._console.hides_interrupts and stream.route.stream == Std.ERR):
                self._floor.put(stream.speaker, stream.cutter.rest(), is_bar=stream.cutter.is_in_bar)
        if now >= self._floor.due_at:
            self._floor.release()

    def _open_files(self, stream: _Stream) -> None:
        self._writing_since = time.monotonic()
        for file in (stream.log, stream.filtered):
            if file is not None:
                file.open()
        self._writing_since = None

    def _carry_block(self, stream: _Stream) -> int:
        """Carry what one read gives; its size, which is 0 where there is nothing to read now."""
        try:
            block = os.read(stream.fd, READ_BYTES)
        except BlockingIOError:
            return 0
        if not block or stream.has_no_reader:
            self._end(stream)
            return 0
        stream.remember(block, self._tail_bytes)
        if stream.log is not None:
            self._write(stream.log, block)
        if stream.filtered is not None:
            self._carry_matching(stream, stream.filtered, stream.filter_cutter.feed(block))
        if stream.speaker is not None:
            lines = stream.cutter.feed(block)
            self._partial.pop(stream, None)
            if stream.has_partial_line(block, now := time.monotonic()):
                self._partial[stream] = now + SILENCE_S
            if lines:
                self._floor.put(stream.speaker, lines)
        return len(block)

    def _carry_matching(self, stream: _Stream, file: LogFile, lines: bytes) -> None:
        self._write(file, matching_lines(lines, stream.needles, stream.prefix))

    def _write(self, file: LogFile, block: bytes) -> None:
        self._writing_since = time.monotonic()
        file.write(block)
        self._writing_since = None

    def _finish(self, stream: _Stream) -> None:
        """Carry what is in the pipe. The worker has left no more than the pipe holds; what its children add may never end.

        They may go on to write there, and do not find it closed as long as other workers run.
        """
        left = pipe_size(stream.fd) if stream.fd >= 0 else 0
        while left > 0 and (count := self._carry_block(stream)):
            left -= count
        if stream.fd >= 0:
            self._conclude(stream)

    def _end(self, stream: _Stream) -> None:
        if stream.fd < 0:
            return
        del self._open[stream.fd]
        self._poll.unregister(stream.fd)
        os.close(stream.fd)
        stream.fd = -1
        self._conclude(stream)

    def _conclude(self, stream: _Stream) -> None:
        """Show the last line, although it has no end."""
        self._partial.pop(stream, None)
        if stream.filtered is not None:
            self._carry_matching(stream, stream.filtered, stream.filter_cutter.rest())
        if stream.speaker is not None:
            self._floor.put(stream.speaker, stream.cutter.rest(), is_last=True)
        else:
            stream.drained.set()
        stream.carried.set()


def _keep_freed_memory() -> None:
    """Make the C library keep what one block frees for the next one.

    It returns freed memory to the system at once, until it has seen a program free a piece as large as this; and then getting
    it back, page by page, costs four times as much as all the rest of what is done to a block.
    """
    bytes(PIPE_BYTES)
