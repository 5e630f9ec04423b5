"""Seeing and steering jobs that run: what an agent tells of itself, how it is asked, and how it asks the others of its job."""

from __future__ import annotations

__all__: list[str] = []
