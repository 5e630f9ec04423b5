"""A Unix socket that only its owner, and root, can talk to.

The kernel gives the socket's file the mode that the socket has when it is bound. So the file is never open to others, not for
a moment, and the umask, which all threads share, is left alone. It is bound under another name and moved to its place when it
listens: whoever finds it there can connect.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator

from rallypoint.errors import UsageError

__all__ = ["PrivateSocket", "is_from_owner", "peer_of"]

PATH_BYTES_MAX = 107  # that the kernel takes, without the zero at the end
BACKLOG = 128
PROBE_S = 1.0
CREDENTIALS = struct.Struct("3i")  # process, user and group


class PrivateSocket:
    """A socket that listens at `path`, until it is removed; `purpose` is who asked for it, for errors.

    A socket there that nobody listens on any more is replaced. UsageError: somebody does, or it is no socket, or
    it cannot be made.
    """

    def __init__(self, path: str, purpose: str) -> None:
        self.path = os.path.abspath(path)  # the process may go elsewhere, and who asks is elsewhere
        if len(os.fsencode(self.path)) > PATH_BYTES_MAX:
            raise UsageError(f"{purpose}: a path of a socket has at most {PATH_BYTES_MAX} bytes, and {self.path!r} has more")
        self._owner = os.getpid()
        try:
            self.listener = _listen(*os.path.split(self.path), purpose)
        except OSError as error:
            raise UsageError(f"{purpose}: {path!r} cannot be listened at: {error.strerror or error}") from error
        self._file = _identity(self.path)

    def remove(self) -> None:
        """Take the file away, unless it is another's by now; a fork of the owner leaves it alone. The listener stays open."""
        if os.getpid() == self._owner and self._file is not None and _identity(self.path) == self._file:
            with contextlib.suppress(OSError):  # somebody else was quicker, or has made the folder read-only
                os.unlink(self.path)


def _listen(folder: str, name: str, purpose: str) -> socket.socket:
    with _opened(folder) as folder_fd:
        _make_way(os.path.join(folder, name), purpose)
        scratch = f".rallypoint-{os.getpid()}-{os.urandom(4).hex()}"
        listener = socket.socket(socket.AF_UNIX)
        try:
            os.fchmod(listener.fileno(), 0o600)
            listener.bind(f"/proc/self/fd/{folder_fd}/{scratch}")  # so that the longer name needs no longer path
            _move_when_listening(listener, scratch, name, folder_fd)
        except BaseException:  # raised again; the socket must not stay open
            listener.close()
            raise
        return listener


def _move_when_listening(listener: socket.socket, scratch: str, name: str, folder_fd: int) -> None:
    try:
        listener.listen(BACKLOG)
        os.rename(scratch, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    except BaseException:  # raised again; nothing may be left in the folder
        os.unlink(scratch, dir_fd=folder_fd)
        raise


@contextlib.contextmanager
def _opened(folder: str) -> Iterator[int]:
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _make_way(path: str, purpose: str) -> None:
    """See that nothing is at the path that must not be replaced."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"{purpose}: {path!r} exists, and is no socket; it is left as it is")
    listener_pid = _who_listens(path)
    if listener_pid is not None:
        raise UsageError(f"{purpose}: process {listener_pid} listens at {path!r} already; each worker needs a path of its own")


def _who_listens(path: str) -> int | None:
    """The process, or None where the socket was left behind by one that is gone."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except BlockingIOError as error:  # many wait to be let in, so somebody is there
            raise OSError(error.errno, "another process listens there already, and is busy") from error
        return peer_of(probe)[0]


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    pid, uid, _ = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return pid, uid


def is_from_owner(sock: socket.socket) -> bool:
    """Whether the peer is this process's user or root, whatever the mode of the file has become."""
    try:
        return peer_of(sock)[1] in (0, os.geteuid())
    except OSError:  # it has gone
        return False
