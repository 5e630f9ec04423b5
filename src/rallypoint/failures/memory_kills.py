"""Was it the out-of-memory killer? The kernel sends a plain SIGKILL, so nobody tells the parent; but it counts and logs.

Counters are compared with those taken when the workers started: per memory cgroup (``oom_kill``), and for the whole host in
/proc/vmstat. The kernel raises them before it sends the signal, so once a worker's end is known they are up to date. The kernel's
log, where it may be read, names the very process, so it is asked first; but only if a counter rose, because pids are reused.

Nothing here raises: where a file is missing or forbidden, less is known. `snapshot` stands on the way to the first worker, so it
uses bare system calls and remembers raw numbers; words are found only after a failure.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from rallypoint.base.records import Value
from rallypoint.base.text import many

TYPE_CHECKING = False
if TYPE_CHECKING:
    import re

__all__ = ["MemoryKills", "read_kernel_log"]

_READ_BYTES_MAX = 1 << 20
_LOG_RECORDS_MAX = 20_000
_LOG_READ_S_MAX = 1.0
_SYSLOG_READ_ALL = 3
_UNLIMITED_BYTES = 1 << 60  # version 1 says "no limit" by a number about as large as the address space

_HOST = "/proc/vmstat"
# The kernel's log runs on its own clock, which drifts from ours by less than this much of the time since boot.
_LOG_CLOCK_DRIFT = 0.001
_LOG_CLOCK_SLACK_S = 5.0


class _Cgroup(Value):
    """A memory cgroup: the folder with its files, its name, and which version's files these are."""

    folder: str
    name: str
    version: int

    @property
    def counter_file(self) -> str:
        return self.folder + ("/memory.events" if self.version == 2 else "/memory.oom_control")

    @property
    def limit_file(self) -> str:
        return self.folder + ("/memory.max" if self.version == 2 else "/memory.limit_in_bytes")


class MemoryKills:
    """What the kernel has to say about workers that were killed since the last `snapshot`.

    `root` and `kernel_log` are for tests: another root folder than /, and another reader of (seconds since boot, line).
    """

    def __init__(self, root: str = "", kernel_log: Callable[[], list[tuple[float, str]]] | None = None) -> None:
        self._root = root
        self._kernel_log = kernel_log or read_kernel_log
        self._cgroups: list[_Cgroup] = []
        self._counters: dict[str, int] = {}
        self._taken_at_s: float | None = None  # monotonic

    def snapshot(self) -> None:
        """Remember the counters as they are now: later kills are those of the workers that start next."""
        self._cgroups = _memory_cgroups(self._root)
        self._counters = self._read_counters()
        self._taken_at_s = time.monotonic()

    def explain(self, pid: int) -> str:
        """Why `pid`, which SIGKILL has ended, was short of memory, as a clause without a full stop; "" if it was not."""
        if self._taken_at_s is None:
            return ""
        now = self._read_counters()
        rises = {file: now[file] - before for file, before in self._counters.items() if now.get(file, 0) > before}
        if not rises:
            return ""
        return self._from_log(pid) or self._from_cgroups(rises) or self._from_host(rises)

    def _read_counters(self) -> dict[str, int]:
        files = [self._root + _HOST, *(cgroup.counter_file for cgroup in self._cgroups)]
        found = {file: _field(_read(file), b"oom_kill") for file in files}
        return {file: count for file, count in found.items() if count is not None}

    def _from_log(self, pid: int) -> str:
        since = (self._taken_at_s or 0.0) * (1 - _LOG_CLOCK_DRIFT) - _LOG_CLOCK_SLACK_S
        lines = [line for logged_at_s, line in self._kernel_log() if logged_at_s >= since]
        killed = _last_match(rf"Killed process {pid} \((.*?)\)(?:.*?anon-rss:(\d+)kB)?", lines)
        chosen = _last_match(rf"oom-kill:constraint=(\w+),.*?(?:oom_memcg=(.*?),task_memcg=.*?)?,task=(.*?),pid={pid},", lines)
        if not killed and not chosen:
            return ""
        command = killed[1] if killed else chosen[3] if chosen else ""
        size = f", {_gib(int(killed[2]) * 1024)} resident" if killed and killed[2] else ""
        return f"the out-of-memory killer ended pid {pid} ({command}{size}): {self._who_was_short(killed, chosen)}"

    def _who_was_short(self, killed: re.Match[str] | None, chosen: re.Match[str] | None) -> str:
        if chosen and chosen[2]:
            limits = [_limit_text(cgroup) for cgroup in self._cgroups if cgroup.name == chosen[2]]
            return f"the memory cgroup {chosen[2]} passed its limit{limits[0] if limits else ''}"
        if killed and "Memory cgroup out of memory" in killed.string:
            return "its memory cgroup passed its limit"
        return "the host ran out of memory" if chosen and chosen[1] == "CONSTRAINT_NONE" else "memory ran out"

    def _from_cgroups(self, rises: dict[str, int]) -> str:
        """The counter of a cgroup counts its members' deaths, whichever limit was passed: its own, or one above it."""
        risen = next((cgroup for cgroup in self._cgroups if cgroup.counter_file in rises), None)
        if risen is None:
            return ""
        count = many(rises[risen.counter_file], "process", "processes")
        limited = [cgroup for cgroup in self._cgroups if cgroup.version == risen.version and _limit_bytes(cgroup)]
        if not limited:
            return f"the kernel killed {count} of cgroup {risen.name} because the host ran out of memory"
        tightest = min(limited, key=lambda cgroup: _limit_bytes(cgroup) or 0)
        return f"the memory cgroup {tightest.name} killed {count} for passing its limit{_limit_text(tightest)}"

    def _from_host(self, rises: dict[str, int]) -> str:
        """A guess, for want of better: where our own cgroup is counted and did not rise, the dead were somebody else's."""
        if len(self._counters) > 1 or self._root + _HOST not in rises:
            return ""
        count = many(rises[self._root + _HOST], "process", "processes")
        return f"probably out of memory: meanwhile the kernel killed {count} on this host because memory ran out"


def read_kernel_log() -> list[tuple[float, str]]:
    """The kernel's log, oldest first, as (seconds since boot, line); empty where this user may not read it."""
    return _read_kmsg("/dev/kmsg") or _read_syslog()


def _read_kmsg(path: str) -> list[tuple[float, str]]:
    """One record for each read, without ever waiting; records may be overwritten while they are being read."""
    records: list[tuple[float, str]] = []
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return records
    give_up_at_s = time.monotonic() + _LOG_READ_S_MAX
    try:
        while len(records) < _LOG_RECORDS_MAX and time.monotonic() < give_up_at_s:
            try:
                record = os.read(fd, 8192).decode(errors="replace")
            except BrokenPipeError:
                continue
            except OSError:
                break
            head, _, line = record.partition(";")
            fields = head.split(",")
            if len(fields) < 3 or not fields[2].isdigit():
                break
            records.append((int(fields[2]) / 1e6, line.partition("\n")[0]))
    finally:
        os.close(fd)
    return records


def _read_syslog() -> list[tuple[float, str]]:
    """What the dmesg command reads, without starting it: some hosts allow this but not /dev/kmsg."""
    import ctypes

    klogctl = getattr(ctypes.CDLL(None), "klogctl", None)
    if klogctl is None:
        return []
    buffer = ctypes.create_string_buffer(_READ_BYTES_MAX)
    count = klogctl(_SYSLOG_READ_ALL, buffer, len(buffer))
    text = buffer.raw[: max(count, 0)].decode(errors="replace")
    import re

    return [(float(when), line) for when, line in re.findall(r"^<\d+>\[ *(\d+\.\d+)\](?:\[.*?\])? (.*)$", text, re.MULTILINE)]


def _memory_cgroups(root: str) -> list[_Cgroup]:
    """This process's memory cgroup and those above it, as far as they are mounted; innermost first."""
    paths = _own_paths(_read(root + "/proc/self/cgroup").decode(errors="surrogateescape"))
    for line in _read(root + "/proc/self/mountinfo").decode(errors="surrogateescape").splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.partition(" ")
        version = 2 if kind == "cgroup2" else 1
        is_memory = kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(" ")[-1].split(","))
        if is_memory and version in paths and len(columns := fields.split(" ")) > 4:
            cgroups = _ancestors(root + _unescaped(columns[4]), _unescaped(columns[3]), paths[version], version)
            # Where both versions are mounted, only one of them has the memory controller.
            if any(_read(cgroup.counter_file) for cgroup in cgroups):
                return cgroups
    return []


def _own_paths(text: str) -> dict[int, str]:
    """This process's path in the memory hierarchy of either version, from lines such as ``4:memory:/a`` and ``0::/b``."""
    paths: dict[int, str] = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    return paths


def _ancestors(mount: str, mounted_path: str, own_path: str, version: int) -> list[_Cgroup]:
    """The cgroups from `own_path` up to the one that is mounted; in a container that is usually not the topmost one."""
    base = mounted_path.rstrip("/")
    inside = own_path[len(base) :].strip("/") if own_path == base or own_path.startswith(base + "/") else ""
    parts = inside.split("/") if inside else []
    names = ["/".join(parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [_Cgroup(f"{mount}/{name}".rstrip("/"), f"{base}/{name}".rstrip("/") or "/", version) for name in names]


def _unescaped(path: str) -> str:
    if "\\" not in path:
        return path
    import re

    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _limit_bytes(cgroup: _Cgroup) -> int | None:
    text = _read(cgroup.limit_file).strip()
    return int(text) if text.isdigit() and int(text) < _UNLIMITED_BYTES else None


def _limit_text(cgroup: _Cgroup) -> str:
    limit = _limit_bytes(cgroup)
    return f" of {_gib(limit)}" if limit is not None else ""


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.0f} MiB"


def _last_match(pattern: str, lines: list[str]) -> re.Match[str] | None:
    import re

    matches = (re.search(pattern, line) for line in reversed(lines))
    return next((match for match in matches if match), None)


def _field(content: bytes, name: bytes) -> int | None:
    """The number after `name` at the beginning of a line."""
    start = content.find(b"\n" + name + b" ")
    if content.startswith(name + b" "):
        start = -1
    elif start < 0:
        return None
    value = content[start + len(name) + 2 :].split(b"\n", 1)[0]
    return int(value) if value.isdigit() else None


def _read(path: str) -> bytes:
    """The content of a small file; nothing if it cannot be read. The kernel hands its own files out a page at a time."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    content = b""
    try:
        while len(content) < _READ_BYTES_MAX and (piece := os.read(fd, 65536)):
            content += piece
    except OSError:
        return b""
    finally:
        os.close(fd)
    return content
