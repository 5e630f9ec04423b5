"""Telling others of a run: what is told of it, by which of its nodes, to whom and how often it is tried."""

from __future__ import annotations

__all__: list[str] = []
