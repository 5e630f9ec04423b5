"""What a run leaves behind, and what can be read from it."""

from __future__ import annotations

__all__: list[str] = []
