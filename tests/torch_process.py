"""Torch in the tests' own process: it can be imported only once there, and most tests want a process without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_modules: dict[str, ModuleType] = {}


@contextmanager
def torch_importable() -> Iterator[None]:
    """Within the block torch is what it was when it was imported first; behind it, it looks as if it never had been."""
    sys.modules.update(_modules)
    try:
        yield
    finally:
        names = [name for name in sys.modules if name == "torch" or name.startswith("torch.")]
        _modules.update((name, sys.modules.pop(name)) for name in names)
