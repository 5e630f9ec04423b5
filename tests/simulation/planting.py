"""How a bug is planted on purpose, and taken out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

__all__ = ["BUGS", "Patches", "bug", "planted"]

Patches = list[tuple[object, str, object]]  # in which object, which attribute is replaced by what
Bug = Callable[[], Patches]
BUGS: dict[str, Bug] = {}


def bug(make: Bug) -> Bug:
    BUGS[make.__name__] = make
    return make


@contextmanager
def planted(name: str) -> Iterator[None]:
    """As long as it lasts, the bug of that name is there; none where there is no name."""
    with ExitStack() as stack:
        for owner, attribute, replacement in BUGS[name]() if name else []:
            stack.enter_context(patch.object(owner, attribute, replacement))
        yield
