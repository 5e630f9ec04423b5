"""Snapshots in a folder, from one job to the next: which are taken up, and from whom."""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.checkpoint.folder import clear_out, find_snapshots, write_out
from rallypoint.checkpoint.layout import BODY_AT, Mark, write_mark

PLENTY = 1 << 20


class Memory:
    """Files in memory with a snapshot in each."""

    def __init__(self) -> None:
        self.fds: list[int] = []

    def snapshot(self, rank: int, count: int, world: int = 2, body: bytes = b"state") -> tuple[int, Mark]:
        mark = Mark(count, 1, count, rank, world, len(body), len(body))
        self.fds.append(os.memfd_create("slot"))
        os.pwrite(self.fds[-1], write_mark(mark), 0)
        os.pwrite(self.fds[-1], body, BODY_AT)
        return self.fds[-1], mark


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    for fd in made.fds:
        os.close(fd)


def counts(folder: Path, *ranks: int, world: int = 2, most_files: int = 2) -> list[list[int]]:
    """What is found for each rank, by the number of its save."""
    found = find_snapshots(str(folder), ranks, world, most_files, PLENTY)
    for of_rank in found.values():
        for one in of_rank:
            os.close(one.fd)
    return [[one.mark.count for one in found[rank]] for rank in ranks] if found else []


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "tmp")


def test_nothing_is_found_where_there_is_no_folder(tmp_path: Path) -> None:
    assert counts(tmp_path / "none", 0) == []
    clear_out(str(tmp_path / "none"), [0], 2)


def test_what_was_written_is_found_by_a_job_of_the_same_size_only(tmp_path: Path, memory: Memory) -> None:
    folder = tmp_path / "a" / "kept"
    assert write_out(str(folder), [memory.snapshot(0, 4), memory.snapshot(0, 5), memory.snapshot(1, 5)]) == 3
    assert names(folder) == ["rank-0-of-2.0", "rank-0-of-2.1", "rank-1-of-2.0"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert counts(folder, 0, 1) == [[5, 4], [5]]
    assert counts(folder, 0, 1, world=3) == [[], []]
    assert counts(folder, 10, 2) == [[], []]


def test_what_the_last_job_has_written_replaces_what_the_one_before_had(tmp_path: Path, memory: Memory) -> None:
    write_out(str(tmp_path), [memory.snapshot(0, 1), memory.snapshot(0, 2), memory.snapshot(0, 3)])
    write_out(str(tmp_path), [memory.snapshot(0, 2)], are_copies=True)
    (tmp_path / "rank-0-of-2.7.0123abcd").touch()  # by somebody who was killed
    (tmp_path / "rank-0-of-20.0").touch()
    (tmp_path / "mine").touch()
    write_out(str(tmp_path), [memory.snapshot(0, 1)])  # of a job that began anew
    assert names(tmp_path) == ["mine", "rank-0-of-2.0", "rank-0-of-20.0"]
    assert counts(tmp_path, 0) == [[1]]


def test_copies_stand_in_for_a_node_that_wrote_nothing(tmp_path: Path, memory: Memory) -> None:
    write_out(str(tmp_path), [memory.snapshot(0, 8), memory.snapshot(0, 9)])
    write_out(str(tmp_path), [memory.snapshot(1, 8), memory.snapshot(1, 9)], are_copies=True)
    assert names(tmp_path) == ["copy-of-rank-1-of-2.0", "copy-of-rank-1-of-2.1", "rank-0-of-2.0", "rank-0-of-2.1"]
    assert counts(tmp_path, 0, 1) == [[9, 8], [9, 8]]
    clear_out(str(tmp_path), [1], 2)
    assert names(tmp_path) == ["rank-0-of-2.0", "rank-0-of-2.1"]


@pytest.mark.parametrize(
    ("own", "copied", "found"),
    [
        ([4, 5], [8, 9], [9, 8]),  # what the lost node had written was of an earlier job
        ([8, 9], [8], [9, 8]),  # it was not lost after all
        ([8, 9], [7, 8], [9, 8]),
        ([9], [8], [9, 8]),
        ([9], [9], [9]),
    ],
)
def test_of_both_those_that_were_saved_last_are_taken_up(
    own: list[int], copied: list[int], found: list[int], tmp_path: Path, memory: Memory
) -> None:
    write_out(str(tmp_path), [memory.snapshot(1, count) for count in own])
    write_out(str(tmp_path), [memory.snapshot(1, count) for count in copied], are_copies=True)
    before = set(os.listdir("/proc/self/fd"))
    assert counts(tmp_path, 1) == [found]
    assert set(os.listdir("/proc/self/fd")) == before


class Evil:
    def __reduce__(self) -> object:
        return os.system, ("touch pwned",)


def plant(folder: Path, memory: Memory) -> Path:
    """As anybody can who may write to the folder."""
    fd, mark = memory.snapshot(0, 99, body=pickle.dumps([]) + pickle.dumps(Evil()))
    path = folder / "rank-0-of-2.0"
    path.write_bytes(os.pread(fd, BODY_AT + mark.body_bytes, 0))
    return path


@pytest.mark.parametrize("how", ["of another user", "others may write", "link", "pipe"])
def test_m5_a_snapshot_that_others_could_have_written_is_not_taken_up(how: str, tmp_path: Path, memory: Memory) -> None:
    """What is in it is run when it is loaded."""
    path = plant(tmp_path, memory)
    if how == "of another user":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(path, 1, -1)
    elif how == "others may write":
        path.chmod(0o666)
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to("elsewhere") if how == "link" else os.mkfifo(path)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"rank-0-of-2\.0: (others could have written it|Too many levels of symbolic links)"):
        counts(tmp_path, 0)
    assert set(os.listdir("/proc/self/fd")) == before


def test_m5_no_link_leads_what_is_written_elsewhere(tmp_path: Path, memory: Memory) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o777)
    for name in ("rank-0-of-2.0", "rank-0-of-2.0.new"):
        (folder / name).symlink_to(victim)
    write_out(str(folder), [memory.snapshot(0, 1)])
    assert victim.read_text() == "untouched"
    assert counts(folder, 0) == [[1]]


@pytest.mark.skipif(os.geteuid() != 0, reason="it matters for root alone")
def test_m5_root_uses_no_folder_of_another_user(tmp_path: Path, memory: Memory) -> None:
    os.chown(tmp_path, 1, -1)
    for use in (
        lambda: counts(tmp_path, 0),
        lambda: write_out(str(tmp_path), [memory.snapshot(0, 1)]),
        lambda: clear_out(str(tmp_path), [0], 2),
    ):
        with pytest.raises(PermissionError, match="it belongs to daemon, who could make root write elsewhere"):
            use()
    assert names(tmp_path) == []


def test_more_than_a_worker_may_have_is_refused(tmp_path: Path, memory: Memory) -> None:
    write_out(str(tmp_path), [memory.snapshot(0, 1), memory.snapshot(0, 2)])
    with pytest.raises(OSError, match=r"snapshots of 8,202 bytes are more than the 8,000 of a worker"):
        find_snapshots(str(tmp_path), [0], 2, 2, 8000)
    assert [one.mark.count for one in _closed(find_snapshots(str(tmp_path), [0], 2, 1, 8000)[0])] == [2]


def _closed(found: list) -> list:  # type: ignore[type-arg]
    for one in found:
        os.close(one.fd)
    return found
