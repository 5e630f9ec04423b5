"""Snapshots in files, from one job to the next of the same size (``--checkpoint-dir``).

    rank-<rank>-of-<world>.<n>            what the node of that rank has written
    copy-of-rank-<rank>-of-<world>.<n>    what another node had copies of, when that node was lost

The head of a snapshot is pickled, so whoever writes such a file runs code in the workers that load it: only files are taken up
that nobody but us can have written (`base.own_files`). A node that writes the snapshots of a rank of its own removes all others
of that rank: none of them is as new. Of several for one rank, those are taken up that were saved last.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

from rallypoint.base.own_files import open_folder, open_own, replace_own
from rallypoint.base.records import Value
from rallypoint.checkpoint.layout import BODY_AT, MARK_BYTES, Mark, read_mark

__all__ = ["Found", "clear_out", "copy_file", "find_snapshots", "write_out"]

_COPY = "copy-of-"
_NAME = re.compile(rf"(?P<copy>{_COPY})?rank-(?P<rank>[0-9]+)-of-(?P<world>[0-9]+)\.[0-9]+(?P<unfinished>\.[0-9a-f]{{8}})?")


class Found(Value):
    """A whole snapshot in a file that is open; its size is that of the file."""

    fd: int
    mark: Mark
    size: int


def write_out(path: str, snapshots: Iterable[tuple[int, Mark]], are_copies: bool = False) -> int:
    """Each into a file, under its name only when it is whole; how many there are. `snapshots` are files in memory."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    folder = open_folder(path)
    try:
        written: dict[tuple[int, int], list[str]] = {}
        for fd, mark in snapshots:
            names = written.setdefault((mark.rank, mark.world), [])
            names.append(_name(mark.rank, mark.world, len(names), are_copies))
            replace_own(names[-1], _writer(fd, BODY_AT + mark.body_bytes), folder)
        for (rank, world), names in written.items():
            _remove(folder, rank, world, keep=names, only_copies=are_copies)
        return sum(map(len, written.values()))
    finally:
        os.close(folder)


def find_snapshots(path: str, ranks: Sequence[int], world: int, most_files: int, most_bytes: int) -> dict[int, list[Found]]:
    """What there is for each of these ranks, at most so much; the caller closes the files.

    OSError: something is not whole, cannot be read, is more than they may have, or could be somebody else's.
    """
    try:
        folder = open_folder(path)
    except FileNotFoundError:
        return {}
    opened: list[Found] = []
    try:
        names = os.listdir(folder)
        found: dict[int, list[Found]] = {}
        for rank in ranks:
            whole = []
            for match in _names_of(names, rank, world):
                if not match["unfinished"]:
                    whole.append(_open_whole(match[0], folder))
                    opened.append(whole[-1])
            found[rank] = _newest(whole)[:most_files]
            size = sum(one.size for one in found[rank])
            if size > most_bytes:
                raise OSError(errno.EFBIG, f"snapshots of {size:,} bytes are more than the {most_bytes:,} of a worker")
    except OSError:
        _close(opened)
        raise
    finally:
        os.close(folder)
    _close(one for one in opened if not any(one in kept for kept in found.values()))
    return found


def clear_out(path: str, ranks: Iterable[int], world: int) -> None:
    """The work is done: nobody is to take up what was left of it."""
    with suppress(FileNotFoundError):
        folder = open_folder(path)
        try:
            for rank in ranks:
                _remove(folder, rank, world)
        finally:
            os.close(folder)


def copy_file(source: int, target: int, begin: int, end: int) -> None:
    """A part of a file to the same place in another; the kernel does it."""
    os.lseek(target, begin, os.SEEK_SET)
    while begin < end:
        count = os.sendfile(target, source, begin, end - begin)
        if not count:
            raise OSError(errno.EIO, "the file has become shorter while it was read")
        begin += count


def _writer(source: int, size: int) -> Callable[[int], None]:
    def write(target: int) -> None:
        copy_file(source, target, 0, size)
        os.fsync(target)

    return write


def _name(rank: int, world: int, number: int, is_copy: bool) -> str:
    return f"{_COPY * is_copy}rank-{rank}-of-{world}.{number}"


def _names_of(names: Iterable[str], rank: int, world: int) -> list[re.Match[str]]:
    matches = map(_NAME.fullmatch, sorted(names))
    return [match for match in matches if match and (int(match["rank"]), int(match["world"])) == (rank, world)]


def _remove(folder: int, rank: int, world: int, keep: Collection[str] = (), only_copies: bool = False) -> None:
    """Also what somebody was killed in the middle of writing."""
    for match in _names_of(os.listdir(folder), rank, world):
        if match[0] not in keep and (match["copy"] or not only_copies):
            with suppress(FileNotFoundError):
                os.unlink(match[0], dir_fd=folder)


def _open_whole(name: str, folder: int) -> Found:
    try:
        fd = open_own(name, folder)
    except OSError as error:
        raise OSError(error.errno, f"{name}: {error.strerror}") from None
    size = os.fstat(fd).st_size
    mark = read_mark(os.pread(fd, MARK_BYTES, 0))
    if mark is None or BODY_AT + mark.body_bytes != size:
        os.close(fd)
        raise OSError(errno.EIO, f"{name} is not a whole snapshot; delete it to do without")
    return Found(fd, mark, size)


def _newest(found: Sequence[Found]) -> list[Found]:
    """Each once, the one that was saved last first."""
    by_mark: dict[Mark, Found] = {}
    for one in found:
        by_mark.setdefault(one.mark, one)
    return sorted(by_mark.values(), key=lambda one: -one.mark.count)


def _close(found: Iterable[Found]) -> None:
    for one in found:
        os.close(one.fd)
