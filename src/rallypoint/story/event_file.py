"""A run's events as lines of JSON in its log folder, from which the run can be understood alone: ``rallypoint explain``.

The folder is made when the first workers start, so what happens before that is kept until then. Each event is appended and the
file closed again: whatever ends the agent, the lines before are there. A disk that is full loses events, not the job; one that
hangs holds up the thread that writes, and nobody else.
"""

from __future__ import annotations

import _thread  # threading takes longer to import, and this is on the way to the first worker
import os
import time

from rallypoint.base import report
from rallypoint.base.json_text import to_json
from rallypoint.base.outbox import Outbox
from rallypoint.events import Event, EventSource
from rallypoint.output.log_specs import LogFolder, open_log

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging

__all__ = ["EventFile", "make_sink"]

KEPT_AT_MOST = 1000  # events of a run that has no folder yet


class EventFile:
    """Where events are appended, once it is known where that is."""

    def __init__(self) -> None:
        self.path = ""  # as long as there is none
        self._folder: LogFolder | None = None
        self._pending: list[Event] = []
        self._has_warned = False
        self._noted = ""  # the folder that `run_index` has on record
        self._lock = _thread.allocate_lock()  # timers expire on a thread of their own
        self._outbox = Outbox(self._write, self._losses)

    def add(self, *events: Event) -> None:
        """Put events on record; one without a time gets the present one."""
        for event in events:
            event.timestamp = event.timestamp or int(time.time() * 1000)
        with self._lock:
            self._pending += events
            if self.path:
                self._send()
            else:
                del self._pending[:-KEPT_AT_MOST]

    def place(self, path: str, folder: LogFolder | None = None) -> None:
        """From now on all goes to this file, also what was kept."""
        with self._lock:
            if path != self.path:
                self.path, self._folder = path, folder
                self._send()

    def settle(self, timeout_s: float) -> bool:
        """Wait until all is written; whether it is."""
        return self._outbox.flush(timeout_s)

    def leave(self) -> None:
        """The file is gone; what comes now is kept."""
        with self._lock:
            self.path, self._folder = "", None
        if self._noted:
            _notes.put((self._noted, False))

    def _send(self) -> None:
        events, self._pending = self._pending, []
        if events and not self._outbox.put((self.path, events)):
            self._warn_once(self.path, "takes none for now")

    def _write(self, sent: tuple[str, list[Event]]) -> None:
        path, events = sent
        text = "".join(f"{to_json(vars(event))}\n" for event in events)
        try:
            fd = open_log(self._folder, path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                os.write(fd, text.encode())
            finally:
                os.close(fd)
            self._note(os.path.dirname(path))
        except OSError as error:
            self._warn_once(path, f"cannot be written: {error.strerror}")

    def _note(self, folder: str) -> None:
        """There is something to be told of the run from now on."""
        if folder != self._noted:
            self._noted = folder
            _notes.put((folder, True))

    def _warn_once(self, path: str, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            report.warn(f"events are lost, because {path} {why}")

    def _losses(self, count: int) -> tuple[str, list[Event]]:
        """So that whoever reads the file knows that there was more."""
        now_ms = int(time.time() * 1000)
        return self.path, [Event("rallypoint.events.lost", EventSource.AGENT, now_ms, {"at_least": count})]


def _write_note(note: tuple[str, bool]) -> None:
    """On a disk that need not be that of the events, and may hang alone; who asks for a run without its path then finds none."""
    from rallypoint.story import run_index

    folder, is_there = note
    try:
        (run_index.note if is_there else run_index.forget)(folder)
    except OSError as error:
        report.debug(f"the run is not on record for rallypoint explain without a path: {error}")


_notes = Outbox(_write_note)
current: EventFile | None = None  # that of the run which this process is in


def make_sink() -> logging.Handler:
    """The sink ``file``: events that anybody records go to the file of the run; outside of a run they go nowhere."""
    import logging

    class EventFileHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if current is not None:
                current.add(Event.deserialize(record.getMessage()))

    return EventFileHandler()
