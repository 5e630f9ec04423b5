"""``--standby``: for each worker of this node another process that has done all that does not depend on its place in the job.

It is started once every worker has called `rallypoint.worker.ready` and some time has passed, and waits in that call. When the
group is restarted, the workers of the next one are those processes. A program that does not call it has no standby: it could not
be told from one that has begun to work.
"""

from __future__ import annotations

import socket
import time

from rallypoint.agent.capabilities import NoReserve
from rallypoint.base import defaults, report
from rallypoint.base.text import many
from rallypoint.errors import WorkerStartError
from rallypoint.processes.standby_worker import READY
from rallypoint.processes.subprocesses import SubprocessContext

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from rallypoint.processes.context import PContext
    from rallypoint.processes.standby import Standby

__all__ = ["Reserve"]

NOT_CALLED_S = 60.0  # after which it is said that there is no standby because nobody has called `ready`
MOST_LOSSES = 2  # of processes on standby that ended by themselves
MEGABYTE = 1 << 20


class Reserve(NoReserve):
    """The processes on standby, and the lines over which workers say that they could have some."""

    def __init__(self) -> None:
        self._lines: dict[int, socket.socket] = {}  # of the workers that have not called `ready` yet
        self._not_ready: set[int] = set()  # also those that will not call it
        self._theirs: list[socket.socket] = []
        self._standby: Standby | None = None
        self._started_at = 0.0
        self._ready_at: float | None = None  # since when all workers are
        self._losses = 0
        self._has_told = self._is_taken = False

    def equip(self, envs: Mapping[int, dict[str, str]]) -> dict[int, tuple[int, ...]]:
        self._hang_up()
        self._ready_at = None
        if self._is_taken:  # they have called it long ago
            return {}
        files: dict[int, tuple[int, ...]] = {}
        for local_rank, env in envs.items():
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            self._lines[local_rank] = ours
            self._not_ready.add(local_rank)
            self._theirs.append(theirs)
            env[defaults.ENV_STANDBY] = str(theirs.fileno())
            files[local_rank] = (theirs.fileno(),)
        return files

    def started(self) -> None:
        self._close_theirs()
        self._started_at = time.monotonic()
        if self._is_taken:
            self._is_taken, self._ready_at = False, self._started_at

    def look(self, context: PContext, now: float) -> None:
        if self._standby is not None:
            self._look_at_standby(self._standby, now)
        for local_rank, line in list(self._lines.items()):
            self._hear(local_rank, line, now)
        if self._ready_at is None:
            self._tell_if_nobody_calls(now)
        elif self._standby is None and self._losses < MOST_LOSSES and now >= self._ready_at + defaults.STANDBY_AFTER_S:
            self._start(context)

    def _hear(self, local_rank: int, line: socket.socket, now: float) -> None:
        try:
            word = line.recv(1)
        except BlockingIOError:
            return
        except ConnectionError:
            word = b""
        line.close()
        del self._lines[local_rank]
        if word == READY:
            self._not_ready.remove(local_rank)
        if not self._not_ready:
            self._ready_at = now

    def _tell_if_nobody_calls(self, now: float) -> None:
        if self._lines and not self._has_told and now >= self._started_at + NOT_CALLED_S:
            self._has_told = True
            report.info("--standby: nobody is on standby, as long as workers have not called rallypoint.worker.ready()")

    def _start(self, context: PContext) -> None:
        if not isinstance(context, SubprocessContext):
            self._lose("only programs can be on standby, not functions", MOST_LOSSES)
            return
        try:
            self._standby = context.start_standby()
        except (OSError, WorkerStartError) as error:
            self._lose(str(error), 1)

    def _look_at_standby(self, standby: Standby, now: float) -> None:
        was_ready = standby.is_ready
        standby.look()
        if standby.ended:
            self._lose(f"a process on standby {standby.ended}", 1)
            self._ready_at = now
        elif standby.is_ready and not was_ready:
            size = standby.memory_bytes() / MEGABYTE
            report.info(f"{many(len(standby.pids), 'process', 'processes')} on standby, with {size:,.0f} MiB of memory")

    def _lose(self, why: str, count: int) -> None:
        self._losses += count
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.close()
        more = "" if self._losses < MOST_LOSSES else "; there will be no other"
        report.warn(f"--standby: {why}{more}")

    def news_fds(self) -> list[int]:
        lines = [line.fileno() for line in self._lines.values()]
        return lines + (self._standby.news_fds() if self._standby is not None else [])

    def next_look_at(self) -> float | None:
        if self._ready_at is None:
            return None if self._has_told or not self._lines else self._started_at + NOT_CALLED_S
        if self._standby is None and self._losses < MOST_LOSSES:
            return self._ready_at + defaults.STANDBY_AFTER_S
        return None

    def take(self) -> Standby | None:
        if self._standby is not None:
            self._look_at_standby(self._standby, time.monotonic())
        standby, self._standby = self._standby, None
        self._is_taken = standby is not None
        return standby

    def close(self) -> None:
        self._hang_up()
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.close()

    def _hang_up(self) -> None:
        self._close_theirs()
        for line in self._lines.values():
            line.close()
        self._lines.clear()
        self._not_ready.clear()

    def _close_theirs(self) -> None:
        for line in self._theirs:
            line.close()
        self._theirs.clear()
