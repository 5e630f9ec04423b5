"""How a whole program, and the processes that it starts, come to have rallypoint behind torch's names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rallypoint.compat
from rallypoint.worker_site import SITE_FOLDER, in_front

ASK = "from torch.distributed.elastic.multiprocessing.errors import record; print(record.__module__)"
OURS = "rallypoint.failures.error_files\n"

RunPython = Callable[..., subprocess.CompletedProcess[str]]
Script = Callable[..., Path]


def test_the_variable_and_the_folder_make_an_interpreter_compatible(python: RunPython) -> None:
    path = in_front(os.pathsep.join(sys.path))
    answer = python("-c", ASK, RALLYPOINT_COMPAT="1", PYTHONPATH=path)
    assert (answer.stdout, answer.stderr) == (OURS, "")


def test_without_the_variable_the_folder_does_nothing(python: RunPython) -> None:
    answer = python("-c", "import sys; print('rallypoint' in sys.modules)", PYTHONPATH=in_front(os.pathsep.join(sys.path)))
    assert (answer.stdout, answer.stderr) == ("False\n", "")


def test_a_program_that_cannot_have_it_is_told_and_runs(python: RunPython, tmp_path: Path) -> None:
    (tmp_path / "rallypoint.py").write_text("")  # hides the package, as if there were none
    answer = python("-c", "print('on')", RALLYPOINT_COMPAT="1", PYTHONPATH=in_front(str(tmp_path)))
    assert "RALLYPOINT_COMPAT is 1, but rallypoint.compat cannot be installed: ModuleNotFoundError" in answer.stderr
    assert (answer.stdout, answer.returncode) == ("on\n", 0)


def test_the_users_own_sitecustomize_runs_after_it(python: RunPython, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import rallypoint.compat; print(rallypoint.compat.is_installed())")
    path = in_front(os.pathsep.join([str(tmp_path), *sys.path]))
    answer = python("-c", "print('on')", RALLYPOINT_COMPAT="1", PYTHONPATH=path)
    assert (answer.stdout, answer.stderr) == ("True\non\n", "")


def test_the_folder_is_put_in_front_once() -> None:
    once = in_front(f"a{os.pathsep}b")
    assert once == in_front(once) == os.pathsep.join([SITE_FOLDER, "a", "b"])
    assert in_front(None) == in_front("") == in_front(SITE_FOLDER) == SITE_FOLDER


@pytest.mark.parametrize(
    ("asked", "given", "expected"),
    [(None, True, True), ("1", None, True), ("1", False, False), (None, None, False), ("0", None, False)],
)
def test_children_follow_where_it_was_asked_for(
    asked: str | None, given: bool | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    if asked is not None:
        monkeypatch.setenv("RALLYPOINT_COMPAT", asked)
    rallypoint.compat.install(children=given)
    try:
        assert os.environ["PYTHONPATH"] == (in_front("mine") if expected else "mine")
        if expected:
            assert os.environ["RALLYPOINT_COMPAT"] == "1"
    finally:
        rallypoint.compat.uninstall()
    assert (os.environ.get("RALLYPOINT_COMPAT"), os.environ["PYTHONPATH"]) == (asked, "mine")


def test_uninstall_leaves_alone_what_others_have_set_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("RALLYPOINT_COMPAT", raising=False)
    rallypoint.compat.install(children=True)
    monkeypatch.setenv("PYTHONPATH", "new")
    rallypoint.compat.uninstall()
    assert os.environ["PYTHONPATH"] == "new"
    assert "RALLYPOINT_COMPAT" not in os.environ


# --- workers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["0", "1"])
def test_workers_are_compatible_where_the_environment_says_so(setting: str, rallyrun: Any, script: Script) -> None:
    program = script(
        "import sys; sys.stdout.write('%s %s\\n' % ('rallypoint.compat' in sys.modules, 'worker_site' in str(sys.path)))"
    )
    answer = rallyrun(["--nproc-per-node", "2", program], env={"RALLYPOINT_COMPAT": setting})
    assert answer.stdout == f"{setting == '1'} False\n" * 2


# --- python -m rallypoint.compat -------------------------------------------------------------------------------------------

TELL = """
import os, subprocess, sys
import torch.distributed.elastic.events as events
print(events.record.__module__, __name__, sys.argv, sys.path[0] == os.path.dirname(os.path.realpath(sys.argv[0])), __file__)
print(sys.modules["__main__"].__dict__ is globals(), __spec__, "annotations" in dir())
sys.stdout.flush()
if sys.argv[-1] != "child":
    subprocess.run([sys.executable, "-c", "import torch.distributed.elastic.events as e; print(e.record.__module__)"])
"""
SPAWN = """
import multiprocessing
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.elastic.multiprocessing.errors import record

@record
def work(queue, config):
    queue.put((config, type(config).__module__))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    config = LaunchConfig(1, 1, 1, run_id="job")
    child = context.Process(target=work, args=(queue, config))
    child.start()
    answer = queue.get(timeout=50)
    child.join()
    print(answer[0].run_id == config.run_id, answer[1])
"""


def test_a_script(environment: str, python: RunPython, script: Script) -> None:
    program = script(TELL, "my program.py")
    answer = python("-m", "rallypoint.compat", program, "-x", "y")
    expected = f"rallypoint.events __main__ {[str(program), '-x', 'y']} True {program}\nTrue None False\nrallypoint.events\n"
    assert (answer.stdout, answer.stderr, answer.returncode) == (expected, "", 0)


def test_a_module(python: RunPython, tmp_path: Path) -> None:
    package = tmp_path / "training"
    package.mkdir()
    (package / "__init__.py").write_text("")
    tell = "import sys, torch.distributed.run as run\nprint(__name__, __package__, __spec__.name, sys.argv, sys.path[0])\n"
    for name in ("steps", "__main__"):
        (package / f"{name}.py").write_text(tell)
    for module, found in (("training.steps", "steps"), ("training", "__main__")):
        answer = python("-m", "rallypoint.compat", "-m", module, "-m", "1")
        argv = [str(package / f"{found}.py"), "-m", "1"]
        assert answer.stdout == f"__main__ training training.{found} {argv} {tmp_path}\n", answer.stderr


def test_objects_pass_into_spawned_children(python: RunPython, script: Script) -> None:
    answer = python("-m", "rallypoint.compat", script(SPAWN))
    assert (answer.stdout, answer.stderr) == ("True rallypoint.agent.config\n", "")


@pytest.mark.parametrize(
    ("program", "status"), [("raise SystemExit(7)", 7), ("raise ValueError('of mine')", 1), ("def", 1), ("", 0)]
)
def test_how_a_program_ends_is_its_own(program: str, status: int, python: RunPython, script: Script) -> None:
    answer = python("-m", "rallypoint.compat", script(program))
    assert answer.returncode == status
    assert ("of mine" in answer.stderr) == ("of mine" in program)


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [([], 2, "usage"), (["-m"], 2, "usage"), (["-x", "a.py"], 2, "usage"), (["nowhere.py"], 1, "nowhere.py"),
     (["-m", "nowhere.at.all"], 1, "nowhere"), (["-m", "rallypoint.core"], 1, "rallypoint.core")],
)  # fmt: skip
def test_what_cannot_be_run_is_named(arguments: list[str], status: int, complaint: str, python: RunPython) -> None:
    answer = python("-m", "rallypoint.compat", *arguments)
    assert (answer.returncode, answer.stdout) == (status, "")
    assert complaint in answer.stderr
    assert "Traceback" not in answer.stderr


# --- torch's own commands --------------------------------------------------------------------------------------------------


def test_torchs_command_is_rallyrun(environment: str, python: RunPython, script: Script) -> None:
    """Programs that start ``python -m torch.distributed.run`` get rallypoint."""
    program = script("import os, sys; print(os.environ['RANK']); sys.exit(7)")
    path = in_front(os.pathsep.join(sys.path))
    command = ["-W", "error::RuntimeWarning", "-m", "torch.distributed.run", "--standalone", "--pass-exit-code"]
    answer = python(*command, program, RALLYPOINT_COMPAT="1", PYTHONPATH=path)
    assert (answer.stdout, answer.returncode) == ("0\n", 7)  # torch's own has no such flag
