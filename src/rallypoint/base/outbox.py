"""What may hang hangs alone: a queue and a thread for each destination, and a deadline for work on files.

A terminal under Ctrl-S, a pipe that nobody reads, a file on a server that is gone: whoever writes there may wait for ever, and
nothing tells so in advance. Nobody who has to act, on a signal, a failure or a keepalive, may wait for them. So what is said and
recorded is put into an `Outbox`, which takes it without waiting; a thread delivers it, one for each destination, so that no
destination silences another. The thread is started when there is something to deliver and ends when there is nothing left, unless
somebody holds it for more. What is too much to keep is dropped, counted, and told when the destination takes something again. And
what has to be done with files before one can go on is left to a `Deputy`, for so long and no longer.

A program that merely calls us wants its lines out when the call returns. So where nobody is *on duty*, things are delivered on
the spot, unless the destination is busy; and whoever ends the last duty gives the destinations some time to take the rest.
"""

from __future__ import annotations

import _thread  # all that is needed of threading
import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    T = TypeVar("T")

__all__ = ["Deputy", "Outbox", "begin_duty", "end_duty", "flush", "is_busy", "is_owing", "on_duty", "settle"]

MOST_ITEMS = 2000
FAREWELL_S = 5.0  # for what is left when the last duty ends
EXIT_S = 5.0  # for what is left when the interpreter ends
LOOK_S = 0.05  # how soon a wait notices that it was interrupted

_lock = _thread.allocate_lock()  # one for all: it is held for an instant, never while anything is delivered
_duties = 0
_running: set[Outbox] = set()  # those that have a thread
_is_registered = False


class _Mark:
    """Stands in a queue; who waits for it learns that all before it was delivered."""

    def __init__(self) -> None:
        self.reached = _thread.allocate_lock()
        self.reached.acquire()


class Outbox:
    """One destination. `deliver` takes one item, for as long as it likes; `tell_loss` makes an item of a number of lost ones.

    What is foreign, as a handler of the user's, gets a thread that has a name.
    """

    def __init__(
        self,
        deliver: Callable[[Any], None],
        tell_loss: Callable[[int], object] | None = None,
        most_items: int = MOST_ITEMS,
        is_for_people: bool = False,
        is_foreign: bool = False,
        on_error: Callable[[BaseException], object] = bool,
    ) -> None:
        self.patience_s = float("inf") if is_for_people else FAREWELL_S  # a person may be reading; a file takes it or does not
        self._is_foreign = is_foreign
        self._on_error = on_error
        self._deliver = deliver
        self._tell_loss = tell_loss
        self._most_items = most_items
        self.reset()

    def reset(self) -> None:
        """As it was in the beginning; in a fork the thread, and what it was to deliver, are the parent's."""
        self._queue: list[object] = []
        self.owed = 0  # how many items must not be lost to a reader who is merely slow, as whoever puts them counts
        self._is_running = False
        self._is_idle = False  # it runs, but has nothing to do
        self._wake_fd = _thread.allocate_lock()
        self._wake_fd.acquire()
        self._holders = 0
        self._lost = 0
        self._since: float | None = None

    def put(self, item: object, may_wait: bool = True) -> bool:
        """Have the item delivered; whether it could be kept. Without a duty, and if the caller may wait, it is done on return."""
        with _lock:
            is_on_the_spot = may_wait and not _duties and not self._is_running
            if not is_on_the_spot:
                if len(self._queue) >= self._most_items:
                    self._lost += 1
                    return False
                self._queue.append(item)
                if self._is_running:
                    self._wake()
                    return True
                self._is_running = True
                _running.add(self)
        if is_on_the_spot:
            self._deliver(item)
        else:
            _start(self._run, self._is_foreign)
        return True

    def busy_s(self) -> float:
        """For how long the destination has been taking one item by now; 0 where it takes none."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was put so far is delivered; whether it is."""
        mark = self.mark()
        return mark is None or _wait(mark.reached, time.monotonic() + timeout_s, bool)

    def abandon(self) -> list[object]:
        """Wait for it no more, neither now nor at the end of the process; what it has not begun with, which it will not get."""
        with _lock:
            left, self._queue = [item for item in self._queue if not isinstance(item, _Mark)], []
            _running.discard(self)
            return left

    def mark(self) -> _Mark | None:
        """To be waited for; None if nothing is left to deliver."""
        with _lock:
            if not self.is_busy:
                return None
            mark = _Mark()
            self._queue.append(mark)
            return mark

    def hold(self) -> None:
        """Keep the thread for more to come: it is cheaper to wake than to start."""
        with _lock:
            self._holders += 1

    def release(self) -> None:
        with _lock:
            self._holders -= 1
            self._wake()

    def _wake(self) -> None:
        if self._is_idle:
            self._is_idle = False
            self._wake_fd.release()

    @property
    def is_busy(self) -> bool:
        return self._is_running and not self._is_idle

    def _run(self) -> None:
        while (batch := self._take_all()) is not None:
            for item in batch:
                if isinstance(item, _Mark):
                    item.reached.release()
                else:
                    self._deliver_one(item)
            if not batch:
                self._wake_fd.acquire()

    def _take_all(self) -> list[object] | None:
        """Everything that waits; nothing if it is to wait for more, and None if it is to end."""
        with _lock:
            batch, self._queue = self._queue, []
            if self._lost and self._tell_loss is not None:
                batch.append(self._tell_loss(self._lost))
            self._lost = 0
            self._is_idle = not batch and self._holders > 0
            if batch or self._is_idle:
                return batch
            self._is_running = False
            _running.discard(self)
            return None

    def _deliver_one(self, item: object) -> None:
        self._since = time.monotonic()
        try:
            self._deliver(item)
        except BaseException as error:  # it is somebody else's code, and those who come later want to be served
            self._on_error(error)
        finally:
            self._since = None


class Deputy:
    """Does work that may hang in a thread of its own. While any that was given up has not come back, it takes no other."""

    def __init__(self) -> None:
        self._given_up: set[_Errand] = set()

    def do(
        self,
        work: Callable[[], T],
        timeout_s: float,
        interrupt: Callable[[], object] = bool,
        discard: Callable[[T], object] | None = None,
    ) -> T:
        """What the work gives or raises; TimeoutError, which is an OSError, after `timeout_s`. `interrupt` may raise meanwhile.

        What comes too late is given to `discard`.
        """
        if self._given_up:
            raise TimeoutError(errno.ETIMEDOUT, "no answer to what was asked before")
        errand = _Errand(work, discard)

        def run() -> None:
            errand.run()
            self._given_up.discard(errand)
            errand.is_back.release()

        _start(run)
        try:
            _wait(errand.is_back, time.monotonic() + timeout_s, interrupt)
        finally:
            is_done = errand.end(self._given_up)
        if not is_done:
            raise TimeoutError(errno.ETIMEDOUT, f"no answer within {timeout_s:g} s")
        return errand.result()  # type: ignore[no-any-return]  # it is what the work gave


class _Errand:
    """One piece of work, seen from both sides."""

    def __init__(self, work: Callable[[], Any], discard: Callable[[Any], object] | None) -> None:
        self.is_back = _thread.allocate_lock()
        self.is_back.acquire()
        self._work = work
        self._discard = discard
        self._value: Any = None
        self._error: BaseException | None = None
        self._is_done = self._is_given_up = False

    def run(self) -> None:
        try:
            value = self._work()
        except BaseException as error:  # raised again where the work is waited for
            self._error = error
            value = None
        with _lock:
            self._value, self._is_done = value, True
            is_too_late = self._is_given_up
        if is_too_late and self._error is None and self._discard is not None:
            self._discard(value)

    def end(self, given_up: set[_Errand]) -> bool:
        """Wait no longer; whether it is done. If not, it is put to those that were given up."""
        with _lock:
            if not self._is_done:
                self._is_given_up = True
                given_up.add(self)
            return self._is_done

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


def begin_duty() -> None:
    """From now on nobody waits for a destination."""
    global _duties
    with _lock:
        _duties += 1


def end_duty(patience_s: float = FAREWELL_S) -> None:
    """The last one gives the destinations so long to take what is left."""
    global _duties
    with _lock:
        _duties -= 1
        is_last = not _duties
    if is_last:
        flush(patience_s)


@contextmanager
def on_duty() -> Iterator[None]:
    begin_duty()
    try:
        yield
    finally:
        end_duty()


def flush(timeout_s: float, interrupt: Callable[[], object] = bool) -> bool:
    """Wait until all that was put so far is delivered, or `interrupt` gives something true; whether it is."""
    now = time.monotonic()
    with _lock:
        boxes = list(_running)
    marks = [(mark, now + min(timeout_s, box.patience_s)) for box in boxes if (mark := box.mark()) is not None]
    return not [mark for mark, deadline in marks if not _wait(mark.reached, deadline, interrupt)]


def settle() -> None:
    """At the end of something that has spoken in a thread: let that be heard, unless somebody is on duty, who cannot wait."""
    if not _duties:
        flush(FAREWELL_S)


def is_busy() -> bool:
    """Whether anything is still to be delivered, or hangs."""
    return any(box.is_busy for box in list(_running))


def is_owing() -> bool:
    """Whether something is still to be delivered that must not be lost."""
    return any(box.owed > 0 for box in list(_running))


def _wait(lock: _thread.LockType, deadline: float, interrupt: Callable[[], object]) -> bool:
    """In small steps: what a signal that another thread got has to say is not heard while a lock is waited for."""
    while not lock.acquire(timeout=max(0.0, min(LOOK_S, deadline - time.monotonic()))):
        if interrupt() or time.monotonic() >= deadline:
            return False
    return True


def _start(run: Callable[[], None], is_foreign: bool = False) -> None:
    global _is_registered
    if not _is_registered:
        import atexit

        _is_registered = True
        atexit.register(flush, EXIT_S)
    try:
        if is_foreign:  # it may ask in which thread it is, and a stranger there would be remembered for ever
            from threading import Thread

            Thread(target=run, name="rallypoint-outbox", daemon=True).start()
        else:
            _thread.start_new_thread(run, ())
    except RuntimeError:  # no thread is left, or the interpreter ends: better late than never
        run()


def _begin_anew() -> None:
    """In a fork only the forking thread is there; who held the lock, and all who deliver, are not."""
    global _lock, _duties
    _lock = _thread.allocate_lock()
    _duties = 0
    for box in _running:
        box.reset()
    _running.clear()


os.register_at_fork(after_in_child=_begin_anew)
