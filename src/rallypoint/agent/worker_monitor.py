"""How a local agent keeps an eye on its workers beyond their ends: timers that they set, hangs, and the health endpoint.

Each of the three is loaded only where it is used. A worker that has to go for one of them is killed, and the agent then sees its
end as that of any other; what is told of it is the reason, not the signal.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

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

    from rallypoint.hangs.watchdog import Hang, HangWatch
    from rallypoint.health.server import HealthCheckServer
    from rallypoint.output.log_specs import LogFolder
    from rallypoint.timers.file_server import FileTimerServer
    from rallypoint.timers.file_timer import FileTimerRequest

    LogEvent = Callable[[str, FileTimerRequest | None], None]

__all__ = ["WorkerMonitor"]

TIMER_INTERVAL_S = 0.1


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
        self._metrics_before: metrics.MetricHandler | None = None

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
            return env
        python_path = env.get(defaults.ENV_PYTHONPATH, environment.own.get(defaults.ENV_PYTHONPATH, ""))
        return {**env, **self._hang_watch.worker_env(local_rank, python_path)}

    def watch(self, group: WorkerGroup, pids: dict[int, int], run_folder: LogFolder | None) -> None:
        """These workers have been started."""
        if self._hang_watch is not None:
            ranks = {worker.local_rank: worker.global_rank for worker in group.workers}
            has_other_nodes = (group.group_world_size or 1) > 1
            self._hang_watch.begin(pids, ranks, self._record.attempt_folder, has_other_nodes, run_folder)

    def stop_watching(self) -> None:
        if self._hang_watch is not None:
            self._hang_watch.end()

    def next_look_at(self) -> float | None:
        """When `look` may find something; None: not by the time alone."""
        return self._hang_watch.next_look_at() if self._hang_watch is not None else None

    def look(self) -> None:
        """A worker that hangs is killed; what it did last is on record by then."""
        look_at, now = self.next_look_at(), time.monotonic()
        if self._hang_watch is None or look_at is None or now < look_at:
            return
        hang = self._hang_watch.look(now, hold_on(self._read_context()).staying)
        if hang is not None:
            self._end_hung(hang)

    def _end_hung(self, hang: Hang) -> None:
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
            reason = EndReason(f"it hung: {one.why}", one.still_s, hang.summary_file)
            hold_on(self._read_context()).end_worker(one.local_rank, reason)

    # --- health ------------------------------------------------------------------------------------------------------------

    def make_health_server(self, address: str, listeners: Sequence[socket.socket], stopping_s: float) -> HealthCheckServer | None:
        """One that answers health checks, where a port was opened for it or the environment names one."""
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
        )
        metrics.configure(handler)
        return server
