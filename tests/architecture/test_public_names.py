"""What users may import from ``rallypoint`` is pinned: a name that appears or goes is a decision, not an accident."""

from __future__ import annotations

import subprocess
import sys

import rallypoint

PUBLIC_NAMES = [
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


def test_public_names_are_these() -> None:
    assert sorted(rallypoint.__all__) == PUBLIC_NAMES


def test_every_public_name_can_be_imported() -> None:
    assert [name for name in PUBLIC_NAMES if not hasattr(rallypoint, name)] == []


def test_an_unknown_name_is_refused() -> None:
    assert not hasattr(rallypoint, "elastic_lunch")


def test_importing_the_package_loads_none_of_it() -> None:
    """A worker that wants only one name pays for nothing else."""
    program = "import sys, rallypoint; print(*(name for name in sys.modules if name.startswith('rallypoint')))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["rallypoint"]
