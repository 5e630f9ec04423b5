"""The live screen of a job: what it shows is decided by pure modules, and drawn by Textual, which `tui.app` alone imports."""

from __future__ import annotations

__all__: list[str] = []
