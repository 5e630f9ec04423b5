"""One line below a notebook's cell that says what is awaited, or how long workers have been running, until the call returns.

A notebook keeps what it is shown apart from what programs print, and lets it be changed. So the line is in nobody's way, and is
there while workers run too. Nothing is imported for it but what the notebook has loaded already.
"""

from __future__ import annotations

import _thread
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rallypoint.base import report
from rallypoint.output import waits
from rallypoint.output.live_line import Ticker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.base.report import Look

__all__ = ["shown_in_notebook"]

WIDTH = 120


@contextmanager
def shown_in_notebook(workers: int) -> Iterator[None]:
    """Within the block, whoever ran the cell sees how it goes."""
    began, line = time.monotonic(), NotebookLine()
    report.set_live_line(line)
    try:
        with line.meanwhile(lambda: waits.Running(workers, began)):
            yield
    finally:
        report.set_live_line(None)
        line.close()


class NotebookLine(Ticker):
    """Below the cell that runs."""

    def __init__(self) -> None:
        super().__init__(is_foreign=True)
        self._lock = _thread.allocate_lock()
        self._handle: Any = None
        self._is_closed = False

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._handle is not None:
                self._handle.update({"text/plain": ""}, raw=True)

    def _draw(self, look: Look) -> None:
        wait = look()
        if wait is None:
            return
        text = waits.line(wait, time.monotonic(), WIDTH)
        with self._lock:
            if not self._is_closed:
                self._show(text)

    def _show(self, text: str) -> None:
        from html import escape

        shown = {"text/plain": text, "text/html": f"<code>{escape(text)}</code>"}
        if self._handle is None:
            self._handle = sys.modules["IPython"].display.display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)
