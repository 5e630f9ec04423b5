"""How nodes meet: the interface, the registry of back ends, and the back ends themselves."""

from __future__ import annotations

__all__: list[str] = []
