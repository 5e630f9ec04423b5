"""The small programs that the benchmarks start: workers, and the bare parent that sets the floor."""

from __future__ import annotations

__all__: list[str] = []
