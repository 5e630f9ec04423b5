"""Send this process's stdout or stderr to a file for a while: Python's own writes, those of C libraries and of children.

The file descriptor itself is replaced, so that whoever writes to it is redirected. What was buffered before is flushed to where
it was meant to go.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["IS_MACOS", "IS_WINDOWS", "get_libc", "get_std_cm", "redirect", "redirect_stderr", "redirect_stdout"]

IS_WINDOWS = sys.platform == "win32"
IS_MACOS = sys.platform == "darwin"

_STREAMS = {"stdout": 1, "stderr": 2}


def get_libc() -> ctypes.CDLL | None:
    """The C library of this process, whose buffers are flushed too; None on Windows, which has none to speak of."""
    return None if IS_WINDOWS else ctypes.CDLL(None)


@contextmanager
def redirect(std: str, to_file: str) -> Iterator[None]:
    """Send `std`, ``"stdout"`` or ``"stderr"``, to a new file for the time of the block.

    >>> import os
    >>> from rallypoint.processes import redirect
    >>> with redirect("stderr", "noise.log"):
    ...     _ = os.system("echo what a library prints >&2")
    >>> open("noise.log").read()
    'what a library prints\\n'
    """
    if std not in _STREAMS:
        raise ValueError(f"unknown standard stream <{std}>, must be one of {set(_STREAMS)}")
    fds = {_STREAMS[std], getattr(sys, std).fileno()}  # a test runner or a notebook gives Python's stream another one
    with open(to_file, "wb") as file:
        _flush(std)
        before = {fd: os.dup(fd) for fd in fds}
        try:
            for fd in fds:
                os.dup2(file.fileno(), fd)
            yield
        finally:
            _flush(std)
            for fd, kept in before.items():
                os.dup2(kept, fd)
                os.close(kept)


redirect_stdout = partial(redirect, "stdout")
redirect_stderr = partial(redirect, "stderr")


def get_std_cm(std_rd: str, redirect_fn: Callable[[str], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """A block that is redirected by `redirect_fn` to the file `std_rd`; one that is not, where no file is named."""
    if IS_WINDOWS or IS_MACOS or not std_rd:
        return nullcontext()
    return redirect_fn(std_rd)


def _flush(std: str) -> None:
    """All that is buffered, by Python and by C; with None, fflush takes every stream of C."""
    getattr(sys, std).flush()
    libc = get_libc()
    if libc is not None:
        libc.fflush(None)
