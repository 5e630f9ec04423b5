"""The agent's side: the memory in which workers keep their snapshots, which stays when they end.

It is made of files without a name, so nothing of it is left when the agent has ended, however that ends. A snapshot belongs to a
rank of the whole job; which worker of this node has that rank may differ from one generation to the next.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rallypoint.base import defaults
from rallypoint.checkpoint.layout import MARK_BYTES, read_mark

__all__ = ["Vault"]

SLOTS = 2


class Vault:
    """Two slots for each worker of this node; `most_bytes` is for all of them."""

    def __init__(self, most_bytes: int, workers: int) -> None:
        self._each_bytes = most_bytes // workers
        self._pairs = [[os.memfd_create("rally-checkpoint", os.MFD_CLOEXEC) for _ in range(SLOTS)] for _ in range(workers)]

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

    def close(self) -> None:
        for pair in self._pairs:
            for fd in pair:
                os.close(fd)
        self._pairs.clear()


def _newest_rank(pair: list[int]) -> int | None:
    """Whose snapshots these are."""
    marks = [mark for fd in pair if (mark := read_mark(os.pread(fd, MARK_BYTES, 0))) is not None]
    return max(marks, key=lambda mark: mark.count).rank if marks else None
