"""How the import system comes to our modules behind torch's names: a finder that is asked before all others."""

from __future__ import annotations

from importlib.machinery import ModuleSpec

from rallypoint.compat import facade
from rallypoint.compat.table import TABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, ModuleType

__all__ = ["Finder"]

_MAIN = """\
if __name__ == "__main__":
    import sys
    from {module} import {function}
    sys.exit({function}())
"""
_PROGRAMS = {  # what `python -m` runs
    "torch.distributed.run": ("rallypoint.__main__", "rallyrun"),
    "torch.distributed.launch": ("rallypoint.compat.launch_module", "main"),
}
_PACKAGES = {place.rpartition(".")[0] for place in TABLE}


class Finder:
    """Finds the modules of the table, and loads them."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in TABLE:
            return None
        return ModuleSpec(fullname, self, origin=facade.__file__, is_package=fullname in _PACKAGES)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return facade.Facade(spec.name, f"{spec.name}, as rallypoint has it.")

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is to be executed; the error of an import that fails shows the file."""
        module.__file__ = facade.__file__
        module.__all__ = facade.public_names(module.__name__)  # type: ignore[attr-defined]

    def get_code(self, fullname: str) -> CodeType:
        """For ``python -m``."""
        module, function = _PROGRAMS.get(fullname, ("", ""))
        return compile(_MAIN.format(module=module, function=function) if module else "", f"<{fullname}>", "exec")
