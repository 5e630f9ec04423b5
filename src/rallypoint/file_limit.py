"""How many files this process may have open: more for the host of a large job's store, but not for its workers.

Programs that use ``select`` break on descriptors of 1,024 and more, which is why the usual limit is what it is. So a process
that we start gets the limit back that we found.
"""

from __future__ import annotations

import resource

from rallypoint import report

__all__ = ["as_many_as_allowed", "make_room", "restore_for"]

_found: tuple[int, int] | None = None


def make_room(files: int) -> None:
    """Let this process open so many files, or as many as it may."""
    allowed = as_many_as_allowed(files)
    if allowed < files:
        report.warn(f"the store of this job may need {files} open files, and {allowed} is the limit here; see ulimit -Hn")


def as_many_as_allowed(files: int) -> int:
    """Raise the limit to `files`, or as far as it may be; how many it is now, and `files` where there are more."""
    global _found
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= files:
        return files
    wanted = files if hard == resource.RLIM_INFINITY else min(files, hard)
    if wanted > soft:
        _found = _found or (soft, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def restore_for(pid: int) -> None:
    """Give a process of ours, and all that it will start, the limit that we found."""
    if _found is not None:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, _found)
