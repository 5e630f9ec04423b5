"""The agent's side of a node that has to leave: it hears the notice, tells workers and other nodes, and sees when all have saved.

`protocol.draining` decides. What is told here comes from any thread: the agent's own, the health endpoint's, the rendezvous's.
Workers are told at once, in that thread, by a word in the page of memory that they share with the agent. The agent's
own thread then looks at what they answer, for as long as there is a notice; while there is none, nobody looks at anything.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Callable

from rallypoint.agent.capabilities import hold_on
from rallypoint.base import report
from rallypoint.hangs.pulse import DrainBoard
from rallypoint.net.wake_fd import WakeFd
from rallypoint.processes.context import PContext
from rallypoint.protocol import draining
from rallypoint.protocol.draining import Drain, WorkerDrain
from rallypoint.protocol.job_records import NO_STEP, NodeDrain, Ruling
from rallypoint.protocol.session import Noticed, Ruled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.agent.peers import NoJob
    from rallypoint.rendezvous.coordinated import CoordinatedHandler

__all__ = ["Draining"]

ALONE = "this node"


class Draining:
    """Of one agent, for all of its generations. Without `grace_s` this node gets no notice of its own, but hears of others'."""

    def __init__(
        self, job: CoordinatedHandler | NoJob, page_fd: Callable[[], int], size: int, grace_s: float | None, forward: str
    ) -> None:
        self._job = job
        self._page_fd = page_fd
        self._size = size
        self._grace_s = grace_s
        self._forward = signal.Signals[forward] if forward else None
        self._lock = threading.Lock()
        self._news = WakeFd()  # for the agent's thread
        self._bell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) if grace_s is not None else None  # for threads of workers
        self._board: DrainBoard | None = None
        self._generation = -1  # whose workers run
        self._drain: Drain | None = None
        self._drain_of = -1
        self._held_at = 0.0
        self._ended: frozenset[int] = frozenset()  # workers that have ended well
        self._reported: NodeDrain | None = None
        self._has_forwarded = False

    # --- the life of a generation ------------------------------------------------------------------------------------------

    def place(self) -> str:
        """Where workers find the pipe that says that there is a notice."""
        return f"/proc/{os.getpid()}/fd/{self._bell[0]}" if self._bell is not None else ""

    def begin(self, generation: int) -> None:
        """These workers are about to be started, and their pages are blank. Others may have had notice before they were."""
        with self._lock:
            self._generation = generation
            is_new = self._drain is not None and self._drain_of != generation
            if is_new and self.is_leaving:  # we had notice while they were being started
                self._drain_of = generation
            elif is_new:
                self._drain = None
                if self._bell is not None:
                    _empty(self._bell[0])
            self._reported, self._has_forwarded, self._ended = None, False, frozenset()
            if self._drain is not None:
                self._tell_workers(self._drain)
        if is_new and self._drain is not None:
            self._job.give_notice(generation, self._drain.why, max(0.0, self._drain.ends_at - time.monotonic()))
            self._job.report_drain(generation, NodeDrain(True, self._job.hosts_store()))

    def close(self) -> None:
        with self._lock:
            if self._board is not None:
                self._board.close()
                self._board = None
            for fd in self._bell or ():
                os.close(fd)
            self._bell = None
            self._news.close()
            self._generation = -1

    # --- notice ------------------------------------------------------------------------------------------------------------

    def give_notice(self, why: str) -> float:
        """This node has to leave; how many seconds its workers have. To be told so twice is a matter of urgency."""
        now = time.monotonic()
        with self._lock:
            before = self._drain if self._drain_of == self._generation else None
            drain = self._drain = draining.hear_notice(before, why, self._grace_s or 0.0, now)
            self._drain_of = self._generation
            is_new = before is None or not before.is_leaving
            if is_new:
                self._tell_workers(drain)
            left_s = max(0.0, drain.ends_at - now)
        if is_new:
            self._job.give_notice(self._drain_of, why, left_s)
            self._job.report_drain(self._drain_of, NodeDrain(True, self._job.hosts_store()))  # who budgets knows why we go
            report.warn(f"{why}: this node leaves within {left_s:g} s, when all workers have saved")
        self._news.set()
        return left_s

    def hear(self, news: Noticed | Ruled) -> None:
        """What the job says, on the thread of the rendezvous."""
        now = time.monotonic()
        with self._lock:
            before = self._drain if self._drain_of == news.generation else None
            if before is None and self.is_leaving:  # `begin` takes our own notice along into that generation
                return
            if isinstance(news, Noticed):
                drain = draining.hear_elsewhere(before, news.notice, now)
            elif before is not None:
                drain = before.replace(ruling=news.ruling)
            else:
                return
            self._drain, self._drain_of = drain, news.generation
            if news.generation == self._generation:
                self._tell_workers(drain)
        if before is None and isinstance(news, Noticed):
            notice = news.notice
            report.info(f"{notice.by} leaves within {notice.left_s:.0f} s, when all workers have saved: {notice.why}")

    def _tell_workers(self, drain: Drain) -> None:
        """Whatever they do. The pages are mapped when there is something to write in them for the first time."""
        if self._board is None and (fd := self._page_fd()) >= 0:
            self._board = self._open_board(fd)
        if self._board is None:
            return
        if drain.ruling.step != NO_STEP:
            self._board.let_go(drain.ruling.step)
            self._board.tell_end(drain.ends_at)
            return
        self._board.hold(drain.ends_at)
        self._held_at = time.monotonic()
        if self._bell is not None:
            os.write(self._bell[1], b"!")

    def _open_board(self, fd: int) -> DrainBoard | None:
        try:
            return DrainBoard(fd, self._size)
        except OSError as error:  # no memory is left; the notice counts all the same
            report.warn(f"the workers cannot be told that a node leaves, and save only if they know otherwise: {error}")
            return None

    # --- for the agent's thread --------------------------------------------------------------------------------------------

    @property
    def is_leaving(self) -> bool:
        drain = self._drain
        return drain is not None and drain.is_leaving

    def fileno(self) -> int:
        return self._news.fileno()

    def next_look_at(self) -> float | None:
        drain = self._drain
        if drain is None or self._drain_of != self._generation:
            return None
        return draining.next_look_at(drain, time.monotonic())

    def look(self, context: PContext | None, acts_as_one: bool) -> draining.Stay | draining.Go | draining.GoAtOnce:
        """Hear what workers answer, pass it on, and say whether it is time to leave."""
        self._news.clear()
        now = time.monotonic()
        with self._lock:
            drain, board = self._drain, self._board
            if drain is None or self._drain_of != self._generation:
                return draining.Stay()
            self._pass_signal_on(context)
            if board is not None and draining.may_report(self._held_at, now):
                drain = self._drain = self._hear_workers(drain, board, context, acts_as_one)
        return draining.decide(drain, now)  # the time runs out also where workers cannot be heard

    def _hear_workers(self, drain: Drain, board: DrainBoard, context: PContext | None, acts_as_one: bool) -> Drain:
        self._ended = hold_on(context).succeeded
        told = draining.summarize(self._answers(board), drain.is_leaving, self._job.hosts_store())
        if not acts_as_one:
            return self._rule_alone(drain, told, board)
        if told != self._reported:
            self._reported = told
            self._job.report_drain(self._generation, told)
        return drain

    def have_ended_to_save(self) -> bool:
        """All workers have ended well; whether that was because they were told to save, and not because their work was done."""
        with self._lock:
            if self._drain is None or self._board is None or self._drain_of != self._generation:
                return False
            return all(was_told for _, was_told, _ in self._board.answers())

    def _pass_signal_on(self, context: PContext | None) -> None:
        if self._forward is not None and not self._has_forwarded:
            self._has_forwarded = True
            hold_on(context).pass_on(self._forward)

    def _answers(self, board: DrainBoard) -> list[WorkerDrain]:
        """A worker that was told to save, and has ended well, has done so."""
        return [
            WorkerDrain(asked - 1 if asked else NO_STEP, was_told, has_saved or (was_told and rank in self._ended))
            for rank, (asked, was_told, has_saved) in enumerate(board.answers())
        ]

    def _rule_alone(self, drain: Drain, told: NodeDrain, board: DrainBoard) -> Drain:
        """Where nobody else rules."""
        ruling: Ruling = draining.rule((ALONE,), {ALONE: told}, drain.ruling)
        if ruling.step != drain.ruling.step:
            board.let_go(ruling.step)
        return drain.replace(ruling=ruling)


def _empty(fd: int) -> None:
    try:
        os.read(fd, mmap.PAGESIZE)
    except BlockingIOError:
        return
