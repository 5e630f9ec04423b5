"""Why workers ended, and how a user reads it."""

from __future__ import annotations

__all__: list[str] = []
