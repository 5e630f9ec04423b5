"""A folder for the front of a worker's PYTHONPATH: the interpreter runs the `sitecustomize` in it when it starts."""

from __future__ import annotations

import os

__all__ = ["SITE_FOLDER", "in_front"]

SITE_FOLDER = os.path.dirname(os.path.abspath(__file__))


def in_front(path: str | None) -> str:
    """A PYTHONPATH that has the folder at its front, and goes on with `path`."""
    rest = [entry for entry in path.split(os.pathsep) if entry != SITE_FOLDER] if path else []
    return os.pathsep.join([SITE_FOLDER, *rest])
