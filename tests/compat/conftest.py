"""rallypoint behind torch's names: with an imported torch, and where torch is not installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rallypoint.compat

TIMEOUT_S = 110.0
SOURCE = Path(rallypoint.__file__).parents[1]


@pytest.fixture(params=["without torch", pytest.param("with torch", marks=pytest.mark.torch)])
def environment(request: pytest.FixtureRequest) -> str:
    """Either has torch imported, or is known not to have it."""
    if request.param == "without torch" and importlib.util.find_spec("torch") is not None:
        pytest.skip("torch is installed")
    return str(request.param)


@pytest.fixture
def installed(environment: str) -> Iterator[str]:
    """Torch's names are rallypoint's."""
    if environment == "with torch":
        importlib.import_module("torch.distributed")
    try:
        rallypoint.compat.install()
        yield environment
    finally:
        rallypoint.compat.uninstall()


RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def python(tmp_path: Path) -> RunPython:
    """``python(*arguments, **env)`` runs an interpreter to its end, with rallypoint importable."""

    def run(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, *map(str, arguments)]
        environ = {**os.environ, "PYTHONPATH": path, **env}
        return subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)

    return run
