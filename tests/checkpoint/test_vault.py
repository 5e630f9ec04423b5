"""The agent's memory for snapshots: it follows the ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rallypoint.base import defaults
from rallypoint.checkpoint.folder import write_out
from rallypoint.checkpoint.layout import JOB
from rallypoint.checkpoint.slots import Slots
from rallypoint.checkpoint.vault import Vault


def slots_of(vault: Vault, fds: tuple[int, ...], rank: int, world: int = 4) -> Slots:
    files, each, _ = vault.variables(fds)[defaults.ENV_CHECKPOINT].split(":")
    return Slots([*map(int, files.split(","))], int(each), rank, world)


def test_a_rank_finds_its_memory_whichever_worker_it_is() -> None:
    with contextlib.closing(Vault(8 << 20, workers=2)) as vault:
        for local_rank, fds in vault.assign({0: 2, 1: 3}).items():
            slots_of(vault, fds, 2 + local_rank).save(5, f"of rank {2 + local_rank}")
        for ranks in ({0: 2, 1: 3}, {0: 3, 1: 2}):
            for local_rank, fds in vault.assign(ranks).items():
                rank = ranks[local_rank]
                assert slots_of(vault, fds, rank).load((1, 5), copy=True) == f"of rank {rank}"


def test_a_rank_that_was_elsewhere_finds_none() -> None:
    with contextlib.closing(Vault(8 << 20, workers=2)) as vault:
        for local_rank, fds in vault.assign({0: 2, 1: 3}).items():
            slots_of(vault, fds, 2 + local_rank).save(5, "old")
        moved = vault.assign({0: 0, 1: 2})
        assert slots_of(vault, moved[0], 0).moments() == []
        assert slots_of(vault, moved[1], 2).moments() == [(1, 5)]
        assert set(moved[0]).isdisjoint(moved[1])


def test_workers_share_what_there_is_and_nothing_stays_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    vault = Vault(100, workers=3)
    (fds,) = vault.assign({0: 0}).values()
    assert vault.variables(fds) == {defaults.ENV_CHECKPOINT: f"{fds[0]},{fds[1]}:33:"}
    vault.close()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "change", [lambda whole: whole[:-1], lambda whole: whole + b"x", lambda whole: b"", lambda whole: bytes(9999)]
)
def test_half_a_snapshot_of_an_earlier_job_is_not_taken_up(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    ranks = {0: 0, 1: 1}
    with contextlib.closing(Vault(8 << 20, workers=2)) as vault:
        for local_rank, fds in vault.assign(ranks).items():
            slots_of(vault, fds, local_rank, 2).save(5, "old")
        assert write_out(str(tmp_path), vault.own()) == 2
    before = set(os.listdir("/proc/self/fd"))
    with contextlib.closing(Vault(8 << 20, workers=2)) as vault:
        files = vault.assign(ranks)
        copies = vault.read_back(str(tmp_path), files, ranks, 2)
        assert [
            slots_of(vault, (copy, copy), rank, 2).load((1 - JOB, 5), copy=True) for rank, (_, copy) in enumerate(copies)
        ] == ["old"] * 2
        for _, copy in copies:
            os.close(copy)
        path = tmp_path / "rank-1-of-2.0"
        path.write_bytes(change(path.read_bytes()))
        with pytest.raises(OSError, match=r"rank-1-of-2\.0 is not a whole snapshot; delete it"):
            vault.read_back(str(tmp_path), files, ranks, 2)
        assert not vault.own()
    assert set(os.listdir("/proc/self/fd")) == before
