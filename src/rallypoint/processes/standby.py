"""Workers on standby: a group that was started ahead of its time, and waits in `rallypoint.worker.ready` for its place.

They are children of a warden of their own, which has no licence until they are workers: they belong to no generation. What they
write until then stays in memory, and comes first in the output of the workers that they become.
"""

from __future__ import annotations

import os
import socket
import time

from rallypoint.base import defaults, limits
from rallypoint.processes import warden_client
from rallypoint.processes.frames import send_frame
from rallypoint.processes.standby_worker import READY, WAIT
from rallypoint.processes.warden_client import Exited, FailedToStart, Launch, Lost, Started

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from rallypoint.processes.warden_client import WardenClient

__all__ = ["Standby"]

SEND_TIMEOUT_S = 1.0  # there is room in the line, also while nobody reads
STDERR_BYTES = 4096


class Standby:
    """`launches` have no streams yet, and no files but those in which a worker keeps snapshots now (`checkpoint.ahead`).

    `prepare` asks the warden for what workers are to find imported.
    """

    def __init__(self, launches: list[Launch], prepare: Callable[[WardenClient, list[Launch]], None]) -> None:
        """WorkerStartError: no warden could be started."""
        self.warden = warden_client.take()
        self.pids: dict[int, int] = {}
        self.ended = ""  # what became of the first that has ended
        self._ready: set[int] = set()
        self._size = len(launches)
        self._lines: dict[int, socket.socket] = {}
        self._errors = {launch.local_rank: _memory_file() for launch in launches}
        warden_client.stop_with_us(self.warden.pid)
        self._spawn(launches, prepare)

    def _spawn(self, launches: list[Launch], prepare: Callable[[WardenClient, list[Launch]], None]) -> None:
        closing = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
        ahead = []
        for launch in launches:
            ours, theirs = socket.socketpair()
            self._lines[launch.local_rank] = ours
            ours.setblocking(False)
            line_fd, out_fd = theirs.detach(), _memory_file()
            closing += [line_fd, out_fd]
            env = {**launch.env, defaults.ENV_STANDBY: f"{line_fd}:{WAIT}:{','.join(map(str, launch.fds))}"}
            files = {0: closing[0], 1: out_fd, 2: self._errors[launch.local_rank], line_fd: line_fd}
            ahead.append(launch.replace(env=env, fds={**launch.fds, **files}))
        try:
            prepare(self.warden, ahead)
            self.warden.spawn(ahead)
        finally:
            for fd in closing:
                os.close(fd)

    def news_fds(self) -> list[int]:
        return [self.warden.fileno(), *(line.fileno() for rank, line in self._lines.items() if rank not in self._ready)]

    @property
    def is_ready(self) -> bool:
        """Whether all wait for their places."""
        return len(self._ready) == self._size

    def look(self) -> None:
        """Take in what has happened."""
        for news in self.warden.receive():
            match news:
                case Started(rank, pid):
                    self.pids[rank] = pid
                case FailedToStart(rank, errno, reason):
                    self.ended = self.ended or f"could not be started: {limits.explain(errno) or reason}"
                case Exited(rank, pid, exitcode, _):
                    self.ended = self.ended or f"(local rank {rank}, process {pid}) {_how(exitcode)}{self._last_words(rank)}"
                case Lost():
                    self.ended = self.ended or "lost the process that had started it"
        for rank, line in self._lines.items():
            if rank not in self._ready and _has_said_ready(line):
                self._ready.add(rank)

    def _last_words(self, rank: int) -> str:
        fd = self._errors[rank]
        size = os.fstat(fd).st_size
        lines = os.pread(fd, STDERR_BYTES, max(0, size - STDERR_BYTES)).decode(errors="replace").splitlines()
        return f": {lines[-1].strip()}" if lines else ""

    def memory_bytes(self) -> int:
        """What they take, counted as if nothing were shared but what the agent keeps for workers."""
        return sum(map(_own_bytes, self.pids.values()))

    def hand_over(self, launches: list[Launch], licence_fd: int | None) -> None:
        """Let them be these workers, as long as the licence says."""
        if licence_fd is not None:
            self.warden.license(licence_fd)
        for launch in launches:
            streams = {target: fd for target, fd in launch.fds.items() if target <= 2}
            kept = {target: fd for target, fd in launch.fds.items() if target > 2}
            fds = [*streams.values(), *kept.values()]
            places = list(enumerate([*streams, *kept]))
            message = (
                launch.env,
                [(target, position) for position, target in places[: len(streams)]],
                [(target, position) for position, target in places[len(streams) :]],
            )
            _send(self._lines[launch.local_rank], message, fds)
        self.let_go()

    def close(self) -> None:
        """They are not needed."""
        self.let_go()
        warden_client.stop_alone(self.warden.pid)
        self.warden.close()

    def let_go(self) -> None:
        """Close what is ours, but for the warden."""
        for line in self._lines.values():
            line.close()
        for fd in self._errors.values():
            os.close(fd)
        self._lines.clear()
        self._errors.clear()


def _memory_file() -> int:
    return os.memfd_create("rally-standby", os.MFD_CLOEXEC)


def _own_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            fields = dict(line.split(b":", 1) for line in status)
    except (OSError, ValueError):  # it has ended
        return 0
    return sum(int(fields.get(name, b"0 kB").split()[0]) for name in (b"RssAnon", b"RssFile")) * 1024


def _how(exitcode: int) -> str:
    return f"ended with exit code {exitcode}" if exitcode >= 0 else f"was ended by signal {-exitcode}"


def _has_said_ready(line: socket.socket) -> bool:
    try:
        return line.recv(1) == READY
    except (BlockingIOError, ConnectionError):
        return False


def _send(line: socket.socket, message: tuple[object, ...], fds: list[int]) -> None:
    try:
        send_frame(line, message, fds, time.monotonic() + SEND_TIMEOUT_S)
    except OSError:  # it has ended, which its warden tells
        return
