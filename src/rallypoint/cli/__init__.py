"""From a command line to a configuration, and from an exception to an exit code."""

from __future__ import annotations

__all__: list[str] = []
