"""The reference pages that are made of the code: ``python -m tools.reference`` writes them, a test says when one is out of date.

The API is told with its types and docstrings, each name where most programs import it from, each method where it comes from. The
page of settings and codes has what the code itself declares; flags have such a page already.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from rallypoint import errors
from rallypoint.errors import ExitCode
from rallypoint.rendezvous import settings

__all__ = ["API", "PAGES", "SETTINGS", "api_page", "main", "settings_page", "signature_of"]

DOCS = Path(__file__).parents[1] / "docs"
API, SETTINGS = "reference-api.md", "reference-settings.md"
PACKAGES = (
    "rallypoint", "rallypoint.agent", "rallypoint.processes", "rallypoint.output", "rallypoint.failures", "rallypoint.rendezvous",
    "rallypoint.store", "rallypoint.timers", "rallypoint.health",
)  # fmt: skip
MODULES = (
    "worker", "inspect", "events", "metrics", "affinity", "control_plane", "data", "compat", "torch_run", "parser_actions",
)  # fmt: skip
_STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
_FIELD = re.compile(r"^(?:([a-z_]+(?:, [a-z_]+)*):(?= )| {2,}(?=\S))", re.MULTILINE)
NOT_FOR_PROGRAMS = {"adopt", "ask_and_tell"}  # of rallypoint.worker.checkpoint: other modules of ours need them
LONG = 100  # characters of a signature; what is longer gets a line for each parameter


def main() -> None:
    for name, make in PAGES.items():
        (DOCS / name).write_text(make())


def api_page() -> str:
    told: dict[int, str] = {}
    parts = [
        "# API\n",
        "Made of the code by `python -m tools.reference`; do not edit. Each name is told where most programs import it from; the",
        "[guide](python-api.md) shows them at work.\n",
    ]
    for name in (*PACKAGES, *(f"rallypoint.{module}" for module in MODULES)):
        parts += _of_module(name, importlib.import_module(name), told)
    return "\n".join(parts).rstrip() + "\n"


def settings_page() -> str:
    codes = "\n".join(f"| {value} | `{name}` | {why} |" for value, name, why in _exit_codes())
    return "\n".join([
        "# Settings and exit codes\n",
        "Made of the code by `python -m tools.reference`; do not edit. Flags are in [Command line](command-line.md), events in",
        "[Events](events.md#schema-1), metrics in [Health and metrics](health.md#metrics).\n",
        "## Settings of the rendezvous\n",
        "For `--rdzv-conf`, `LaunchConfig(rdzv_configs=…)`, or the variable; [how they work together](rendezvous.md#settings).\n",
        settings.markdown() + "\n",
        "## Exit codes\n",
        "As [`rallypoint.errors.ExitCode`](failures.md#exit-codes); 128 + n where signal n ended the job.\n",
        "| code | name | meaning |\n|---|---|---|",
        codes,
    ]) + "\n"  # fmt: skip


def signature_of(name: str, value: Callable[..., Any]) -> str:
    """As it would be written: one line, or one for each parameter."""
    found = inspect.signature(value)
    parameters = list(_parameters(found))
    result = "" if found.return_annotation is inspect.Signature.empty else f" -> {_annotation(found.return_annotation)}"
    line = f"{name}({', '.join(parameters)}){result}"
    if len(line) <= LONG:
        return line
    return f"{name}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + f"){result}"


def _of_module(name: str, module: ModuleType, told: dict[int, str]) -> Iterator[str]:
    yield f"## {name}\n"
    if name not in PACKAGES:
        yield f"{_text(inspect.cleandoc(module.__doc__ or '').partition(chr(10) * 2)[0])}\n"
    again: list[str] = []
    parts: list[str] = []
    for public in sorted(module.__all__, key=lambda one: (one[0].islower(), one.lower())):
        value = getattr(module, public)
        if public in NOT_FOR_PROGRAMS:
            continue
        if inspect.ismodule(value):
            parts += _of_module(f"{name}.{public}", value, told)
        elif not public.startswith("__") and isinstance(value, type | FunctionType) and not hasattr(value, "__origin__"):
            if (home := told.setdefault(id(value), name)) != name:
                again.append(f"`{public}` ([{home}](#{home.replace('.', '')}))")
            else:
                yield from _of_value(public, value)
    if again:
        yield f"Also here: {', '.join(again)}.\n"
    yield from parts


def _of_value(name: str, value: Any) -> Iterator[str]:
    yield f"### {name}\n"
    is_error = isinstance(value, type) and issubclass(value, BaseException)
    if isinstance(value, type) and issubclass(value, enum.Enum):
        yield _code("\n".join(f"{name}.{member.name} = {member.value!r}" for member in value.__members__.values()))
    elif callable(value) and not is_error:
        yield _code(signature_of(name, value))
    yield f"{_text(inspect.getdoc(value) or '')}\n"
    if isinstance(value, type):
        if bases := _bases(value):
            yield f"Extends {', '.join(f'`{base}`' for base in bases)}.\n"
        if not issubclass(value, enum.Enum) and (rows := list(_members(value))):
            yield "| | |\n|---|---|\n" + "\n".join(rows) + "\n"


def _bases(owner: type) -> list[str]:
    """The public ones, and those of Python that an error can be caught as."""
    plain = (object, BaseException, Exception)
    is_error = issubclass(owner, BaseException)
    return [
        one.__name__
        for one in owner.__mro__[1:]
        if one not in plain and (one in _public() or (is_error and one.__module__ == "builtins"))
    ]


@cache
def _public() -> frozenset[type]:
    """Every class that can be imported from a package of the API."""
    modules = [importlib.import_module(name) for name in PACKAGES]
    return frozenset(one for module in modules for name in module.__all__ if isinstance(one := getattr(module, name), type))


def _members(owner: type) -> Iterator[str]:
    """Its public methods and properties, but for those that a public base has too."""
    inherited = {name for base in owner.__mro__[1:] if base in _public() for name in dir(base)}
    for name in sorted(set(dir(owner)) - inherited):
        if name.startswith("_") or not _is_ours(owner, name):
            continue
        member = inspect.getattr_static(owner, name)
        kind = member.__func__ if isinstance(member, staticmethod | classmethod) else member
        if isinstance(kind, property):
            yield f"| `{name}` | {_first(kind)} |"
        elif isinstance(kind, FunctionType):
            line = re.sub(r",?\n *", " ", signature_of(name, kind)).replace("( ", "(").replace(" )", ")")
            line = re.sub(r"\((self|cls)(, )?", "(", line, count=1)
            yield f"| `{line.replace('|', chr(92) + '|')}` | {_first(getattr(owner, name))} |"


def _is_ours(owner: type, name: str) -> bool:
    home = next((one for one in owner.__mro__ if name in vars(one)), object)
    return home.__module__.startswith("rallypoint") and not home.__module__.endswith(".records")


def _first(value: Any) -> str:
    """The first sentence of what it says of itself."""
    text = _text(inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=[.])\s", text, maxsplit=1)[0].replace("|", "\\|")


def _parameters(found: inspect.Signature) -> Iterator[str]:
    kinds = [one.kind for one in found.parameters.values()]
    star = inspect.Parameter.VAR_POSITIONAL in kinds
    for one in found.parameters.values():
        if one.kind is inspect.Parameter.KEYWORD_ONLY and not star:
            star = True
            yield "*"
        prefix = _STARS.get(one.kind, "")
        annotation = "" if one.annotation is inspect.Parameter.empty else f": {_annotation(one.annotation)}"
        default = "" if one.default is inspect.Parameter.empty else f" = {_default(one.default)}"
        yield f"{prefix}{one.name}{annotation}{default if annotation else default.replace(' ', '')}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", repr(annotation))


def _default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    text = repr(value)
    return "..." if " at 0x" in text or text.startswith("<") else text


def _text(text: str) -> str:
    """What stands in a docstring, as Markdown: fields as a list, code between single ticks, examples in blocks of their own."""
    text = "\n\n".join(map(_fields, text.split("\n\n")))
    blocks = re.sub(r"((?:^>>> .*\n?)(?:^(?!\n).+\n?)*)", lambda found: _code(found[1].rstrip()), text, flags=re.MULTILINE)
    return re.sub(r"``(?!`)(.+?)``", r"`\1`", blocks).rstrip()


def _fields(paragraph: str) -> str:
    """A list, if it is one: each line a name and what it is, or the rest of the line before."""
    if not all(map(_FIELD.match, paragraph.splitlines())):
        return paragraph
    return _FIELD.sub(lambda found: f"- `{found[1]}`:" if found[1] else found[0], paragraph)


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n"


def _exit_codes() -> Iterator[tuple[int, str, str]]:
    """From the source, as a comment says what each means."""
    source = inspect.getsource(errors)
    tree = next(one for one in ast.parse(source).body if isinstance(one, ast.ClassDef) and one.name == ExitCode.__name__)
    lines = source.splitlines()
    for one in tree.body:
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
            name = one.targets[0].id
            yield getattr(ExitCode, name), name, lines[one.lineno - 1].partition("# ")[2] or "all workers succeeded"


PAGES: dict[str, Callable[[], str]] = {API: api_page, SETTINGS: settings_page}


if __name__ == "__main__":
    main()
