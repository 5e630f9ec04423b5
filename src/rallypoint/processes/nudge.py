"""A signal must end a call that blocks, also when it comes at a bad moment.

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

__all__ = ["nudging"]

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
