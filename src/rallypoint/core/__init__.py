"""Every decision of rallypoint, as functions of (state, observation, now). No I/O, no clock, no threads, no logging."""

from __future__ import annotations

__all__: list[str] = []
