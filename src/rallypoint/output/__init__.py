"""Where the bytes go that workers write: log files, the pump, the console."""

from __future__ import annotations

__all__: list[str] = []
