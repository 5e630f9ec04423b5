"""What lasts, and has to be undone: processes that stand still or go slowly, connections that hear nothing, a disk or memory
that is full. Each is done when it is made, goes on by `turn`, and is undone by `undo`, which may be called at any moment, and
again.

Nothing here leaves a trace that outlives whoever holds it, but for stopped processes, which somebody has to continue:

- Connections are cut by a filter on the agent's own sockets, of which the kernel gives us a copy (``pidfd_getfd``). No rule
  of the machine's is touched, and nobody else's packets; a filter is gone with its socket.
- The file that fills a disk has no name, and memory is that of a child of ours: the kernel frees both when that child ends,
  and ends it with us. Where memory runs out, the kernel is told to take this child first.
"""

from __future__ import annotations

import errno
import mmap
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator, Sequence

from rallypoint.base.text import size_text
from rallypoint.processes import kernel

__all__ = ["Cut", "Filled", "Hold", "Slowed", "Stopped", "go_on", "heal", "why_no_cut"]

PERIOD_S = 0.1  # in which a slow process runs and stands once
LOOK_S = 0.001  # for new connections of a node that is cut off: in some milliseconds it would be in the job again
Process = tuple[int, int]  # its descriptor and its id, which is its own for as long as it is there
_PIDFD_GETFD = 438
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # a filter of one instruction: let nothing through
_CHUNK = 64 << 20
_PAGE = mmap.PAGESIZE
MOST_DISK = 64 << 30
MARGIN_SHARE, MARGIN_LEAST = 0.05, 256 << 20  # of memory, that is left for others


class Hold:
    """`next_at` is when `turn` is due; `fd` is readable when it has something to tell."""

    next_at = float("inf")
    fd: int | None = None

    def turn(self, now: float) -> None:
        return

    def news(self) -> str:
        """What is to be told, in words."""
        return ""

    def undo(self) -> None:
        return


# --- processes -------------------------------------------------------------------------------------------------------------


def signal_all(pidfds: Sequence[int], number: signal.Signals) -> int:
    """How many of these processes were there for it."""
    reached = 0
    for fd in pidfds:
        try:
            signal.pidfd_send_signal(fd, number)
        except (ProcessLookupError, PermissionError):  # it has ended, or become somebody else
            continue
        reached += 1
    return reached


def go_on(pidfds: Sequence[int]) -> None:
    signal_all(pidfds, signal.SIGCONT)


class Stopped(Hold):
    """They stand still."""

    def __init__(self, pidfds: Sequence[int]) -> None:
        self._pidfds = pidfds
        signal_all(pidfds, signal.SIGSTOP)

    def undo(self) -> None:
        go_on(self._pidfds)


class Slowed(Hold):
    """They run for a share of their time."""

    def __init__(self, pidfds: Sequence[int], percent: int, now: float) -> None:
        self._pidfds, self._share = pidfds, percent / 100
        self._are_standing = False
        self.next_at = now

    def turn(self, now: float) -> None:
        self._are_standing = not self._are_standing
        signal_all(self._pidfds, signal.SIGSTOP if self._are_standing else signal.SIGCONT)
        self.next_at = now + PERIOD_S * ((1 - self._share) if self._are_standing else self._share)

    def undo(self) -> None:
        go_on(self._pidfds)


# --- connections -----------------------------------------------------------------------------------------------------------


class Cut(Hold):
    """The connections that processes have made, and those that they make meanwhile, hear nothing more.

    What is sent still goes out, as with a firewall that drops one direction; but the answers do not come, and a connection
    that is closed stays open for the other side.
    """

    def __init__(self, processes: Sequence[Process], now: float) -> None:
        self._processes = processes
        self._silenced: list[socket.socket] = []
        self._known: set[int] = set()
        self._own_ports: set[int] = set()  # whoever connects to these is not cut off: health, the workers' store
        self.turn(now)

    @property
    def count(self) -> int:
        return len(self._silenced)

    def turn(self, now: float) -> None:
        self.next_at = now + LOOK_S
        found = list(_tcp_sockets(self._processes, self._known))
        self._own_ports.update(one.getsockname()[1] for one in found if _listens(one))
        for one in found:
            if one.getsockname()[1] not in self._own_ports:
                _silence(one)
                self._silenced.append(one)
            else:
                one.close()

    def undo(self) -> None:
        for one in self._silenced:
            _heal(one)
            one.close()
        self._silenced.clear()


def why_no_cut(process: Process) -> str:
    """Why the connections of a process cannot be cut; empty if they can."""
    try:
        for sock in _tcp_sockets([process], set()):
            sock.close()
    except PermissionError:
        return (
            "this system does not let one process have a copy of another's connections"
            " (see kernel.yama.ptrace_scope, or in a container the capability SYS_PTRACE)"
        )
    except OSError as error:
        return f"the agent's connections cannot be copied: {error.strerror}"
    return ""


def heal(processes: Sequence[Process]) -> None:
    """Undo what somebody has done who is not there any more."""
    for sock in _tcp_sockets(processes, set()):
        _heal(sock)
        sock.close()


def _tcp_sockets(processes: Sequence[Process], known: set[int]) -> Iterator[socket.socket]:
    """Copies of those that are not `known` yet, by their inodes."""
    for pidfd, pid in processes:
        for fd, inode in _sockets(pid):
            if inode in known:
                continue
            known.add(inode)
            copy = _copy_of(pidfd, fd)
            if copy is not None and copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                yield copy
            elif copy is not None:
                copy.close()


def _sockets(pid: int) -> Iterator[tuple[int, int]]:
    """The number and the inode of each."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:  # it has ended
        return
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            yield int(name), int(target[8:-1])


def _copy_of(pidfd: int, fd: int) -> socket.socket | None:
    """Of a file of another process; None if it is closed by now. OSError: it cannot be had."""
    import ctypes

    copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, fd, 0)
    number = ctypes.get_errno()
    if copy < 0 and number in (errno.EBADF, errno.ESRCH):
        return None
    if copy < 0:
        raise OSError(number, os.strerror(number))
    try:
        return socket.socket(fileno=copy)
    except OSError:  # the number is another file's by now, and no socket
        os.close(copy)
        return None


def _listens(sock: socket.socket) -> bool:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 0


def _silence(sock: socket.socket) -> None:
    import ctypes

    program = ctypes.create_string_buffer(_DROP, len(_DROP))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program)))


def _heal(sock: socket.socket) -> None:
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
    except OSError:  # it has none
        return


# --- room ------------------------------------------------------------------------------------------------------------------


class Filled(Hold):
    """A child of ours has taken what there was of memory, or of the disk of a folder; it tells how much."""

    def __init__(self, folder: str, size: int) -> None:
        self.fd, write_fd = os.pipe()
        parent = os.getpid()
        self._child = os.fork()
        if self._child == 0:
            _take(parent, write_fd, folder, size)
        os.close(write_fd)

    def news(self) -> str:
        if self.fd is None:
            return ""
        said = os.read(self.fd, 4096).decode(errors="replace")
        os.close(self.fd)
        self.fd = None
        return said or "the process that was to take it has ended"

    def undo(self) -> None:
        """It is not waited for: it may be stuck in a file system, and the signal waits there for it."""
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, os.WNOHANG)
            self._child = 0
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _take(parent: int, write_fd: int, folder: str, size: int) -> None:
    """In the child, which never returns."""
    try:
        kernel.die_with_parent()
        if os.getppid() != parent:
            return
        kernel.set_name("rally-filler")
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
        held = _take_disk(folder, size) if folder else _take_memory(size)
        os.write(write_fd, held.encode())
        os.close(write_fd)
        while True:
            time.sleep(3600)
    except OSError as error:
        os.write(write_fd, f"it could not be filled: {error.strerror}".encode())
    finally:
        os._exit(0)


_taken: list[mmap.mmap] = []


def _take_memory(size: int) -> str:
    from rallypoint.preflight.checks import memory_left

    left = memory_left()
    if left is None:
        return "it could not be filled: this system does not say how much memory is left"
    most = max(left - max(MARGIN_LEAST, int(left * MARGIN_SHARE)), 0)
    wanted = min(size or most, most)
    for begin in range(0, wanted, _CHUNK):
        part = mmap.mmap(-1, min(_CHUNK, wanted - begin))
        part[::_PAGE] = b"\1" * -(-len(part) // _PAGE)
        _taken.append(part)
    return f"{size_text(wanted)} of memory are taken, {size_text(left - wanted)} are left"


def _take_disk(folder: str, size: int) -> str:
    fd = _nameless_file(folder)
    wanted = size or MOST_DISK
    taken, step = 0, _CHUNK
    while taken < wanted and step >= _PAGE:
        try:
            os.posix_fallocate(fd, taken, min(step, wanted - taken))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            step //= 4
        else:
            taken += min(step, wanted - taken)
    space = os.statvfs(folder)
    return f"{size_text(taken)} of its disk are taken, {size_text(space.f_bavail * space.f_frsize)} are left"


def _nameless_file(folder: str) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    path = os.path.join(folder, f".rallypoint-chaos-{os.getpid()}")
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    os.unlink(path)
    return fd
