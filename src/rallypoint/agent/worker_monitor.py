"""How a local agent keeps an eye on its workers beyond their ends: timers that they set, hangs, and the health endpoint.

Each of the three is loaded only where it is used. A worker that has to go for one of them is killed, and the agent then sees its
end as that of any other; what is told of it is the reason, not the signal.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from rallypoint import metrics
from rallypoint.agent.capabilities import hold_on
from rallypoint.agent.records import RunRecord
from rallypoint.agent.workers import WorkerGroup, WorkerSpec
from rallypoint.base import defaults, environment, report
from rallypoint.processes.context import PContext
from rallypoint.processes.warden_context import EndReason

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

    from rallypoint.agent.pace_watch import PaceWatch
    from rallypoint.agent.peers import NoJob
    from rallypoint.hangs.pulse import PulseBoard
    from rallypoint.hangs.pulse_page import Pulse
    from rallypoint.hangs.watchdog import Hang, HangWatch
    from rallypoint.health.server import HealthCheckServer
    from rallypoint.net.http_server import Answer
    from rallypoint.output.log_specs import LogFolder
    from rallypoint.protocol.pace import Pace, Scores
    from rallypoint.rendezvous.coordinated import CoordinatedHandler
    from rallypoint.timers.file_server import FileTimerServer
    from rallypoint.timers.file_timer import FileTimerRequest

    LogEvent = Callable[[str, FileTimerRequest | None], None]

__all__ = ["WorkerMonitor"]

TIMER_INTERVAL_S = 0.1
PACE_PAUSE_S = 5.0
STEP_OFFSET, BELL_OFFSET = 40, 200  # in a worker's page, see `hangs.pulse_page`
BLANK_PAGE = defaults.PULSE_MAGIC.to_bytes(8, sys.byteorder) + bytes(defaults.PULSE_PAGE_BYTES - 8)


class WorkerMonitor:
    """Watches over the workers of the context that `read_context` gives at the time, and puts what it sees on record."""

    def __init__(
        self,
        spec: WorkerSpec,
        record: RunRecord,
        read_context: Callable[[], PContext | None],
        hang_timeout: str | float | None = None,
    ) -> None:
        self.starting = threading.Lock()  # held while workers are started: the context is not yet theirs
        self._spec = spec
        self._record = record
        self._read_context = read_context
        self._hang_timeout = hang_timeout
        self._hang_watch: HangWatch | None = None
        self._page_fd = -1  # where workers tell of their progress, if nobody watches over hangs
        self._board: PulseBoard | None = None  # the same, once somebody has asked for it
        self._reading = threading.Lock()
        self._looking = threading.Lock()
        self._metrics_before: metrics.MetricHandler | None = None
        self._bell_fd = -1  # a pipe in which workers write a byte with their first step
        self._awaits_steps = False
        self._pace_at: float | None = None  # when to see how quick the workers are, once they tell of steps
        self._pace_watch: PaceWatch | None = None  # once anybody wants to know
        self._paced_job: tuple[int, int, CoordinatedHandler | NoJob] | None = None  # its generation, its nodes, who compares all
        self._pace_words: deque[tuple[int, bytes]] = deque()  # what it says
        record.board.read_paces, record.board.read_slowness = self.paces, self.slowness

    def open(self, is_asked_for_progress: bool) -> None:
        """Before the first workers are started."""
        if self._hang_timeout is not None or is_asked_for_progress:
            from rallypoint.hangs.watchdog import HangWatch, parse_hang_timeout

            limits = None if self._hang_timeout is None else parse_hang_timeout(str(self._hang_timeout))
            self._hang_watch = HangWatch(limits, self._spec.local_world_size)
            self._record.board.read_progress = self._hang_watch.progress_at
            self._record.checkpoint_at = self._hang_watch.checkpoint_at

    def close(self) -> None:
        """At the very end of the run, after the health server, which reads what we know of progress."""
        if self._metrics_before is not None:
            metrics.configure(self._metrics_before)
        if self._hang_watch is not None:
            self._hang_watch.close()
        with self._reading:
            if self._board is not None:
                self._board.close()
                self._board = None
            elif self._page_fd >= 0:
                os.close(self._page_fd)
            self._page_fd = -1
        if self._bell_fd >= 0:
            os.close(self._bell_fd)
            self._bell_fd = -1

    # --- timers that workers set -------------------------------------------------------------------------------------------

    def make_timer_server(self, envs: dict[int, dict[str, str]], log_event: LogEvent) -> FileTimerServer | None:
        """One that watches over file timers, where the environment asks for it; the workers are told where."""
        if not environment.is_on(defaults.ENV_ENABLE_FILE_TIMER):
            return None
        from rallypoint.timers.file_server import FileTimerServer

        own_path = os.path.join(environment.temporary_dir(), f"watchdog_timer_{os.urandom(8).hex()}")
        path = environment.text(defaults.ENV_TIMER_FILE) or own_path
        for env in envs.values():
            env[defaults.ENV_TIMER_FILE] = path
        return FileTimerServer(
            path,
            self._spec.rdzv_handler.get_run_id(),
            TIMER_INTERVAL_S,
            log_event=log_event,
            may_reap=self.is_ours,
            on_reaped=self._note_expired,
        )

    def is_ours(self, pid: int) -> bool:
        """Each worker leads a session of its own. Who is late before all have been started is judged once they have."""
        with self.starting:
            context = self._read_context()
        try:
            return context is not None and os.getsid(pid) in context.pids().values()
        except ProcessLookupError:
            return False

    def _note_expired(self, pid: int, request: FileTimerRequest) -> None:
        """On the timers' thread, before the worker is signalled."""
        from rallypoint.timers.file_timer import describe_expiry

        why = describe_expiry(request)
        self._record.board.count("expired_timers")
        self._record.note("timer.expired", pid=pid, scope=request.scope_id, message=why)
        hold_on(self._read_context()).explain_end(os.getsid(pid), EndReason(why))

    # --- hangs -------------------------------------------------------------------------------------------------------------

    def add_env(self, local_rank: int, env: dict[str, str]) -> dict[str, str]:
        """What a worker has to know so that it can give signs of life."""
        if self._hang_watch is None:
            own = {defaults.ENV_PULSE: self._new_page(local_rank)}
        else:
            own = self._hang_watch.worker_env(local_rank, {**environment.own, **env})
        if env.get(defaults.ENV_WORLD_SIZE) != "1":  # one alone is neither slow nor quick
            self._hang_bell(local_rank)
        return {**env, **own}

    def _new_page(self, local_rank: int) -> str:
        """A page in which this worker can tell of its progress, for whoever asks: two system calls, and nothing to import."""
        if self._page_fd < 0:
            self._page_fd = os.memfd_create("rallypoint-pulse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.truncate(self._page_fd, self._spec.local_world_size * defaults.PULSE_PAGE_BYTES)
        offset = local_rank * defaults.PULSE_PAGE_BYTES
        os.pwrite(self._page_fd, BLANK_PAGE, offset)
        return f"{offset}:/proc/{os.getpid()}/fd/{self._page_fd}"

    def page_fd(self) -> int:
        """Of the file in which all workers have their pages; -1 where they have none."""
        return self._hang_watch.page_fd() if self._hang_watch is not None else self._page_fd

    def watch(
        self, group: WorkerGroup, pids: dict[int, int], run_folder: LogFolder | None, job: CoordinatedHandler | NoJob
    ) -> None:
        """These workers have been started; with those of the other nodes they are a generation of the job."""
        self._watch_paces(len(pids), group.group_world_size or 1, job)
        if self._hang_watch is not None:
            ranks = {worker.local_rank: worker.global_rank for worker in group.workers}
            has_other_nodes = (group.group_world_size or 1) > 1
            generation, folder = job.generation(), self._record.attempt_folder
            world_size = group.workers[0].world_size if group.workers else 0
            self._hang_watch.begin(pids, ranks, folder, has_other_nodes, run_folder, generation, job.declare, world_size)
            if has_other_nodes and self._hang_timeout is not None:
                job.on_inquiry(self._hang_watch.hear)

    def pulse(self, local_rank: int, now: float) -> Pulse | None:
        """What this worker tells of itself, if it tells anything; for any thread."""
        with self._reading:
            if self._hang_watch is not None:
                return self._hang_watch.pulse(local_rank, now)
            if self._board is None and self._page_fd >= 0:
                from rallypoint.hangs.pulse import PulseBoard

                self._board = PulseBoard(self._spec.local_world_size, self._page_fd)
            return self._board.read(local_rank, now) if self._board is not None else None

    def stop_watching(self) -> None:
        self._pace_at, self._paced_job, self._awaits_steps = None, None, False
        if self._hang_watch is not None:
            self._hang_watch.end()

    def news_fd(self) -> int | None:
        """Readable when `look` may find something; None: nothing is waited for in this way."""
        return self._bell_fd if self._awaits_steps else None

    def next_look_at(self) -> float | None:
        """When `look` may find something; None: not by the time alone."""
        hang_at = self._hang_watch.next_look_at() if self._hang_watch is not None else None
        pace_at = 0.0 if self._pace_words and self._paced_job is not None else self._pace_at
        return min((at for at in (hang_at, pace_at) if at is not None), default=None)

    def look(self) -> None:
        """A worker that hangs is killed; what it did last is on record by then."""
        now = time.monotonic()
        try:
            self._look_at_paces(now)
        except ImportError:  # rallypoint was moved under the job, which goes on
            self._pace_at = self._paced_job = None
        look_at = self._hang_watch.next_look_at() if self._hang_watch is not None else None
        if self._hang_watch is None or look_at is None or now < look_at:
            return
        hang = self._hang_watch.look(now, hold_on(self._read_context()).staying)
        if hang is not None:
            self._end_hung(hang)

    def _end_hung(self, hang: Hang) -> None:
        from rallypoint.failures.process_failure import HUNG

        for line in hang.lines:
            report.warn(line)
        self._record.board.count("hung_workers", len(hang.hung))
        for one in hang.hung:
            self._record.note(
                "worker.hung",
                generation=self._record.board.status.generation,
                rank=one.global_rank,
                local_rank=one.local_rank,
                pid=one.pid,
                phase=one.phase,
                still_s=round(one.still_s, 3),
                step=one.step,
                message=one.why,
                stacks=hang.summary_file,
            )
            reason = EndReason(f"{HUNG}{one.why}", one.still_s, hang.summary_file)
            hold_on(self._read_context()).end_worker(one.local_rank, reason)

    # --- stragglers --------------------------------------------------------------------------------------------------------

    def paces(self) -> list[Pace]:
        """How long the workers here take for a step, as far as they tell; for any thread."""
        return self._pacing().paces()

    def slowness(self) -> Scores:
        """The same, by the median of all; for any thread."""
        return self._pacing().scores()

    def _watch_paces(self, workers: int, nodes: int, job: CoordinatedHandler | NoJob) -> None:
        """A worker that is alone in its job is neither slow nor quick."""
        self._pace_at, self._pace_watch, self._paced_job = None, None, None
        self._awaits_steps = self._bell_fd >= 0 and (workers > 1 or nodes > 1)
        if nodes > 1:
            self._paced_job = job.generation(), nodes, job
            job.on_pace(self._hear_of_pace)

    def _hear_of_pace(self, generation: int, found: bytes) -> None:
        """On the thread of the rendezvous; the agent is woken."""
        self._pace_words.append((generation, found))

    def _pacing(self) -> PaceWatch:
        from rallypoint.agent.pace_watch import PaceWatch

        with self._looking:
            if self._pace_watch is None:
                self._pace_watch = PaceWatch(self._pulses, self._record, *(self._paced_job or ()))
            return self._pace_watch

    def _pulses(self) -> list[tuple[int, Pulse]]:
        """What the workers here say of themselves, with their ranks."""
        now, ranks = time.monotonic(), self._record.board.status.ranks
        told = ((rank, self.pulse(local_rank, now)) for local_rank, rank in enumerate(ranks))
        return [(rank, pulse) for rank, pulse in told if pulse is not None]

    def _hang_bell(self, local_rank: int) -> None:
        """Tell this worker where to ring: an agent that nobody tells of steps need not wake to find that out."""
        if self._bell_fd < 0:
            self._bell_fd = _open_bell()
        if self._bell_fd >= 0:
            place = local_rank * defaults.PULSE_PAGE_BYTES + BELL_OFFSET
            os.pwrite(self.page_fd(), self._bell_fd.to_bytes(8, sys.byteorder), place)

    def _has_rung(self) -> bool:
        try:
            return bool(os.read(self._bell_fd, defaults.PULSE_PAGE_BYTES))
        except BlockingIOError:
            return False

    def _look_at_paces(self, now: float) -> None:
        """Say who is slower than the others, once."""
        if self._pace_words and self._paced_job is not None:
            self._pacing().take_word(self._pace_words)
        if self._awaits_steps and self._has_rung():
            self._awaits_steps, self._pace_at = False, now + PACE_PAUSE_S
        if self._pace_at is not None and now >= self._pace_at:
            self._pace_at = now + self._pacing().look(now)

    def is_told_of_steps(self) -> bool:
        """Whether any worker does, found out without loading what reads the pages."""
        if self._hang_watch is not None or self._board is not None:
            return True
        told = range(self._spec.local_world_size) if self._page_fd >= 0 else ()
        return any(any(os.pread(self._page_fd, 8, rank * defaults.PULSE_PAGE_BYTES + STEP_OFFSET)) for rank in told)

    # --- health ------------------------------------------------------------------------------------------------------------

    def make_health_server(
        self, address: str, listeners: Sequence[socket.socket], stopping_s: float, pages: Mapping[str, Answer]
    ) -> HealthCheckServer | None:
        """One that answers health checks, where a port was opened for it or the environment names one, and has those pages."""
        if not listeners and not environment.text(defaults.ENV_HEALTH_CHECK_PORT):
            return None
        from rallypoint.health.server import HealthCheckServer, PrometheusMetricHandler, resolve_health_port

        self._metrics_before = metrics.default_handler()
        handler = PrometheusMetricHandler(self._metrics_before)
        server = HealthCheckServer(
            lambda: int(time.time()),
            resolve_health_port(None),
            defaults.HEALTH_TIMEOUT_S,
            board=self._record.board,
            address=address,
            listeners=listeners,
            stopping_s=stopping_s,
            metric_handler=handler,
            pages=pages,
        )
        metrics.configure(handler)
        return server


def _open_bell() -> int:
    """A pipe that we hold at both ends, so that nobody hangs up; -1 where there are no more files to be had."""
    try:
        read_fd, write_fd = os.pipe()
        try:
            return os.open(f"/proc/self/fd/{read_fd}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        finally:
            os.close(read_fd)
            os.close(write_fd)
    except OSError:
        return -1
