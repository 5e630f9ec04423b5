"""The site: Sphinx makes it of the pages in docs/, which can be read in the repository as they are."""

from __future__ import annotations

__all__: list[str] = []
