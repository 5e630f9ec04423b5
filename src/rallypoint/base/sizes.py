"""Numbers of bytes as users write them."""

from __future__ import annotations

__all__ = ["parse_size"]

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """The number of bytes that ``4096``, ``500M`` or ``2G`` stands for; ValueError for anything else."""
    text = text.strip().upper()
    unit = UNITS.get(text[-1:])
    return int(text[:-1]) * unit if unit else int(text)
