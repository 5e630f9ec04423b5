"""A folder for the front of a worker's PYTHONPATH: the interpreter runs the `sitecustomize` in it when it starts."""

from __future__ import annotations

__all__: list[str] = []
