"""The console, which all workers share: whole lines, and one stream at a time.

Our stdout and stderr are mostly the same terminal, so there is one `SharedConsole` for both. Writing to it is the one
wait of the stream pump that nobody can bound, since whoever should read it may have stopped reading. So the pump's
thread lays down its `Baton` for that time, and somebody else may finish the work.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rallypoint import report
from rallypoint.processes.line_relay import InterruptFilter, LinePrefixer
from rallypoint.processes.log_file import write_all
from rallypoint.processes.log_specs import Std

__all__ = ["Baton", "Console", "Revoked", "SharedConsole", "Speaker", "console_writer"]

Console = Callable[[bytes], None]


class Revoked(Exception):
    """The baton was taken for good while its holder was away, who must touch nothing any more."""


class Baton:
    """A lock that its holder lays down while it waits for the outside world."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_revoked = False

    @contextmanager
    def held(self, timeout_s: float = -1) -> Iterator[bool]:
        """Hold it; False when it was not to be had in time."""
        got_it = self._lock.acquire(timeout=timeout_s)
        try:
            yield got_it
        finally:
            if got_it:
                self._lock.release()

    @contextmanager
    def laid_down(self) -> Iterator[None]:
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
        if self.is_revoked:
            raise Revoked


class Speaker:
    """One stream of one worker, as the console sees it."""

    def __init__(self, write: Console, prefix: bytes, stream: Std) -> None:
        self.write: Console | None = write
        self.stream = stream
        self.prefixer = LinePrefixer(prefix)
        self.interrupts = InterruptFilter()


class SharedConsole:
    """Shows lines of many speakers. To be used with the baton held; it is laid down while the console takes its time."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self._inside_line: Speaker | None = None  # whose last line was too long to wait for its end
        self._failed = Std.NONE
        self.hides_interrupts = False
        self.is_silent = False

    def show(self, speaker: Speaker, lines: bytes) -> None:
        if self.hides_interrupts and speaker.stream == Std.ERR:
            lines = speaker.interrupts.feed(lines)
        self._show(speaker, lines)

    def end(self, speaker: Speaker) -> None:
        """Show what was held back, and end the speaker's last line."""
        self._show(speaker, speaker.interrupts.rest())
        self._end_line(speaker)

    def _show(self, speaker: Speaker, lines: bytes) -> None:
        if not lines:
            return
        if self._inside_line is not None and self._inside_line is not speaker:
            self._end_line(self._inside_line)
        text = speaker.prefixer.feed(lines)
        self._inside_line = speaker if speaker.prefixer.is_inside_line else None
        self._write(speaker, text)

    def _end_line(self, speaker: Speaker) -> None:
        if self._inside_line is speaker:
            self._inside_line = None
        self._write(speaker, speaker.prefixer.end_line())

    def _write(self, speaker: Speaker, text: bytes) -> None:
        if not text or self.is_silent or speaker.write is None:
            return
        with self._baton.laid_down():
            try:
                speaker.write(text)
            except Exception as error:  # it may be any object of the user's, and must not take the log files with it
                speaker.write = None
                self._warn(speaker.stream, error)

    def _warn(self, stream: Std, error: Exception) -> None:
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

    def write(block: bytes) -> None:
        text.flush()
        write_all(fd, block)

    return write


def _write_text(text: TextIO | None, block: bytes) -> None:
    if text is not None:  # Python has none where the descriptor was closed at its start
        text.write(block.decode(errors="replace"))
        text.flush()
