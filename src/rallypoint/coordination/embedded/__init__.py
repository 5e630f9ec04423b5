"""The engine inside an agent: a server, and a client that survives breaks."""

from __future__ import annotations

__all__: list[str] = []
