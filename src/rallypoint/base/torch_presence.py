"""Whether the program has imported torch. We never import it; and `rallypoint.compat` may have put stand-ins in its place."""

from __future__ import annotations

import sys
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["StandIn", "imported_torch"]


class StandIn(ModuleType):
    """A parent for our modules behind torch's names where torch is not installed; it has nothing else of torch."""


def imported_torch(name: str = "torch") -> Any:
    """The module of torch with this name, if the program has imported it; else None."""
    module = sys.modules.get(name)
    return None if isinstance(module, StandIn) else module
