"""A run's events as lines of JSON in its log folder, from which the run can be understood alone: ``rallypoint explain``.

The folder is made when the first workers start, so what happens before that is kept until then. Each event is appended and the
file closed again: whatever ends the agent, the lines before are there. A disk that is full loses events, not the job.
"""

from __future__ import annotations

import _thread  # threading takes longer to import, and this is on the way to the first worker
import os
import time

from rallypoint import report
from rallypoint.events import Event

__all__ = ["EventFile"]

KEPT_AT_MOST = 1000  # events of a run that has no folder yet


class EventFile:
    """Where events are appended, once it is known where that is."""

    def __init__(self) -> None:
        self._path = ""
        self._pending: list[Event] = []
        self._has_warned = False
        self._lock = _thread.allocate_lock()  # timers expire on a thread of their own

    @property
    def path(self) -> str:
        """Empty as long as there is none."""
        return self._path

    def add(self, *events: Event) -> None:
        """Put events on record; one without a time gets the present one."""
        for event in events:
            event.timestamp = event.timestamp or int(time.time() * 1000)
        with self._lock:
            self._pending += events
            if self._path:
                self._write()
            else:
                del self._pending[:-KEPT_AT_MOST]

    def place(self, path: str) -> None:
        """From now on all goes to this file, also what was kept."""
        with self._lock:
            if path != self._path:
                self._path = path
                self._write()

    def _write(self) -> None:
        from rallypoint.json_text import to_json

        text = "".join(f"{to_json(vars(event))}\n" for event in self._pending)
        self._pending.clear()
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.write(fd, text.encode())
            finally:
                os.close(fd)
        except OSError as error:
            self._warn_once(error)

    def _warn_once(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            report.warn(f"events are lost, because {self._path} cannot be written: {error.strerror}; the job goes on")


current: EventFile | None = None  # that of the run which this process is in
