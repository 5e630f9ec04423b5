"""What users may import is pinned: a name that appears or goes is a decision, not an accident.

From ``rallypoint`` itself and from those of its packages that are part of the API. Names are found where they are looked for: by
an import, by ``dir()``, by editors and by type checkers; and none is loaded before it is used.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

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


PACKAGES = {
    "rallypoint.agent": "ElasticAgent LaunchConfig LocalElasticAgent RunResult SimpleElasticAgent Worker WorkerGroup WorkerSpec"
    " WorkerState elastic_launch launch_agent",
    "rallypoint.failures": "ChildFailedError ErrorHandler ProcessFailure get_error_handler record",
    "rallypoint.health": "HealthCheckServer create_healthcheck_server",
    "rallypoint.output": "DefaultLogsSpecs LogsDest LogsSpecs Std",
    "rallypoint.processes": "MultiprocessContext PContext RunProcsResult SubprocessContext SubprocessHandler TailLog"
    " get_subprocess_handler redirect redirect_stderr redirect_stdout start_processes tail_logfile",
    "rallypoint.rendezvous": "CoordinatedHandler DynamicRendezvousHandler Introduction RendezvousBackend RendezvousClosedError"
    " RendezvousConnectionError RendezvousError RendezvousGracefulExitError RendezvousHandler RendezvousHandlerCreator"
    " RendezvousHandlerRegistry RendezvousInfo RendezvousParameters RendezvousSettings RendezvousStateError RendezvousStoreInfo"
    " RendezvousTimeout RendezvousTimeoutError WakingHandler get_rendezvous_handler rendezvous_handler_registry",
    "rallypoint.store": "FileStore HashStore PrefixStore QueueEmptyError Store StoreError StoreLike StoreNetworkError"
    " StoreTimeoutError TCPStore barrier get_all synchronize",
    "rallypoint.timers": "FileTimerClient FileTimerRequest FileTimerServer LocalTimerClient LocalTimerServer TimerClient"
    " TimerRequest TimerServer configure expires",
}
every_package = pytest.mark.parametrize("package", ["rallypoint", *PACKAGES])


@pytest.mark.parametrize("package", PACKAGES)
def test_the_packages_of_the_api_offer_these(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(PACKAGES[package].split())
    assert dir(module) == sorted(module.__all__)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018


@every_package
def test_every_name_of_a_package_is_found_and_says_what_it_is(package: str) -> None:
    module = importlib.import_module(package)
    values = {name: getattr(module, name) for name in module.__all__ if name != "__version__"}
    assert [name for name, value in values.items() if isinstance(value, type | FunctionType) and not value.__doc__] == []


@every_package
def test_type_checkers_are_told_the_same_as_the_interpreter(package: str) -> None:
    """They read the imports under TYPE_CHECKING and a plain ``__all__``; the interpreter has the table of homes."""
    module: Any = importlib.import_module(package)
    tree = ast.parse(Path(module.__file__).read_text())
    told = dict(imports_for_type_checkers(tree))
    assert told == {name: f"rallypoint.{home}" for name, home in module._HOMES.items()}
    [listed] = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    assert sorted(ast.literal_eval(listed)) == sorted({*told, *(["__version__"] if package == "rallypoint" else [])})


def imports_for_type_checkers(tree: ast.Module) -> Iterator[tuple[str, str]]:
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for node in (statement for block in blocks for statement in block.body):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("rallypoint."):
            yield from ((alias.name, str(node.module)) for alias in node.names)


OFFERED = {
    "from rallypoint import La": ["LaunchConfig", "launch", "launch_agent"],
    "import rallypoint\nrallypoint.elastic_l": ["elastic_launch"],
    "import rallypoint\nrallypoint.LaunchConfig.stand": ["standalone", "standby"],
    "from rallypoint.rendezvous import RendezvousPa": ["RendezvousParameters"],
    "from rallypoint.timers import FileTimerC": ["FileTimerClient"],
}
EDITOR = """
import json, sys, jedi
def offer(line):
    return sorted(one.name for one in jedi.Script(line, environment=jedi.InterpreterEnvironment()).complete())
print(json.dumps({line: offer(line) for line in json.load(sys.stdin)}))
"""


def test_f26_editors_offer_the_names(tmp_path: Path) -> None:
    """By what jedi knows, which completes in IPython, in Jupyter and in many editors."""
    pytest.importorskip("jedi", reason="the extra [test] has it")
    answer = subprocess.run(
        [sys.executable, "-c", EDITOR], input=json.dumps(list(OFFERED)), capture_output=True, text=True, check=True, cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert json.loads(answer.stdout) == OFFERED


def test_importing_the_packages_loads_none_of_what_they_offer() -> None:
    """A worker that wants only one name pays for nothing else."""
    program = f"import sys, {', '.join(PACKAGES)}; print(*(name for name in sys.modules if name.startswith('rallypoint')))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert sorted(answer.stdout.split()) == ["rallypoint", *PACKAGES]
