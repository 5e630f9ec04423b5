"""CPUs and devices of this machine, and which worker gets which."""

from __future__ import annotations

__all__: list[str] = []
