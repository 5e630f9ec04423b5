"""Whether a machine is fit to run workers: checks before it gets a seat, and after a failure; and the same on demand."""

from __future__ import annotations

__all__: list[str] = []
