"""A line in the log about timers that have expired, for those who keep timers themselves."""

from __future__ import annotations

from rallypoint import report

__all__ = ["log_debug_info_for_expired_timers"]


def log_debug_info_for_expired_timers(run_id: str, expired_timers: dict[int, list[str]]) -> None:
    """Tell which scopes have expired, by the process that set them; where none has, nothing is told."""
    if expired_timers:
        report.info(f"timers have expired in the run {run_id}: {expired_timers}")
