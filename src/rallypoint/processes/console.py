"""The console, which all workers share: whole lines, and one stream at a time.

Our stdout and stderr are mostly the same terminal, so there is one `ConsoleRelay` for both. It has a thread of its own,
because writing to a console is the one wait that nobody can bound: whoever should read it may have stopped. Meanwhile the
log files go on, until the queue in between is full; and a relay that is closed leaves such a console behind.
"""

from __future__ import annotations

import io
import sys
import threading
from collections import deque
from collections.abc import Callable

from rallypoint import report
from rallypoint.processes.line_relay import InterruptFilter, LinePrefixer
from rallypoint.processes.log_file import enlarge_pipe, write_all
from rallypoint.processes.log_specs import Std
from rallypoint.records import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

__all__ = ["Console", "ConsoleRelay", "Speaker", "console_writer"]

Console = Callable[[bytes], None]
MAX_QUEUED_BYTES = 2 << 20


class Speaker:
    """One stream of one worker, as the console sees it."""

    def __init__(self, write: Console, prefix: bytes, stream: Std, has_ended: threading.Event) -> None:
        self.write: Console | None = write
        self.stream = stream
        self.prefixer = LinePrefixer(prefix)
        self.interrupts = InterruptFilter()
        self.has_ended = has_ended  # set once all that it had to say was shown


class _Said(Value):
    speaker: Speaker
    lines: bytes
    is_last: bool


class ConsoleRelay:
    """Shows the lines of many speakers, in the order in which they were put."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[_Said] = deque()
        self._queued_bytes = 0
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._is_silent = False
        self._inside_line: Speaker | None = None  # whose last line was too long to wait for its end
        self._failed = Std.NONE
        self.hides_interrupts = False

    def put(self, speaker: Speaker, lines: bytes, is_last: bool = False) -> None:
        """Show these whole lines soon; the last ones need not be whole. Waits while too much is waiting already."""
        with self._changed:
            while self._queued_bytes > MAX_QUEUED_BYTES and not self._is_silent:
                self._changed.wait()
            if self._is_silent:
                return
            if self._thread is None and not lines:  # many a run has nothing to show, and needs no thread
                speaker.has_ended.set()
                return
            self._queue.append(_Said(speaker, lines, is_last))
            self._queued_bytes += len(lines)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rallypoint-console", daemon=True)
                self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Give the console this time to take what is left; says whether it did. Nothing that comes later is shown."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
        with self._changed:
            self._is_silent = True
            self._changed.notify_all()
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while batch := self._take_all():
            for said in batch:
                self._show(said.speaker, self._worth_showing(said.speaker, said.lines, said.is_last), said.is_last)
                if said.is_last:
                    said.speaker.has_ended.set()

    def _take_all(self) -> list[_Said]:
        """Everything that waits, and nothing only at the end."""
        with self._changed:
            while not (self._queue or self._is_closing):
                self._changed.wait()
            batch = list(self._queue)
            self._queue.clear()
            self._queued_bytes = 0
            self._changed.notify_all()
            return batch

    def _worth_showing(self, speaker: Speaker, lines: bytes, is_last: bool) -> bytes:
        if self.hides_interrupts and speaker.stream == Std.ERR:
            lines = speaker.interrupts.feed(lines)
        return lines + speaker.interrupts.rest() if is_last else lines

    def _show(self, speaker: Speaker, lines: bytes, is_last: bool) -> None:
        """In one piece, the missing newline of a last line included: other processes may write to the same console."""
        text = speaker.prefixer.feed(lines)
        if is_last:
            text += speaker.prefixer.end_line()
        if not text:
            return
        if self._inside_line is not None and self._inside_line is not speaker:
            self._write(self._inside_line, self._inside_line.prefixer.end_line())
        self._inside_line = speaker if speaker.prefixer.is_inside_line else None
        self._write(speaker, text)

    def _write(self, speaker: Speaker, text: bytes) -> None:
        if self._is_silent or speaker.write is None:
            return
        try:
            speaker.write(text)
        except Exception as error:  # it may be any object of the user's, and must not take the other streams with it
            speaker.write = None
            self._warn_once(speaker.stream, error)

    def _warn_once(self, stream: Std, error: Exception) -> None:
        if not self._failed & stream:
            self._failed |= stream
            name = "stdout" if stream == Std.OUT else "stderr"
            report.warn(f"the workers' {name} is no longer shown, because ours cannot be written: {error}. Log files go on.")


def console_writer(stream: Std) -> Console:
    """What shows bytes on our own stdout or stderr: past Python's text layer where there is a file behind it, else through it.

    Only Python's own text files are bypassed. A notebook's stream has a file number as well, but that one leads to the
    terminal of the notebook's server.
    """
    text: TextIO | None = sys.stdout if stream == Std.OUT else sys.stderr
    if not isinstance(text, io.TextIOWrapper):
        return lambda block: _write_text(text, block)
    try:
        fd = text.fileno()
    except (OSError, ValueError):  # a text file in memory, or a closed one
        return lambda block: _write_text(text, block)
    enlarge_pipe(fd)

    def write(block: bytes) -> None:
        text.flush()
        write_all(fd, block)

    return write


def _write_text(text: TextIO | None, block: bytes) -> None:
    if text is not None:  # Python has none where the descriptor was closed at its start
        text.write(block.decode(errors="replace"))
        text.flush()
