"""One node of a job: from a configuration to workers, and from their ends to a result."""

from __future__ import annotations

__all__: list[str] = []
