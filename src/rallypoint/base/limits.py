"""What a machine has run out of, said in one sentence: processes, files or memory. It is nobody's bug, and no traceback helps.

The kernel's own words for it ("Resource temporarily unavailable") name neither the limit nor where it is set.

How many files this process may have open: as many as it and its job need, and never all of them to strangers.

The usual soft limit is 1,024, because programs that use ``select`` break on descriptors beyond it. The launcher does not, so it
raises its own limit as far as it may; a process that it starts gets the limit back that was found. Connections from the network
are put at numbers above that, where there are such, so that files for workers keep numbers that a worker can have too. And the
last numbers are *reserved*: strangers, who have not shown that they belong to the job, may hold a few of them, so that everybody
can come in, but not those that it takes to stop, start and tell of workers: all but the latest few are sent away then.

The kernel gives the lowest number that is free, so the number of a new descriptor says how many there are: nothing is counted.
"""

from __future__ import annotations

import errno
import os

from rallypoint.base import report
from rallypoint.base.text import many
from rallypoint.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

__all__ = [
    "STRANGERS_IN_RESERVE",
    "as_many_as_allowed",
    "exhausted",
    "explain",
    "is_reserved",
    "limit_for_workers",
    "make_room",
    "reserve",
    "restore_for",
    "set_aside",
]


# --- file limit ------------------------------------------------------------------------------------------------------------


MOST_FILES = 65_536
OWN_FILES = 64  # of an agent, its store and its senses, without connections and workers
STRANGERS_IN_RESERVE = 16  # at each door

_found: tuple[int, int] | None = None  # the limits before they were raised
_reserved = OWN_FILES


def reserve(workers: int, least_files: int, files_per_worker: int) -> None:
    """Let this process open what so many workers take, and keep that for them; UsageError if `least_files` are too many."""
    global _reserved
    files = OWN_FILES + 3 * STRANGERS_IN_RESERVE + files_per_worker * workers
    _reserved = max(_reserved, files)
    if _limit() >= 2 * files:  # nothing is loaded for what is so nearly always
        return
    allowed = as_many_as_allowed(max(2 * files, MOST_FILES))
    if allowed < least_files:
        raise UsageError(
            f"{many(workers, 'worker needs', 'workers need')} at least {least_files} open files, and {allowed} are"
            f" allowed here: raise the limit (ulimit -n {least_files}; LimitNOFILE= of a service) or start fewer workers"
        )


def make_room(connections: int) -> None:
    """Let this process serve so many connections, or as many as it may."""
    needed = _reserved + connections
    allowed = as_many_as_allowed(max(needed, MOST_FILES))
    if allowed < needed:
        report.warn(f"the store of this job may need {needed} open files, and {allowed} is the limit here; see ulimit -Hn")


def as_many_as_allowed(files: int) -> int:
    """Raise the limit to `files`, or as far as it may be; how many it is now, and `files` where there are more."""
    import resource

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
        import resource

        resource.prlimit(pid, resource.RLIMIT_NOFILE, _found)


def limit_for_workers() -> int:
    """How many files a process of ours may have open."""
    return _limit() if _found is None else _found[0]


def set_aside(sock: socket.socket) -> socket.socket:
    """A connection, moved to a number that no worker could have; as it is where the limit was not raised, or there is no room."""
    if _found is None or sock.fileno() >= _found[0]:
        return sock
    import fcntl

    try:
        above = fcntl.fcntl(sock, fcntl.F_DUPFD_CLOEXEC, _found[0])
    except OSError:
        return sock
    moved = type(sock)(sock.family, sock.type, sock.proto, fileno=above)
    moved.settimeout(sock.gettimeout())
    sock.close()
    return moved


def is_reserved(fd: int) -> bool:
    """Whether this is one of the last numbers, which are not for strangers."""
    limit = _limit()
    return fd >= limit - min(_reserved, limit // 2)


def _limit() -> int:
    return os.sysconf("SC_OPEN_MAX") % (1 << 63)  # -1 where there is none


# --- host limits -----------------------------------------------------------------------------------------------------------


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
