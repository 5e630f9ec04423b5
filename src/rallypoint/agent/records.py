"""What an agent leaves on record about its run: events and metrics, under the names that dashboards for torchrun know."""

from __future__ import annotations

import os

from rallypoint.agent.run_record import RunRecord
from rallypoint.agent.workers import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from rallypoint.base import report
from rallypoint.base.json_text import to_json
from rallypoint.events import FILE, Event, EventSource, is_recorded, record
from rallypoint.metrics import put_metric
from rallypoint.protocol import agent_machine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.timers.file_timer import FileTimerRequest

__all__ = ["AgentRecords", "describe", "event_of", "state_of", "timer_event"]


def _get_fq_hostname() -> str:
    """The host's name as it knows it itself: a look-up in the network could block for many seconds."""
    return os.uname().nodename


class AgentRecords:
    """Where what an agent puts on record goes: the run's own file and board, the sink that the user has chosen, the metrics."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self.run = RunRecord(spec)

    def entered(self, state: agent_machine.State, action: agent_machine.Action, restarts: int) -> None:
        """The agent is in this state now, having spent so many restarts, and is about to act."""
        report.debug(f"{type(state).__name__}: {action.why}")
        self.run.entered(state, action.why)
        if isinstance(action, agent_machine.Restart):
            self.run.note("restart", why=action.why, restarts=restarts + action.restarts_spent, delay_s=action.delay_s)

    @property
    def has_sink(self) -> bool:
        """Whether events go anywhere but to the run's file."""
        return is_recorded(self._spec.event_log_handler)

    def send(self, *events: Event) -> None:
        """To the run's own file, and to the sink."""
        if self._spec.event_log_handler != FILE:
            self.send_to_sink(*events)
        self.run.file.add(*events)

    def send_to_sink(self, *events: Event) -> None:
        for event in events if self.has_sink else ():
            record(event, self._spec.event_log_handler)

    def put(self, name: str, value: int) -> None:
        """A metric of this role."""
        put_metric(f"workers.{self._spec.role}.{name}", value)


def event_of(
    group: WorkerGroup,
    total_run_time_s: int,
    restarts: int,
    state: str,
    source: EventSource,
    worker: Worker | None = None,
    raw_error: str | None = None,
    duration_ms: float | None = None,
    exit_code: int | None = None,
    worker_pid: int | None = None,
) -> Event:
    """An agent's event, or one of its workers', with all that dashboards for torchrun look for."""
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
        "total_run_time": total_run_time_s,
        "rdzv_backend": spec.rdzv_handler.get_backend(),
        "raw_error": raw_error,
        "metadata": to_json(details),
        "agent_restarts": restarts,
        "duration_ms": duration_ms,
    }
    return Event(f"torchelastic.worker.status.{state}", source=source, metadata=metadata)


def timer_event(described: Event, hostname: str, name: str, request: FileTimerRequest | None) -> Event:
    """What the file timers did, added to an event that describes the agent."""
    facts: dict[str, str] = {"watchdog_event": name}
    if request is not None:
        facts["worker_pid"] = str(request.worker_pid)
        facts["scope_id"] = str(request.scope_id)
        facts["expiration_time"] = str(request.expiration_time)
        facts["signal"] = str(int(request.signal))
    metadata = {**described.metadata, "hostname": hostname, "metadata": to_json(facts)}
    del metadata["duration_ms"]
    return Event(name, EventSource.AGENT, metadata=metadata)


def state_of(worker: Worker, result: RunResult) -> str:
    """A worker that ended with its group but not by itself was terminated by the agent."""
    failed = worker.global_rank in result.failures
    if result.state in {WorkerState.UNHEALTHY, WorkerState.FAILED} and not failed:
        return "TERMINATED"
    if failed or worker.global_rank in result.return_values:
        return result.state.value
    raise ValueError(f"rank {worker.global_rank} neither failed nor returned; the result is of another generation")


def describe(result: RunResult) -> str:
    """One line on the first failure, for the line that says what is done about it."""
    if not result.failures:
        return f"the workers are {result.state.name}"
    from rallypoint.failures.process_failure import ChildFailedError

    rank, failure = ChildFailedError("", result.failures).get_first_failure()
    others = len(result.failures) - 1
    more = f" and {others} more" if others else ""
    return f"rank {rank} (pid {failure.pid}){more} failed: {failure.message}"
