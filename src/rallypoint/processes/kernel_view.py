"""Where the threads of a process are, as the kernel shows it to anybody who may look: no program is stopped or entered for it."""

from __future__ import annotations

import os
import time

from rallypoint.processes.activity import look_at, read_file, threads_of

__all__ = ["kernel_view", "waits_in"]

MAX_THREADS = 256
# The calls in which programs wait; all others are told by their number.
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 23: "select", 34: "pause", 35: "nanosleep", 42: "connect", 43: "accept", 45: "recvfrom",
        47: "recvmsg", 61: "wait4", 62: "kill", 74: "fsync", 128: "rt_sigtimedwait", 202: "futex", 230: "clock_nanosleep",
        232: "epoll_wait", 247: "waitid", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait", 288: "accept4",
    },
    "aarch64": {
        22: "epoll_pwait", 63: "read", 64: "write", 72: "pselect6", 73: "ppoll", 82: "fsync", 95: "waitid", 98: "futex",
        101: "nanosleep", 115: "clock_nanosleep", 137: "rt_sigtimedwait", 202: "accept", 203: "connect", 207: "recvfrom",
        212: "recvmsg", 242: "accept4", 260: "wait4",
    },
}  # fmt: skip
_STATES = {
    "R": "running", "S": "asleep", "I": "idle", "D": "waiting for a device", "T": "stopped", "t": "held by a debugger",
    "Z": "ended",
}  # fmt: skip


def kernel_view(pid: int, give_up_at: float) -> tuple[str, ...]:
    """A line for each thread, with the kernel's own stack where it may be read; the main thread is the first."""
    lines: list[str] = []
    threads = sorted(threads_of(pid), key=int)
    for tid in threads[:MAX_THREADS]:
        if time.monotonic() > give_up_at:
            break
        name = (read_file(f"/proc/{pid}/task/{tid}/comm") or b"").decode(errors="replace").strip()
        lines.append(f"thread {tid} ({name}): {waits_in(pid, tid)}")
        stack = (read_file(f"/proc/{pid}/task/{tid}/stack") or b"").decode(errors="replace")
        lines += [f"  {line.partition('] ')[2] or line}" for line in stack.splitlines()]
    told = sum(1 for line in lines if line.startswith("thread "))
    return (*lines, f"and {len(threads) - told} more threads") if told < len(threads) else tuple(lines)


def waits_in(pid: int, tid: str) -> str:
    """In which state a thread is, and in which call to the kernel."""
    sight = look_at(pid, f"/task/{tid}")
    if sight is None:
        return "ended"
    shown = [_STATES.get(sight.state, sight.state)]
    call = (read_file(f"/proc/{pid}/task/{tid}/syscall") or b"").split()
    if call and call[0].isdigit():
        number = int(call[0])
        shown.append(f"in {_CALLS.get(os.uname().machine, {}).get(number, f'call {number}')}")
    place = (read_file(f"/proc/{pid}/task/{tid}/wchan") or b"").decode(errors="replace")
    return " ".join([*shown, f"at {place}"] if place not in ("", "0") else shown)
