"""The figures that rallypoint promises, side by side with 0.1.0 and torchrun: ``make bench``, or ``python -m benchmarks --help``.

Contestants take turns, so that a machine that is slow for a minute is slow for all of them; what is printed are medians. Times
are taken on CLOCK_MONOTONIC, which all processes of a machine share, by the workers themselves wherever that is possible.
"""

from __future__ import annotations

__all__: list[str] = []
