"""Follow files that others write, and show what is added to them, as ``tail -f`` does.

Whole lines only: a line is shown when it is complete, or when the file is known to be at its end, so that lines of several files
never mix and the last one is never lost. rallypoint's own console output does not come this way, but through
`output.pump`; this is for programs that follow files themselves.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping

from rallypoint.base import outbox, report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO, TextIO

__all__ = ["TailLog", "tail_logfile"]

LINE_BYTES_MAX = 1 << 20  # a longer line is shown in pieces
_READ_BYTES = 64 * 1024


def tail_logfile(
    header: str,
    file: str,
    dst: TextIO,
    finished: threading.Event,
    interval_sec: float,
    log_line_filter: Callable[[str], bool] | None = None,
) -> None:
    """Write each line of `file` to `dst`, behind `header`, until `finished` is set and the end of the file is reached.

    A file that is not there yet is waited for. The filter says which lines are shown; without one, all are.
    """
    while not os.path.exists(file):
        if finished.wait(interval_sec):
            return
    with open(file, "rb") as source:
        for line in _lines(source, finished, interval_sec):
            if log_line_filter is None or log_line_filter(line):
                dst.write(f"{header}{line}")


def _lines(source: BinaryIO, finished: threading.Event, interval_sec: float) -> Iterator[str]:
    """The lines of a file that grows. That it is finished is asked before it is read: what was written before is then seen."""
    begun = b""
    while True:
        is_finished = finished.is_set()
        block = source.read(_READ_BYTES)
        whole, begun = _cut(begun + block)
        yield from map(_text, whole)
        if not block and is_finished:
            break
        if not block:
            finished.wait(interval_sec)
    if begun:
        yield _text(begun)


def _cut(data: bytes) -> tuple[list[bytes], bytes]:
    """The lines that are complete, and what is begun. A carriage return ends a line too, as in the drawing of a progress bar."""
    lines = data.splitlines(keepends=True)
    is_begun = bool(lines) and not lines[-1].endswith(b"\n") and len(lines[-1]) < LINE_BYTES_MAX
    return (lines[:-1], lines[-1]) if is_begun else (lines, b"")


def _text(line: bytes) -> str:
    has_end = line.endswith((b"\n", b"\r"))
    return line.rstrip(b"\r\n").decode(errors="replace") + ("\n" if has_end else "")


class TailLog:
    """Follows one file for each local rank, each on a thread of its own, and shows all of them at `dst`.

    Before each line stands the prefix of its rank, or ``[<name><rank>]:``.

    >>> import sys
    >>> from rallypoint.processes import TailLog
    >>> tail = TailLog("trainer", {0: "rank0.log", 1: "rank1.log"}, sys.stdout).start()
    >>> tail.stop()
    """

    def __init__(
        self,
        name: str,
        log_files: Mapping[int, str],
        dst: TextIO,
        log_line_prefixes: Mapping[int, str] | None = None,
        interval_sec: float = 0.1,
        log_line_filter: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._name = name
        self._log_files = dict(log_files)
        self._dst = dst
        self._log_line_prefixes = log_line_prefixes or {}
        self._interval_sec = interval_sec
        self._log_line_filter = log_line_filter
        self._finished = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> TailLog:
        """Begin to follow; a second call does nothing."""
        if self.stopped():
            raise RuntimeError(f"the tail of {self._name} was stopped; make a new one")
        if not self._threads:
            ranks = self._log_files
            self._threads = [
                threading.Thread(target=self._follow, args=(rank,), name=f"TailLog_{self._name}_{rank}", daemon=True)
                for rank in ranks
            ]
            for thread in self._threads:
                thread.start()
        return self

    def stop(self) -> None:
        """Show what is in the files by now, and end."""
        self._finished.set()
        for thread in self._threads:
            thread.join()
        outbox.settle()

    def stopped(self) -> bool:
        return self._finished.is_set()

    def _follow(self, rank: int) -> None:
        header = self._log_line_prefixes.get(rank, f"[{self._name}{rank}]:")
        file = self._log_files[rank]
        try:
            tail_logfile(header, file, self._dst, self._finished, self._interval_sec, self._log_line_filter)
        except Exception as error:  # the destination and the filter are the caller's, and may fail in any way
            report.warn(f"the tail of {file} ended: {type(error).__name__}: {error}")
