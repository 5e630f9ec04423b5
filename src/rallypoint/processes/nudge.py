"""A signal must end a call that blocks, also when it comes at a bad moment.

The interpreter notes a signal when it comes, and runs the handler when the main thread is back in Python. A call that blocks in
the kernel comes back for that only if the signal interrupts it; a signal that was there a moment before, or that the kernel gave
to another thread, does not, and the handler waits for as long as the call does. So a thread looks whether a signal that has come
is handled soon, and sends it to the main thread again if not.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["nudging"]

HANDLED_WITHIN_MS = 50


@contextmanager
def nudging(is_handled: Callable[[], bool], is_ours: Callable[[int], bool]) -> Iterator[None]:
    """Within the block, signals that are ours and that have come, but are not handled, are sent to this thread, the main one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    thread = threading.Thread(target=_nudge, args=(read, is_handled, is_ours), name="rallypoint-nudge", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)  # which ends the thread
        thread.join()
        os.close(read)


def _nudge(read: int, is_handled: Callable[[], bool], is_ours: Callable[[int], bool]) -> None:
    main = threading.main_thread().ident
    assert main is not None
    news = select.poll()
    news.register(read, select.POLLIN)
    late: set[int] = set()
    while True:
        has_come = news.poll(HANDLED_WITHIN_MS if late else None)
        if has_come:
            numbers = os.read(read, 256)
            if not numbers:
                return
            late |= {number for number in numbers if is_ours(number)}
            continue
        if is_handled():
            late.clear()
        for number in late:
            signal.pthread_kill(main, number)
