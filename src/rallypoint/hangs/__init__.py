"""Who is stuck: the rules, the signs of life, the stacks."""

from __future__ import annotations

__all__: list[str] = []
