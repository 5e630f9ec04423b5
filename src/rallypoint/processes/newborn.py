"""What a new process does on its way to being a worker, whoever has forked it: the warden, or the keeper of warm workers."""

from __future__ import annotations

import errno
import fcntl
import os

from rallypoint.processes.kernel import die_with_parent

TYPE_CHECKING = False  # to import typing would take longer than all else here
if TYPE_CHECKING:
    from typing import Any

__all__ = ["NOT_STARTED", "bind", "leave_home", "place_files"]

NOT_STARTED = 127  # the exit code of a process that did not become its worker


def leave_home(parent: int) -> None:
    """Into a session of its own, and to be killed by the kernel if the parent dies; it may have done so already."""
    os.setsid()
    die_with_parent()
    if os.getppid() != parent:
        os._exit(NOT_STARTED)


def place_files(request: dict[str, Any], fds: list[int], error_fd: int) -> tuple[int, set[int]]:
    """Put its files in place; where `error_fd` is then, and the numbers of all that is its own."""
    places = [(fds[position], target) for position, target in request["fds"]]
    error_fd = _move_above(error_fd, places)
    _place_fds(places)
    return error_fd, {error_fd, *(target for _, target in places)}


def bind(request: dict[str, Any]) -> None:
    """Keep the new process on its CPUs, if it has any, and with it all threads and processes that it will start."""
    if not request["cpus"]:
        return
    try:
        _set_affinity(request["cpus"])
    except OSError as error:
        if not request["may_run_unbound"]:
            raise
        os.write(2, f"rallyrun: worker {request['local_rank']} runs without being bound: {error}\n".encode())


def _set_affinity(cpus: tuple[int, ...]) -> None:
    """All of them or an error: of CPUs that are gone the kernel says nothing as long as one is left."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
        missing = set(cpus) - os.sched_getaffinity(0)
    except OSError:
        missing = set(cpus)
    if missing:
        os.sched_setaffinity(0, before)
        names, gone = (",".join(map(str, sorted(numbers))) for numbers in (cpus, missing))
        raise OSError(errno.EINVAL, f"it cannot be bound to CPUs {names}: {gone} went offline, or may not be used any more")


def _place_fds(pairs: list[tuple[int, int]]) -> None:
    """Put each file descriptor at its number in the worker, whatever numbers they have now."""
    for fd, target in [(_copy_above(fd, pairs), target) for fd, target in pairs]:
        os.dup2(fd, target)
        os.close(fd)


def _copy_above(fd: int, pairs: list[tuple[int, int]]) -> int:
    """A copy under a number that is nobody's target."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 1 + max((target for _, target in pairs), default=2))


def _move_above(fd: int, pairs: list[tuple[int, int]]) -> int:
    copy = _copy_above(fd, pairs)
    os.close(fd)
    return copy
