"""Write surface-VERSION.json: the public surface of the installed torch's launcher, as introspection shows it.

    python -m tests.compat.make_surface

Of torch 2.15 only the Python files of the launcher were at hand, and were imported within an installed 2.13.

`describe` is what the tests use on rallypoint's own names, so that both are seen with the same eyes. Annotations are left out:
they bind nobody. Nothing of torch's source is read, only its objects are looked at.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import logging
import pkgutil
import re
import sys
import types
from pathlib import Path
from typing import Any

SURFACE = Path(__file__).with_name("surface-2.15.json")  # the newest that there is one of
ROOTS = (
    "torch.distributed.elastic",
    "torch.distributed.launcher",
    "torch.distributed.run",
    "torch.distributed.launch",
)
# What every class has, and what the machinery of classes leaves behind.
INHERITED_BY_ALL = (object, Exception, BaseException, enum.Enum, enum.IntFlag, enum.Flag, int, str, tuple)
# Objects without a name of their own that belong to the surface all the same, for they are not private.
CONSTANTS = (str, int, float, bool, bytes, tuple, list, dict, type(None))


class _Foreign(types.ModuleType):
    """Stands in for a client library that is not installed: enough of it to import those who use it."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (Exception,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


def ensure_etcd() -> None:
    """Torch's modules for etcd import its client and what that one uses, of which only the names are needed here."""
    for name in ("etcd", "urllib3", "urllib3.exceptions"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            sys.modules[name] = _Foreign(name)


def module_names() -> list[str]:
    """The public modules below the roots, the roots included."""
    ensure_etcd()
    found = []
    for root in ROOTS:
        module = importlib.import_module(root)
        found.append(root)
        for entry in pkgutil.walk_packages(getattr(module, "__path__", []), f"{root}."):
            if not any(part.startswith("_") for part in entry.name.split(".")):
                found.append(entry.name)
    return found


def public_names(module: types.ModuleType) -> list[str]:
    """Those of ``__all__``; without one, those without underscore that torch made: no modules, nothing of other libraries."""
    told = getattr(module, "__all__", None)
    names = list(told) if told is not None else [name for name in vars(module) if not name.startswith("_")]
    return sorted(name for name in names if told is not None or _is_torchs(getattr(module, name)))


def _is_torchs(value: object) -> bool:
    if isinstance(value, types.ModuleType | logging.Logger):
        return False
    home = getattr(value, "__module__", None)
    if home is not None and (isinstance(value, type) or callable(value)):
        return str(home).startswith("torch.")
    return isinstance(value, CONSTANTS) or type(value).__module__.startswith("torch.")


def home_of(value: object) -> str | None:
    """The module that a class or function was made in."""
    return getattr(value, "__module__", None) if isinstance(value, type | types.FunctionType) else None


def describe(value: object) -> dict[str, Any]:
    """Everything about a public name that its users may rely on."""
    if isinstance(value, type):
        return _describe_class(value)
    if callable(value):
        return {"kind": "function", "signature": signature(value)}
    return {"kind": "constant", "value": text_of(value)}


def _describe_class(cls: type) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "kind": "class",
        "bases": [base.__name__ for base in cls.__bases__ if base is not object],
        "ancestors": [base.__name__ for base in cls.__mro__[1:]],
    }
    if issubclass(cls, enum.Enum):
        facts["members"] = {member.name: member.value for member in cls.__members__.values()}
    elif "__init__" in _made_by_author(cls) or dataclasses.is_dataclass(cls):
        facts["signature"] = signature(cls)
    if type(vars(cls).get("__init__")).__name__ == "instancemethod":
        facts["native"] = True  # nothing is known of its signatures, nor of what its objects have
    if dataclasses.is_dataclass(cls):
        facts["fields"] = {one.name: _field_default(one) for one in dataclasses.fields(cls)}
    facts["abstract"] = sorted(getattr(cls, "__abstractmethods__", ()))
    facts["attributes"] = {name: _attribute(cls, name) for name in sorted(_made_by_author(cls)) if not name.startswith("_")}
    return {name: fact for name, fact in facts.items() if fact or name in ("kind", "signature")}


def _made_by_author(cls: type) -> set[str]:
    """The names that the class and its bases define, but not those that every class, enum or exception has."""
    own = [
        vars(base) for base in cls.__mro__ if base not in INHERITED_BY_ALL and not base.__module__.startswith(("abc", "typing"))
    ]
    fields = {one.name for one in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    members = set(cls.__members__) if issubclass(cls, enum.Enum) else set()
    return {name for names in own for name in names} - fields - members


def _attribute(cls: type, name: str) -> dict[str, Any]:
    raw = inspect.getattr_static(cls, name)
    if isinstance(raw, property):
        return {"kind": "property"}
    if isinstance(raw, staticmethod | classmethod):
        return {"kind": type(raw).__name__, "signature": signature(getattr(cls, name))}
    if inspect.isfunction(raw):
        return {"kind": "method", "signature": signature(raw)}
    if inspect.isdatadescriptor(raw) or inspect.isroutine(raw):
        return {"kind": "attribute"}
    return {"kind": "value", "value": text_of(raw)}


def signature(value: Any) -> list[list[str]] | None:
    """Each parameter as name, kind and the text of its default, where it has one."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    made_anew = {one.name for one in dataclasses.fields(value) if _is_made_anew(one)} if dataclasses.is_dataclass(value) else ()
    return [
        [
            one.name,
            one.kind.name,
            *([] if one.default is one.empty else ["made anew" if one.name in made_anew else text_of(one.default)]),
        ]
        for one in parameters
    ]


def _is_made_anew(one: dataclasses.Field[Any]) -> bool:
    return one.default_factory is not dataclasses.MISSING


def _field_default(one: dataclasses.Field[Any]) -> str:
    if _is_made_anew(one):
        return f"made by {getattr(one.default_factory, '__name__', 'a factory')}"
    return "required" if one.default is dataclasses.MISSING else text_of(one.default)


def text_of(value: object) -> str:
    """A value as text that is the same in every process."""
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return "a function"
    if isinstance(value, float) and value.is_integer():
        return repr(int(value))  # 300 seconds are 300.0 seconds
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return (
        re.sub(r" at 0x[0-9a-f]+", "", repr(value)) if isinstance(value, (*CONSTANTS, enum.Enum)) else f"a {type(value).__name__}"
    )


def make_surface() -> dict[str, Any]:
    """Each module's public names; a name that lives in another module of the surface only says where."""
    names = module_names()
    surface: dict[str, Any] = {}
    for module_name in names:
        module = importlib.import_module(module_name)
        surface[module_name] = {}
        for name in public_names(module):
            value = getattr(module, name)
            home = home_of(value)
            if home != module_name and home in names and getattr(sys.modules[home], name, None) is value:
                surface[module_name][name] = {"kind": "alias", "home": home}
            else:
                surface[module_name][name] = describe(value)
    return surface


def surface_of(version: str) -> Path:
    return SURFACE.with_name(f"surface-{'.'.join(version.split('.')[:2])}.json")


def every_name() -> dict[str, list[str]]:
    """All that each module holds, what it has imported included."""
    modules = {name: importlib.import_module(name) for name in module_names()}
    return {name: sorted(one for one in vars(module) if not one.startswith("__")) for name, module in modules.items()}


def make_document(version: str) -> dict[str, Any]:
    return {"torch": version, "modules": make_surface(), "names": every_name()}


def main() -> None:
    import torch

    document = make_document(torch.__version__.partition("+")[0])
    surface_of(document["torch"]).write_text(as_text(document))


def as_text(document: dict[str, Any]) -> str:
    """JSON with one line for each name, so that a change can be read."""
    modules = []
    for module, names in sorted(document["modules"].items()):
        lines = ",\n".join(f"   {json.dumps(name)}: {json.dumps(facts)}" for name, facts in sorted(names.items()))
        modules.append(f"  {json.dumps(module)}: {{\n{lines}\n  }}" if lines else f"  {json.dumps(module)}: {{}}")
    names = ",\n".join(f"  {json.dumps(module)}: {json.dumps(held)}" for module, held in sorted(document["names"].items()))
    parts = [json.dumps(document["torch"]), "{\n" + ",\n".join(modules) + "\n }", "{\n" + names + "\n }"]
    return '{{\n "torch": {},\n "modules": {},\n "names": {}\n}}\n'.format(*parts)


if __name__ == "__main__":
    main()
