"""What is put in front of a worker's PYTHONPATH lets it answer, and leaves no trace in it (P31)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rallypoint
from rallypoint.base import defaults
from rallypoint.hangs.stacks import StackDesk
from rallypoint.worker_site import SITE_FOLDER
from rallypoint.worker_site.sitecustomize import ENV_STACKS

LOOK_AROUND = "import sys; print('sitecustomize' in sys.modules, [one for one in sys.path if 'worker_site' in one])"


def run(program: str, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-c", program]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=30)


@pytest.fixture
def desk() -> Iterator[StackDesk]:
    desk = StackDesk(1)
    yield desk
    desk.close()


def test_an_interpreter_without_a_sitecustomize_stays_without(desk: StackDesk) -> None:
    answer = run(LOOK_AROUND, PYTHONPATH=SITE_FOLDER, **{ENV_STACKS: desk.place(0)})
    assert (answer.stdout, answer.stderr) == ("False []\n", "")


def test_the_users_own_sitecustomize_runs(desk: StackDesk, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine', __name__)")
    path = f"{SITE_FOLDER}{os.pathsep}{tmp_path}"
    answer = run(f"{LOOK_AROUND}; print(sys.modules['sitecustomize'].__file__)", PYTHONPATH=path, **{ENV_STACKS: desk.place(0)})
    assert answer.stdout.splitlines() == ["mine sitecustomize", "True []", str(tmp_path / "sitecustomize.py")]
    assert answer.stderr == ""


def test_a_failure_of_the_users_own_sitecustomize_is_told_as_ever(desk: StackDesk, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('of mine')")
    with_us = run("print('on')", PYTHONPATH=f"{SITE_FOLDER}{os.pathsep}{tmp_path}", **{ENV_STACKS: desk.place(0)})
    without_us = run("print('on')", PYTHONPATH=str(tmp_path))
    assert with_us.stdout == without_us.stdout == "on\n"
    assert "of mine" in with_us.stderr
    assert with_us.stderr.splitlines()[-1] == without_us.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "place", ["", "rubbish", "57:/nowhere", "0:/dev/null", "9:/dev/null", "999:/dev/null", "57:/proc/1/fd/9999"]
)
def test_whatever_is_wrong_the_program_starts_in_silence(place: str) -> None:
    answer = run("print('on')", PYTHONPATH=SITE_FOLDER, **{ENV_STACKS: place})
    assert (answer.stdout, answer.stderr, answer.returncode) == ("on\n", "", 0)


def test_without_the_variable_it_only_makes_way() -> None:
    answer = run(LOOK_AROUND, PYTHONPATH=SITE_FOLDER)
    assert (answer.stdout, answer.stderr) == ("False []\n", "")


def test_it_stands_alone(desk: StackDesk) -> None:
    """It may run in any interpreter, and costs no import that the interpreter does not do anyway."""
    source = Path(rallypoint.__file__).parent / "worker_site" / "sitecustomize.py"
    program = f"""
import sys
before = set(sys.modules)
import importlib.util
spec = importlib.util.spec_from_file_location("standing_alone", {str(source)!r})
module = importlib.util.module_from_spec(spec)
before |= set(sys.modules)
spec.loader.exec_module(module)
import os
module.register(os.environ)
print(*(set(sys.modules) - before))
"""
    answer = run(program, "-S", **{ENV_STACKS: desk.place(0)})
    assert answer.stderr == ""
    assert set(answer.stdout.split()) <= {"__future__", "faulthandler"}


def test_the_name_that_it_cannot_import_is_the_agents() -> None:
    assert ENV_STACKS == defaults.ENV_STACKS
