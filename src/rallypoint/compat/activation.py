"""Compatibility in the processes that a program starts.

A new interpreter with ``RALLYPOINT_COMPAT=1`` installs it before the program begins, by the `sitecustomize` of `worker_site`,
which has to be at the front of its PYTHONPATH. An agent sees to that for its workers; `for_children` does it for all processes
that this one will start.
"""

from __future__ import annotations

import os

from rallypoint.base import defaults
from rallypoint.worker_site import in_front

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["for_children", "is_asked_for"]

_PYTHONPATH = "PYTHONPATH"


def is_asked_for() -> bool:
    """Whether the environment asks for it."""
    return os.environ.get(defaults.ENV_COMPAT) == "1"


def for_children() -> Callable[[], None]:
    """Let all processes that are started from now on be compatible; the result, when called, ends that."""
    before = {name: os.environ.get(name) for name in (defaults.ENV_COMPAT, _PYTHONPATH)}
    os.environ[defaults.ENV_COMPAT] = "1"
    os.environ[_PYTHONPATH] = in_front(before[_PYTHONPATH])
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
