"""Sockets for every server: the wake-up descriptor, accepting, listening, HTTP, a private Unix socket."""

from __future__ import annotations

__all__: list[str] = []
