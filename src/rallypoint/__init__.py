"""rallypoint: an elastic launcher for distributed Python programs.

The public names are imported when they are first used, so that a worker that wants only `record` pays for nothing else.

This is the first line of ours that runs when somebody types ``rallyrun``, so Ctrl-C is made quiet here: what pip and Python put
before it is not ours to change.
"""

from __future__ import annotations

import sys

# To import typing would cost every worker that imports us. And it is no plain False: editors would take what follows for dead
# code, and not offer these names.
TYPE_CHECKING = bool()
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


__all__ = [
    "ChildFailedError",
    "DefaultLogsSpecs",
    "ElasticAgent",
    "ErrorHandler",
    "FileStore",
    "HashStore",
    "JobFailedError",
    "LaunchConfig",
    "LocalElasticAgent",
    "LogsDest",
    "LogsSpecs",
    "PContext",
    "PrefixStore",
    "ProcessFailure",
    "QueueEmptyError",
    "RallypointError",
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousStateError",
    "RendezvousTimeoutError",
    "RunProcsResult",
    "RunResult",
    "SignalException",
    "SimpleElasticAgent",
    "Std",
    "Store",
    "StoreError",
    "StoreNetworkError",
    "StoreTimeoutError",
    "TCPStore",
    "UnkillableWorkersError",
    "UsageError",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerStartError",
    "WorkerState",
    "__version__",
    "elastic_launch",
    "launch",
    "launch_agent",
    "record",
    "start_processes",
]

_HOMES = {
    "ChildFailedError": "failures.process_failure",
    "DefaultLogsSpecs": "output.log_specs",
    "ElasticAgent": "agent.agent",
    "ErrorHandler": "failures.error_files",
    "FileStore": "store.file_store",
    "HashStore": "store.hash_store",
    "JobFailedError": "errors",
    "LaunchConfig": "agent.config",
    "LocalElasticAgent": "agent.local_agent",
    "LogsDest": "output.log_specs",
    "LogsSpecs": "output.log_specs",
    "PContext": "processes.context",
    "PrefixStore": "store.prefix_store",
    "ProcessFailure": "failures.process_failure",
    "QueueEmptyError": "store.interface",
    "RallypointError": "errors",
    "RendezvousClosedError": "errors",
    "RendezvousConnectionError": "errors",
    "RendezvousError": "errors",
    "RendezvousGracefulExitError": "errors",
    "RendezvousStateError": "errors",
    "RendezvousTimeoutError": "errors",
    "RunProcsResult": "processes.context",
    "RunResult": "agent.workers",
    "SignalException": "errors",
    "SimpleElasticAgent": "agent.agent",
    "Std": "output.log_specs",
    "Store": "store.interface",
    "StoreError": "store.interface",
    "StoreNetworkError": "store.interface",
    "StoreTimeoutError": "store.interface",
    "TCPStore": "store.tcp_store",
    "UnkillableWorkersError": "errors",
    "UsageError": "errors",
    "Worker": "agent.workers",
    "WorkerGroup": "agent.workers",
    "WorkerSpec": "agent.workers",
    "WorkerStartError": "errors",
    "WorkerState": "agent.workers",
    "elastic_launch": "agent.launch",
    "launch": "agent.launch",
    "launch_agent": "agent.launch",
    "record": "failures.error_files",
    "start_processes": "processes.subprocesses",
}


def _lazily(package: str, homes: Mapping[str, str], *others: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package: they know in which module below rallypoint each name is."""

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"rallypoint.{homes[name]}"), name)

    return find, lambda: [*homes, *others]


if not TYPE_CHECKING:  # whoever checks types knows the names from above, and no others
    __getattr__, __dir__ = _lazily(__name__, _HOMES, "__version__")
