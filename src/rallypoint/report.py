"""What rallypoint itself has to say while it runs: few lines, each of one sentence.

A library logs and a program prints. So the lines go to the logger ``rallypoint``, unless the command line has put its own
sink in place. ``logging`` is imported only when a line is really logged: it costs as much as a third of a cold start.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["debug", "info", "set_sink", "warn"]

# The numbers are those of the logging module.
DEBUG, INFO, WARNING = 10, 20, 30

Sink = Callable[[int, str], None]


def _log(level: int, text: str) -> None:
    import logging

    logging.getLogger("rallypoint").log(level, "%s", text)


_sink: Sink = _log


def set_sink(sink: Sink | None) -> None:
    """Send every later line to `sink`; None restores logging."""
    global _sink
    _sink = sink or _log


def debug(text: str) -> None:
    _sink(DEBUG, text)


def info(text: str) -> None:
    _sink(INFO, text)


def warn(text: str) -> None:
    _sink(WARNING, text)
