"""What `rallypoint demo` shows: a job that is hurt on purpose (`scenes`), and the program that it runs (`train`)."""

from __future__ import annotations

__all__: list[str] = []
