"""Small shared memories in which agents and workers find each other."""

from __future__ import annotations

__all__: list[str] = []
