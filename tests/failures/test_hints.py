"""A full disk, a broken pipe, a lost mount: the exception is told for what it is, and no other exception is."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.failures.hints import hint_for


@pytest.mark.parametrize(
    ("exception", "begins", "ends"),
    [
        ("OSError: [Errno 28] No space left on device: '/data/step 3.pt'", "the disk is full", "; it was /data/step 3.pt"),
        ("OSError: [Errno 28] No space left on device", "the disk is full", "`df -i` there"),
        ("RuntimeError: PytorchStreamWriter failed writing file: No space left on device", "the disk is full", "there"),
        ("OSError: [Errno 116] Stale file handle: '/mnt/data/a'", "the mount is stale", "; it was /mnt/data/a"),
        ("OSError: [Errno 5] Input/output error: '/mnt/data/a'", "the disk, or the file server", "; it was /mnt/data/a"),
        ("OSError: [Errno 107] Transport endpoint is not connected: '/mnt/s3'", "the mount is gone", "; it was /mnt/s3"),
        ("OSError: [Errno 122] Disk quota exceeded", "the disk quota", "`quota -s`"),
        ("OSError: [Errno 30] Read-only file system: '/data/x'", "the file system is read-only", "; it was /data/x"),
        ("BrokenPipeError: [Errno 32] Broken pipe", "it wrote to a pipe", "first"),
        ("OSError: [Errno 24] Too many open files: 'x'", "the process has no open files left", "; it was x"),
        ("MemoryError", "Python found no memory", "more"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "the GPU has no memory left", "`"),
    ],
)
def test_it_is_told_for_what_it_is(exception: str, begins: str, ends: str) -> None:
    assert hint_for(exception).startswith(begins)
    assert hint_for(exception).endswith(ends)


@pytest.mark.parametrize(
    "exception",
    [
        "",
        "ValueError: the learning rate is -1",
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/x'",
        "OSError: [Errno 107] Transport endpoint is not connected",  # of a socket
        "OSError: [Errno 5] Input/output error",  # of a terminal
        "OSError: [Errno 99999999999999999999] what",
        "OSError: [Errno",
        "exited with code 28",
    ],
)
def test_where_there_may_be_another_reason_nothing_is_said(exception: str) -> None:
    assert hint_for(exception) == ""


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EROFS, errno.EMFILE, errno.EIO, errno.ENOTCONN]
)
def test_it_knows_what_python_says(number: int) -> None:
    error = OSError(number, os.strerror(number), "/data/x")
    assert hint_for(f"{type(error).__name__}: {error}").endswith("; it was /data/x")


@given(st.text())
def test_nothing_raises(text: str) -> None:
    assert isinstance(hint_for(text), str)
    assert isinstance(hint_for(f"OSError: [Errno {text}"), str)
