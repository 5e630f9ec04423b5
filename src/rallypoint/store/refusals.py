"""Lines about peers that were turned away: the first at once, then at most one a second, with a count.

Whoever can connect can cause them, so they must neither fill a log nor slow the store down.
"""

from __future__ import annotations

from rallypoint import report

__all__ = ["Refusals"]

QUIET_S = 1.0


class Refusals:
    """What is still to be said, and from when on it may be."""

    def __init__(self) -> None:
        self._untold = 0
        self._last = ""
        self._quiet_until = 0.0

    @property
    def due_at(self) -> float | None:
        """When to call `tell`; None while there is nothing to say."""
        return self._quiet_until if self._untold else None

    def add(self, peer: str, reason: str) -> None:
        self._untold += 1
        self._last = f"the store has turned away {peer}: {reason}"

    def tell(self, now: float) -> None:
        if not self._untold or now < self._quiet_until:
            return
        more = f" (and {self._untold - 1} more)" if self._untold > 1 else ""
        report.warn(self._last + more)
        self._untold = 0
        self._quiet_until = now + QUIET_S
