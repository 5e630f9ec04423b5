"""What this process finds around it: its environment, read here and nowhere else, and torch, where the program has loaded that.

What a worker is to find in its own environment is laid over a copy of this one, which is written only where torch writes it
(`write`). The names of the variables are in `defaults`. Torch is never imported by us, and `rallypoint.compat` may have put
stand-ins in its place.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType

from rallypoint.base import defaults

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "StandIn",
    "cache_dir",
    "first_of",
    "has_settings",
    "imported_torch",
    "is_on",
    "own",
    "replace",
    "state_dir",
    "take",
    "temporary_dir",
    "text",
    "torch_distributed",
    "write",
]

own: Mapping[str, str] = os.environ  # as it is at any moment


def write(variables: Mapping[str, str]) -> None:
    """Put these into this process's own environment: programs for torch look for them there."""
    os.environ.update(variables)


def take(name: str) -> str | None:
    """The value of a variable that is of use once; neither we nor our children find it from now on."""
    return os.environ.pop(name, None)


def replace(variables: Mapping[str, str]) -> None:
    """Let this process have another environment, as if it had been started with it."""
    os.environ.clear()
    os.environ.update(variables)


def text(name: str, default: str = "") -> str:
    """A variable that is empty says nothing."""
    return own.get(name) or default


def is_on(name: str, default: str = "0") -> bool:
    """As torch has it: only 1 switches something on."""
    return own.get(name, default) == "1"


def has_settings(variables: Mapping[str, str]) -> bool:
    """Whether any of them may be a setting of the rendezvous."""
    return any(name.startswith(defaults.ENV_SETTING_PREFIX) and name not in defaults.ENV_NO_SETTINGS for name in variables)


def first_of(names: Iterable[str]) -> str | None:
    """The first of these variables that says something."""
    return next(filter(None, map(text, names)), None)


def temporary_dir() -> str:
    return text(defaults.ENV_TMPDIR, defaults.TEMPORARY_DIR)


def cache_dir() -> str:
    """Where this user's programs keep what they can do without; empty if there is no such place."""
    home, named = text(defaults.ENV_HOME), text(defaults.ENV_CACHE_HOME)
    if os.path.isabs(named):  # others are to be ignored
        return named
    return os.path.join(home, ".cache") if os.path.isabs(home) else ""


def state_dir() -> str:
    """The user's folder for what programs keep, an absolute path; empty where there is none."""
    home = text(defaults.ENV_HOME)
    own_choice = text(defaults.ENV_STATE_HOME)
    found = own_choice if os.path.isabs(own_choice) else os.path.join(home, defaults.STATE_DIR)
    return found if os.path.isabs(found) else ""


class StandIn(ModuleType):
    """A parent for our modules behind torch's names where torch is not installed; it has nothing else of torch."""


def imported_torch(name: str = "torch") -> Any:
    """The module of torch with this name, if the program has imported it; else None."""
    module = sys.modules.get(name)
    return None if isinstance(module, StandIn) else module


def torch_distributed() -> Any:
    """``torch.distributed``, if the program has imported it and it has stores; else None."""
    module = imported_torch("torch.distributed")
    return module if isinstance(getattr(module, "TCPStore", None), type) else None
