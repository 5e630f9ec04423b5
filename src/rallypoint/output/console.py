"""The console, which all workers share: whole lines, and one stream at a time.

Our stdout and stderr are mostly the same terminal, so there is one outbox for both, and for all groups of workers that come
after each other. Its thread is the one that waits for a console that nobody reads. Meanwhile the log files go on, until there is
too much in between; and a group that has ended leaves its last lines there, to be shown if the console takes them in time.

A pipe gives bytes in blocks that begin and end anywhere, and several workers write to one console. Lines of different
workers must not mix, so a block is shown only up to its last line end, and the rest waits for its own; but not for long, if it
may be somebody's prompt. All of this works on blocks, never line by line, which is what makes it as fast as it is; and on bytes,
because a worker may write anything.

A carriage return ends a line too: what comes after it is a progress bar, and overwrites the one before.
"""

from __future__ import annotations

import fcntl
import io
import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable

from rallypoint.base import report
from rallypoint.base.outbox import Outbox
from rallypoint.base.records import Value
from rallypoint.output.log_specs import Std

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

__all__ = [
    "PIPE_BYTES", "Console", "ConsoleRelay", "Floor", "InterruptFilter", "LineCutter", "LinePrefixer", "Speaker",
    "console_writer", "enlarge_pipe", "inherited_writer", "is_stuck", "matching_lines", "pipe_size", "write_all",
]  # fmt: skip

Console = Callable[[bytes], None]
MAX_LINE_BYTES = 1 << 20
MAX_TRACEBACK_BYTES = 1 << 18
LINE_ENDS = (b"\n", b"\r")
PIPE_BYTES = 1 << 20
MAX_QUEUED_BYTES = 2 << 20  # of one group of workers, while it runs
MAX_LEFT_BYTES = 16 << 20  # of all groups that have ended
MOST_ITEMS = 1 << 20
STUCK_AFTER_S = 1.0  # in one write; then nobody who has to act waits for it any more
LOOK_S = 0.05
FLOOR_S = 1.0  # for whoever is inside a line, before others may break it
MAX_WAITING_BYTES = 1 << 18  # of those others


class LineCutter:
    """Gives out whole lines, however the blocks were cut; a line that grows beyond `max_line_bytes` comes in pieces."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._held: list[bytes] = []  # joined only once, so that a long line of tiny blocks costs no quadratic time
        self._held_bytes = 0
        self.is_in_bar = False  # what it holds comes after a carriage return

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def feed(self, block: bytes) -> bytes:
        newline = block.rfind(b"\n")
        cut = max(newline, block.rfind(b"\r", newline + 1)) + 1
        if not cut:
            self._hold(block)
            return self.rest() if self._held_bytes >= self._max_line_bytes else b""
        self.is_in_bar = cut > newline + 1
        if cut == len(block) and not self._held:
            return block
        lines = b"".join((*self._held, memoryview(block)[:cut]))
        self._held.clear()
        self._held_bytes = 0
        self._hold(block[cut:])
        return lines

    def rest(self) -> bytes:
        """What has been held back so far; it is no longer held."""
        rest = b"".join(self._held)
        self._held.clear()
        self._held_bytes = 0
        return rest

    def _hold(self, block: bytes) -> None:
        if block:
            self._held.append(block)
            self._held_bytes += len(block)


class LinePrefixer:
    """Puts the prefix before every line; it remembers where the last text ended, since that may be inside a line."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._last = b"\n"
        self._is_bar = False

    @property
    def is_inside_line(self) -> bool:
        return self._last not in LINE_ENDS

    @property
    def is_inside_bar(self) -> bool:
        """Whether the line that it is inside of began after a carriage return, and is to be overwritten by the next."""
        return self._is_bar and self.is_inside_line

    def feed(self, text: bytes) -> bytes:
        if not text:
            return b""
        opening = self._prefix if self._begins_line(text) else b""
        before, self._last = self._last, text[-1:]
        if self.is_inside_line:
            newline, carriage_return = text.rfind(b"\n"), text.rfind(b"\r")
            if newline != carriage_return:  # there is one, or both
                self._is_bar = carriage_return > newline
            elif before in LINE_ENDS:
                self._is_bar = before == b"\r"
        if not self._prefix:
            return text
        if b"\r" in text:
            return opening + self._prefix.join(text.splitlines(keepends=True))
        prefixed = text.replace(b"\n", b"\n" + self._prefix)
        begun_too_early = len(self._prefix) if self._last == b"\n" else 0  # the line that comes next
        return b"".join((opening, memoryview(prefixed)[: len(prefixed) - begun_too_early]))

    def overwritten(self) -> None:
        """Somebody else's carriage return has ended the line."""
        self._last = b"\r"

    def end_line(self) -> bytes:
        """The newline that is missing, if it is, so that whatever comes next starts on its own line."""
        missing = b"" if self._last == b"\n" else b"\n"
        self._last = b"\n"
        return missing

    def _begins_line(self, text: bytes) -> bool:
        if self._last == b"\r":
            return not text.startswith(b"\n")  # the two together are one line end, which happened to be cut
        return self._last == b"\n"


def matching_lines(lines: bytes, needles: tuple[bytes, ...], prefix: bytes) -> bytes:
    """Those lines that contain one of the needles, each with the prefix before it."""
    if not any(needle in lines for needle in needles):
        return b""
    found = [line for line in lines.splitlines(keepends=True) if any(needle in line for needle in needles)]
    text = b"".join(prefix + line for line in found)
    return text + b"\n" if text and not text.endswith(LINE_ENDS) else text


class InterruptFilter:
    """Leaves out tracebacks that end in KeyboardInterrupt: somebody pressed Ctrl-C and knows why the program ended.

    A traceback is held back until its last line tells what it is; also while another one may follow it ("During handling of
    the above exception …"), for they are one story. What grows too long to hold is shown after all.
    """

    _TRACEBACK = b"Traceback (most recent call last)"
    _INTERRUPTED_START = (b"Fatal Python error: init_", b"Python runtime state: ")  # before the first line of the program
    _OPENERS = (_TRACEBACK, b"Exception ignored ", _INTERRUPTED_START[0])
    _LINKS = (b"During handling of the above exception", b"The above exception was the direct cause")

    def __init__(self, max_held_bytes: int = MAX_TRACEBACK_BYTES) -> None:
        self._max_held_bytes = max_held_bytes
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._has_ended = False  # the held traceback has its last line, which names no interrupt
        self._is_linked = False  # and another one is announced

    def feed(self, lines: bytes) -> bytes:
        if not self._held and not any(opener in lines for opener in self._OPENERS):
            return lines
        return b"".join([self._step(line) for line in lines.splitlines(keepends=True)])

    def rest(self) -> bytes:
        """What has been held back so far; it is no longer held."""
        rest = b"".join(self._held)
        self._held.clear()
        self._held_bytes = 0
        self._has_ended = self._is_linked = False
        return rest

    def _step(self, line: bytes) -> bytes:
        if not self._held:
            return self._hold(line) if line.startswith(self._OPENERS) else line
        if line.startswith(self._LINKS):
            self._is_linked = True
            return self._hold(line)
        if line.startswith(self._TRACEBACK) and (self._is_linked or not self._has_ended):
            self._has_ended = self._is_linked = False
            return self._hold(line)
        if line.isspace() or line.startswith((b" ", b"\t")):
            return self._hold(line)
        if line.startswith(self._INTERRUPTED_START) and not self._has_ended:
            return self._hold(line)
        if self._has_ended:
            return self.rest() + self._step(line)
        if line.startswith(b"KeyboardInterrupt"):
            self.rest()
            return b""
        self._has_ended = True
        return self._hold(line)

    def _hold(self, line: bytes) -> bytes:
        self._held.append(line)
        self._held_bytes += len(line)
        return self.rest() if self._held_bytes > self._max_held_bytes else b""


class Speaker:
    """One stream of one worker, as the console sees it."""

    def __init__(self, write: Console, prefix: bytes, stream: Std, has_ended: threading.Event, is_owed: bool = False) -> None:
        self.write: Console | None = write  # None once that has failed
        self.is_owed = is_owed  # what it says is the output of the job, for which the reader may take any time
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


class _Cursor:
    """Where the console is, whichever group has spoken last."""

    inside_line: Speaker | None = None  # whose last line has no end, or was too long to wait for it


_backlog = _Backlog()
_cursor = _Cursor()


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
            _outbox.owed += speaker.is_owed
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
                _outbox.owed -= said.speaker.is_owed
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
        """In one piece, the missing newline of a last line included: other processes may write to the same console.

        What is the job's own output gets no byte more than it has, unless somebody else speaks.
        """
        text = speaker.prefixer.feed(lines)
        if is_last and not speaker.is_owed:
            text += speaker.prefixer.end_line()
        if not text:
            return
        other = _cursor.inside_line if _cursor.inside_line is not speaker else None
        if other is not None and other.prefixer.is_inside_bar and text.startswith(b"\r"):
            other.prefixer.overwritten()  # two progress bars, which look as they do without us
        elif other is not None:
            self._write(other, other.prefixer.end_line())
        _cursor.inside_line = speaker if speaker.prefixer.is_inside_line else None
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


class Floor:
    """Lets whoever is inside a line end it before the others speak; they wait for a moment, and only if they have little to say.

    For one thread, which asks it to `release` the others when that is due.
    """

    def __init__(self, relay: ConsoleRelay) -> None:
        self._relay = relay
        self._holder: Speaker | None = None
        self._until = 0.0
        self._waiting: list[tuple[Speaker, bytes]] = []
        self._waiting_bytes = 0

    @property
    def due_at(self) -> float:
        """When those who wait have waited long enough; for ever if nobody does."""
        return self._until if self._waiting else math.inf

    def put(self, speaker: Speaker, lines: bytes, is_last: bool = False, is_bar: bool = False) -> None:
        """Have this shown, now or soon. If it ends inside a line, others wait; not for a bar, which has no end."""
        now = time.monotonic()
        if is_last or now >= self._until:
            self.release()
        if self._holder is not None and self._holder is not speaker:
            self._waiting.append((speaker, lines))
            self._waiting_bytes += len(lines)
            if self._waiting_bytes > MAX_WAITING_BYTES:
                self.release()
            return
        self._relay.put(speaker, lines, is_last)
        if is_last or lines.endswith(LINE_ENDS):
            self.release()
        elif self._holder is None and not is_bar:
            self._holder, self._until = speaker, now + FLOOR_S

    def release(self) -> None:
        """Let everybody speak, those who wait first."""
        self._holder = None
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for speaker, lines in waiting:
            self._relay.put(speaker, lines)


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
        with report.stepping_aside(fd):
            write_all(fd, block)

    return write


def inherited_writer(fd: int) -> Console:
    """What shows bytes where a worker that inherits this descriptor would have written them."""

    def write(block: bytes) -> None:
        with report.stepping_aside(fd):
            write_all(fd, block)

    return write


def _write_text(text: TextIO | None, block: bytes) -> None:
    if text is not None:  # Python has none where the descriptor was closed at its start
        text.write(block.decode(errors="replace"))
        text.flush()


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
