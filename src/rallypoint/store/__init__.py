"""The store in which workers find each other, with torch's operations and wire format."""

from __future__ import annotations

__all__: list[str] = []
