"""The console, which all workers share: whole lines, and one stream at a time.

Our stdout and stderr are mostly the same terminal, so there is one outbox for both, and for all groups of workers that come
after each other. Its thread is the one that waits for a console that nobody reads. Meanwhile the log files go on, until there is
too much in between; and a group that has ended leaves its last lines there, to be shown if the console takes them in time.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable

from rallypoint import report
from rallypoint.outbox import Outbox
from rallypoint.processes.line_relay import InterruptFilter, LinePrefixer
from rallypoint.processes.log_file import enlarge_pipe, write_all
from rallypoint.processes.log_specs import Std
from rallypoint.records import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

__all__ = ["Console", "ConsoleRelay", "Speaker", "console_writer", "is_stuck"]

Console = Callable[[bytes], None]
MAX_QUEUED_BYTES = 2 << 20  # of one group of workers, while it runs
MAX_LEFT_BYTES = 16 << 20  # of all groups that have ended
MOST_ITEMS = 1 << 20
STUCK_AFTER_S = 1.0  # in one write; then nobody who has to act waits for it any more
LOOK_S = 0.05


class Speaker:
    """One stream of one worker, as the console sees it."""

    def __init__(self, write: Console, prefix: bytes, stream: Std, has_ended: threading.Event) -> None:
        self.write: Console | None = write
        self.stream = stream
        self.prefixer = LinePrefixer(prefix)
        self.interrupts = InterruptFilter()
        self.has_ended = has_ended  # set once all that it had to say was shown


class _Said(Value):
    relay: ConsoleRelay
    speaker: Speaker
    lines: bytes
    is_last: bool


_outbox = Outbox(lambda said: said.relay.show(said), most_items=MOST_ITEMS, is_for_people=True, is_foreign=True)


class _Backlog:
    """How much is to be shown, of all groups together; roughly, as several threads count."""

    bytes = 0


_backlog = _Backlog()


def is_stuck() -> bool:
    """Whether the console takes nothing at present, as far as that can be known."""
    return _outbox.busy_s() > STUCK_AFTER_S


class ConsoleRelay:
    """Shows the lines of the speakers of one group of workers, in the order in which they were put."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queued_bytes = 0
        self._queued_items = 0
        self._has_spoken = False
        self._is_hasty = False
        self._lost_bytes = 0
        self._inside_line: Speaker | None = None  # whose last line was too long to wait for its end
        self._failed = Std.NONE
        self.hides_interrupts = False

    def put(self, speaker: Speaker, lines: bytes, is_last: bool = False) -> None:
        """Show these whole lines soon; the last ones need not be whole. Waits while too much is waiting already."""
        with self._changed:
            while self._queued_bytes > MAX_QUEUED_BYTES and not self._is_hasty:
                self._changed.wait()
            if self._is_hasty and _backlog.bytes > MAX_LEFT_BYTES:
                self._lost_bytes += len(lines)
                return
            if not (self._has_spoken or lines):  # many a run has nothing to show, and needs no thread
                speaker.has_ended.set()
                return
            if not self._has_spoken and not self._is_hasty:
                _outbox.hold()
            self._has_spoken = True
            self._queued_bytes += len(lines)
            self._queued_items += 1
            _backlog.bytes += len(lines)
        _outbox.put(_Said(self, speaker, lines, is_last), may_wait=False)

    def hurry(self) -> None:
        """Make nobody wait for room any more: what comes now is the last."""
        with self._changed:
            if self._has_spoken and not self._is_hasty:
                _outbox.release()
            self._is_hasty = True
            self._changed.notify_all()

    def wait_shown(self, timeout_s: float) -> bool:
        """Give the console this time to take what it was given, and none if it takes nothing; says whether it did."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._queued_items:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or is_stuck():
                    return False
                self._changed.wait(min(left_s, LOOK_S))
        return True

    def show(self, said: _Said) -> None:
        """Done by the thread of the outbox."""
        try:
            self._show(said.speaker, self._worth_showing(said.speaker, said.lines, said.is_last), said.is_last)
        finally:
            if said.is_last:
                said.speaker.has_ended.set()
            with self._changed:
                self._queued_bytes -= len(said.lines)
                self._queued_items -= 1
                _backlog.bytes -= len(said.lines)
                lost_bytes = 0 if self._queued_items else self._lost_bytes
                self._lost_bytes -= lost_bytes
                self._changed.notify_all()
            if lost_bytes:
                report.warn(f"{lost_bytes} bytes of the workers' output were not shown here: they were not taken in time")

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
        if speaker.write is None:
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
