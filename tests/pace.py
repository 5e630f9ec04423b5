"""How much a promise in milliseconds may be missed by: more where the machine is busy with other things, as measured then."""

from __future__ import annotations

import os
import subprocess
import sys
import time

__all__ = ["is_kept", "is_under"]

LOADED_S = 2.0  # where two cores run the tests of others besides
START_AT_REST_S = 0.05  # of an interpreter, on two slow cores
SAMPLES = 4


def is_kept(took_s: float, promised_s: float) -> bool:
    """Whether the promise was kept, for a machine as busy as this one is now."""
    return took_s <= promised_s + LOADED_S or took_s <= promised_s + LOADED_S * _slowness()


def is_under(took_s: float, most_s: float) -> bool:
    """Whether it took no longer than that at rest, or so much longer as everything takes now."""
    return took_s < most_s or took_s < most_s * _slowness()


def _slowness() -> float:
    """How many times longer than at rest something takes that is known; or took, if the machine was busier until a moment ago."""
    waited = os.getloadavg()[0] / (os.cpu_count() or 1)  # over a minute: how many wanted each core
    began_at = time.monotonic()
    for _ in range(SAMPLES):
        subprocess.run([sys.executable, "-S", "-c", "import json, socket"], check=True)
    return max(1.0, waited, (time.monotonic() - began_at) / SAMPLES / START_AT_REST_S)
