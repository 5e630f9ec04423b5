"""The sink ``file``: events that anybody records go to the event file of the run that this process is in."""

from __future__ import annotations

import logging

from rallypoint.events import Event
from rallypoint.story import event_file

__all__ = ["EventFileHandler"]


class EventFileHandler(logging.Handler):
    """Appends events to the run's file; outside of a run they go nowhere."""

    def emit(self, record: logging.LogRecord) -> None:
        if event_file.current is not None:
            event_file.current.add(Event.deserialize(record.getMessage()))
