"""What each worker starts, from the script that stands on the command line.

A script becomes ``python -u script``, with ``-m`` a module, with ``--no-python`` any program, and with ``--run-path`` a function
that runs the script inside a worker that is Python already. That the thing is there is looked up before anything starts: one
line now is better than N tracebacks later. No code of the user's is imported for that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace

from rallypoint.base import defaults, environment
from rallypoint.errors import UsageError

__all__ = ["check_entry_point", "entry_point", "get_use_env", "run_script_path"]

EntryPoint = Callable[..., None] | str

_FORMS = {"module": "-m/--module", "no_python": "--no-python", "run_path": "--run-path"}


def entry_point(args: SimpleNamespace) -> tuple[EntryPoint, list[str]]:
    """What to start and with which arguments."""
    forms = [flag for dest, flag in _FORMS.items() if getattr(args, dest)]
    if len(forms) > 1:
        raise UsageError(f"{' and '.join(forms)} exclude each other; use one of them")
    if not args.training_script or "\0" in args.training_script:
        raise UsageError(f"the script's name is {args.training_script!r}; give the name of a script")
    entry, before = _command(args)
    local_rank = [] if get_use_env(args) else ["--local-rank=${local_rank}"]
    return entry, [*before, *local_rank, *args.training_script_args]


def get_use_env(args: object) -> bool:
    """Whether workers read their local rank from the environment only; False is asked for by torch.distributed.launch alone."""
    return bool(getattr(args, "use_env", True))


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Run a script in this interpreter as if Python had been started with it."""
    import runpy

    sys.argv = [training_script, *training_script_args]
    runpy.run_path(training_script, run_name="__main__")


def check_entry_point(args: SimpleNamespace) -> None:
    """UsageError says what is not there."""
    script, python = args.training_script, environment.text(defaults.ENV_PYTHON_EXEC)
    if args.no_python:
        _check_program(script, "--no-python")
        return
    if python and not args.run_path:
        _check_program(python, defaults.ENV_PYTHON_EXEC)
    if args.module:
        _check_module(script)
    else:
        _check_script(script)


def _command(args: SimpleNamespace) -> tuple[EntryPoint, list[str]]:
    script = args.training_script
    if args.no_python:
        return script, []
    if args.run_path:
        return run_script_path, [script]
    python = environment.text(defaults.ENV_PYTHON_EXEC, sys.executable)
    return python, ["-u", *(["-m"] if args.module else []), script]


def _check_script(script: str) -> None:
    """A script may be a file, or a folder or archive that Python knows how to run."""
    if not os.path.exists(script):
        raise UsageError(f"script {script!r} is not there (looked in {_here()}); with -m it would be a module")
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise UsageError(f"script {script!r} is a folder, and holds no __main__.py")
    if not os.access(script, os.R_OK):
        raise UsageError(f"script {script!r} cannot be read by this user")


def _here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "the working folder, which was deleted"


def _check_module(module: str) -> None:
    """Look for the top-level package only: to look further, Python would import it."""
    if environment.text(defaults.ENV_PYTHON_EXEC):
        return  # another interpreter has modules of its own
    top = module.partition(".")[0]
    if not all(map(str.isidentifier, module.split("."))):
        raise UsageError(f"module {module!r} is not a module's name; write -m package.module, without .py or slashes")
    if not _is_importable(top):
        raise UsageError(f"module {module!r} is not there: no {top!r} in {_here()} or where Python looks for packages")


def _is_importable(top: str) -> bool:
    import importlib.machinery
    import importlib.util

    # `python -m` looks into the current folder first, which need not be on the path of this process.
    try:
        if importlib.machinery.PathFinder.find_spec(top, [os.getcwd()]) is not None:
            return True
    except FileNotFoundError:  # it was deleted
        pass
    try:
        return importlib.util.find_spec(top) is not None
    except ValueError:  # it is loaded, and does not know from where
        return True


def _check_program(program: str, named: str) -> None:
    folders = [""] if os.sep in program else os.get_exec_path()
    found = [path for path in (os.path.join(folder, program) for folder in folders) if os.path.isfile(path)]
    if not found:
        where = "there" if os.sep in program else "on the PATH"
        raise UsageError(f"{named}: program {program!r} is not {where}")
    if not any(os.access(path, os.X_OK) for path in found):
        raise UsageError(f"{named}: {found[0]!r} is not executable; chmod +x it, or run it as a Python script")
