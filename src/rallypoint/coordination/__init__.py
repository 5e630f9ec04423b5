"""The agents' store: its words and their meaning, and three engines for it."""

from __future__ import annotations

__all__: list[str] = []
