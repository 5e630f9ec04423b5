"""``--standby``: for each worker of this node another process that has done all that does not depend on its place in the job.

It waits in `rallypoint.worker.ready`. When the group is restarted, the workers of the next one are those processes. A program
that does not call it has no standby: it could not be told from one that has begun to work. When they are started is decided in
`processes.standby_rules`.
"""

from __future__ import annotations

import socket
import time

from rallypoint.agent.capabilities import NoReserve
from rallypoint.base import defaults, report
from rallypoint.base.outbox import Outbox
from rallypoint.base.text import many
from rallypoint.errors import WorkerStartError
from rallypoint.processes import standby_rules
from rallypoint.processes.standby_worker import READY
from rallypoint.processes.subprocesses import SubprocessContext

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from rallypoint.processes.context import PContext
    from rallypoint.processes.standby import Standby

__all__ = ["Reserve"]

MEGABYTE = 1 << 20


class Reserve(NoReserve):
    """The processes on standby, and the lines over which workers say that they could have some."""

    def __init__(self) -> None:
        self._lines: dict[int, socket.socket] = {}  # of the workers of whom something may be heard
        self._theirs: list[socket.socket] = []
        self._standby: Standby | None = None
        self._known = standby_rules.Known()
        self._is_taken = False
        self._gpu_teller = Outbox(_tell_gpu_memory)  # the driver is asked, and nobody waits for that

    def equip(self, envs: Mapping[int, dict[str, str]]) -> dict[int, tuple[int, ...]]:
        self._hang_up()
        ranks, self._is_taken = () if self._is_taken else tuple(envs), False  # who was on standby has called it long ago
        self._known = standby_rules.begin(self._known, ranks)
        files: dict[int, tuple[int, ...]] = {}
        for local_rank in ranks:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            self._lines[local_rank] = ours
            self._theirs.append(theirs)
            envs[local_rank][defaults.ENV_STANDBY] = str(theirs.fileno())
            files[local_rank] = (theirs.fileno(),)
        return files

    def started(self) -> None:
        self._close_theirs()
        self._known = standby_rules.started(self._known, time.monotonic())

    def look(self, context: PContext, now: float) -> None:
        if self._standby is not None:
            self._look_at_standby(self._standby, now)
        for local_rank, line in list(self._lines.items()):
            self._hear(local_rank, line, now)
        match standby_rules.decide(self._known, now):
            case standby_rules.Start():
                self._start(context, now)
            case standby_rules.TellNobodyCalls():
                self._known = self._known.replace(has_told=True)
                report.info("--standby: nobody is on standby, as long as workers have not called rallypoint.worker.ready()")

    def _hear(self, local_rank: int, line: socket.socket, now: float) -> None:
        try:
            word = line.recv(1)
        except BlockingIOError:
            return
        except ConnectionError:
            word = b""
        line.close()
        del self._lines[local_rank]
        self._known = standby_rules.heard(self._known, local_rank, word == READY, now)

    def _start(self, context: PContext, now: float) -> None:
        if not isinstance(context, SubprocessContext):
            self._lose("only programs can be on standby, not functions", now, is_for_good=True)
            return
        try:
            self._standby = context.start_standby()
            self._known = self._known.replace(has_standby=True)
        except (OSError, WorkerStartError) as error:
            self._lose(str(error), now)

    def _look_at_standby(self, standby: Standby, now: float) -> None:
        was_ready = standby.is_ready
        standby.look()
        if standby.ended:
            self._lose(f"a process on standby {standby.ended}", now)
        elif standby.is_ready and not was_ready:
            size = standby.memory_bytes() / MEGABYTE
            report.info(f"{many(len(standby.pids), 'process', 'processes')} on standby, with {size:,.0f} MiB of memory")
            self._gpu_teller.put(frozenset(standby.pids.values()), may_wait=False)

    def _lose(self, why: str, now: float, is_for_good: bool = False) -> None:
        self._known = standby_rules.lost(self._known, now, is_for_good)
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.close()
        more = "" if standby_rules.will_retry(self._known) else "; there will be no other"
        report.warn(f"--standby: {why}{more}")

    def news_fds(self) -> list[int]:
        lines = [line.fileno() for line in self._lines.values()]
        return lines + (self._standby.news_fds() if self._standby is not None else [])

    def next_look_at(self) -> float | None:
        now = time.monotonic()
        decision = standby_rules.decide(self._known, now)
        return decision.until if isinstance(decision, standby_rules.Wait) else now

    def take(self) -> Standby | None:
        if self._standby is not None:
            self._look_at_standby(self._standby, time.monotonic())
        standby, self._standby = self._standby, None
        self._known, self._is_taken = standby_rules.taken(self._known), standby is not None
        return standby

    def close(self) -> None:
        self._hang_up()
        self._gpu_teller.abandon()
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.close()

    def _hang_up(self) -> None:
        self._close_theirs()
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def _close_theirs(self) -> None:
        for line in self._theirs:
            line.close()
        self._theirs.clear()


def _tell_gpu_memory(pids: frozenset[int]) -> None:
    from rallypoint.hardware.gpu_use import GpuMeter

    size = GpuMeter().memory_of(pids) / MEGABYTE
    if size:
        report.info(f"the processes on standby have {size:,.0f} MiB of GPU memory")
