"""Ctrl-Z: the terminal stops the launcher, in its foreground; the workers, in sessions of their own, would not hear of it.

So the launcher passes it on to its wardens before it stops, and tells them when it goes on. A signal is enough for that: it comes
through whatever the launcher, or the line to the warden, is busy with.

A launcher that stands still says nothing to its job either. In a job of several nodes its workers are killed when their licence
is over, and it joins anew when it is continued.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

__all__ = ["begin", "end"]

_wardens: set[int] = set()


def begin(warden: int) -> None:
    """From now on this warden's workers are stopped with us, if nobody else cares for that signal."""
    _wardens.add(warden)
    if _may_change_handlers() and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
        signal.signal(signal.SIGTSTP, _suspend)


def end(warden: int) -> None:
    _wardens.discard(warden)
    if not _wardens and _may_change_handlers() and signal.getsignal(signal.SIGTSTP) is _suspend:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)


def _may_change_handlers() -> bool:
    return threading.current_thread() is threading.main_thread()


def _suspend(_number: int, _frame: FrameType | None) -> None:
    """The handler: stop the workers, then ourselves, as if there were no handler; go on here when we are continued."""
    _tell_wardens(signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, _suspend)
    _tell_wardens(signal.SIGCONT)


def _tell_wardens(number: signal.Signals) -> None:
    for warden in list(_wardens):
        try:
            os.kill(warden, number)
        except ProcessLookupError:  # as process 1 we have a thread that reaps whatever ends
            pass


os.register_at_fork(after_in_child=_wardens.clear)
