"""What is released: what the wheel is made of (``sbom``), whether it is fit (``check``), and that it works alone (``smoke``)."""

from __future__ import annotations

__all__: list[str] = []
