"""A file in large pages is a file as any other, only quicker."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.checkpoint import pages as module
from rallypoint.checkpoint.pages import LARGE_BYTES, map_file, use_large_pages
from rallypoint.checkpoint.rooms import make_room

PAGE = os.sysconf("SC_PAGESIZE")
SIZES = [1, PAGE, LARGE_BYTES - 1, LARGE_BYTES, 3 * LARGE_BYTES, 3 * LARGE_BYTES + 5 * PAGE, 5 * LARGE_BYTES - 1]


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("slot")
    yield made
    os.close(made)


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def mappings() -> set[str]:
    return {line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:slot" in line}


def reserved() -> int:
    """How many ranges of addresses are taken without memory."""
    return Path("/proc/self/maps").read_text().count(" ---p 00000000 00:00 0")


@pytest.mark.parametrize("size", SIZES)
def test_a_mapping_is_the_file_as_long_as_anybody_has_a_view_of_it(fd: int, size: int) -> None:
    os.ftruncate(fd, size)
    view = map_file(fd, size)
    assert (len(view), view.format, view.readonly) == (size, "B", False)
    assert size < LARGE_BYTES or address_of(view) % LARGE_BYTES == 0
    end = view[-1:]
    end[0] = 7
    assert os.pread(fd, 1, size - 1) == b"\7"
    os.pwrite(fd, b"\1", 0)
    assert view[0] == 1
    del view
    gc.collect()
    assert len(mappings()) == 1
    assert end[0] == os.pread(fd, 1, size - 1)[0]
    del end
    gc.collect()
    assert not mappings()


def test_more_than_there_is_cannot_be_mapped(fd: int) -> None:
    os.ftruncate(fd, LARGE_BYTES)
    with pytest.raises(OSError, match="shorter"):
        map_file(fd, LARGE_BYTES + 1)


def test_what_cannot_be_mapped_leaves_no_mapping(fd: int) -> None:
    os.ftruncate(fd, LARGE_BYTES)
    readonly = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    before = reserved()
    try:
        with pytest.raises(PermissionError):
            map_file(readonly, LARGE_BYTES)
    finally:
        os.close(readonly)
    assert reserved() == before


@pytest.mark.parametrize("size", SIZES)
def test_only_the_first_byte_of_each_is_lost(fd: int, size: int) -> None:
    content = os.urandom(size)
    os.pwrite(fd, content, 0)
    use_large_pages(fd, size)
    found = bytearray(os.pread(fd, size + 1, 0))
    found[::LARGE_BYTES] = content[::LARGE_BYTES]
    assert found == content
    assert not mappings()


@pytest.mark.parametrize("refused", [14, 23, 25])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOMEM])
def test_a_kernel_without_them_gives_small_ones(fd: int, refused: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        mmap, munmap = module._libc.mmap, module._libc.munmap

        @staticmethod
        def madvise(begin: int, size: int, advice: int) -> int:
            if advice != refused:
                return 0
            ctypes.set_errno(code)
            return -1

    monkeypatch.setattr(module, "_libc", Libc)
    make_room(fd, 2 * LARGE_BYTES)
    assert os.fstat(fd).st_blocks * 512 >= 2 * LARGE_BYTES, "it is reserved all the same"
    assert not mappings()


def test_the_kernel_maps_them_as_what_they_are(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    advised: dict[int, Any] = {}
    madvise = module._libc.madvise

    class Libc:
        mmap, munmap = module._libc.mmap, module._libc.munmap

        @staticmethod
        def madvise(begin: int, size: int, advice: int) -> Any:
            advised[advice] = madvise(begin, size, advice)
            return advised[advice]

    monkeypatch.setattr(module, "_libc", Libc)
    make_room(fd, 4 * LARGE_BYTES)
    if advised.get(25) != 0:
        pytest.skip("this kernel has none, or none to spare")
    view = map_file(fd, 4 * LARGE_BYTES)
    for at in range(0, len(view), PAGE):
        view[at] = 1
    begin = f"{address_of(view):x}-"
    mine = Path("/proc/self/smaps").read_text().partition(begin)[2]
    assert re.search(r"ShmemPmdMapped: +(\d+) kB", mine)[1] == str(4 * LARGE_BYTES // 1024)  # type: ignore[index]
