"""Large pages: what a kernel does for each page of memory, it does here for two megabytes at once.

A slot has gigabytes. In pages of 4 KiB, each worker that maps one has millions of them entered into its table, a device has each
of them made known, and when the worker is killed, all of that is undone one by one before the worker counts as gone: its
successor waits for that. In pages of 2 MiB it is a matter of milliseconds.

The kernel uses them for a file in memory where it is asked to, and where a mapping begins at a multiple of their size. What
`mmap.mmap` maps begins anywhere, so this is done by the C library. A kernel that has no large pages, or none to spare, is no
error: the file has small ones.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref

__all__ = ["LARGE_BYTES", "map_file", "use_large_pages"]

LARGE_BYTES = 2 << 20
_HUGEPAGE, _POPULATE_WRITE, _COLLAPSE = 14, 23, 25  # of madvise; mmap knows only those of the kernel that Python was built with
_FIXED, _NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_file(fd: int, size: int, flags: int = 0) -> memoryview:
    """So much of a file, to be read and written; it stays mapped as long as anybody has a view of it. OSError."""
    if os.fstat(fd).st_size < size:
        raise OSError(errno.ENXIO, "the file has become shorter")
    if size < LARGE_BYTES:
        return memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED | flags))
    begin = _map(fd, size, flags)
    array = (ctypes.c_char * size).from_address(begin)
    weakref.finalize(array, _libc.munmap, begin, size).atexit = False  # somebody may still use it then
    return memoryview(array).cast("B")


def use_large_pages(fd: int, size: int) -> None:
    """Have the file consist of them as far as that goes, before it is filled: the first byte of each is lost.

    Nothing is promised. Who must have the memory reserves it after this.
    """
    whole = size - size % LARGE_BYTES
    if not whole:
        return
    try:
        begin = _map(fd, whole, 0)
    except OSError:
        return
    try:
        _advise(begin, whole, _HUGEPAGE)
        for at in range(0, whole, LARGE_BYTES):  # a page where there is none: an empty range is not made one
            _advise(begin + at, mmap.PAGESIZE, _POPULATE_WRITE)
        _advise(begin, whole, _COLLAPSE)
    except OSError:  # this kernel is too old, is told not to, or has none left
        pass
    finally:
        _libc.munmap(begin, whole)


def _map(fd: int, size: int, flags: int) -> int:
    """The address, a multiple of the size of a large page."""
    reserved = size + LARGE_BYTES
    first = _try_map(None, reserved, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1)
    begin = -(-first // LARGE_BYTES) * LARGE_BYTES
    end = begin - (-size // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        _try_map(begin, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED | flags, fd)
    except OSError:
        _libc.munmap(first, reserved)
        raise
    if begin > first:
        _libc.munmap(first, begin - first)
    _libc.munmap(end, first + reserved - end)
    return begin


def _try_map(at: int | None, size: int, rights: int, flags: int, fd: int) -> int:
    address: int | None = _libc.mmap(at, size, rights, flags, fd, 0)
    if address is None or address == _FAILED:
        raise _error()
    return address


def _advise(begin: int, size: int, advice: int) -> None:
    if _libc.madvise(begin, size, advice):
        raise _error()


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
