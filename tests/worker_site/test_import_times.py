"""What a worker measures of its imports, and that the program notices nothing of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rallypoint.worker_site import SITE_FOLDER
from rallypoint.worker_site.sitecustomize import ENV_IMPORTS

SLOW = "import time; time.sleep(0.05)\n"


class Program:
    """A script, beside folders of modules; what it imports is written to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.measured = folder / "measured"
        self.measured.touch()

    def write(self, path: str, text: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))

    def run(self, *command: str, order: str | None = None) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([SITE_FOLDER, str(self.folder / "site-packages"), str(self.folder / "mine")])
        order = f"1::{self.measured}" if order is None else order
        asked = {"PYTHONPATH": path, ENV_IMPORTS: order} if order else {"PYTHONPATH": path.partition(os.pathsep)[2]}
        env = {**os.environ, **asked}
        command = (sys.executable, *(command or ("script.py",)))
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=60)

    def names(self) -> list[str]:
        head, *lines = self.measured.read_text().splitlines()
        assert head == "imports"
        return [line.split()[0] for line in lines if line.split()[0] not in sys.stdlib_module_names]

    def changed(self) -> dict[str, str]:
        return {line.split()[0]: line.split()[2] for line in self.measured.read_text().splitlines()[1:]}


@pytest.fixture
def program(tmp_path: Path) -> Program:
    program = Program(tmp_path)
    for name in ("slow", "inner", "other"):
        program.write(f"site-packages/{name}.py", SLOW)
    program.write("site-packages/outer.py", f"import inner\n{SLOW}")
    program.write("site-packages/package/__init__.py", SLOW)
    program.write("site-packages/package/part.py", SLOW)
    program.write("site-packages/namespace/part.py", SLOW)
    program.write("mine/own.py", f"import other\n{SLOW}")
    program.write("beside.py", f"import slow\n{SLOW}")
    return program


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import slow", ["slow"]),
        ("import outer, inner, slow", ["outer", "slow"]),  # what it pulls in belongs to it
        ("import inner, outer", ["inner", "outer"]),
        ("import beside", ["slow"]),  # a module of the program's own does not count, but what that imports does
        ("import own", ["other"]),
        ("from package import part", ["package", "package.part"]),
        ("import package.part", ["package", "package.part"]),
        ("import namespace.part", ["namespace.part"]),
        ("import importlib; importlib.import_module('slow')", ["slow"]),
        ("def late():\n    import slow\nlate()", ["slow"]),
        ("import sys; sys.path.insert(0, 'elsewhere'); import stranger", []),  # where no keeper would find it
        ("import sys; sys.path.insert(0, 'site-packages/package'); import part", []),
        ("import threading\nthread = threading.Thread(target=lambda: __import__('slow'))\nthread.start()\nthread.join()", []),
        ("import os\nif os.fork() == 0:\n    import slow\n    os._exit(0)\nos.wait()\nimport other", ["other"]),
        ("import slow, os, signal\nos.kill(os.getpid(), signal.SIGKILL)", ["slow"]),  # however it ends
        ("try:\n    import nothing_of_the_kind\nexcept ImportError:\n    import slow", ["slow"]),
        ("import broken\n", []),
        ("", []),
    ],
)
def test_what_a_program_imports_of_what_is_installed(text: str, names: list[str], program: Program) -> None:
    program.write("elsewhere/stranger.py", SLOW)
    program.write("site-packages/broken.py", f"{SLOW}raise ValueError")
    program.write("script.py", text)
    program.run()
    assert program.names() == names


def test_a_module_counts_for_its_own_time_only(program: Program) -> None:
    program.write("site-packages/package/__init__.py", "import time; time.sleep(2.0)\n")
    program.write("script.py", "import package.part\n")
    program.run()
    seconds = {line.split()[0]: float(line.split()[1]) for line in program.measured.read_text().splitlines()[1:]}
    assert seconds["package"] >= 2.0
    assert seconds["package.part"] < seconds["package"]


def test_the_package_of_a_program_that_is_a_module_is_its_own(program: Program) -> None:
    program.write("site-packages/package/__init__.py", f"import slow\n{SLOW}")
    program.run("-m", "package.part", order=f"1:package:{program.measured}")
    assert program.names() == ["slow"]


def test_what_is_imported_after_the_environment_was_changed_is_told_apart(program: Program) -> None:
    program.write("site-packages/changes.py", f"import os; os.environ['OF_MODULE'] = '1'\n{SLOW}")
    program.write("script.py", "import changes, slow, os\nos.environ['OF_PROGRAM'] = '1'\nimport other\n")
    program.run()
    changed = {name: variable for name, variable in program.changed().items() if name in ("changes", "slow", "other")}
    assert changed == {"changes": "-", "slow": "-", "other": "OF_PROGRAM"}


LOOK_AROUND = """
    import builtins, importlib, os, sys
    files, modules = sorted(os.listdir("/proc/self/fd")), sorted(sys.modules)
    print(files, {name: os.environ[name] for name in sorted(os.environ)}, sys.path, sys.meta_path, builtins.__import__, modules)
    import package, beside
    print(package.__spec__, package.__loader__.__class__, beside.__spec__.name)
    for name in ("nothing", "broken", "wrong"):
        try:
            importlib.import_module(name)
        except Exception:
            import traceback
            traceback.print_exc()
    import deeper
"""


def test_the_program_notices_nothing(program: Program) -> None:
    program.write("script.py", LOOK_AROUND)
    program.write("site-packages/broken.py", "import inner\nraise ValueError('of mine')\n")
    program.write("site-packages/wrong.py", "def f(:\n")
    program.write("site-packages/deeper.py", "import package\nimport broken\n")
    measured, plain = program.run(), program.run(order="")
    assert program.names() == ["package", "slow"]
    # Our files are as Python's own: they begin with an import from __future__.
    seen = [re.sub(r" at 0x[0-9a-f]+|'__future__', ", "", text) for text in (measured.stdout, plain.stdout)]
    assert seen[0] == seen[1]
    assert measured.stderr == plain.stderr != ""
    assert measured.returncode == plain.returncode == 1


@pytest.mark.parametrize("order", [":", "1", "1:", "1:x:/nowhere/file", "1:x:/", ":::", "1::/proc/1/fd/9999"])
def test_whatever_is_wrong_the_program_runs_in_silence(order: str, program: Program) -> None:
    program.write("script.py", "import outer; print('on')\n")
    ended = program.run(order=order)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("on\n", "", 0)


def test_when_the_place_is_gone_the_program_goes_on(program: Program) -> None:
    program.write("script.py", "import os\nos.unlink('measured')\nimport slow, other\nprint('on')\n")
    ended = program.run()
    assert (ended.stdout, ended.stderr, ended.returncode) == ("on\n", "", 0)
