"""A hold on workers that does not need their warden: should that be stopped or stuck, they can still be killed, from any thread.

A worker is a child of the warden, which may reap it at any moment, so its process id alone is worth nothing to anybody else. A
pidfd is: it stands for this one process. It is opened when the worker is reported to run; that it is the right one shows in its
parent, which no stranger has.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time

__all__ = ["WorkerHandles", "is_stopped"]


class WorkerHandles:
    """The workers of one group that have not been reported to have ended, by local rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for system calls that do not wait
        self._handles: dict[int, tuple[int, int]] = {}  # pid and pidfd

    def add(self, local_rank: int, pid: int, parent: int) -> None:
        """A worker that has ended in the meantime, or for which there is no file descriptor left, is left to the warden."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return
        with self._lock:
            self._handles[local_rank] = pid, pidfd
        if _parent_of(pid) != parent:
            self.discard(local_rank)

    def discard(self, local_rank: int) -> None:
        with self._lock:
            _, pidfd = self._handles.pop(local_rank, (0, -1))
            if pidfd >= 0:
                os.close(pidfd)

    def kill(self) -> None:
        """SIGKILL to each, and to the group that it leads. It is sent when this returns."""
        with self._lock:
            for pid, pidfd in self._handles.values():
                _kill(pid, pidfd)

    def await_ends(self, timeout_s: float) -> None:
        """Until all of them have ended, or for this time."""
        give_up_at = time.monotonic() + timeout_s
        for _, pidfd in list(self._handles.values()):
            _has_ended(pidfd, max(0.0, give_up_at - time.monotonic()))

    def close(self) -> None:
        for local_rank in list(self._handles):
            self.discard(local_rank)


def _kill(pid: int, pidfd: int) -> None:
    """The group first: while its leader lives, nobody else's has its number."""
    if not _has_ended(pidfd):
        try:
            os.kill(-pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has ended; or it has become another user, and can only be waited for
        pass


def _has_ended(pidfd: int, wait_s: float = 0.0) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(wait_s * 1000))


def _parent_of(pid: int) -> int:
    return int(_stat(pid)[1])


def is_stopped(pid: int) -> bool:
    """By a signal, or by a debugger."""
    return _stat(pid)[0] in (b"T", b"t")


def _stat(pid: int) -> list[bytes]:
    """The fields of proc(5) from the state on; of a process that is gone, those of one that has no parent."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return [b"X", b"0"]
