"""From the first node's join to the last one's seat: many nodes, each with its own connection, driven from four processes.

The host of the store has a process to itself, as it has on a real cluster; the others share three. Torch's c10d is driven the
same way, by threads, up to the size that it manages in reasonable time.
"""

from __future__ import annotations

import socket
import subprocess
import sys

from benchmarks.contestants import PROGRAMS, RALLYRUN, clean_environment, launchers
from benchmarks.figures import Figure, at_most

__all__ = ["free_port", "measure"]

SIZES = {8: 0.5, 64: 0.5, 128: 0.5, 1000: 3.0}  # nodes, and the seconds that they may take
TORCHS_SIZES = (8, 64, 128)  # 256 nodes did not meet within 450 s
RUNS = 3
OTHERS = 3


def measure() -> list[Figure]:
    names = [contestant.name for contestant in launchers()]
    return [_figure(nodes, limit_s, names) for nodes, limit_s in SIZES.items()]


def _figure(nodes: int, limit_s: float, names: list[str]) -> Figure:
    samples: dict[str, list[float]] = {name: [] for name in names if name == RALLYRUN or nodes in TORCHS_SIZES}
    for run in range(RUNS):
        for name, times in samples.items():
            if name == RALLYRUN or run == 0 or nodes < TORCHS_SIZES[-1]:
                times.append(meeting(name, nodes))
    return Figure(f"rendezvous of {nodes} nodes: first join to last seat", "s", samples, (at_most(limit_s, "s"),))


def meeting(kind: str, nodes: int) -> float:
    """How long it took, in seconds."""
    port = free_port()
    shares = _shares(nodes)
    processes = [_start(kind, port, nodes, first, count) for first, count in shares]
    try:
        for process in processes:
            _expect(process, "ready")
        for process in processes:
            _say(process, "go")
        times = [_read_times(process) for process in processes]
        for process in processes:
            _say(process, "end")
        return max(end for _, end in times) - min(began for began, _ in times)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _shares(nodes: int) -> list[tuple[int, int]]:
    """The first node and the number of nodes of each process."""
    rest, shares = nodes - 1, [(0, 1)]
    for index in range(OTHERS):
        count = rest // OTHERS + (index < rest % OTHERS)
        shares.append((shares[-1][0] + shares[-1][1], count))
    return [share for share in shares if share[1]]


def _start(kind: str, port: int, nodes: int, first: int, count: int) -> subprocess.Popen[str]:
    numbers = map(str, (port, nodes, first, count))
    return subprocess.Popen(
        [sys.executable, str(PROGRAMS / "meet.py"), kind, *numbers],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )


def _say(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def _read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _expect(process: subprocess.Popen[str], word: str) -> None:
    line = _read_line(process)
    if line != word:
        raise RuntimeError(f"a node's process said {line!r} where {word!r} was due")


def _read_times(process: subprocess.Popen[str]) -> tuple[float, float]:
    began, ended = map(float, _read_line(process).split())
    return began, ended


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    for size in map(int, sys.argv[1:]):
        print(size, [round(meeting(RALLYRUN, size), 3) for _ in range(RUNS)], flush=True)
