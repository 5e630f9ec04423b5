"""What makes things of this repository: the site, the recording of the demo, what is released."""

from __future__ import annotations

__all__: list[str] = []
