"""What rallypoint itself has to say while it runs: few lines, each of one sentence.

A library logs and a program prints. So the lines go to the logger ``rallypoint``, unless the command line has put its own
sink in place. ``logging`` is imported only when a line is really logged: it costs as much as a third of a cold start.

Whoever says something never waits for who should hear it (`outbox`). And a line holds what others have said, on other hosts
too: a name, a message, a stack. So whatever could act on a terminal, or look like a line of ours, is escaped here, once for all.

Where a person looks on, there is also a *live line*, which says what is waited for at this moment (`meanwhile`). Who draws it is
loaded only there; everybody else pays for a comparison with None.
"""

from __future__ import annotations

import _thread
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from rallypoint.base.outbox import Outbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    Look = Callable[[], Any]  # it gives one of `output.waits`, or nothing
else:
    Protocol = object

__all__ = [
    "LiveLine", "debug", "error", "escaped", "info", "is_live", "meanwhile", "set_live_line", "set_sink", "step_aside",
    "stepping_aside", "warn", "warning_once",
]  # fmt: skip

# The numbers are those of the logging module.
DEBUG, INFO, WARNING, ERROR = 10, 20, 30, 40

Sink = Callable[[int, str], None]


def escaped(text: str) -> str:
    """The same with everything that is no plain character in the notation of Python's literals."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\t" else one.encode("unicode_escape").decode() for one in text)


def _log(level: int, text: str) -> None:
    import logging

    logging.getLogger("rallypoint").log(level, "%s", text)


def _is_logged(level: int) -> bool:
    """Where nobody has imported logging, nobody has asked for anything below a warning.

    It is imported here and not where the line is delivered: a fork must find no thread in the middle of that.
    """
    if level < WARNING and "logging" not in sys.modules:
        return False
    import logging

    return logging.getLogger("rallypoint").isEnabledFor(level)


def _losses(count: int) -> tuple[int, str]:
    return WARNING, f"{count} lines are missing here: what shows them did not take them in time"


def _outbox_to(sink: Sink, is_foreign: bool) -> Outbox:
    return Outbox(lambda said: sink(*said), _losses, is_for_people=True, is_foreign=is_foreign)


_outbox = _outbox_to(_log, is_foreign=True)
_is_wanted: Callable[[int], bool] = _is_logged


def set_sink(sink: Sink | None, least: int = 0) -> None:
    """Send every later line of at least this level to `sink`; None restores logging."""
    global _outbox, _is_wanted
    _outbox = _outbox_to(sink or _log, is_foreign=sink is None)
    _is_wanted = _is_logged if sink is None else lambda level: level >= least


def _say(level: int, text: str) -> None:
    if _is_wanted(level):
        _outbox.put((level, text), may_wait=_is_main_thread())


def _is_main_thread() -> bool:
    """Other threads have something to do that cannot wait: they keep leases, watch timers, serve the store."""
    if "threading" not in sys.modules:
        return True
    import threading

    return threading.main_thread().ident == _thread.get_ident()


# --- the live line ---------------------------------------------------------------------------------------------------------


class LiveLine(Protocol):
    """Whoever shows what is waited for, to a person who looks on."""

    def meanwhile(self, look: Look) -> AbstractContextManager[object]: ...

    def stepping_aside(self, fd: int) -> AbstractContextManager[object]: ...

    def step_aside(self) -> None: ...


_NOTHING = nullcontext()
_live_line: LiveLine | None = None


def set_live_line(line: LiveLine | None) -> None:
    global _live_line
    _live_line = line


def is_live() -> bool:
    """Whether somebody looks on, so that what is waited for need not be said again and again."""
    return _live_line is not None


def meanwhile(look: Look) -> AbstractContextManager[object]:
    """Within the block something is waited for. `look` tells what, and is called by another thread, and only if it takes long."""
    return _NOTHING if _live_line is None else _live_line.meanwhile(look)


def stepping_aside(fd: int) -> AbstractContextManager[object]:
    """Whoever writes to what may be the terminal does so within this block; the live line is not there meanwhile."""
    return _NOTHING if _live_line is None else _live_line.stepping_aside(fd)


def step_aside() -> None:
    """Take it away at once, if that can be done without waiting: this process is about to be stopped."""
    if _live_line is not None:
        _live_line.step_aside()


# --- lines -----------------------------------------------------------------------------------------------------------------


def debug(text: str) -> None:
    _say(DEBUG, escaped(text))


def info(text: str) -> None:
    _say(INFO, escaped(text))


def warn(text: str) -> None:
    _say(WARNING, escaped(text))


def warning_once(what: str) -> Callable[[BaseException], None]:
    """For errors that nobody is left to raise to: the first of them is said, as the reason for `what`."""
    told: list[BaseException] = []

    def complain(error: BaseException) -> None:
        if not told:
            warn(f"{what} failed: {error!r}; the job does without")
        told[:] = [error]

    return complain


def error(text: str) -> None:
    """What ended the job; the one thing that may take several lines."""
    _say(ERROR, "\n".join(map(escaped, text.split("\n"))))
