"""Looking at this machine: what each check reads, and the commands and plug-ins that others bring.

They run beside each other, each in a thread of its own, because any of them may hang: a dead file server, a driver that does not
answer. Whoever asks waits for none of them for longer than `CHECK_TIMEOUT_S`.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from rallypoint.base import defaults, environment
from rallypoint.preflight import rules
from rallypoint.preflight.rules import CHECK_TIMEOUT_S, Finding, Spec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["memory_left", "read_specs", "run_all"]

_LATE_S = 2.0  # beyond its own timeout, until a check is given up as a whole
_OUTPUT_BYTES_MAX = 64 * 1024
_UNSYNCHRONISED = 0x40  # of the kernel's clock: STA_UNSYNC


def read_specs(pieces: Iterable[str]) -> tuple[Spec, ...]:
    """The checks that a flag or a field names; ValueError says which is none."""
    pieces = tuple(pieces)
    names = [piece.partition("=")[0] for piece in pieces]
    is_plain = all(name in rules.CHECKS or "/" in name or " " in name for name in names)
    return rules.parse_checks(pieces, () if is_plain else sorted(_plug_ins()))


def _plug_ins() -> dict[str, Any]:
    from importlib.metadata import entry_points

    return {one.name: one for one in entry_points(group=defaults.ENTRY_POINTS_PREFLIGHT)}


def run_all(specs: Sequence[Spec], timeout_s: float = CHECK_TIMEOUT_S + _LATE_S) -> list[Finding]:
    """What each of them finds, in their order."""
    found: dict[int, Finding] = {}

    def run(at: int, spec: Spec) -> None:
        found[at] = run_one(spec)

    threads = [threading.Thread(target=run, args=one, name="rallypoint-check", daemon=True) for one in enumerate(specs)]
    for thread in threads:
        thread.start()
    ends_at = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, ends_at - time.monotonic()))
    late = f"no answer within {timeout_s:g} s"
    return [found.get(at) or Finding(spec.text.split()[0], "bad", late) for at, spec in enumerate(specs)]


def run_one(spec: Spec) -> Finding:
    try:
        return _RUN[spec.kind](spec)
    except Exception as error:  # a check is anybody's code, and reads files of any kernel: what it raises is what it found
        return Finding(spec.text.split()[0], "bad", f"{type(error).__name__}: {error}"[: rules.REASON_CHARS_MAX])


# --- ours ------------------------------------------------------------------------------------------------------------------


def _built_in(spec: Spec) -> Finding:
    if rules.is_of_network(spec):
        advice = "run `rallypoint doctor --listen PORT` on another machine, and name it here with --endpoint HOST:PORT"
        return Finding(spec.text, "unknown", "it takes other nodes of a job", advice)
    least = rules.least_of(spec)
    return _look_at_disks(least, spec.folders) if spec.text == "disk" else _LOOK[spec.text](least)


def _look_at_memory(least: int) -> Finding:
    return rules.judge_memory(memory_left(), least)


def memory_left() -> int | None:
    """How much this machine, or the container, may still use; None where neither tells."""
    left = [one for one in (_from_meminfo(), _left_in_cgroup()) if one is not None]
    return min(left, default=None)


def _from_meminfo() -> int | None:
    for line in (_read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left_in_cgroup() -> int | None:
    """What the container may still use, by version 2 or 1 of its files; the file cache can be taken back."""
    for limit, used, stat, cache in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "inactive_file "),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes",
            "/sys/fs/cgroup/memory/memory.stat", "total_inactive_file ",
        ),
    ):  # fmt: skip
        most, now = _read(limit), _read(used)
        if most and now and most.strip().isdecimal():
            lines = (_read(stat) or "").splitlines()
            cached = next((int(line.split()[1]) for line in lines if line.startswith(cache)), 0)
            return max(0, int(most) - int(now) + cached)
    return None


def _look_at_disks(least: int, more: Sequence[str] = ()) -> Finding:
    folders = dict.fromkeys((environment.temporary_dir(), os.getcwd(), *map(_made_already, more)))
    return rules.judge_disks({folder: _free(folder) for folder in folders}, least)


def _made_already(folder: str) -> str:
    """The folder, or the one in which it will be made."""
    folder = os.path.abspath(folder)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return folder


def _free(folder: str) -> int | str:
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"rallypoint")
            file.flush()
        space = os.statvfs(folder)
    except OSError as error:
        return error.strerror or str(error)
    return space.f_bavail * space.f_frsize


def _look_at_shm(least: int) -> Finding:
    try:
        space = os.statvfs("/dev/shm")
    except OSError:
        return rules.judge_shm(None, 0, least)
    return rules.judge_shm(space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize, least)


def _look_at_files(least: int) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return rules.judge_files(soft, hard, least)


def _look_at_clock(_: int) -> Finding:
    return rules.judge_clock(_is_synchronised())


def _is_synchronised() -> bool | None:
    """By what a daemon such as chronyd has told the kernel, which anybody may read."""
    import ctypes

    class Timex(ctypes.Structure):
        _fields_ = (
            ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long), ("maxerror", ctypes.c_long),
            ("esterror", ctypes.c_long), ("status", ctypes.c_int), ("rest", ctypes.c_char * 256),
        )  # fmt: skip

    timex = Timex()
    answer = ctypes.CDLL(None).adjtimex(ctypes.byref(timex))
    return None if answer < 0 else not timex.status & _UNSYNCHRONISED


def _look_at_gpus(least: int) -> Finding:
    from rallypoint.failures.memory_kills import read_kernel_log

    with os.scandir("/dev") as entries:
        devices = sum(entry.name.startswith("nvidia") and entry.name[6:].isdecimal() for entry in entries)
    xids = rules.parse_xids(read_kernel_log(), time.clock_gettime(time.CLOCK_BOOTTIME) - rules.RECENT_S)
    smi, fields = _ask_smi()
    return rules.judge_gpus(devices, smi, xids, least, fields)


def _ask_smi() -> tuple[tuple[int | None, str] | None, str]:
    """What it says, if there is one, and to which question: older ones do not know all that we ask."""
    import shutil

    path, fields = shutil.which("nvidia-smi"), rules.SMI_FIELDS
    if path is None:
        return None, fields
    while True:
        code, text = _output_of([path, f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
        fewer = rules.without_rejected(fields, text) if code else ""
        if not fewer:
            return (code, text), fields
        fields = fewer


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return None


# --- what others bring -----------------------------------------------------------------------------------------------------


def _command(spec: Spec) -> Finding:
    import shlex

    return rules.judge_command(spec.text, *_output_of(shlex.split(spec.text)))


def _output_of(command: list[str]) -> tuple[int | None, str]:
    """The exit code, and the end of what it printed; nothing of it is left when we return, are told to stop, or die."""
    import subprocess

    from rallypoint.preflight import leash

    with subprocess.Popen(
        [sys.executable, "-I", "-S", leash.__file__, *command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip
        line, late = process.stdin, threading.Event()
        assert line is not None
        assert process.stdout is not None

        def let_go() -> None:
            late.set()
            line.close()

        timer = threading.Timer(CHECK_TIMEOUT_S, let_go)
        timer.start()
        output = b""
        while part := os.read(process.stdout.fileno(), _OUTPUT_BYTES_MAX):
            output = (output + part)[-_OUTPUT_BYTES_MAX:]
        code = process.wait()
        timer.cancel()
    return None if late.is_set() else code, output.decode(errors="replace")


def _plug_in(spec: Spec) -> Finding:
    """A function without arguments: what it gives, or raises, is why this machine is unfit; nothing: it is fit."""
    why = _plug_ins()[spec.text].load()()
    return Finding(spec.text, "bad", str(why)[: rules.REASON_CHARS_MAX]) if why else Finding(spec.text, "ok", "fit")


_LOOK: dict[str, Callable[[int], Finding]] = {
    "memory": _look_at_memory,
    "shm": _look_at_shm,
    "files": _look_at_files,
    "clock": _look_at_clock,
    "gpu": _look_at_gpus,
}
_RUN: dict[rules.Kind, Callable[[Spec], Finding]] = {"built_in": _built_in, "command": _command, "plug_in": _plug_in}
