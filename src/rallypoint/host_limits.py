"""What a machine has run out of, said in one sentence: processes, files or memory. It is nobody's bug, and no traceback helps.

The kernel's own words for it ("Resource temporarily unavailable") name neither the limit nor where it is set.
"""

from __future__ import annotations

import errno

__all__ = ["exhausted", "explain"]

NO_THREAD = "can't start new thread"  # Python's words, which come without a number
PIDS_MAX = ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max")


def exhausted(error: BaseException) -> str | None:
    """What has run out, if that is what the error is about; None if it is about something else."""
    if isinstance(error, MemoryError):
        return explain(errno.ENOMEM)
    if isinstance(error, RuntimeError) and NO_THREAD in str(error):
        return explain(errno.EAGAIN)
    # Of all that is temporarily unavailable only processes are meant, which are told of where they are started.
    return explain(error.errno) if isinstance(error, OSError) and error.errno != errno.EAGAIN else None


def explain(number: int | None) -> str | None:
    """The same, for the kernel's number, where it was a process that could not be started."""
    match number:
        case errno.EAGAIN:
            return f"no more processes or threads may be started here ({_limits_of_processes()})"
        case errno.ENOMEM:
            return "there is no memory left on this machine, or in this container"
        case errno.EMFILE:
            return f"no more files may be opened here (ulimit -n {_soft('RLIMIT_NOFILE')}; raise it, or start fewer workers)"
        case errno.ENFILE:
            return "no more files may be opened on this machine (sysctl fs.file-max)"
    return None


def _limits_of_processes() -> str:
    limits = [f"ulimit -u {_soft('RLIMIT_NPROC')}, for all processes of this user"]
    for path in PIDS_MAX:
        try:
            with open(path) as file:
                allowed = file.read().strip()
        except OSError:
            continue
        if allowed.isdecimal():
            limits.append(f"pids.max of this container {allowed}")
    return "; ".join(limits)


def _soft(name: str) -> str:
    import resource

    soft, _ = resource.getrlimit(getattr(resource, name))
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
