"""One agent on each of some hosts, started from here by ssh: the decisions, the far side, and this side."""

from __future__ import annotations

__all__: list[str] = []
