"""The environment of this process, read here and nowhere else; the names of the variables are in `defaults`.

It is never written: what a worker is to find in its own is laid over a copy of this one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from rallypoint.base import defaults

__all__ = ["first_of", "is_on", "own", "temporary_dir", "text"]

own: Mapping[str, str] = os.environ  # as it is at any moment


def text(name: str, default: str = "") -> str:
    """A variable that is empty says nothing."""
    return own.get(name) or default


def is_on(name: str, default: str = "0") -> bool:
    """As torch has it: only 1 switches something on."""
    return own.get(name, default) == "1"


def first_of(names: Iterable[str]) -> str | None:
    """The first of these variables that says something."""
    return next(filter(None, map(text, names)), None)


def temporary_dir() -> str:
    return text(defaults.ENV_TMPDIR, defaults.TEMPORARY_DIR)
