"""What workers write about themselves, and what can be judged by it: which generations there were, and if two ran at once.

A worker writes one line when it starts, and then, every 10 ms, the time. All of them read one clock (CLOCK_TAI), which no time
namespace shifts; the time is read before it is written, so a worker ran at least until its last beat. No disk that is busy or
hung can delay a beat: the folder is in memory where there is such a place.

The first worker of a node does besides what it is ordered to.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["BEAT_S", "BEAT_WORKER", "Journal", "Overlap"]

BEAT_S = 0.01
PORT_AGAIN_S = 1.0

BEAT_WORKER = f"""
import json, mmap, os, pathlib, struct, sys, time
began = time.clock_gettime(time.CLOCK_TAI)
folder, pid = pathlib.Path(sys.argv[1]), os.getpid()
name = f"beat_{{pid}}_{{began}}"
file = os.open(folder / name, os.O_CREAT | os.O_RDWR)
os.ftruncate(file, 8)
beat = mmap.mmap(file, 8)
struct.pack_into("d", beat, 0, began)
journal = os.open(folder / "journal", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
said = {{name.lower(): int(os.environ[name]) for name in names}}
said |= {{"master_addr": os.environ["MASTER_ADDR"], "run_id": os.environ["TORCHELASTIC_RUN_ID"]}}
said |= {{"node": os.uname().nodename, "pid": pid, "beat": name}}
said |= {{"began": began, "uptime": time.monotonic(), "wall": time.time()}}
os.write(journal, (json.dumps(said) + "\\n").encode())
order = folder / f"order_{{os.uname().nodename}}"
while not (folder / "finish").exists():
    struct.pack_into("d", beat, 0, time.clock_gettime(time.CLOCK_TAI))
    time.sleep({BEAT_S})
    if os.environ["LOCAL_RANK"] == "0" and order.exists():
        text = order.read_text()
        order.unlink()
        exec(text)
"""

Start = dict[str, Any]  # a worker's line


class Overlap(NamedTuple):
    """Two workers of different generations that ran at once."""

    older: Start
    newer: Start
    length_s: float

    def __str__(self) -> str:
        sides = (f"rank {one['rank']} of {one['world_size']} on {one['node']}, pid {one['pid']}" for one in self[:2])
        return f"for {self.length_s:.3f} s: {' and '.join(sides)}"


class Journal:
    """All that the workers of one job wrote; read once, as it comes."""

    def __init__(self) -> None:
        in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="rally-journal-", dir=in_memory))
        self._offset = 0
        self._starts: list[Start] = []
        self._generations: list[list[Start]] = []
        self._latest: dict[object, list[Start]] = {}  # by what the members of a generation have in common

    def starts(self) -> list[Start]:
        with contextlib.suppress(FileNotFoundError), (self.folder / "journal").open("rb") as file:
            file.seek(self._offset)
            text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                self._add(json.loads(line))
        return self._starts

    def last_beat(self, start: Start) -> float:
        """When a worker was last seen running."""
        return float(struct.unpack("d", (self.folder / start["beat"]).read_bytes())[0])

    def generations(self) -> list[list[Start]]:
        """The workers of each generation, in the order of its first start."""
        self.starts()
        return self._generations

    def whole_world(self, nodes: int, since: float = 0.0) -> list[Start] | None:
        """The latest generation, if it has that many nodes, began after `since`, and all its workers have started."""
        for workers in self.generations()[-1:]:
            first = workers[0]
            is_it = first["group_world_size"] == nodes and all(worker["began"] > since for worker in workers)
            return list(workers) if is_it and len(workers) == first["world_size"] else None
        return None

    def check_ranks(self) -> None:
        """In every generation each rank was there at most once, and the members agree on how many there are."""
        for workers in self.generations():
            ranks, size, nodes = [worker["rank"] for worker in workers], workers[0]["world_size"], workers[0]["group_world_size"]
            assert len(set(ranks)) == len(ranks), workers
            assert set(ranks) <= set(range(size)), workers
            assert {worker["group_world_size"] for worker in workers} == {nodes}, workers
            assert len({worker["node"] for worker in workers}) <= nodes, workers

    def overlaps(self) -> list[Overlap]:
        """Whoever ran beside a worker of another generation, to the precision of a beat."""
        lives = [(one["began"], self.last_beat(one), index, one) for index, each in enumerate(self.generations()) for one in each]
        found: list[Overlap] = []
        running: list[tuple[float, float, int, Start]] = []
        for life in sorted(lives, key=lambda life: life[0]):
            running = [other for other in running if other[1] > life[0]]
            found += [
                Overlap(other[3], life[3], min(other[1], life[1]) - life[0]) for other in running if other[2] != life[2]
            ]  # fmt: skip
            running.append(life)
        return found

    def check_overlaps(self) -> None:
        found = self.overlaps()
        assert not found, "workers of two generations ran at once: " + "; ".join(map(str, found))

    def finish(self) -> None:
        (self.folder / "finish").touch()

    def order(self, node: str, text: str) -> None:
        """Let the first worker of this node, that of now or the next, run this, once."""
        draft = self.folder / f"draft_{node}"
        draft.write_text(text)
        draft.rename(self.folder / f"order_{node}")

    def remove(self) -> None:
        shutil.rmtree(self.folder)

    def _add(self, start: Start) -> None:
        self._starts.append(start)
        key = (start["run_id"], start["master_addr"], start["master_port"], start["world_size"])
        known = self._latest.get(key)
        if known is None or self._is_another(start, known):
            known = self._latest[key] = []
            self._generations.append(known)
        known.append(start)

    def _is_another(self, start: Start, known: list[Start]) -> bool:
        """The kernel gives out a port again by chance: then the rank was there before, or all of the others are long gone."""
        if any(other["rank"] == start["rank"] for other in known):
            return True
        return all(self.last_beat(other) + PORT_AGAIN_S < start["began"] for other in known)
