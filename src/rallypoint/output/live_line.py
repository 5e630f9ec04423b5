"""One line on the terminal that says what is awaited, while it is awaited; nothing is left of it afterwards.

**It is not where anybody writes.** The line stands in a row below the cursor, and the cursor stays where it was. So a prompt, a
progress bar or the ``^C`` that the terminal echoes is not touched, and nobody's text is ever appended to ours. What rallypoint
and the pump write takes the line away first (`stepping_aside`), under one lock, and it comes back afterwards.

**Workers write past us.** Their stdout is the terminal itself, and nobody can tell when they do. So the line is there only where
that does no harm. While workers run, there is none. While nodes are awaited or a restart is put off, there is no worker. While
workers are stopped they may have last words, which most say at once: so the line comes only after a moment, and stays some rows
away from the cursor, as many as last words usually are. Once a second everything below the cursor, wherever that is by then, is
cleared and the line is drawn anew.
*Rejected:* a scrolling region above it (a launcher that is killed would leave the terminal like that); asking the terminal where
the cursor is (the answer comes as input, which is the workers'); giving workers another stdout (their progress bars and colours).

**Nobody waits for it.** It is drawn by a thread of its own, which is there only while there is something to show, and which draws
only if the terminal takes something at present, we are in its foreground and it is wide enough. The width is asked for each time.

`Ticker` is what remains without the terminal, for a line that is shown elsewhere (`output.notebook_line`).
"""

from __future__ import annotations

import _thread
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rallypoint.base import defaults, environment, report
from rallypoint.base.outbox import Outbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.base.report import Look
    from rallypoint.output.waits import Wait

__all__ = ["TerminalLine", "Ticker", "can_show"]

DELAY_S = 0.5  # what takes no longer than that is not worth a line
INTERVAL_S = 1.0
LEAST_COLUMNS = 20
CLEAR_BELOW = "\x1b[J"


def can_show(fd: int) -> bool:
    """Whether a person is likely to look at what is drawn there."""
    is_dumb = environment.text(defaults.ENV_TERM, "dumb") == "dumb"
    return os.isatty(fd) and not is_dumb and not environment.text(defaults.ENV_CI)


class Ticker:
    """Has something drawn again and again, for as long as it is awaited. A subclass draws, in a thread that may hang alone."""

    def __init__(self, is_foreign: bool = False) -> None:
        self._outbox = Outbox(self._tell_on, is_foreign=is_foreign)
        self._look: Look | None = None
        self._changed = _thread.allocate_lock()
        self._changed.acquire()

    @contextmanager
    def meanwhile(self, look: Look) -> Iterator[None]:
        outer = self._look
        self._turn_to(look)
        try:
            yield
        finally:
            self._turn_to(outer)

    def _turn_to(self, look: Look | None) -> None:
        """What was shown so far ends at once, and with it the thread, if nothing follows."""
        self._look = look
        if self._changed.locked():
            self._changed.release()
        if look is not None:
            self._outbox.put(look, may_wait=False)

    def await_gone(self, timeout_s: float) -> bool:
        """After the block: wait until nothing of it is to be seen; whether that is so."""
        return self._outbox.flush(timeout_s)

    def stepping_aside(self, fd: int) -> AbstractContextManager[object]:
        """Only a line on the terminal is in anybody's way."""
        return nullcontext()

    def step_aside(self) -> None:
        return

    def _tell_on(self, look: Look) -> None:
        """In the thread: until this is no longer what is awaited."""
        self._pause(DELAY_S, look)
        try:
            while self._look is look:
                self._draw(look)
                self._pause(INTERVAL_S, look)
        finally:
            self._remove()

    def _pause(self, seconds: float, look: Look) -> None:
        end_at = time.monotonic() + seconds
        while self._look is look and (left_s := end_at - time.monotonic()) > 0:
            self._changed.acquire(timeout=left_s)

    def _draw(self, look: Look) -> None:
        """Show what it tells now."""

    def _remove(self) -> None:
        """It is awaited no longer."""


class TerminalLine(Ticker):
    """The line on the terminal that `fd` leads to."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._device = os.fstat(fd).st_rdev
        self._writing = _thread.allocate_lock()  # held by whoever writes to the terminal
        self._is_drawn = False

    @contextmanager
    def meanwhile(self, look: Look) -> Iterator[None]:
        """On Ctrl-Z it goes before the shell has something to say."""
        is_ours = _stops_by_default()
        if is_ours:
            signal.signal(signal.SIGTSTP, self._suspend)
        try:
            with super().meanwhile(look):
                yield
        finally:
            if is_ours and signal.getsignal(signal.SIGTSTP) == self._suspend:
                signal.signal(signal.SIGTSTP, signal.SIG_DFL)

    @contextmanager
    def stepping_aside(self, fd: int) -> Iterator[None]:
        if not self._is_same(fd):
            yield
            return
        with self._writing:
            self._clear()
            yield

    def step_aside(self) -> None:
        if self._writing.acquire(False):
            try:
                if self._takes_something():
                    self._clear()
            finally:
                self._writing.release()

    def _suspend(self, _number: int, _frame: object) -> None:
        """The handler: stop as if there were none, and go on here when we are continued."""
        self.step_aside()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.pthread_kill(_thread.get_ident(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._suspend)

    def _draw(self, look: Look) -> None:
        from rallypoint.output import waits

        wait: Wait | None = look()
        with self._writing:
            if self._look is not look or not self._takes_something():
                return
            if not _is_in_foreground(self._fd):
                self._is_drawn = False  # what is below the cursor is somebody else's now
                return
            size = os.get_terminal_size(self._fd)
            if wait is None or size.columns < LEAST_COLUMNS or size.lines < 2:
                self._clear()
                return
            rows = min(waits.rows_apart(wait) + 1, size.lines - 1)
            self._write(_below(rows, waits.line(wait, time.monotonic(), size.columns - 1)))
            self._is_drawn = True

    def _remove(self) -> None:
        with self._writing:
            self._clear()

    def _clear(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            self._write(CLEAR_BELOW)

    def _write(self, text: str) -> None:
        from rallypoint.output.console import write_all

        try:
            write_all(self._fd, text.encode())
        except OSError:  # the terminal is gone, and nobody misses the line
            self._is_drawn = False

    def _is_same(self, fd: int) -> bool:
        try:
            return fd == self._fd or os.fstat(fd).st_rdev == self._device
        except OSError:
            return False

    def _takes_something(self) -> bool:
        """Not after Ctrl-S, for one."""
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return any(events == select.POLLOUT for _, events in poll.poll(0))


def _below(rows: int, text: str) -> str:
    """Clear what is below, make room for so many rows, and write in the last; the cursor is where it was then.

    Going down row by row moves what is shown up, if that is needed, and leaves the column as it is.
    """
    down = "\x1bD" * rows
    return f"{CLEAR_BELOW}{down}\x1b[{rows}A\x1b7\x1b[{rows}B\r{text}\x1b8"


def _is_in_foreground(fd: int) -> bool:
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:  # it is not the terminal of our session, so nobody can put us into its background
        return True


def _stops_by_default() -> bool:
    import threading

    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL


os.register_at_fork(after_in_child=lambda: report.set_live_line(None))  # it is the parent's, and so may be its lock
