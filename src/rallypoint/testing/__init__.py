"""For those who write plug-ins: tests that every engine has to pass, and a store in memory to try programs on."""

from __future__ import annotations

__all__: list[str] = []
