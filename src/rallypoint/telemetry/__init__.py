"""A run in the terms of OpenTelemetry: spans and measurements that are made of its events."""

from __future__ import annotations

__all__: list[str] = []
