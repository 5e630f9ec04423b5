"""Starting, watching, stopping and listening to worker processes."""

from __future__ import annotations

from rallypoint import _lazily

TYPE_CHECKING = bool()  # see rallypoint
if TYPE_CHECKING:
    from rallypoint.processes.context import PContext, RunProcsResult
    from rallypoint.processes.functions import MultiprocessContext
    from rallypoint.processes.redirects import redirect, redirect_stderr, redirect_stdout
    from rallypoint.processes.subprocess_handler import SubprocessHandler, get_subprocess_handler
    from rallypoint.processes.subprocesses import SubprocessContext, start_processes
    from rallypoint.processes.tail_log import TailLog, tail_logfile

__all__ = [
    "MultiprocessContext",
    "PContext",
    "RunProcsResult",
    "SubprocessContext",
    "SubprocessHandler",
    "TailLog",
    "get_subprocess_handler",
    "redirect",
    "redirect_stderr",
    "redirect_stdout",
    "start_processes",
    "tail_logfile",
]

_HOMES = {
    "MultiprocessContext": "processes.functions",
    "PContext": "processes.context",
    "RunProcsResult": "processes.context",
    "SubprocessContext": "processes.subprocesses",
    "SubprocessHandler": "processes.subprocess_handler",
    "TailLog": "processes.tail_log",
    "get_subprocess_handler": "processes.subprocess_handler",
    "redirect": "processes.redirects",
    "redirect_stderr": "processes.redirects",
    "redirect_stdout": "processes.redirects",
    "start_processes": "processes.subprocesses",
    "tail_logfile": "processes.tail_log",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazily(__name__, _HOMES)
