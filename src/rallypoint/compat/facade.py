"""Modules that show rallypoint's names under torch's, and how the import system comes to them.

A name is looked up in our module each time, so a value that was replaced there is seen here. A value that is set or deleted
here is set or deleted in our module, if the name belongs to this place: see `table`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

from rallypoint.compat.python_names import IMPORTS, LOGGERS
from rallypoint.compat.table import FACADE_OF, TABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import CodeType
    from typing import Any

__all__ = ["Contents", "Facade", "Finder", "Home", "homes_behind", "public_names"]

Home = tuple[str, str]  # a module, and an attribute of it; without an attribute, the module itself

_OWN_DICT: Any = vars(ModuleType)["__dict__"]
_NOTHING = object()
_STANDARD_LIBRARY = ""
_FROM = "from "
_ALIASES = "@"
_LOGGERS = "@logger"


class Facade(ModuleType):
    """One of torch's modules, made of rallypoint's names."""

    def __getattr__(self, name: str) -> Any:
        """Called for whatever has not been set on this module itself."""
        homes = homes_behind(self.__name__).get(name)
        if homes is not None:
            return self._look_up(name, homes[0])
        if f"{self.__name__}.{name}" in TABLE:
            return import_module(f"{self.__name__}.{name}")
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self)

    def _look_up(self, name: str, home: Home) -> Any:
        module, attribute = home
        if module == _LOGGERS:
            from logging import getLogger

            return getLogger(attribute)
        try:
            value = import_module(module)
            if attribute:
                value = getattr(value, attribute)
        except (ImportError, AttributeError) as error:
            text = f"rallypoint has no {name}, which {self.__name__} of torch has"
            raise AttributeError(text, name=name, obj=self) from error
        return import_module(FACADE_OF[value.__name__]) if _has_facade(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        own = _own_homes(self.__name__).get(name, ())
        for module, attribute in own:
            setattr(import_module(module), attribute, _behind(value))
        if not own:
            super().__setattr__(name, value)
        if not own and name in homes_behind(self.__name__):
            self._stop_hiding(name, value)

    def _stop_hiding(self, name: str, value: object) -> None:
        """Who takes back what they set has left nothing here."""
        super().__delattr__(name)
        if self.__dict__.get(name, _NOTHING) is not value:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        own = _own_homes(self.__name__).get(name, ())
        for module, attribute in own:
            delattr(import_module(module), attribute)
        if not own:
            super().__delattr__(name)

    @property
    def __dict__(self) -> Contents:  # type: ignore[override]
        """Those who replace a name look here, to know whether it has to be set again afterwards or deleted."""
        return Contents(self, _OWN_DICT.__get__(self))

    def __dir__(self) -> list[str]:
        return sorted({*_OWN_DICT.__get__(self), *homes_behind(self.__name__)})

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        """In another process it is the module of this name, as with any module that is passed on by name."""
        return import_module, (self.__name__,)


class Contents(dict[str, "Any"]):
    """The names of a facade with their values, each looked up when it is asked for."""

    def __init__(self, facade: Facade, own: dict[str, Any]) -> None:
        super().__init__(own)
        self._facade = facade

    def __missing__(self, name: str) -> Any:
        if name not in homes_behind(self._facade.__name__):
            raise KeyError(name)
        try:
            return getattr(self._facade, name)
        except AttributeError:
            raise KeyError(name) from None

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name, _NOTHING) is not _NOTHING

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._facade, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._facade, name)


def public_names(place: str) -> list[str]:
    """The names that ``from place import *`` gives."""
    return sorted({name for name, _ in _entries(TABLE[place][0])})


@cache
def homes_behind(place: str) -> dict[str, tuple[Home, ...]]:
    """Where in our modules each name of this module of torch's is; where several use it, the first is the one to ask."""
    below = place.removeprefix("torch.distributed.")
    found: dict[str, tuple[Home, ...]] = {name: ((_LOGGERS, place),) for name, places in LOGGERS.items() if below in places}
    for names in (*TABLE[place], IMPORTS.get(below, {})):
        for name, home in _entries(names):
            found[name] = (*found.get(name, ()), home)
    return found


@cache
def _own_homes(place: str) -> dict[str, tuple[Home, ...]]:
    """The same, without what belongs to another place."""
    owners = _owners()
    mine = {name: tuple(home for home in homes if owners.get(home) == place) for name, homes in homes_behind(place).items()}
    return {name: homes for name, homes in mine.items() if homes}


@cache
def _owners() -> dict[Home, str]:
    """The first place in the table that maps to it; nobody owns what is not ours."""
    owners: dict[Home, str] = {}
    places = [(place, public) for place, (public, _) in TABLE.items()] + [(place, more) for place, (_, more) in TABLE.items()]
    for place, names in places:
        for _, home in _entries(names):
            if home[1] and home[0].startswith("rallypoint."):
                owners.setdefault(home, place)
    return owners


def _entries(names: dict[str, str]) -> Iterator[tuple[str, Home]]:
    for module, texts in names.items():
        for text in texts.split():
            theirs, _, ours = text.partition("=")
            yield theirs, _home(module, ours or theirs)


def _home(module: str, name: str) -> Home:
    if module == _STANDARD_LIBRARY:
        return name, ""
    if module.startswith(_FROM):
        return module.removeprefix(_FROM), name
    if module == _ALIASES:
        return f"torch.distributed.{name}", ""
    return f"rallypoint.{module}", name


def _has_facade(value: object) -> bool:
    return isinstance(value, ModuleType) and value.__name__ in FACADE_OF


def _behind(value: Any) -> Any:
    """Our own module, where a value is what stands for one: who takes a patch back sets what was shown to them."""
    for ours, theirs in FACADE_OF.items() if isinstance(value, Facade) else ():
        if theirs == value.__name__:
            return import_module(ours)
    return value


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
    """Finds the modules of the table before anybody else does, and loads them."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in TABLE:
            return None
        return ModuleSpec(fullname, self, origin=__file__, is_package=fullname in _PACKAGES)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Facade(spec.name, f"{spec.name}, as rallypoint has it.")

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is to be executed; the error of an import that fails shows the file."""
        module.__file__ = __file__
        module.__all__ = public_names(module.__name__)  # type: ignore[attr-defined]

    def get_code(self, fullname: str) -> CodeType:
        """For ``python -m``."""
        module, function = _PROGRAMS.get(fullname, ("", ""))
        return compile(_MAIN.format(module=module, function=function) if module else "", f"<{fullname}>", "exec")
