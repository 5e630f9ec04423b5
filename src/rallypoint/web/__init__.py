"""The web page of a running job: what `rallypoint status` shows, in a browser, as it changes."""

from __future__ import annotations

__all__: list[str] = []
