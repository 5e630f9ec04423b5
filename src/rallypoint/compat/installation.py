"""What is changed in this process to put our modules behind torch's names, and how it is undone.

Modules that are not loaded yet are left to the import system, which finds ours first. Those that are loaded are replaced at once.
Where torch is not installed, two modules without content stand in for the parents that ours need.

A new interpreter with ``RALLYPOINT_COMPAT=1`` does the same before its program begins, by the `sitecustomize` of `worker_site`,
which has to be at the front of its PYTHONPATH. An agent sees to that for its workers; `for_children` does it for all processes
that this one will start.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import partial
from importlib import import_module

from rallypoint.base import defaults
from rallypoint.base.environment import StandIn
from rallypoint.compat.facade import Finder
from rallypoint.compat.table import ROOTS, TABLE
from rallypoint.worker_site import in_front

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["Installation", "for_children", "is_asked_for"]

_PARENTS = ("torch", "torch.distributed")
_BELOW = tuple(f"{root}." for root in ROOTS)


class Installation:
    """Our modules in the place of torch's, from its making until `undo`."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self._modules = modules
        self._finder = Finder()
        self._to_undo: list[Callable[[], object]] = []
        self._is_for_children = False
        self._displaced = {name: modules.pop(name) for name in list(modules) if name in ROOTS or name.startswith(_BELOW)}
        sys.meta_path.insert(0, self._finder)
        if modules.get(_PARENTS[0]) is None and not _is_torch_installed():
            self._stand_in()
        elif _PARENTS[1] in modules:
            self._replace_loaded(modules[_PARENTS[1]])

    def _stand_in(self) -> None:
        """Be found by imports, and not by those who only ask whether torch is there."""
        self._displaced.update((name, self._modules[name]) for name in _PARENTS if name in self._modules)
        torch, distributed = (_Parent(name) for name in _PARENTS)
        vars(torch)["distributed"] = distributed
        self._modules.update(zip(_PARENTS, (torch, distributed), strict=True))
        find_spec = importlib.util.find_spec

        def find_spec_but_of_stand_ins(name: str, package: str | None = None) -> ModuleSpec | None:
            return None if isinstance(sys.modules.get(name), StandIn) else find_spec(name, package)

        self._keep(importlib.util, "find_spec")
        importlib.util.find_spec = find_spec_but_of_stand_ins

    def _replace_loaded(self, parent: ModuleType) -> None:
        for root in ROOTS:
            self._keep(parent, root.rpartition(".")[2])
            import_module(root)  # which makes it an attribute of its parent
        for name in self._displaced:
            if name in TABLE:
                import_module(name)

    def _keep(self, owner: ModuleType, name: str) -> None:
        """Remember an attribute as it is, for the end."""
        if name in vars(owner):
            self._to_undo.append(partial(setattr, owner, name, vars(owner)[name]))

    def extend_to_children(self) -> None:
        if not self._is_for_children:
            self._is_for_children = True
            self._to_undo.append(for_children())

    def undo(self) -> None:
        """Leave everything as it was found."""
        sys.meta_path.remove(self._finder)
        for name in [name for name in self._modules if name in TABLE or isinstance(self._modules[name], StandIn)]:
            del self._modules[name]
        parent = self._modules.get(_PARENTS[1])
        for root in ROOTS if parent is not None else ():  # the import system has set them, where torch came after us
            vars(parent).pop(root.rpartition(".")[2], None)
        while self._to_undo:
            self._to_undo.pop()()
        self._modules.update(self._displaced)


def _is_torch_installed() -> bool:
    try:
        return importlib.util.find_spec(_PARENTS[0]) is not None
    except ImportError:  # somebody keeps it from being imported
        return False


class _Parent(StandIn):
    """Has the modules below it, and nothing else of torch."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"{name} is not installed; rallypoint.compat has put its own modules below this name.")
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> ModuleType:
        if f"{self.__name__}.{name}" in ROOTS:
            return import_module(f"{self.__name__}.{name}")
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}: torch is not installed", name=name, obj=self)


def is_asked_for() -> bool:
    """Whether the environment asks for it."""
    return os.environ.get(defaults.ENV_COMPAT) == "1"


def for_children() -> Callable[[], None]:
    """Let all processes that are started from now on be compatible; the result, when called, ends that."""
    before = {name: os.environ.get(name) for name in (defaults.ENV_COMPAT, defaults.ENV_PYTHONPATH)}
    os.environ[defaults.ENV_COMPAT] = "1"
    os.environ[defaults.ENV_PYTHONPATH] = in_front(before[defaults.ENV_PYTHONPATH])
    after = {name: os.environ[name] for name in before}

    def undo() -> None:
        """What somebody else has changed in the meantime is theirs."""
        for name, value in before.items():
            if os.environ.get(name) != after[name]:
                continue
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

    return undo
