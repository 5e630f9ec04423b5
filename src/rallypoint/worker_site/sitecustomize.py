"""Run by a worker's interpreter when it starts: prepare what the environment asks for, then make way.

With ``RALLYPOINT_COMPAT=1``, rallypoint comes to stand behind torch's elastic names. With ``RALLYPOINT_STACKS``, the agent's
signal is answered with the stacks of all threads. The answer is given by ``faulthandler``, in the signal's handler, so it comes
even while the program waits for a lock or spins in C. It goes into a file in the agent's memory, and the program notices
nothing. No failure of this may hurt the program: then it has no stacks to show, and that is all. With ``RALLYPOINT_KEEPER``, this
is no worker yet: it keeps workers warm, which are forks of it. With ``RALLYPOINT_IMPORTS``, the program's imports are timed.

This module stands alone: the interpreter may be any, and need not have rallypoint. Once it has run, the folder that it is in is
taken out of ``sys.path``, and the interpreter goes on with the ``sitecustomize`` that it would have had, if any. Its children
inherit the environment, and so answer too.
"""

from __future__ import annotations

import os
import sys

__all__ = [
    "ENV_COMPAT", "ENV_IMPORTS", "ENV_KEEPER", "ENV_STACKS", "install_compat", "keep_warm", "register", "take_order",
    "time_imports",
]  # fmt: skip

ENV_COMPAT = "RALLYPOINT_COMPAT"  # defaults.ENV_COMPAT, which may not be there
ENV_IMPORTS = "RALLYPOINT_IMPORTS"  # 1 if our folder is in front for it alone, the program's package, the path of the file
ENV_KEEPER = "RALLYPOINT_KEEPER"  # the number of its line to the warden, a colon, and where rallypoint is
ENV_STACKS = "RALLYPOINT_STACKS"  # the number of the signal, a colon, and the path of the file
_HERE = os.path.dirname(os.path.abspath(__file__))


def register(environ: object) -> None:
    """Answer the signal that the environment names, if it names one."""
    try:
        number, _, path = environ[ENV_STACKS].partition(":")  # type: ignore[index]
        import faulthandler

        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        faulthandler.register(int(number), file=fd, all_threads=True, chain=False)
    except Exception:  # whatever the interpreter lacks or the system forbids, the program must start
        return


def install_compat(environ: object) -> None:
    """Put rallypoint behind torch's names, if the environment asks for it."""
    try:
        if environ[ENV_COMPAT] == "1":  # type: ignore[index]
            from importlib import import_module

            import_module("rallypoint.compat").install()
    except KeyError:
        return
    except Exception as error:  # the program must start; but it asked for this, and so is told that it does without
        sys.stderr.write(f"rallypoint: {ENV_COMPAT} is 1, but rallypoint.compat cannot be installed: {error!r}\n")


def keep_warm(environ: object) -> None:
    """Where this interpreter is to be the keeper of warm workers, be that; go on in each of those. It never runs the program."""
    line_fd, _, root = environ.pop(ENV_KEEPER, "").partition(":")  # type: ignore[attr-defined]
    if not line_fd:
        return
    try:
        from importlib import import_module

        sys.path.insert(0, root)
        keeper = import_module("rallypoint.processes.keeper")
        sys.path.remove(root)
        keeper.keep(int(line_fd))
    except BaseException:  # whatever it is, this process has no place in the job
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def take_order(environ: object) -> list[str]:
    """Where to write how long the program's imports take, if anywhere; the program does not find that in its environment."""
    order: list[str]
    is_ours, *order = environ.pop(ENV_IMPORTS, "").split(":", 2)  # type: ignore[attr-defined]
    if is_ours:  # our folder is in front for this alone
        _, _, rest = environ.pop("PYTHONPATH", "").partition(os.pathsep)  # type: ignore[attr-defined]
        if rest:
            environ["PYTHONPATH"] = rest  # type: ignore[index]
    return order


def time_imports(order: list[str]) -> None:
    """Begin to measure, if that is asked for."""
    if not order:
        return
    try:
        sys.path.insert(0, _HERE)
        __import__("import_times").measure(*order)
    except Exception:  # whatever the interpreter lacks or the system forbids, the program must start
        pass
    sys.modules.pop("import_times", None)
    _leave_path()


def make_way() -> None:
    """Import the next ``sitecustomize``. Where there is none, that raises what an interpreter without one meets, and ignores."""
    _leave_path()
    sys.modules.pop("sitecustomize", None)
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401


def _leave_path() -> None:
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]
    sys.path_importer_cache.pop(_HERE, None)


if __name__ == "sitecustomize":
    install_compat(os.environ)
    keep_warm(os.environ)
    register(os.environ)
    _ORDER = take_order(os.environ)
    try:
        make_way()
    finally:
        time_imports(_ORDER)
