"""How long to wait before trying again.

Each pause is drawn from the upper half of what it may be, never the same for two: those who were refused, or cut off, together
do not come back together.
"""

from __future__ import annotations

import random

__all__ = ["Backoff", "jittered"]

_DOUBLINGS_MAX = 30


class Backoff:
    """Pauses that double with each failure in a row, up to the longest. `failures` is how many there were."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self.failures = 0

    def next_s(self) -> float:
        """One more failure: the pause after it."""
        self.failures += 1
        return jittered(min(self._longest_s, self._first_s * 2.0 ** min(self.failures - 1, _DOUBLINGS_MAX)))


def jittered(pause_s: float) -> float:
    return pause_s * random.uniform(0.5, 1.0)
