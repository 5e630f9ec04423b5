"""What the cases share: how they are found, how an outcome becomes facts that two libraries can be compared by.

A case is a function that uses torch's names and returns a dict: each of its items is one fact. It runs in a process where these
names mean torch's own code, or rallypoint's behind ``rallypoint.compat``; it cannot tell which.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CASES: dict[str, Callable[[], dict[str, Any]]] = {}
FAMILIES = tuple(sorted(path.stem.removeprefix("cases_") for path in Path(__file__).parent.glob("cases_*.py")))
SIDE_VARIABLE = "CONFORMANCE_SIDE"
# What torch's stores raise exists only where torch is; without it these stand for it.
STANDS_FOR = {"StoreError": "DistStoreError", "StoreNetworkError": "DistNetworkError"}
ENDLESS_S = 100.0  # longer than anything takes, however busy the machine is


def case(function: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Enter a case under its family and name."""
    family = function.__module__.rpartition(".")[2].removeprefix("cases_")
    CASES[f"{family}.{function.__name__}"] = function
    return function


def load_cases() -> dict[str, Callable[[], dict[str, Any]]]:
    for family in FAMILIES:
        importlib.import_module(f"tests.compat.conformance.cases_{family}")
    return CASES


def outcome(function: Callable[..., Any], *args: Any, words: tuple[str, ...] = (), **kwargs: Any) -> dict[str, Any]:
    """What a call returns; or what it raises, and which of the words, and of the call's own arguments, its message has."""
    try:
        value = function(*args, **kwargs)
    except (Exception, SystemExit) as error:
        given = (one for one in (*args, *kwargs.values()) if isinstance(one, str) and len(one.strip()) > 1 and "/" not in one)
        return raised(error, (*words, *given))
    return {"value": plain(value)}


def raised(error: BaseException, words: tuple[str, ...] = ()) -> dict[str, Any]:
    """The names of the exception's classes, from its own to the base of all."""
    names = [cls.__name__ for cls in type(error).__mro__ if cls is not object]
    if os.environ[SIDE_VARIABLE] == "without":
        names += [STANDS_FOR[name] for name in names if name in STANDS_FOR]
    facts: dict[str, Any] = {"raised": names}
    if isinstance(error, SystemExit):
        facts["code"] = error.code
    if words:
        facts["says"] = {word: word in str(error) for word in words}
    return facts


def plain(value: Any) -> Any:
    """A value as JSON: enums by name, mappings with text as keys, objects by the name of their class."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return f"bytes {value!r}"
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, BaseException):
        return raised(value)
    return f"a {type(value).__name__}"


def without_numbers(text: str) -> str:
    """Text in which process ids, ports and times do not matter."""
    return re.sub(r"\d+", "N", text)


def store() -> Any:
    """A store in memory: torch's where torch is, else ours."""
    if os.environ[SIDE_VARIABLE] == "without":
        from rallypoint import HashStore

        return HashStore()
    from torch.distributed import HashStore as TorchHashStore

    return TorchHashStore()


def tcp_store() -> Any:
    """A store that listens: torch's where torch is, else ours."""
    if os.environ[SIDE_VARIABLE] == "without":
        from rallypoint import TCPStore

        return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    from torch.distributed import TCPStore as TorchTCPStore

    return TorchTCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def command(module: str, argv: list[str]) -> list[str]:
    """How a module of torch's is run as a program on this side."""
    flags = {"torch": [], "beside": ["-m", "rallypoint.compat"], "without": ["-S", "-m", "rallypoint.compat"]}
    return [sys.executable, *flags[os.environ[SIDE_VARIABLE]], "-m", module, *argv]


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="conformance_") as name:
        yield Path(name)


@contextlib.contextmanager
def environment(**variables: str | None) -> Iterator[None]:
    """These variables for a while; None takes one away."""
    before = {name: os.environ.get(name) for name in variables}

    def put(values: dict[str, str | None]) -> None:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    put(variables)
    try:
        yield
    finally:
        put(before)


def until(condition: Callable[[], Any], timeout_s: float = ENDLESS_S) -> Any:
    """The condition's first true value, or its last false one."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return value


def together(*functions: Callable[[], Any]) -> list[Any]:
    """The outcomes of functions that run at the same time, each in a thread."""
    outcomes: list[Any] = [None] * len(functions)

    def run(index: int) -> None:
        outcomes[index] = outcome(functions[index])

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ENDLESS_S)
    return outcomes


def tree(path: Path) -> list[str]:
    """The files below a folder, with random parts of their names left out."""
    found = sorted(str(one.relative_to(path)) for one in path.rglob("*") if one.is_file())
    return [re.sub(r"_[0-9a-z_]{8}(?=/)", "_RANDOM", name, count=1) for name in found]


def nearest(path: Path, pattern: str) -> Path:
    """The one file below a folder that fits."""
    return next(iter(sorted(path.rglob(pattern))))
