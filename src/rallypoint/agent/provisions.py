"""What the end of a job will need, loaded while nothing happens.

Much is imported only where it is used, so that a start is quick: how workers are stopped, how a failure is described, who serves
the workers' store. A job may run for weeks, and meanwhile the package may be upgraded, moved or removed. So once the workers run
and all is quiet, the rest is fetched, as long as it is there and of the same version. Modules of the standard library are not
listed: they cost more, and stay. Neither is what answers questions from outside, such as the page of metrics.

A test compares the list with what is really imported later.
"""

from __future__ import annotations

from rallypoint.base import report

__all__ = ["load"]

MODULES = (
    "rallypoint.protocol.shutdown",
    "rallypoint.base.limits",
    "rallypoint.failures.error_files",
    "rallypoint.failures.process_failure",
    "rallypoint.processes.kernel",
    "rallypoint.base.signals",
    "rallypoint.failures.summary",
    "rallypoint.store.tcp_serving",
)


def load() -> None:
    """Import what is missing. What cannot be had any more is told of, once: it may never be needed."""
    try:
        for name in MODULES:
            __import__(name)
    except ImportError as error:
        report.warn(f"rallypoint was upgraded, moved or removed while it runs, and may not end this job well: {error}")
    else:
        report.debug("all that the end of this job may need is loaded")
