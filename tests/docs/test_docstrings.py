"""Examples in docstrings of the public names work; whatever a program makes or calls has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import rallypoint
from rallypoint.timers import interface

PACKAGES = ("rallypoint", *(f"rallypoint.{name}" for name in (
    "agent", "failures", "health", "output", "processes", "rendezvous", "store", "timers",
)))  # fmt: skip
# To be implemented, and shown on the pages of plug-ins and of the API; or given to a program, which never makes one.
WITHOUT = """
    ElasticAgent SimpleElasticAgent LogsSpecs PContext Store StoreLike RendezvousHandler WakingHandler CoordinatedHandler
    RendezvousBackend TimerClient TimerServer DynamicRendezvousHandler Introduction RendezvousHandlerCreator RendezvousSettings
    WorkerGroup RunProcsResult HealthCheckServer MultiprocessContext SubprocessContext SubprocessHandler get_subprocess_handler
    tail_logfile FileTimerClient FileTimerServer FileTimerRequest LocalTimerClient LocalTimerServer
"""


def public() -> dict[str, Any]:
    modules = [importlib.import_module(name) for name in PACKAGES]
    return {name: getattr(module, name) for module in modules for name in module.__all__ if not name.startswith("__")}


EXAMPLES = {name: value for name, value in public().items() if ">>>" in (inspect.getdoc(value) or "")}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_works(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(interface, "_client", None)  # as examples of timers set one
    text = inspect.getdoc(EXAMPLES[name]) or ""
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(doctest.DocTestParser().get_doctest(text, {}, name, None, 0), out=said.append)
    assert runner.failures == 0, "".join(said)
    assert runner.tries > 0


def test_what_programs_make_or_call_has_an_example() -> None:
    made = {name for name, value in public().items() if isinstance(value, type | FunctionType)}
    errors = {name for name in made if isinstance(value := public()[name], type) and issubclass(value, BaseException)}
    assert made - errors - set(EXAMPLES) == set(WITHOUT.split()) & made
    assert {"launch", "LaunchConfig", "TCPStore", "record"} <= set(EXAMPLES)
    assert rallypoint.launch.__doc__
