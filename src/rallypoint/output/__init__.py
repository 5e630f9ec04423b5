"""Where the bytes go that workers write: log files, the pump, the console."""

from __future__ import annotations

from rallypoint import _lazily

TYPE_CHECKING = bool()  # see rallypoint
if TYPE_CHECKING:
    from rallypoint.output.log_specs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "Std",
]

_HOMES = {
    "DefaultLogsSpecs": "output.log_specs",
    "LogsDest": "output.log_specs",
    "LogsSpecs": "output.log_specs",
    "Std": "output.log_specs",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazily(__name__, _HOMES)
