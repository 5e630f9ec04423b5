"""Files whose content is obeyed: modules that they name are imported, or what was pickled in them is loaded.

Whoever can write such a file runs code as us. So it is read only if nobody else can have written it, whatever folder it lies in,
and written under a name that nobody can have prepared: through no link, for us alone, and as a whole or not at all.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress

__all__ = ["FOREIGN", "NOBODY", "foreign_owner", "open_folder", "open_own", "replace_own", "write_whole"]

NOBODY = 65534  # whom a file server takes root for
FOREIGN = "it belongs to {owner}, who could make root write elsewhere"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_WRITABLE_BY_OTHERS = 0o022


def foreign_owner(status: os.stat_result) -> str:
    """The other user of this machine to whom a folder belongs, if we are root; it is for root that this matters.

    Whoever has no account here, as the owner of what is mounted into a container, can swap nothing here either.
    """
    if os.geteuid() != 0 or status.st_uid in (0, NOBODY):
        return ""
    import pwd

    try:
        return pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        return ""


def open_folder(path: str) -> int:
    """A descriptor of it. PermissionError: another user could swap what is in it under root's hands."""
    fd = os.open(path, _FOLDER)
    owner = foreign_owner(os.fstat(fd))
    if owner:
        os.close(fd)
        raise PermissionError(errno.EPERM, FOREIGN.format(owner=owner))
    return fd


def open_own(name: str, folder: int | None = None) -> int:
    """A descriptor to read it by. PermissionError: somebody else could have written it; else OSError."""
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        _check(os.fstat(fd), name, folder)
    except OSError:
        os.close(fd)
        raise
    return fd


def replace_own(name: str, write: Callable[[int], object], folder: int | None = None) -> None:
    """Write a file that only we may read and write; what had that name before stays until this is whole."""
    new = f"{name}.{os.urandom(4).hex()}"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        try:
            write(fd)
        finally:
            os.close(fd)
        os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(new, dir_fd=folder)
        raise


def write_whole(fd: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(fd, left) :]


def _check(status: os.stat_result, name: str, folder: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _not_ours("it is no plain file")
    if status.st_mode & _WRITABLE_BY_OTHERS:
        raise _not_ours(f"its mode is {stat.S_IMODE(status.st_mode):o}")
    if status.st_uid != os.geteuid() and (status.st_uid != NOBODY or _owner_of_new(name, folder) != NOBODY):
        raise _not_ours(f"it belongs to user {status.st_uid}")


def _owner_of_new(name: str, folder: int | None) -> int:
    """To whom a file belongs that we make there: on a file server root may be nobody."""
    probe = f"{name}.{os.urandom(4).hex()}"
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)
        os.unlink(probe, dir_fd=folder)


def _not_ours(why: str) -> PermissionError:
    return PermissionError(errno.EPERM, f"others could have written it: {why}")
