"""What everything stands on: records, defaults, what we say and how it gets out. Imports nothing of ours but errors."""

from __future__ import annotations

__all__: list[str] = []
