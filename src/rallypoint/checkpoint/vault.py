"""The agent's side: the memory in which workers keep their snapshots, which stays when they end.

It is made of files without a name, so nothing of it is left when the agent has ended, however that ends. A snapshot belongs to a
rank of the whole job; which worker of this node has that rank may differ from one generation to the next.

When a job ends before its work is done, what is kept can be written to a folder, from which the next one takes it up.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from rallypoint.base import defaults, report
from rallypoint.base.outbox import Deputy
from rallypoint.base.signals import inbox
from rallypoint.base.text import many
from rallypoint.checkpoint.layout import BODY_AT, MARK_BYTES, Mark, read_mark, write_mark

T = TypeVar("T")

__all__ = ["Snapshots", "Vault"]

SLOTS = 2
FOLDER_TIMEOUT_S = 600.0  # for a disk that may be slow; one that hangs does not keep a job for ever


class Snapshots:
    """What an agent does for its workers' snapshots; with a `folder`, also from one job to the next."""

    def __init__(self, most_bytes: int, workers: int, folder: str | None = None) -> None:
        self._vault = Vault(most_bytes, workers)
        self._folder = folder
        self._ranks: dict[int, int] = {}
        self._world = 0
        self._clerk = Deputy()

    def prepare(self, ranks: dict[int, int], world: int) -> dict[int, tuple[int, ...]]:
        """The files of each worker of a group that is about to start; by local rank, as `ranks` are."""
        files, is_first = self._vault.assign(ranks), not self._world
        self._ranks, self._world = ranks, world
        if self._folder is not None and is_first:
            read = partial(self._vault.read_back, files=files, ranks=ranks, world=world)
            for fd, copy in self._try(read, "what an earlier job left is not used", _close_copies) or ():
                os.dup2(copy, fd, inheritable=False)
                os.close(copy)
        return files

    def variables(self, fds: tuple[int, ...]) -> dict[str, str]:
        return self._vault.variables(fds)

    def end(self, succeeded: bool) -> None:
        """The job is over, and its workers are gone."""
        if self._folder is None:
            return
        if succeeded:
            self._try(lambda folder: self._vault.clear_out(folder, self._ranks.values(), self._world), "what is there stays")
        elif not self._vault.is_empty():
            count = self._try(self._vault.write_out, "what was saved last is lost")
            if count:
                report.info(f"{many(count, 'snapshot')} of this node's workers written to {self._folder}")

    def _try(self, work: Callable[[str], T], otherwise: str, discard: Callable[[T], None] | None = None) -> T | None:
        """Whatever is wrong with the folder, the job goes on, or ends as it would; and whoever cannot wait sends a signal."""
        folder = self._folder or ""
        try:
            return self._clerk.do(lambda: work(folder), FOLDER_TIMEOUT_S, inbox.raise_pending, discard)
        except OSError as error:
            report.warn(f"--checkpoint-dir {folder}: {otherwise}: {error.strerror or error}")
            return None

    def close(self) -> None:
        self._vault.close()


class Vault:
    """Two slots for each worker of this node; `most_bytes` is for all of them."""

    def __init__(self, most_bytes: int, workers: int) -> None:
        self._each_bytes = most_bytes // workers
        self._pairs = [[_new_file() for _ in range(SLOTS)] for _ in range(workers)]

    def is_empty(self) -> bool:
        return not any(_marks(pair) for pair in self._pairs)

    def assign(self, ranks: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        """The files of each worker, given the rank of each in the job; by local rank."""
        free = list(self._pairs)
        found: dict[int, list[int]] = {}
        for local_rank, rank in ranks.items():
            kept = next((pair for pair in free if _newest_rank(pair) == rank), None)
            if kept is not None:
                found[local_rank] = kept
                free.remove(kept)
        return {local_rank: tuple(found.get(local_rank) or free.pop()) for local_rank in ranks}

    def variables(self, fds: tuple[int, ...]) -> dict[str, str]:
        """What a worker with these files is told."""
        return {defaults.ENV_CHECKPOINT: ":".join(map(str, (*fds, self._each_bytes)))}

    def write_out(self, folder: str) -> int:
        """Each snapshot into a file, under its name only when it is whole; how many there are."""
        os.makedirs(folder, exist_ok=True)
        count = 0
        for pair in self._pairs:
            for slot, (fd, mark) in enumerate(_marks(pair)):
                path = os.path.join(folder, _name(mark.rank, mark.world, slot))
                _copy_into(fd, f"{path}.new", BODY_AT + mark.body_bytes)
                os.rename(f"{path}.new", path)
                count += 1
        return count

    def read_back(
        self, folder: str, files: Mapping[int, tuple[int, ...]], ranks: Mapping[int, int], world: int
    ) -> list[tuple[int, int]]:
        """What an earlier job has left for these ranks: files of theirs, and a copy for each, to be put in its place.

        OSError: something cannot be read, is not whole, or is more than they may have.
        """
        copies: list[tuple[int, int]] = []
        try:
            for local_rank, fds in files.items():
                paths = [os.path.join(folder, _name(ranks[local_rank], world, slot)) for slot in range(SLOTS)]
                found = [(fd, path) for fd, path in zip(fds, paths, strict=True) if os.path.exists(path)]
                size = sum(os.path.getsize(path) for _, path in found)
                if size > self._each_bytes:
                    raise OSError(errno.EFBIG, f"snapshots of {size:,} bytes are more than the {self._each_bytes:,} of a worker")
                for fd, path in found:
                    copies.append((fd, _new_file()))
                    _read_whole(path, copies[-1][1])
        except OSError:
            _close_copies(copies)
            raise
        return copies

    def clear_out(self, folder: str, ranks: Iterable[int], world: int) -> None:
        """The work is done: nobody is to take up what was left of it."""
        for rank in ranks:
            for slot in range(SLOTS):
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, _name(rank, world, slot)))

    def close(self) -> None:
        for pair in self._pairs:
            for fd in pair:
                os.close(fd)
        self._pairs.clear()


def _new_file() -> int:
    return os.memfd_create("rally-checkpoint", os.MFD_CLOEXEC)


def _close_copies(copies: list[tuple[int, int]]) -> None:
    for _, copy in copies:
        os.close(copy)


def _read_whole(path: str, target: int) -> None:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        mark = read_mark(file.read(MARK_BYTES))
        if mark is None or BODY_AT + mark.body_bytes != size:
            raise OSError(errno.EIO, f"{path} is not a whole snapshot; delete it to do without")
        _copy(file.fileno(), target, size)
        os.pwrite(target, write_mark(mark.of_earlier_job()), 0)


def _marks(pair: Sequence[int]) -> list[tuple[int, Mark]]:
    """The files that hold a snapshot, and which."""
    found = ((fd, read_mark(os.pread(fd, MARK_BYTES, 0))) for fd in pair)
    return [(fd, mark) for fd, mark in found if mark is not None]


def _newest_rank(pair: Sequence[int]) -> int | None:
    """Whose snapshots these are."""
    marks = [mark for _, mark in _marks(pair)]
    return max(marks, key=lambda mark: mark.count).rank if marks else None


def _name(rank: int, world: int, slot: int) -> str:
    return f"rank-{rank}-of-{world}.{slot}"


def _copy_into(fd: int, path: str, size: int) -> None:
    with open(path, "wb") as file:
        _copy(fd, file.fileno(), size)
        os.fsync(file.fileno())


def _copy(source: int, target: int, size: int) -> None:
    """Of files; the kernel does it."""
    offset = 0
    os.lseek(target, 0, os.SEEK_SET)
    while offset < size:
        count = os.sendfile(target, source, offset, size - offset)
        if not count:
            raise OSError(errno.EIO, "the file has become shorter while it was read")
        offset += count
