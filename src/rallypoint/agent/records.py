"""What an agent leaves on record about its run: events and metrics, under the names that dashboards for torchrun know."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rallypoint.agent.run_record import RunRecord
from rallypoint.agent.workers import RunResult, Worker, WorkerGroup, WorkerState
from rallypoint.base import report
from rallypoint.base.json_text import to_json
from rallypoint.events import FILE, Event, EventSource, is_recorded, record
from rallypoint.metrics import put_metric
from rallypoint.protocol import agent_machine
from rallypoint.rendezvous.coordinated import CoordinatedHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["AgentRecords", "describe"]


def _get_fq_hostname() -> str:
    """The host's name as it knows it itself: a look-up in the network could block for many seconds."""
    return os.uname().nodename


class AgentRecords:
    """The recording part of an agent."""

    _worker_group: WorkerGroup
    _remaining_restarts: int
    _total_execution_time: int
    _state: agent_machine.State
    _run_record: RunRecord

    def _note(self, action: agent_machine.Action) -> None:
        """Put down in which state we are now, and why."""
        report.debug(f"{type(self._state).__name__}: {action.why}")
        self._run_record.entered(self._state, action.why, self._checkpoint_at)
        if isinstance(action, agent_machine.Restart):
            restarts = self._restarts() + action.restarts_spent
            self._run_record.note("restart", why=action.why, restarts=restarts, delay_s=action.delay_s)

    def _note_generation(self) -> None:
        self._run_record.formed(self._worker_group, self._generation(), self._restarts(), self._attempt_folder())

    def _restarts(self) -> int:
        """How many have been spent so far."""
        return self._worker_group.spec.max_restarts - self._remaining_restarts

    def _generation(self) -> int:
        """The number that all nodes know; 0 where nobody gives one."""
        handler = self._worker_group.spec.rdzv_handler
        return handler.generation() if isinstance(handler, CoordinatedHandler) else 0

    def _attempt_folder(self) -> str:
        """Where the logs of the present workers are; empty where there are none."""
        return ""

    def _checkpoint_at(self) -> float | None:
        """When the workers last had a complete checkpoint, if they tell of any."""
        return None

    def get_event_failed(self) -> Event:
        """The event that says that the agent, not a worker, failed; to be called where the exception is handled."""
        import traceback

        return self._construct_event(state="FAILED", source=EventSource.AGENT, raw_error=traceback.format_exc())

    def get_event_succeeded(self) -> Event:
        return self._construct_event(state="SUCCEEDED", source=EventSource.AGENT)

    @contextmanager
    def record_duration(self, state: str) -> Iterator[None]:
        """Record how long the block took, under the name of this state."""
        started_at = time.perf_counter()
        try:
            yield
        finally:
            duration_ms = (time.perf_counter() - started_at) * 1000
            self._record_event(state, EventSource.AGENT, duration_ms=duration_ms)

    def _record_event(self, state: str, source: EventSource, **facts: Any) -> None:
        self._send_events(self._construct_event(state, source, **facts))

    def _send_events(self, *events: Event) -> None:
        """To the run's own file, and to the sink that the user has chosen."""
        sink = self._worker_group.spec.event_log_handler
        for event in events if sink != FILE and is_recorded(sink) else ():
            record(event, sink)
        self._run_record.file.add(*events)

    def _record_worker_start_events(self) -> None:
        """For the sink that was chosen; to the run's file the event of the generation says the same."""
        sink = self._worker_group.spec.event_log_handler
        for worker in self._worker_group.workers if is_recorded(sink) else ():
            record(self._construct_event("START", EventSource.WORKER, worker), sink)

    def _record_worker_events(self, result: RunResult) -> None:
        self._send_events(*(self._end_of(worker, result) for worker in self._worker_group.workers))

    def _end_of(self, worker: Worker, result: RunResult) -> Event:
        state, failure = self._get_worker_state(worker, result), result.failures.get(worker.global_rank)
        if failure is None:
            return self._construct_event(state, EventSource.WORKER, worker)
        error = to_json(failure.error_file_data)
        return self._construct_event(state, EventSource.WORKER, worker, error, exit_code=failure.exitcode, worker_pid=failure.pid)

    def _get_worker_state(self, worker: Worker, result: RunResult) -> str:
        """A worker that ended with its group but not by itself was terminated by the agent."""
        failed = worker.global_rank in result.failures
        if result.state in {WorkerState.UNHEALTHY, WorkerState.FAILED} and not failed:
            return "TERMINATED"
        if failed or worker.global_rank in result.return_values:
            return result.state.value
        raise ValueError(f"rank {worker.global_rank} neither failed nor returned; the result is of another generation")

    def _construct_event(
        self,
        state: str,
        source: EventSource,
        worker: Worker | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> Event:
        group = self._worker_group
        spec = group.spec
        details: dict[str, Any] = {"group_world_size": group.group_world_size, "entry_point": spec.get_entrypoint_name()}
        if worker is not None:
            details["local_rank"] = (worker.local_rank,)
            details["role_rank"] = (worker.role_rank,)
            details["role_world_size"] = (worker.role_world_size,)
            details["exit_code"] = (exit_code,)
            details["worker_pid"] = (worker_pid,)
        metadata = {
            "run_id": spec.rdzv_handler.get_run_id(),
            "global_rank": worker.global_rank if worker is not None else None,
            "group_rank": group.group_rank,
            "worker_id": str(worker.id) if worker is not None else None,
            "role": spec.role,
            "hostname": _get_fq_hostname(),
            "state": state,
            "total_run_time": self._total_execution_time,
            "rdzv_backend": spec.rdzv_handler.get_backend(),
            "raw_error": raw_error,
            "metadata": to_json(details),
            "agent_restarts": self._restarts(),
            "duration_ms": duration_ms,
        }
        return Event(f"torchelastic.worker.status.{state}", source=source, metadata=metadata)

    def _record_metrics(self, group_results: RunResult) -> None:
        failed = group_results.is_failed()
        retried = self._remaining_restarts != self._worker_group.spec.max_restarts
        self._record_flakiness_metric(failed)
        self._record_metric_with_condition("run_total", True)
        self._record_metric_with_condition("run_success_with_retries", not failed and retried)
        self._record_metric_with_condition("run_success_no_retries", not failed and not retried)
        self._record_metric_with_condition("run_failed_with_retries", failed and retried)
        self._record_metric_with_condition("run_failed_no_retries", failed and not retried)

    def _record_flakiness_metric(self, is_failed: bool = False) -> None:
        """How much of the restart budget a run needed, in percent; a failed run needed more than all."""
        left, most = self._remaining_restarts + 1, self._worker_group.spec.max_restarts + 1
        self._put("flakiness", 100 if is_failed else int(100.0 - 100.0 * left / most))

    def _record_metric_with_condition(self, metric_name: str, condition: bool) -> None:
        """1 where it holds, else 0."""
        self._put(metric_name, int(condition))

    def _put(self, name: str, value: int) -> None:
        put_metric(f"workers.{self._worker_group.spec.role}.{name}", value)


def describe(result: RunResult) -> str:
    """One line on the first failure, for the line that says what is done about it."""
    if not result.failures:
        return f"the workers are {result.state.name}"
    from rallypoint.failures.process_failure import ChildFailedError

    rank, failure = ChildFailedError("", result.failures).get_first_failure()
    others = len(result.failures) - 1
    more = f" and {others} more" if others else ""
    return f"rank {rank} (pid {failure.pid}){more} failed: {failure.message}"
