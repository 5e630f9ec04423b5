"""Who has gone silent, as one observer saw it on its own clock.

A pulse that has not moved for the time to live of its lease, while this observer looked, is silent. It cannot have been seen
before its owner sent it; so the owner, which counts from when it sent its last one, always gives up before it is given up.

Time in which the observer did not look does not count beyond `LONGEST_GAP_S`: it was stopped, or the cell could not be read, and
then its owner could not write it either.
"""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.core.cell_document import Pulse
from rallypoint.records import Value

__all__ = ["LONGEST_GAP_S", "Sightings"]

LONGEST_GAP_S = 2.0


class _Sighting(Value):
    count: int
    silent_s: float
    ttl_s: float


class Sightings:
    """The pulses of the others, and for how long each has not moved."""

    def __init__(self) -> None:
        self._seen: dict[int, _Sighting] = {}
        self._looked_at: float | None = None

    def look(self, pulses: Mapping[int, Pulse], now: float) -> list[tuple[int, int]]:
        """These are the pulses now: the leases that have been silent for too long, each with the count that it is stuck at."""
        passed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, LONGEST_GAP_S)
        self._looked_at = now
        self._seen = {number: self._sighting(number, pulse, passed_s) for number, pulse in pulses.items()}
        return [(number, one.count) for number, one in self._seen.items() if one.silent_s >= one.ttl_s]

    def look_at(self) -> float | None:
        """When the next one can be silent for too long; None while there is none."""
        if self._looked_at is None or not self._seen:
            return None
        return self._looked_at + max(0.0, min(one.ttl_s - one.silent_s for one in self._seen.values()))

    def _sighting(self, number: int, pulse: Pulse, passed_s: float) -> _Sighting:
        before = self._seen.get(number)
        silent_s = before.silent_s + passed_s if before is not None and before.count == pulse.count else 0.0
        return _Sighting(pulse.count, silent_s, pulse.ttl_s)
