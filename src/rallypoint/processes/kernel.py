"""What only Linux offers and Python does not: to be told of a parent's death, to adopt orphans, to list children and states."""

from __future__ import annotations

import os
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "WARDEN_NAME", "adopt_orphans", "children", "die_with_parent", "has_children", "kill_children", "kill_if_allowed", "parents",
    "set_name", "stat_fields",
]  # fmt: skip

WARDEN_NAME = "rally-warden"  # as ps and top show it
_SIGKILL = 9  # importing signal takes longer than all else here
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def _find_prctl() -> Callable[..., int]:
    """Through what ctypes is made of: ctypes itself takes 4 ms to import, in the launcher and in its warden."""
    try:
        import _ctypes

        call, address = _ctypes.call_function, _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
    except (ImportError, AttributeError):  # a Python that has made it of something else
        import ctypes

        return ctypes.CDLL(None).prctl
    return lambda *arguments: call(address, arguments)


_prctl = _find_prctl()


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends; it stays so over exec."""
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def set_name(name: str) -> None:
    """The name that ps and top show; 15 bytes of it."""
    _prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def kill_children(timeout_s: float) -> None:
    """SIGKILL to every child, then to those that come to us in their place, until there are none."""
    give_up_at = time.monotonic() + timeout_s
    while (left := children()) and time.monotonic() < give_up_at:
        for pid in left:
            kill_if_allowed(pid, _SIGKILL)
        _wait_for_one(left, give_up_at)
        for pid in left:
            _reap(pid)


def _wait_for_one(pids: list[int], until: float) -> None:
    """Wait for the end of any of these children. Those that it leaves behind are ours by then."""
    poll = select.poll()
    pidfds = [fd for fd in map(_pidfd, pids) if fd is not None]
    for fd in pidfds:
        poll.register(fd, select.POLLIN)
    if len(pidfds) == len(pids):
        poll.poll(max(0.0, until - time.monotonic()) * 1000)
    for fd in pidfds:
        os.close(fd)


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:  # as process 1 we have a thread that reaps whatever ends
        return None


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # as above
        pass


def kill_if_allowed(pid: int, number: int) -> None:
    """Signal a child, or with a negative id a group; one that has become another user can only be waited for."""
    try:
        os.kill(pid, number)
    except (PermissionError, ProcessLookupError):
        pass


def has_children() -> bool:
    """Whether there is anybody below us, in whatever state; those who have ended are still there until they are reaped."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def children() -> list[int]:
    """Our children, those that came to us included, as the kernel lists them."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as listing:
            return [int(pid) for pid in listing.read().split()]
    except FileNotFoundError:  # a kernel without that list
        me = os.getpid()
        return [pid for pid, parent in parents().items() if parent == me]


def parents() -> dict[int, int]:
    """The parent of each process that there is."""
    found = {int(name): stat_fields(name) for name in os.listdir("/proc") if name.isdigit()}
    return {pid: int(fields[1]) for pid, fields in found.items() if fields}


def stat_fields(process: int | str) -> list[bytes]:
    """The fields of proc(5) from the state on, which is the third; none for a process that is gone, or not for us to see."""
    try:
        with open(f"/proc/{process}/stat", "rb", buffering=0) as stat:
            return stat.read().rpartition(b")")[2].split()
    except OSError:
        return []
