"""The engine on any back end that is one cell of bytes with a version, such as torch's are."""

from __future__ import annotations

__all__: list[str] = []
