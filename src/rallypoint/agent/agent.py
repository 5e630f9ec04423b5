"""Agents: one on each machine, which meets its peers, starts the workers, and acts on what becomes of them.

What to do next is decided in `protocol.agent_machine`; `SimpleElasticAgent` performs it, one action at a time, through methods
that subclasses may override, and reports what came of it. How workers are started, looked at and stopped is left to a subclass.

An agent holds its parts: the other nodes (`agent.peers`), its own budget of restarts, and its records (`agent.records`). What
torch's subclassers override or call stays a method of the agent, and is always called as one, also where a part does the work.
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from rallypoint.agent.capabilities import peers_of
from rallypoint.agent.peers import OwnRestarts
from rallypoint.agent.records import RunRecord, _get_fq_hostname, describe
from rallypoint.agent.workers import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState, _RoleInstanceInfo, workers_of
from rallypoint.base import defaults, outbox, report
from rallypoint.base.json_text import to_json
from rallypoint.base.signals import inbox
from rallypoint.base.text import node_label, stopped_text
from rallypoint.errors import (
    JobFailedError,
    LicenceOverError,
    PreemptedError,
    RendezvousGracefulExitError,
    SignalException,
    StoppedError,
    UnkillableWorkersError,
)
from rallypoint.events import Event, EventSource
from rallypoint.metrics import prof, put_metric
from rallypoint.processes.context import wait_readable
from rallypoint.protocol import agent_machine, restarts
from rallypoint.protocol.worker_plan import Member, assign_ranks
from rallypoint.store import barriers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.output.waits import Wait

__all__ = ["DEFAULT_ROLE", "ElasticAgent", "SimpleElasticAgent"]

DEFAULT_ROLE = "default"
_TERMINAL_STATE_SYNC_ID = "torchelastic/agent/terminal_state"
_ROLE_INFO_PREFIX = "torchelastic/role_info"


def _seen(error: SignalException) -> agent_machine.Signalled:
    match error:
        case StoppedError():
            return agent_machine.Signalled(error.sigval.name, str(error))
        case PreemptedError():
            return agent_machine.Signalled("a notice to leave")
    name, sender = error.sigval.name, error.sender
    return agent_machine.Signalled(name, "" if sender is None else f"{name} was received{sender.origin}")


def _backing_off(number: int, most: int, until: float) -> Wait:
    from rallypoint.output.waits import BackOff

    return BackOff(number, most, until)


class ElasticAgent(ABC):
    """Runs workers of one or more roles on this machine until they are done."""

    @abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers, restarting them as allowed; failures of workers are in the result, all else is raised."""

    @abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The workers of this role, as they are now; they may change under the caller's eyes."""


class SimpleElasticAgent(ElasticAgent):
    """An agent for the workers of a single role."""

    def __init__(
        self,
        spec: WorkerSpec,
        exit_barrier_timeout: float = defaults.EXIT_BARRIER_TIMEOUT_S,
        shutdown_timeout: float = defaults.SHUTDOWN_TIMEOUT_S,
    ) -> None:
        self._worker_group = WorkerGroup(spec)
        self._remaining_restarts = spec.max_restarts
        self._store: Any = None
        self._exit_barrier_timeout = exit_barrier_timeout
        self._shutdown_timeout = shutdown_timeout
        self._total_execution_time = 0
        self._signals_to_handle = defaults.SIGNALS_TO_HANDLE
        self._state: agent_machine.State = agent_machine.begin()[0]
        self._last_result = RunResult(WorkerState.INIT)
        self._ended_by: Exception | None = None
        self._untold: SignalException | None = None  # by which we end, and whose sender was not told yet
        self._restarting = agent_machine.Restart("", 0)
        self._peers = peers_of(spec)
        self._peers.on_long_wait = self._open_desk
        self._own_restarts = OwnRestarts(restarts.RestartPolicy(spec.max_restarts))
        self.is_hopeless = False  # whether it has given up because no restart could have helped
        self._run_record = RunRecord(spec)

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        return self._worker_group

    @abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers and return the id of each local rank."""

    @abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        """Stop the workers, in whatever state they are."""

    @abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the workers, without waiting."""

    @abstractmethod
    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = defaults.SHUTDOWN_TIMEOUT_S, is_restart: bool = False
    ) -> None:
        """End the workers and let go of everything."""

    @prof
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        started_at = time.monotonic()
        death_sig = signal.SIGTERM
        with outbox.on_duty(), inbox.watch(self._signals_to_watch()):
            try:
                result = self._invoke_run(role)
                self._total_execution_time = int(time.monotonic() - started_at)
                self._record_metrics(result)
                self._record_worker_events(result)
                return result
            except RendezvousGracefulExitError as left_out:
                report.info(f"this node is not needed and ends: {left_out}")
                return RunResult(WorkerState.SUCCEEDED)
            except SignalException as error:
                received = self._untold = self._as_meant(error)
                death_sig = received.sigval
                self._depart(received)
                raise received from error.__cause__
            finally:
                self._shutdown(death_sig, timeout=self._shutdown_timeout)
                self._tell_sender()
                self._peers.close_worker_store()
                self._total_execution_time = int(time.monotonic() - started_at)

    def _signals_to_watch(self) -> str:
        """Those that end a run, by their names, and those that mean something else to this agent."""
        return self._signals_to_handle

    def _tell_sender(self) -> None:
        """Who has sent the signal that ends us, once, when all has been done that it asks for."""
        received, self._untold = self._untold, None
        if received is not None and received.sender is not None:
            from rallypoint.base.senders import describe

            if who := describe(received.sigval.name, received.sender):
                report.info(who)

    def _as_meant(self, received: SignalException) -> SignalException:
        """A signal, or that it only stands for somebody's word."""
        by = self._stopped_by()
        return StoppedError(stopped_text(by)) if by and not isinstance(received, StoppedError) else received

    def _stopped_by(self) -> str:
        """Who has stopped the whole job, if anybody has."""
        return ""

    def _depart(self, received: SignalException) -> None:
        if isinstance(received, StoppedError):
            self._peers.job.depart(str(received), ends_as="stopped")
            report.warn(f"{received}: {self._what_a_signal_does()}")
            return
        if isinstance(received, PreemptedError):
            why = f"node {self._label()} left after its notice: {received}"
            self._peers.job.depart(why, ends_as="preempted" if received.all_saved else "unsaved")
            report.warn(f"this node leaves: {received}")
            return
        name, origin = received.sigval.name, "" if received.sender is None else received.sender.origin
        self._peers.job.depart(f"{name} was received by node {self._label()}{origin}", int(received.sigval))
        report.warn(f"{name} was received: {self._what_a_signal_does()}")

    def _label(self) -> str:
        """This node, as the others are told of it."""
        group = self._worker_group
        return node_label(group.group_rank, _get_fq_hostname(), (worker.global_rank for worker in group.workers))

    def _what_a_signal_does(self) -> str:
        match self._worker_group.state:
            case WorkerState.INIT:
                return "no worker was started yet"
            case WorkerState.STOPPED | WorkerState.SUCCEEDED:
                return "no worker runs any more"
        return f"passing it on to the workers, {self._shutdown_timeout:g} s to stop"

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Perform one action after the other until the run is over."""
        self._state, action = agent_machine.begin()
        self._note(action)
        while not isinstance(action, agent_machine.Finish | agent_machine.Abandon):
            action = self._observe(self._attempt(action))
        if isinstance(action, agent_machine.Abandon):
            raise self._ended_by or RuntimeError(action.why)
        if not action.succeeded:
            self._worker_group.state = WorkerState.FAILED
            if not self._last_result.is_failed():
                self._last_result = RunResult(WorkerState.FAILED)  # for a reason that lies elsewhere
        return self._last_result

    def _observe(self, seen: agent_machine.Observation) -> agent_machine.Action:
        self._state, action = agent_machine.step(self._state, seen)
        self._note(action)
        return action

    def _attempt(self, action: agent_machine.Action) -> agent_machine.Observation:
        """Perform an action; what ends the agent is an observation like any other."""
        try:
            return self._perform(action)
        except SignalException as received:
            error = self._ended_by = self._as_meant(received)
            return _seen(error)
        except UnkillableWorkersError as error:
            self._ended_by = error
            return agent_machine.CouldNotStop(str(error))
        except JobFailedError as error:
            return agent_machine.JobEnded("failed", error.why)
        except LicenceOverError as error:
            return self._fenced(str(error))

    def _perform(self, action: agent_machine.Action) -> agent_machine.Observation:
        group = self._worker_group
        match action:
            case agent_machine.Initialize():
                self._initialize_workers(group)
                return agent_machine.Started()
            case agent_machine.Restart(why, spent):
                report.warn(why)
                self._restarting = action
                self._remaining_restarts -= spent
                self._restart_workers(group)
                return agent_machine.Started()
            case agent_machine.Stop(why):
                report.warn(why)
                self._restarting = agent_machine.Restart(why, 0)  # whatever the last one was, this stop has its grace
                self._stop_workers(group)
                self._hear_last_words()
                group.state = WorkerState.FAILED
                inbox.raise_pending()
                return agent_machine.Stopped()
            case agent_machine.Drain():
                return self._drain()
        return self._watch()

    def _note(self, action: agent_machine.Action) -> None:
        self._run_record.entered(self._state, action, self._restarts())

    def _restarts(self) -> int:
        """How many have been spent so far."""
        return self._worker_group.spec.max_restarts - self._remaining_restarts

    def _drain(self) -> agent_machine.Observation:
        """Our workers are done: stay until all are."""
        seen = self._peers.drain(self._exit_barrier_timeout)
        if seen is None:
            self._exit_barrier()
        return seen or agent_machine.Drained()

    def _watch(self) -> agent_machine.Observation:
        """Look; if there is nothing to see, wait until there may be."""
        inbox.raise_pending()
        seen = self._look()
        if seen == agent_machine.PeersWaiting(0):
            self._wait_for_news()
        return seen

    def _look(self) -> agent_machine.Observation:
        group, spec = self._worker_group, self._worker_group.spec
        news = self._peers.job.observe() or self._wish()
        if isinstance(news, agent_machine.Fenced) or (isinstance(news, agent_machine.JobEnded) and news.how == "failed"):
            return news
        result = self._last_result = self._monitor_workers(group)
        if result.state is WorkerState.FAILED or (isinstance(news, agent_machine.Regroup) and news.is_failure):
            may_be_hopeless = isinstance(news, agent_machine.Regroup) and news.looks_hopeless
            result = self._last_result = self._see_who_follows(result, may_be_hopeless)
        if result.state is not WorkerState.SUCCEEDED and (why := self._licence_over()):
            return self._fenced(why)
        group.state = result.state
        put_metric(f"workers.{spec.role}.remaining_restarts", self._remaining_restarts)
        put_metric(f"workers.{spec.role}.{result.state.name.lower()}", 1)
        match result.state:
            case WorkerState.SUCCEEDED:
                return news or agent_machine.Succeeded()
            case WorkerState.FAILED | WorkerState.UNHEALTHY:
                self._run_record.failed(result)
                return agent_machine.Failed(describe(result, (group.group_world_size or 1) > 1), self._report_failure(result))
            case WorkerState.HEALTHY:
                return news or agent_machine.PeersWaiting(self._peers.nodes_waiting())
        return agent_machine.LostTrack(f"the workers of role {spec.role} are in the state {result.state.name}")

    def _report_failure(self, result: RunResult) -> restarts.Again | restarts.GiveUp | None:
        """Tell the job, which then rules; where each agent rules for itself, the ruling."""
        group, step = self._worker_group, self._furthest_step(result)
        self._peers.report_failure(result, step=step)
        if self._peers.act_as_one:
            return None
        world_size = group.workers[0].world_size if group.workers else 0
        ruling = self._own_restarts.rule(result, group.spec.max_restarts, self._restarts(), step, world_size)
        self.is_hopeless = isinstance(ruling, restarts.GiveUp) and ruling.is_hopeless
        return ruling

    def _furthest_step(self, result: RunResult) -> int:
        """How far the workers came that have failed, if they tell and somebody wants to know; else -1."""
        return -1

    def _see_who_follows(self, result: RunResult, may_be_hopeless: bool = False) -> RunResult:
        """Workers failed, here or elsewhere; with those who fail the same way, for which they are given a moment."""
        return result

    def _wish(self) -> agent_machine.Regroup | None:
        """What somebody from outside asks of this agent alone."""
        return None

    def _hear_last_words(self) -> None:
        """The workers are gone; those that were only stopped may have failed the same way meanwhile."""

    def _fenced(self, why: str) -> agent_machine.Fenced:
        self._peers.job.was_fenced(why)
        return agent_machine.Fenced(why)

    def _licence_over(self) -> str:
        """Why our workers were killed, if that was because they may not run any longer."""
        return ""

    def _wait_for_news(self) -> None:
        """An agent that knows no better looks every monitor interval."""
        wait_readable([inbox.fileno()], self._worker_group.spec.monitor_interval)

    @prof
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Meet the other agents, then start the workers of this one."""
        self._rendezvous(worker_group)
        for local_rank, worker_id in self._start_workers(worker_group).items():
            worker_group.workers[local_rank].id = worker_id
        worker_group.state = WorkerState.HEALTHY
        self._own_restarts.began()
        self._last_result = RunResult(WorkerState.HEALTHY)
        job = self._peers.job
        self._run_record.formed(worker_group, job.generation(), self._restarts(), job.formed_after())
        self._record_worker_start_events()

    @prof
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers of this agent, and begin anew."""
        self._stop_workers(worker_group)
        self._hear_last_words()
        worker_group.state = WorkerState.STOPPED
        self._observe(agent_machine.Stopped())
        inbox.raise_pending()
        if self._restarting.delay_s > 0:
            self._back_off(time.monotonic() + self._restarting.delay_s)
        self._initialize_workers(worker_group)

    def _back_off(self, until: float) -> None:
        with report.meanwhile(lambda: _backing_off(self._restarts(), self._worker_group.spec.max_restarts, until)):
            while (left_s := until - time.monotonic()) > 0:  # a signal that is not ours wakes us too
                wait_readable([inbox.fileno()], left_s)
                inbox.raise_pending()

    @prof
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Agree with the other agents on ranks and on the workers' master."""
        spec = worker_group.spec
        with self.record_duration("RENDEZVOUS"):
            info = self._peers.next_rendezvous(self._shutdown_timeout, self._use_the_wait)
        spent = self._peers.job.restart_count()
        if spent is not None:
            self._remaining_restarts = spec.max_restarts - spent
        self._store = info.store
        with self.record_duration("ASSIGN_WORKER_RANKS"):
            workers = self._assign_worker_ranks(info.store, info.rank, info.world_size, spec)
        master = info.bootstrap_store_info
        worker_group.workers = workers
        worker_group.store = info.store
        worker_group.group_rank = info.rank
        worker_group.group_world_size = info.world_size
        worker_group.master_addr = spec.master_addr or master.master_addr
        worker_group.master_port = spec.master_port or master.master_port
        self._observe(agent_machine.Joined(info.rank, info.world_size))

    def _use_the_wait(self, licence_fd: int | None) -> None:
        """The others are waited for. Whoever cleans up after us can already tell them so, by this licence."""

    def _open_desk(self) -> None:
        """Something takes long: whoever asks how the job is from now on is to get an answer."""

    @prof
    def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec) -> list[Worker]:
        """Our ranks: the job knows them, or we compute them from what all agents tell about their workers."""
        known = self._peers.job.worker_ranks()
        if known is not None:
            return workers_of(known)
        members = [Member(spec.role, spec.local_world_size)]
        if group_world_size > 1:
            my_info = _RoleInstanceInfo(spec.role, group_rank, spec.local_world_size).serialize()
            with inbox.interrupting():
                told = barriers.synchronize(store, my_info, group_rank, group_world_size, _ROLE_INFO_PREFIX)
            members = [Member(info.role, info.local_world_size) for info in map(_RoleInstanceInfo.deserialize, told)]
        return workers_of(assign_ranks(members, group_rank if group_world_size > 1 else 0))

    def _exit_barrier(self) -> None:
        """Stay until all agents are done, or for the exit barrier's time: whoever leaves early would look like a lost node."""
        started_at = time.monotonic()
        try:
            with inbox.interrupting():
                barriers.barrier(
                    store=self._store,
                    world_size=self._worker_group.group_world_size or 1,
                    key_prefix=_TERMINAL_STATE_SYNC_ID,
                    barrier_timeout=self._exit_barrier_timeout,
                    rank=self._worker_group.group_rank,
                )
        except SignalException:
            raise
        except Exception as error:  # our workers have succeeded; whatever a store does at the end cannot change that
            report.warn(f"after {time.monotonic() - started_at:.1f} s the other nodes were not seen to finish: {error}")

    # --- events and metrics, as subclassers know them ----------------------------------------------------------------------

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
            self._run_record.send(self._construct_event(state, EventSource.AGENT, duration_ms=duration_ms))

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
        """An agent's event, or one of its workers', with all that dashboards for torchrun look for."""
        group, spec = self._worker_group, self._worker_group.spec
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

    def _record_worker_start_events(self) -> None:
        """For the sink that was chosen; to the run's file the event of the generation says the same."""
        workers = self._worker_group.workers if self._run_record.has_sink else ()
        self._run_record.send_to_sink(*(self._construct_event("START", EventSource.WORKER, worker) for worker in workers))

    def _record_worker_events(self, result: RunResult) -> None:
        self._run_record.send(*(self._end_of(worker, result) for worker in self._worker_group.workers))

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
        self._run_record.put("flakiness", 100 if is_failed else int(100.0 - 100.0 * left / most))

    def _record_metric_with_condition(self, metric_name: str, condition: bool) -> None:
        """1 where it holds, else 0."""
        self._run_record.put(metric_name, int(condition))
