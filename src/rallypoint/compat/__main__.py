"""``python -m rallypoint.compat SCRIPT ARGUMENTS`` and ``python -m rallypoint.compat -m MODULE ARGUMENTS``.

The program runs as Python itself would run it, but for torch's elastic names, which are rallypoint's, in its children too.
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from types import ModuleType

from rallypoint.compat import install

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import CodeType
    from typing import Any

__all__ = ["main"]

_USAGE = "usage: python -m rallypoint.compat SCRIPT [ARGUMENTS], or python -m rallypoint.compat -m MODULE [ARGUMENTS]"
_USAGE_STATUS = 2


def main(arguments: list[str]) -> None:
    """Run the program that the arguments name, to its end."""
    is_module = arguments[:1] == ["-m"]
    program = arguments[1:] if is_module else arguments
    if not program or program[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        sys.exit(_USAGE_STATUS)
    install(children=True)
    if is_module:
        _run_module(*program)
    else:
        _run_script(*program)


def _run_script(path: str, *arguments: str) -> None:
    if os.path.isdir(path):
        sys.path[0] = path
        return _run_as_main(_find_code("__main__"), path, arguments)
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        sys.exit(f"{sys.executable}: can't open file {os.path.abspath(path)!r}: {error}")
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    return _run_as_main((None, compile(source, path, "exec", dont_inherit=True)), path, arguments, __file__=path)


def _run_module(name: str, *arguments: str) -> None:
    sys.path[0] = os.getcwd()
    spec, code = _find_code(name)
    _run_as_main((spec, code), (spec and spec.origin) or name, arguments)


def _find_code(name: str) -> tuple[ModuleSpec | None, CodeType]:
    """The program of a module, or of a package's ``__main__``."""
    before = sys.modules.pop(name, None) if name == "__main__" else None
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        sys.exit(f"{sys.executable}: error while finding {name}: {error}")
    finally:
        if before is not None:
            sys.modules[name] = before
    if spec is not None and spec.submodule_search_locations is not None and not name.endswith("__main__"):
        return _find_code(f"{name}.__main__")
    get_code = getattr(spec and spec.loader, "get_code", None)
    code = get_code(name) if get_code is not None else None
    if code is None:
        sys.exit(f"{sys.executable}: no module named {name} that could be run")
    return spec, code


def _run_as_main(found: tuple[ModuleSpec | None, CodeType], argv0: str, arguments: tuple[str, ...], **names: Any) -> None:
    """Execute it in a new ``__main__``, which stays the main module until the process ends."""
    spec, code = found
    module = ModuleType("__main__")
    vars(module).update(names)
    module.__spec__ = spec
    if spec is not None:
        vars(module).update(__file__=spec.origin, __loader__=spec.loader, __package__=spec.parent)
    vars(module)["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv[:] = [argv0, *arguments]
    exec(code, vars(module))


if __name__ == "__main__":
    main(sys.argv[1:])
