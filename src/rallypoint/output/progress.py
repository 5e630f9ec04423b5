"""How far a command is that takes long, and how long it will still take: on a terminal, and nowhere else.

It is the line that a launcher shows while it waits (`output.live_line`), and it is gone when the work is done. Who works counts,
and a thread looks at the count once a second.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rallypoint.base import report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.output.waits import Counted

__all__ = ["Meter", "metered"]

STDERR = 2
GONE_WITHIN_S = 1.0


class Meter:
    """How much of `whole` is done; in so many of a `unit`, or as a share where there is none."""

    def __init__(self, what: str, whole: float = 0.0, unit: str = "") -> None:
        self.whole = whole
        self._what, self._done, self._unit = what, 0.0, unit
        self._since = self._counted_at = time.monotonic()

    def reach(self, done: float) -> None:
        self._done, self._counted_at = done, time.monotonic()

    def advance(self, by: float) -> None:
        self.reach(self._done + by)

    def look(self) -> Counted:
        from rallypoint.output.waits import Counted

        return Counted(self._what, self._done, self.whole, self._since, self._counted_at, self._unit)


@contextmanager
def metered(what: str, whole: float = 0.0, unit: str = "") -> Iterator[Meter]:
    """Within the block, whoever looks at stderr sees the meter. Nothing of it is there when the block ends."""
    from rallypoint.output.live_line import TerminalLine, can_show

    meter = Meter(what, whole, unit)
    if not can_show(STDERR):
        yield meter
        return
    line = TerminalLine(STDERR)
    report.set_live_line(line)
    try:
        with line.meanwhile(meter.look):
            yield meter
    finally:
        report.set_live_line(None)
        line.await_gone(GONE_WITHIN_S)
