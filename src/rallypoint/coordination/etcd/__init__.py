"""The engine on an etcd v3 cluster, through its JSON gateway."""

from __future__ import annotations

__all__: list[str] = []
