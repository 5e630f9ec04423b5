"""How a local agent keeps an eye on its workers beyond their ends: timers that they set, hangs, and the health endpoint.

Each of the three is loaded only where it is used. A worker that has to go for one of them is killed, and the agent then sees its
end as that of any other; what is told of it is the reason, not the signal.
"""

from __future__ import annotations

import os
import time

from rallypoint import metrics
from rallypoint.agent import records as agent_records
from rallypoint.agent.agent import SimpleElasticAgent
from rallypoint.base import defaults, environment, report
from rallypoint.base.json_text import to_json
from rallypoint.events import Event, EventSource
from rallypoint.processes.context import PContext
from rallypoint.processes.warden_context import WardedContext

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import threading
    from typing import Any

    from rallypoint.hangs.watchdog import Hang, HangWatch
    from rallypoint.output.log_specs import LogFolder
    from rallypoint.timers.file_server import FileTimerServer
    from rallypoint.timers.file_timer import FileTimerRequest

__all__ = ["AgentSenses"]

TIMER_INTERVAL_S = 0.1


class AgentSenses(SimpleElasticAgent):
    """The part of a local agent that watches over how its workers are."""

    _pcontext: PContext | None
    _starting: threading.Lock  # held while workers are started: `_pcontext` is not yet theirs
    _health_check_server: Any
    _hang_watch: HangWatch | None
    _worker_watchdog: FileTimerServer | None
    _hang_timeout: str | float | None
    _health_listeners: list[socket.socket]
    _health_addr: str
    _kill_wait_s: float | None
    _metrics_before: metrics.MetricHandler | None = None

    def _open_senses(self) -> None:
        """Before the first workers are started."""
        self._setup_healthcheck()
        if self._hang_timeout is not None or self._health_check_server is not None:
            from rallypoint.hangs.watchdog import HangWatch, parse_hang_timeout

            limits = None if self._hang_timeout is None else parse_hang_timeout(str(self._hang_timeout))
            self._hang_watch = HangWatch(limits, self._worker_group.spec.local_world_size)
            self._run_record.board.read_progress = self._hang_watch.progress_at

    # --- timers that workers set -------------------------------------------------------------------------------------------

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        """Watch over file timers, where the environment asks for it, and tell the workers where."""
        if not environment.is_on(defaults.ENV_ENABLE_FILE_TIMER):
            return
        from rallypoint.timers.file_server import FileTimerServer

        path = environment.text(defaults.ENV_TIMER_FILE) or _timer_path()
        run_id = self._worker_group.spec.rdzv_handler.get_run_id()
        self._worker_watchdog = FileTimerServer(
            path,
            run_id,
            TIMER_INTERVAL_S,
            log_event=self._log_watchdog_event,
            may_reap=self._is_ours,
            on_reaped=self._note_expired,
        )
        self._worker_watchdog.start()
        for env in envs.values():
            env[defaults.ENV_TIMER_FILE] = path

    def _is_ours(self, pid: int) -> bool:
        """Each worker leads a session of its own. Who is late before all have been started is judged once they have."""
        with self._starting:
            context = self._pcontext
        try:
            return context is not None and os.getsid(pid) in context.pids().values()
        except ProcessLookupError:
            return False

    def _note_expired(self, pid: int, request: FileTimerRequest) -> None:
        """On the timers' thread, before the worker is signalled."""
        from rallypoint.timers.file_timer import describe_expiry

        why = describe_expiry(request)
        self._run_record.board.count("expired_timers")
        self._run_record.note("timer.expired", pid=pid, scope=request.scope_id, message=why)
        if isinstance(self._pcontext, WardedContext):
            self._pcontext.explain_end(os.getsid(pid), why)

    def _log_watchdog_event(self, name: str, request: FileTimerRequest | None) -> None:
        """Under the names and with the facts that dashboards for torchrun know."""
        facts: dict[str, str] = {"watchdog_event": name}
        if request is not None:
            facts["worker_pid"] = str(request.worker_pid)
            facts["scope_id"] = str(request.scope_id)
            facts["expiration_time"] = str(request.expiration_time)
            facts["signal"] = str(int(request.signal))
        described = self._construct_event("RUNNING", EventSource.AGENT).metadata
        metadata = {**described, "hostname": self._get_fq_hostname(), "metadata": to_json(facts)}
        del metadata["duration_ms"]
        self._send_events(Event(name, EventSource.AGENT, metadata=metadata))

    def _get_fq_hostname(self) -> str:
        """The name of this host in those events; to be overridden."""
        return agent_records._get_fq_hostname()

    def _stop_local_watchdog(self) -> None:
        watchdog, self._worker_watchdog = self._worker_watchdog, None
        if watchdog is not None:
            watchdog.stop()

    # --- hangs -------------------------------------------------------------------------------------------------------------

    def _add_hang_env(self, local_rank: int, env: dict[str, str]) -> dict[str, str]:
        if self._hang_watch is None:
            return env
        python_path = env.get(defaults.ENV_PYTHONPATH, environment.own.get(defaults.ENV_PYTHONPATH, ""))
        return {**env, **self._hang_watch.worker_env(local_rank, python_path)}

    def _watch_for_hangs(self, pids: dict[int, int]) -> None:
        if self._hang_watch is not None:
            ranks = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
            has_other_nodes = (self._worker_group.group_world_size or 1) > 1
            self._hang_watch.begin(pids, ranks, self._attempt_folder(), has_other_nodes, self._run_folder())

    def _run_folder(self) -> LogFolder | None:
        """The folder that all files of the run are below; None where there is none."""
        return None

    def _look_for_hangs(self) -> None:
        """A worker that hangs is killed; what it did last is on record by then."""
        look_at = self._hang_watch.next_look_at() if self._hang_watch is not None else None
        now = time.monotonic()
        if self._hang_watch is None or look_at is None or now < look_at:
            return
        hang = self._hang_watch.look(now)
        if hang is not None:
            self._end_hung(hang)

    def _end_hung(self, hang: Hang) -> None:
        for line in hang.lines:
            report.warn(line)
        self._run_record.board.count("hung_workers", len(hang.hung))
        for one in hang.hung:
            self._run_record.note(
                "worker.hung",
                generation=self._run_record.board.status.generation,
                rank=one.global_rank,
                local_rank=one.local_rank,
                pid=one.pid,
                phase=one.phase,
                still_s=round(one.still_s, 3),
                step=one.step,
                message=one.why,
                stacks=hang.summary_file,
            )
            if isinstance(self._pcontext, WardedContext):
                self._pcontext.end_worker(one.local_rank, f"it hung: {one.why}", one.still_s)

    def _checkpoint_at(self) -> float | None:
        return self._hang_watch.checkpoint_at() if self._hang_watch is not None else None

    def _stop_watching_for_hangs(self) -> None:
        if self._hang_watch is not None:
            self._hang_watch.end()

    # --- health ------------------------------------------------------------------------------------------------------------

    def _setup_healthcheck(self) -> None:
        """Answer health checks where a port was opened for it, or the environment names one; not if we were given a server."""
        is_wanted = self._health_listeners or environment.text(defaults.ENV_HEALTH_CHECK_PORT)
        if self._health_check_server is not None or not is_wanted:
            return
        from rallypoint.health.metric_values import PrometheusMetricHandler
        from rallypoint.health.port import resolve_health_port
        from rallypoint.health.server import HealthCheckServer

        self._metrics_before = metrics.default_handler()
        handler = PrometheusMetricHandler(self._metrics_before)
        self._health_check_server = server = HealthCheckServer(
            lambda: int(time.time()),
            resolve_health_port(None),
            defaults.HEALTH_TIMEOUT_S,
            board=self._run_record.board,
            address=self._health_addr,
            listeners=self._health_listeners,
            stopping_s=self._shutdown_timeout + (self._kill_wait_s or defaults.UNINTERRUPTIBLE_TIMEOUT_S),
            metric_handler=handler,
        )
        metrics.configure(handler)
        server.start()
        report.info(f"health checks are answered at port {server.port}: /healthz, /readyz, /metrics")

    def _close_senses(self) -> None:
        """At the very end of the run."""
        self._stop_local_watchdog()
        if self._health_check_server is not None:
            self._health_check_server.stop()
        if self._metrics_before is not None:
            metrics.configure(self._metrics_before)
        if self._hang_watch is not None:  # last: the health server reads what it knows of progress
            self._hang_watch.close()


def _timer_path() -> str:
    folder = environment.temporary_dir()
    return os.path.join(folder, f"watchdog_timer_{os.urandom(8).hex()}")
