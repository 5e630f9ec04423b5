"""What the kernel shows of processes: their states, their descendants, their processor time."""

from __future__ import annotations

import os
import time

from rallypoint.base.records import Value
from rallypoint.processes import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "ProcessSight", "busy_s", "families_of", "is_uninterruptible_state", "look_at", "read_file", "read_proc_state", "runs_since",
    "threads_of",
]  # fmt: skip

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
CLOCK_STEP_S = 5.0  # by which the clock on the wall may have been set since a process began
MAX_MEMBERS = 4096
MAX_THREADS = 1024
READ_BYTES = 64 * 1024
_UNINTERRUPTIBLE = "D"  # the kernel's letter for a process that no signal ends


class ProcessSight(Value):
    """A line of /proc/PID/stat."""

    state: str
    parent: int
    cpu_s: float
    started_at: int  # in ticks since the system started: with the process id it names a process for ever

    @property
    def is_gone(self) -> bool:
        return self.state in "ZXx"


def read_file(path: str) -> bytes | None:
    """The beginning of a file of the kernel's; None if it is not there, or not for us."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(fd, READ_BYTES)
    except OSError:  # the process ended meanwhile, or the kernel refuses
        return None
    finally:
        os.close(fd)


def look_at(pid: int, thread: str = "") -> ProcessSight | None:
    """A process, or one of its threads, as it is now; None if there is none."""
    fields = kernel.stat_fields(f"{pid}{thread}")
    if len(fields) < 20:
        return None
    return ProcessSight(fields[0].decode(), int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND, int(fields[19]))


def busy_s(pid: int) -> float | None:
    """For how long the main thread of a process has had a processor, or has waited for one, so far; None: it cannot be seen."""
    told = (read_file(f"/proc/{pid}/schedstat") or b"").split()
    if len(told) == 3:
        return (int(told[0]) + int(told[1])) / 1e9
    sight = look_at(pid, f"/task/{pid}")
    return None if sight is None else sight.cpu_s


def runs_since(pid: int, began_ms: float) -> bool:
    """Whether a process of this id runs that is not younger than something it did, in milliseconds since 1970."""
    sight = look_at(pid)
    if sight is None or sight.is_gone:
        return False
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - sight.started_at / TICKS_A_SECOND
    return time.time() - age_s < began_ms / 1000 + CLOCK_STEP_S


def threads_of(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")[:MAX_THREADS]
    except OSError:
        return []


def families_of(pids: Iterable[int]) -> dict[int, list[int]]:
    """Each of these processes with all that descend from it, parents first."""
    children: dict[int, list[int]] = {}
    lists_children = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
    for pid, parent in () if lists_children else kernel.parents().items():
        children.setdefault(parent, []).append(pid)
    families = {pid: [pid] for pid in pids}
    for found in families.values():
        for one in found:  # it grows meanwhile
            if len(found) < MAX_MEMBERS:
                found.extend(_listed_children(one) if lists_children else children.get(one, []))
    return families


def _listed_children(pid: int) -> list[int]:
    lists = [read_file(f"/proc/{pid}/task/{tid}/children") or b"" for tid in threads_of(pid)]
    return [int(child) for one in lists for child in one.split()]


def read_proc_state(pid: int) -> str | None:
    """The letter, as in ``ps``; None where there is no such process."""
    sight = look_at(pid)
    return None if sight is None else sight.state


def is_uninterruptible_state(state: str | None) -> bool:
    """Whether the letter, of which `ps` may show more, is that of a process that waits in the kernel for a device."""
    return state is not None and state.startswith(_UNINTERRUPTIBLE)
