"""What the kernel shows of a worker's processes: their states, their processor time, what they read and wrote.

The kernel's letter for what a process does; D is the one that no signal ends.
"""

from __future__ import annotations

import os

from rallypoint.base.records import Value
from rallypoint.processes.inactivity import Sample

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "Family",
    "ProcessSight",
    "families_of",
    "is_uninterruptible_state",
    "look_at",
    "read_file",
    "read_proc_state",
    "threads_of",
]


# --- activity --------------------------------------------------------------------------------------------------------------


TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
MAX_MEMBERS = 4096
MAX_THREADS = 1024
READ_BYTES = 64 * 1024


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
    line = read_file(f"/proc/{pid}{thread}/stat")
    if line is None:
        return None
    fields = line.rpartition(b")")[2].split()
    if len(fields) < 20:
        return None
    return ProcessSight(fields[0].decode(), int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND, int(fields[19]))


def threads_of(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")[:MAX_THREADS]
    except OSError:
        return []


def families_of(pids: Iterable[int]) -> dict[int, list[int]]:
    """Each of these processes with all that descend from it, parents first."""
    lists_children = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
    children_of = _listed_children if lists_children else _scanned_children()
    families = {pid: [pid] for pid in pids}
    for found in families.values():
        for one in found:  # it grows meanwhile
            if len(found) < MAX_MEMBERS:
                found.extend(children_of(one))
    return families


def _listed_children(pid: int) -> list[int]:
    lists = [read_file(f"/proc/{pid}/task/{tid}/children") or b"" for tid in threads_of(pid)]
    return [int(child) for one in lists for child in one.split()]


def _scanned_children() -> Callable[[int], list[int]]:
    """For kernels that keep no list of children: everybody's parent, read once."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (sight := look_at(int(name))) is not None and not sight.is_gone:
            children.setdefault(sight.parent, []).append(int(name))
    return lambda pid: children.get(pid, [])


class Family:
    """A worker's process and its descendants, looked at in passing or thoroughly."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._members = [pid]

    def glance(self, now: float) -> Sample:
        """The processes that are known, each by its main thread: two files each."""
        sights = {pid: sight for pid in self._members if (sight := look_at(pid)) is not None and not sight.is_gone}
        io_bytes = [_io_bytes(pid) for pid in sights]
        return Sample(
            at=now,
            members=frozenset((pid, sight.started_at) for pid, sight in sights.items()),
            cpu_s=sum(sight.cpu_s for sight in sights.values()),
            io_bytes=None if None in io_bytes else sum(filter(None, io_bytes)),
            states=frozenset(sight.state for sight in sights.values()),
        )

    def look(self, now: float) -> Sample:
        """All descendants that there are by now, and each thread of them."""
        self._members = families_of([self.pid])[self.pid]
        states, ready = set(), set()
        for pid in self._members:
            for tid in threads_of(pid):
                if (sight := look_at(pid, f"/task/{tid}")) is not None:
                    states.add(sight.state)
                    if sight.state == "R":
                        ready.add(int(tid))
        seen = self.glance(now)
        return seen.replace(states=seen.states | states, ready=frozenset(ready))


def _io_bytes(pid: int) -> int | None:
    """What a process has read and written, pipes and terminals included; None if it is not for us to see."""
    text = read_file(f"/proc/{pid}/io")
    if text is None:
        return None
    numbers = dict(line.split(b": ") for line in text.splitlines() if b": " in line)
    return sum(int(numbers.get(name, b"0")) for name in (b"rchar", b"wchar", b"read_bytes", b"write_bytes"))


# --- process state ---------------------------------------------------------------------------------------------------------


_UNINTERRUPTIBLE = "D"


def read_proc_state(pid: int) -> str | None:
    """The letter, as in ``ps``; None where there is no such process."""
    sight = look_at(pid)
    return None if sight is None else sight.state


def is_uninterruptible_state(state: str | None) -> bool:
    """Whether the letter, of which `ps` may show more, is that of a process that waits in the kernel for a device."""
    return state is not None and state.startswith(_UNINTERRUPTIBLE)
