"""rallypoint: an elastic launcher for distributed Python programs.

The public names are imported when they are first used, so that a worker that wants only `record` pays for nothing else.

This is the first line of ours that runs when somebody types ``rallyrun``, so Ctrl-C is made quiet here: what pip and Python put
before it is not ours to change.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # to import typing would cost every worker that imports us
if TYPE_CHECKING:
    from rallypoint.agent.agent import ElasticAgent, SimpleElasticAgent
    from rallypoint.agent.config import LaunchConfig
    from rallypoint.agent.launch import elastic_launch, launch, launch_agent
    from rallypoint.agent.local_agent import LocalElasticAgent
    from rallypoint.agent.workers import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
    from rallypoint.errors import (
        JobFailedError,
        RallypointError,
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousError,
        RendezvousGracefulExitError,
        RendezvousStateError,
        RendezvousTimeoutError,
        SignalException,
        UnkillableWorkersError,
        UsageError,
        WorkerStartError,
    )
    from rallypoint.failures.error_files import ErrorHandler, record
    from rallypoint.failures.process_failure import ChildFailedError, ProcessFailure
    from rallypoint.output.log_specs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std
    from rallypoint.processes.context import PContext, RunProcsResult
    from rallypoint.processes.subprocesses import start_processes
    from rallypoint.store.file_store import FileStore
    from rallypoint.store.hash_store import HashStore
    from rallypoint.store.interface import QueueEmptyError, Store, StoreError, StoreNetworkError, StoreTimeoutError
    from rallypoint.store.prefix_store import PrefixStore
    from rallypoint.store.tcp_store import TCPStore

__version__ = "0.1.0"


def _is_command() -> bool:
    """Whether this process is the command line, and not a program that uses us."""
    script = (getattr(sys, "argv", None) or [""])[0]
    if script == "-m":  # Python is still looking for what it was told to run
        return "rallypoint" in sys.orig_argv[sys.orig_argv.index("-m") :][1:2]
    return script.rpartition("/")[2] in ("rallyrun", "rallypoint")


if _is_command():
    if TYPE_CHECKING:
        import signal as _signal
    else:
        import _signal
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # __main__ has the exit code, and a few milliseconds to go


_HOMES = {
    "agent.agent": ("ElasticAgent", "SimpleElasticAgent"),
    "agent.config": ("LaunchConfig",),
    "errors": (
        "JobFailedError",
        "RallypointError",
        "RendezvousClosedError",
        "RendezvousConnectionError",
        "RendezvousError",
        "RendezvousGracefulExitError",
        "RendezvousStateError",
        "RendezvousTimeoutError",
        "SignalException",
        "UnkillableWorkersError",
        "UsageError",
        "WorkerStartError",
    ),
    "agent.launch": ("elastic_launch", "launch", "launch_agent"),
    "agent.local_agent": ("LocalElasticAgent",),
    "processes.context": ("PContext", "RunProcsResult"),
    "failures.error_files": ("ErrorHandler", "record"),
    "failures.process_failure": ("ChildFailedError", "ProcessFailure"),
    "output.log_specs": ("DefaultLogsSpecs", "LogsDest", "LogsSpecs", "Std"),
    "processes.subprocesses": ("start_processes",),
    "store.file_store": ("FileStore",),
    "store.hash_store": ("HashStore",),
    "store.interface": ("QueueEmptyError", "Store", "StoreError", "StoreNetworkError", "StoreTimeoutError"),
    "store.prefix_store": ("PrefixStore",),
    "store.tcp_store": ("TCPStore",),
    "agent.workers": ("RunResult", "Worker", "WorkerGroup", "WorkerSpec", "WorkerState"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: PLE0604  # the names are those of the table above
    "__version__",
    *sorted(_HOME_OF),
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'rallypoint' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"rallypoint.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
