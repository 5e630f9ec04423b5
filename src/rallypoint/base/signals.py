"""Signals that ask the launcher to stop: they are enqueued the instant they come, and the loop that waits raises.

A handler that raises makes every line of the program one that may throw. And a handler in Python runs only once the main thread
is back in Python, which it is not while it sleeps in ``poll`` and the kernel has given the signal to another thread. So what
counts is not that our handlers run but the byte that the interpreter writes to its *wakeup descriptor*, in whichever thread:
that is the pipe which the agent's loop polls beside its workers. A signal that was ignored when we started (``nohup``) stays
ignored. The one exception is a call into code that is not ours and may block for long: around such a call, `interrupting()` lets
the handler raise, for nothing else could end it.

Handlers are a property of the process, and so is this inbox: whoever watches inside another watcher shares it. Signals that are
not ours are passed on to whoever had the wakeup descriptor before.

A signal must end a call that blocks, also when it comes at a bad moment.

The interpreter notes a signal when it comes, and runs the handler when the main thread is back in Python. A call that blocks in
the kernel comes back for that only if a signal interrupts it; one that was there a moment before, or that the kernel gave
to another thread, does not, and the handler waits for as long as the call does. So a thread looks whether a signal that has come
is taken soon, and if not interrupts the main thread, with a signal that means nothing and that nobody counts.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rallypoint.base import report
from rallypoint.errors import SignalException, signal_exception

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.base.senders import Notes, Sender

__all__ = ["SignalInbox", "inbox", "nudging", "parse_signal_names"]


# --- nudge -----------------------------------------------------------------------------------------------------------------


TAKEN_WITHIN_MS = 50
NUDGE = signal.SIGURG  # ignored by whoever does not ask for it, so it does no harm when it comes late


@contextmanager
def nudging(news_fd: int | None, take: Callable[[], None]) -> Iterator[None]:
    """Within the block, this thread, the main one, is interrupted to `take` what `news_fd` has, if it is not taken soon."""
    is_main = threading.current_thread() is threading.main_thread()
    if news_fd is None or not is_main or signal.getsignal(NUDGE) is None:  # None: a C library's, which could not be put back
        yield
        return
    old = signal.getsignal(NUDGE)
    signal.signal(NUDGE, _taking(take, old))
    over_read, over_write = os.pipe2(os.O_CLOEXEC)
    thread = threading.Thread(target=_nudge, args=(news_fd, over_read), name="rallypoint-nudge", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(over_write)  # which ends the thread
        thread.join()
        os.close(over_read)
        signal.signal(NUDGE, old)


def _taking(take: Callable[[], None], old: object) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        take()
        if callable(old):  # it may have been meant for somebody else
            old(number, frame)

    return handle


def _nudge(news_fd: int, over_fd: int) -> None:
    main = threading.main_thread().ident
    assert main is not None
    either, over, news = select.poll(), select.poll(), select.poll()
    for poll, fds in ((either, (news_fd, over_fd)), (over, (over_fd,)), (news, (news_fd,))):
        for fd in fds:
            poll.register(fd, select.POLLIN)
    while over_fd not in {fd for fd, _ in either.poll()} and not over.poll(TAKEN_WITHIN_MS):
        if news.poll(0):
            signal.pthread_kill(main, NUDGE)


# --- signals ---------------------------------------------------------------------------------------------------------------


def parse_signal_names(names: str) -> list[signal.Signals]:
    """The signals of a list such as ``SIGTERM,SIGINT``; unknown names are said and left out."""
    known = signal.Signals.__members__
    wanted = [name.strip().upper() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            report.warn(f"signals_to_handle names {name!r}, which this system does not have; it is left out")
    return [known[name] for name in wanted if name in known]


class SignalInbox:
    """The signals received since `watch` was entered, oldest first."""

    def __init__(self) -> None:
        self._watchers = 0
        self._old_handlers: dict[int, object] = {}
        self._old_wakeup_fd = -1
        self._pipe: tuple[int, int] | None = None
        self._may_raise = False
        self._pending: list[tuple[signal.Signals, Sender | None]] = []
        self._notes: Notes | None = None
        self.sender: Sender | None = None  # of the signal that was seen or taken last, if that is known
        # In the main thread: what is left of a signal that came, if somebody has a use for it besides ending; any may be it.
        self.sift: Callable[[signal.Signals], signal.Signals | None] = _as_it_is
        self.received = 0  # since the first watcher began, of those seen; the second signal is one of impatience

    @property
    def is_watched(self) -> bool:
        """Whether somebody takes what comes; may be asked from any thread."""
        return self._watchers > 0

    @contextmanager
    def watch(self, names: str) -> Iterator[SignalInbox]:
        """Receive the named signals here instead of dying of them. Outside the main thread nothing can be received."""
        counted = self.begin(names)
        try:
            yield self
        finally:
            if counted:
                self.end()

    def begin(self, names: str) -> bool:
        """Start to receive; whether anything can be received here, and so whether `end` is to be called."""
        if not _is_main_thread():
            return False
        self._watchers += 1
        if self._watchers > 1:
            return True
        self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pending.clear()
        self.received = 0
        self._old_wakeup_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in parse_signal_names(names):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._old_handlers[number] = signal.signal(number, self._handle)
        return True

    def learn_senders(self) -> None:
        """Know who sends what comes from now on, where that can be known. Nobody needs that to start."""
        if self._watchers and self._notes is None and _is_main_thread():
            from rallypoint.base import senders

            self._notes = senders.take_notes(self._old_handlers)

    def end(self) -> signal.Signals | None:
        """Stop to receive; the last watcher is told of a signal that nobody has taken."""
        self._watchers -= 1
        if self._watchers or self._pipe is None:
            return None
        self._restore()
        left = self.take()
        self._close()
        return left

    def _restore(self) -> None:
        """Give handlers and wakeup descriptor back to those who had them; what came before is in the pipe."""
        ours = self._pipe[1] if self._pipe else -1
        for number, old in self._old_handlers.items():
            signal.signal(number, old)  # type: ignore[arg-type]  # it is what signal.signal() gave us
        current = signal.set_wakeup_fd(self._old_wakeup_fd)
        if current != ours:  # somebody has taken it meanwhile, and has still to give it back
            signal.set_wakeup_fd(current)

    def _close(self) -> None:
        self._old_handlers.clear()
        self._pending.clear()
        self._notes = self.sender = None
        for fd in self._pipe or ():
            os.close(fd)
        self._pipe = None

    def forget(self) -> None:
        """In a fork of this process: what is sent to it is not for us, and must not be swallowed either."""
        if self._pipe is not None:
            self._restore()
            self._close()
        self._watchers = 0
        self._may_raise = False
        self.stop_sifting()

    def stop_sifting(self) -> None:
        self.sift = _as_it_is

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        """The byte is in the pipe already, unless somebody has taken the wakeup descriptor from us."""
        if self._pipe is None:
            return
        current = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if current != self._pipe[1]:
            signal.set_wakeup_fd(current)
            os.write(self._pipe[1], bytes([number]))
        self._raise_if_wanted()

    def _raise_if_wanted(self) -> None:
        """Once: what is cleaned up behind the call that was interrupted is not to be interrupted in turn."""
        if self._may_raise and (number := self.take()) is not None:
            self._may_raise = False
            raise self._exception(number)

    def fileno(self) -> int | None:
        """Readable when a signal has come; None where none can come."""
        return self._pipe[0] if self._pipe and _is_main_thread() else None

    def count_stop(self) -> None:
        """We were asked to stop in another way than by a signal that is still to be taken: the next signal is the second."""
        self.received += 1

    def collect(self) -> list[signal.Signals]:
        """What has come since the last look; it stays to be taken. Only the main thread takes: signals are told to it alone."""
        if self._pipe is None or not _is_main_thread():
            return []
        try:
            numbers = os.read(self._pipe[0], 4096)
        except BlockingIOError:
            return []
        ours = [signal.Signals(number) for number in numbers if number in self._old_handlers]
        new = [one for number in ours if (one := self._sifted(number)) is not None]
        self._pass_on(bytes(number for number in numbers if number not in self._old_handlers))
        self._pending += new
        self.received += len(new)
        return [number for number, _ in new]

    def _sifted(self, number: signal.Signals) -> tuple[signal.Signals, Sender | None] | None:
        self.sender = self._notes.take(number) if self._notes is not None else None
        left = self.sift(number)
        return None if left is None else (left, self.sender)

    def _pass_on(self, numbers: bytes) -> None:
        if numbers and self._old_wakeup_fd >= 0:
            try:
                os.write(self._old_wakeup_fd, numbers)
            except OSError:  # it is full, or closed: the interpreter would not have told anybody either
                return

    def take(self) -> signal.Signals | None:
        """The oldest signal not yet taken."""
        self.collect()
        if not self._pending or not _is_main_thread():
            return None
        number, self.sender = self._pending.pop(0)
        return number

    def raise_pending(self) -> None:
        number = self.take()
        if number is not None:
            raise self._exception(number)

    def _exception(self, number: signal.Signals) -> SignalException:
        error = signal_exception(f"received {number.name}", number)
        error.sender = self.sender
        return error

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Around a call into foreign code that may block: a signal is raised right there."""

        with nudging(self.fileno(), self._raise_if_wanted):
            self.raise_pending()
            self._may_raise = True
            try:
                yield
            finally:
                self._may_raise = False


def _as_it_is(number: signal.Signals) -> signal.Signals | None:
    return number


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


inbox = SignalInbox()
os.register_at_fork(after_in_child=inbox.forget)
