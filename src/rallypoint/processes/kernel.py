"""What only Linux offers and Python does not: to be told of a parent's death, to adopt orphans, to list one's children."""

from __future__ import annotations

import ctypes
import os

__all__ = ["adopt_orphans", "children", "die_with_parent", "set_name"]

_SIGKILL = 9  # importing signal takes longer than all else here
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends; it stays so over exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def set_name(name: str) -> None:
    """The name that ps and top show; 15 bytes of it."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def children() -> list[int]:
    """Our children, those that came to us included, as the kernel lists them."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as listing:
            return [int(pid) for pid in listing.read().split()]
    except FileNotFoundError:  # a kernel without that list
        return _children_by_scan()


def _children_by_scan() -> list[int]:
    me = os.getpid()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stat:
                    parent = int(stat.read().rpartition(b")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == me:
                found.append(int(name))
    return found
