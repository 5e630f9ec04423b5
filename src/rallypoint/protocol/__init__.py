"""The job, as pure functions of (state, observation, now): everything here runs under the simulator."""

from __future__ import annotations

__all__: list[str] = []
