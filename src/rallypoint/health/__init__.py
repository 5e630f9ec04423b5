"""The health endpoint of an agent: whether it is alive and ready, and its numbers for Prometheus."""

from __future__ import annotations

__all__: list[str] = []
