"""Small servers: HTTP on one thread, over TCP or over a Unix socket that only its owner can use."""

from __future__ import annotations

__all__: list[str] = []
