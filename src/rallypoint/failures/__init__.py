"""Why workers ended, and how a user reads it."""

from __future__ import annotations

from rallypoint import _lazily

TYPE_CHECKING = bool()  # see rallypoint
if TYPE_CHECKING:
    from rallypoint.failures.error_files import ErrorHandler, get_error_handler, record
    from rallypoint.failures.process_failure import ChildFailedError, ProcessFailure

__all__ = [
    "ChildFailedError",
    "ErrorHandler",
    "ProcessFailure",
    "get_error_handler",
    "record",
]

_HOMES = {
    "ChildFailedError": "failures.process_failure",
    "ErrorHandler": "failures.error_files",
    "ProcessFailure": "failures.process_failure",
    "get_error_handler": "failures.error_files",
    "record": "failures.error_files",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazily(__name__, _HOMES)
