"""Starting, watching, stopping and listening to worker processes."""

from __future__ import annotations

__all__: list[str] = []
