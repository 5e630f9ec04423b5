"""How fast the output of two chatty workers gets through the launcher to its console and into log files, and if all of it does.

Two kinds of worker: one writes 64 KB blocks of 80-byte lines, as a program that logs a lot through a large buffer does, and is
compared with ``cat`` on the same pipes, which adds no prefix and writes no file; the other uses ``print``. The console is a
pipe that the harness empties with splice(2), so that it costs next to nothing. Log files are on a memory file system where there
is one, because the speed of a disk is not what is measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.contestants import PROGRAMS, TORCHRUN, Contestant, clean_environment, launchers
from benchmarks.figures import Figure, at_least, at_most, ratio_at_least

__all__ = ["measure"]

CAT = "cat"
WORKERS = 2
LINE_BYTES = 80
LINES_PER_BLOCK = 64 * 1024 // LINE_BYTES
ROUNDS = 5
BLOCKS, CHECKED_BLOCKS, TORCHRUN_BLOCKS = 3000, 200, 150  # per worker; 3,000 are 197 MB
PRINTS = 400_000  # lines per worker
SPLICE_BYTES = 1 << 20

Starter = Callable[[Path, int, int], list["subprocess.Popen[bytes]"]]  # (folder, blocks or lines per worker, console fd)


class Pass(NamedTuple):
    """One passage of everything that the workers wrote."""

    seconds: float  # from the first write of a worker to the last byte on the console
    wrong: int  # lines that were expected and did not come whole


def measure() -> list[Figure]:
    samples: dict[str, dict[str, list[float]]] = {"blocks": {}, "prints": {}, "wrong": {}}
    for _ in range(ROUNDS):
        samples["blocks"].setdefault(CAT, []).append(_rate(BLOCKS * LINES_PER_BLOCK, _pass(_cats, BLOCKS)))
        for contestant in launchers():
            _round(contestant, samples)
    return [
        Figure("tee: 64 KB blocks of lines", "lines/s", samples["blocks"], (ratio_at_least(0.5, CAT),), more_is_better=True),
        Figure("tee: buffered prints", "lines/s", samples["prints"], (at_least(500_000, "lines/s"),), more_is_better=True),
        Figure("tee: lines lost or torn, worst round", "lines", _worst(samples["wrong"]), (at_most(0, "lines"),)),
    ]


def _round(contestant: Contestant, samples: dict[str, dict[str, list[float]]]) -> None:
    name = contestant.name
    blocks = TORCHRUN_BLOCKS if name == TORCHRUN else BLOCKS
    fast = _pass(_teed(contestant, "blocks.py"), blocks)
    checked = _pass(_teed(contestant, "blocks.py"), CHECKED_BLOCKS, _block_lines)
    prints = _pass(_teed(contestant, "prints.py"), PRINTS, _printed_lines)
    samples["blocks"].setdefault(name, []).append(_rate(blocks * LINES_PER_BLOCK, fast))
    samples["prints"].setdefault(name, []).append(_rate(PRINTS, prints))
    samples["wrong"].setdefault(name, []).append(checked.wrong + prints.wrong)


def _pass(start: Starter, count: int, expected: Callable[[int, int], list[bytes]] | None = None) -> Pass:
    """Run the workers of `start` once; with `expected`, keep what comes and check it line by line."""
    with _memory_folder() as folder, (folder / "console").open("wb+") if expected else Path(os.devnull).open("wb+") as sink:
        for rank in range(WORKERS):
            (folder / f"block.{rank}").write_bytes(_block(rank))
        console, console_end = os.pipe()
        processes = start(folder, count, console_end)
        os.close(console_end)
        last_byte_at = _drain(console, sink.fileno())
        os.close(console)
        for process in processes:
            process.wait()
        began = min(float((folder / f"start.{rank}").read_text()) for rank in range(WORKERS))
        wrong = _wrong_lines(folder / "console", [expected(rank, count) for rank in range(WORKERS)]) if expected else 0
        return Pass(last_byte_at - began, wrong)


def _teed(contestant: Contestant, program: str) -> Starter:
    def start(folder: Path, count: int, console: int) -> list[subprocess.Popen[bytes]]:
        options = ["-t", "1", "--log-dir", str(folder / "logs")]
        command = contestant.command(WORKERS, options, [str(PROGRAMS / program), str(folder), str(count)])
        return [subprocess.Popen(command, env=clean_environment(), stdout=console, stderr=subprocess.DEVNULL)]

    return start


def _cats(folder: Path, count: int, console: int) -> list[subprocess.Popen[bytes]]:
    """The same two writers, each with a cat on its pipe."""
    processes = []
    for rank in range(WORKERS):
        read_end, write_end = os.pipe()
        writer = [sys.executable, str(PROGRAMS / "blocks.py"), str(folder), str(count), str(rank)]
        processes.append(subprocess.Popen(writer, env=clean_environment(), stdout=write_end))
        processes.append(subprocess.Popen(["cat"], stdin=read_end, stdout=console))
        os.close(read_end)
        os.close(write_end)
    return processes


def _drain(source: int, sink: int) -> float:
    """Move everything from pipe to file; the time at which the last byte came."""
    last_byte_at = time.monotonic()
    while os.splice(source, sink, SPLICE_BYTES):
        last_byte_at = time.monotonic()
    return last_byte_at


def _wrong_lines(console: Path, expected: list[list[bytes]]) -> int:
    """How many of the expected lines did not come whole, behind the prefix of their rank; at least 1 if their order is wrong."""
    came: list[list[bytes]] = [[] for _ in expected]
    prefixes = [f"[default{rank}]:".encode() for rank in range(WORKERS)]
    with console.open("rb") as file:
        for line in file:
            for prefix, lines in zip(prefixes, came, strict=True):
                if line.startswith(prefix):
                    lines.append(line[len(prefix) :])
    return sum(_missing(one, other) for one, other in zip(expected, came, strict=True))


def _missing(expected: list[bytes], came: list[bytes]) -> int:
    return 0 if expected == came else max(1, (Counter(expected) - Counter(came)).total())


def _block(rank: int) -> bytes:
    """Lines that name their writer and their place in the block: a lost, torn or exchanged one is seen."""
    lines = (f"rank {rank} line {number} ".ljust(LINE_BYTES - 1, ".") + "\n" for number in range(LINES_PER_BLOCK))
    return "".join(lines).encode()


def _block_lines(rank: int, count: int) -> list[bytes]:
    return _block(rank).splitlines(keepends=True) * count


def _printed_lines(rank: int, count: int) -> list[bytes]:
    return [f"rank {rank} step {number} loss 0.6931471805599453\n".encode() for number in range(count)]


def _rate(lines_per_worker: int, passage: Pass) -> float:
    return WORKERS * lines_per_worker / passage.seconds


def _worst(wrong: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [max(values)] for name, values in wrong.items()}


@contextmanager
def _memory_folder() -> Iterator[Path]:
    shared_memory = Path("/dev/shm")
    place = shared_memory if os.access(shared_memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="rallypoint-bench-", dir=place) as folder:
        yield Path(folder)
