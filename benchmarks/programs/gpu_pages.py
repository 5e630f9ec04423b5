"""How long the kernel takes to clear away a killed process, by what it held: a GPU's context, memory there, slots of snapshots.

``gpu_pages.py GIB``. The slots are two, of that size each, in small pages and in large ones; mapped, or known to the driver too.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rallypoint.checkpoint.devices import Registered
from rallypoint.checkpoint.pages import map_file
from rallypoint.checkpoint.rooms import make_room

CASES = [
    ("context", "", ""),
    ("context, memory of the device", "", ""),
    ("mapped", "small", ""),
    ("known to the driver", "small", "known"),
    ("mapped", "large", ""),
    ("known to the driver", "large", "known"),
]
BYTES = int(float(sys.argv[1]) * (1 << 30))


def main() -> None:
    for name in ("/proc/version", "/sys/kernel/mm/transparent_hugepage/shmem_enabled"):
        print(f"{name}: {Path(name).read_text().strip()}", flush=True)
    for name, pages, known in CASES:
        _measure(name, pages, bool(known))


def _measure(name: str, pages: str, is_known: bool) -> None:
    fds = [os.memfd_create("slot") for _ in range(2)] if pages else []
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            _hold(fds, make_room if pages == "large" else _make_small_room, "memory" in name or bool(pages), is_known, writing)
        finally:
            os._exit(1)
    os.close(writing)
    told = os.read(reading, 1000).decode() or "it ended"
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    took_ms = (time.monotonic() - killed_at) * 1000
    print(f"{name}{f', {pages} pages' if pages else ''}: cleared away in {took_ms:.0f} ms ({told})", flush=True)
    for fd in (*fds, reading):
        os.close(fd)


def _make_small_room(fd: int, size: int) -> None:
    os.ftruncate(fd, size)
    os.posix_fallocate(fd, 0, size)


def _hold(fds: list[int], make: Callable[[int, int], None], has_memory: bool, is_known: bool, writing: int) -> None:
    told: list[str] = []
    _timed(told, "context", partial(torch.ones, 64, device="cuda"))
    held: list[object] = []
    if has_memory:
        held.append(torch.ones(BYTES // 4, device="cuda"))
    for number, fd in enumerate(fds):
        _timed(told, f"room {number}", make, fd, BYTES)
        memory = _timed(told, "mapped", map_file, fd, BYTES, mmap.MAP_POPULATE)
        held.append(memory)
        if is_known:
            held.append(_timed(told, "known", Registered, torch, memory))
            kept = torch.frombuffer(memory, dtype=torch.float32)
            for _ in range(2):
                _timed(told, "copied", kept.copy_, held[0], True)
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("ShmemHugePages"):
            told.append(" ".join(line.split()))
    os.write(writing, ", ".join(told).encode())
    time.sleep(600)


def _timed(told: list[str], what: str, call: Callable[..., Any], *args: Any) -> Any:
    began_at = time.monotonic()
    result = call(*args)
    torch.cuda.synchronize()
    told.append(f"{what} {time.monotonic() - began_at:.2f} s")
    return result


if __name__ == "__main__":
    main()
