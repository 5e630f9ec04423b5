"""The agent that runs its workers on its own machine.

To the parts of every agent it adds one that watches over its workers beyond their ends (`agent.worker_monitor`), and the run's
folder.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence

from rallypoint.agent import records as agent_records
from rallypoint.agent.agent import SimpleElasticAgent
from rallypoint.agent.capabilities import NoReserve, folders_of, hold_on, news_fd_of
from rallypoint.agent.leaving import NO_DRAIN, DrainFlags, Leaving
from rallypoint.agent.peers import NoAttendant, OwnRestarts
from rallypoint.agent.worker_monitor import WorkerMonitor
from rallypoint.agent.workers import RunResult, WorkerGroup, WorkerSpec, WorkerState
from rallypoint.base import defaults, environment, limits, outbox, report
from rallypoint.base.signals import inbox
from rallypoint.errors import JobPreemptedError, JobStoppedError, SignalException, UsageError
from rallypoint.events import EventSource
from rallypoint.metrics import prof
from rallypoint.output.log_specs import LogsSpecs, Std
from rallypoint.output.outlets import mixes_lines
from rallypoint.processes import warden_client
from rallypoint.processes.context import PContext, wait_readable
from rallypoint.processes.subprocesses import start_processes, warm_up
from rallypoint.protocol import agent_machine
from rallypoint.protocol.restarts import RestartPolicy
from rallypoint.protocol.worker_plan import Group, WorkerPlan, WorkerRanks, plan_worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any

    from rallypoint.agent.peers import PlainPeers
    from rallypoint.checkpoint.vault import Snapshots
    from rallypoint.failures.process_failure import ProcessFailure
    from rallypoint.inspection.desk import Desk
    from rallypoint.inspection.view import NodeView
    from rallypoint.net.http_server import Answer
    from rallypoint.notices.notifier import Notifier
    from rallypoint.preflight.attendant import Attendant
    from rallypoint.processes.learning import Learner
    from rallypoint.processes.titles import Titles
    from rallypoint.timers.file_server import FileTimerServer
    from rallypoint.timers.file_timer import FileTimerRequest
    from rallypoint.web.site import Site

__all__ = ["LocalElasticAgent", "make_learner", "plan_workers"]

QUIET_S = 0.5
FILES_PER_WORKER = 4  # two pipes with two ends each, or with one end and a log file
FILES_PER_WORKER_WITHOUT_LOGS = 2
FILES_OF_SNAPSHOTS, FILES_OF_COPIED_SNAPSHOTS = 2, 8  # three for a worker, three for another node's, and a line
OWN_FILES, OWN_FILES_AMONG_PEERS = 18, 34  # without which not even a job of one worker can be run to its end
# What the end of a job will need, loaded while nothing happens. Much is imported only where it is used, so that a start is quick:
# how workers are stopped, how a failure is described, who serves the workers' store. A job may run for weeks, and meanwhile the
# package may be upgraded, moved or removed. So once the workers run and all is quiet, the rest is fetched, as long as it is there
# and of the same version. Modules of the standard library are not listed: they cost more, and stay. Neither is what answers
# questions from outside, such as the page of metrics. A test compares the list with what is really imported later.
PROVISIONS = (
    "rallypoint.protocol.shutdown",
    "rallypoint.base.limits",
    "rallypoint.failures.error_files",
    "rallypoint.failures.process_failure",
    "rallypoint.processes.kernel",
    "rallypoint.base.signals",
    "rallypoint.store.tcp_serving",
)


class LocalElasticAgent(SimpleElasticAgent):
    """Starts `spec.local_world_size` workers on this machine, and starts or stops them as one.

    >>> from rallypoint import DefaultLogsSpecs, LocalElasticAgent, WorkerSpec
    >>> from rallypoint.rendezvous import RendezvousParameters, get_rendezvous_handler
    >>> handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "my-job", 1, 1))
    >>> agent = LocalElasticAgent(WorkerSpec("trainer", 2, handler, entrypoint=abs, args=(-7,)), DefaultLogsSpecs())
    >>> agent.run().return_values
    {0: 7, 1: 7}
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str = defaults.START_METHOD,
        exit_barrier_timeout: float = defaults.EXIT_BARRIER_TIMEOUT_S,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: float = defaults.SHUTDOWN_TIMEOUT_S,
        health_check_server: Any = None,
        uninterruptible_state_timeout: float | None = None,
        *,
        signals_to_handle: str = defaults.SIGNALS_TO_HANDLE,
        worker_env: dict[str, str] | None = None,
        restart_policy: RestartPolicy | None = None,
        hang_timeout: str | float | None = None,
        preload: tuple[str, ...] = (),
        standby: bool = False,
        proctitle: bool = False,
        checkpoint_memory: int | None = None,
        checkpoint_dir: str | None = None,
        checkpoint_copies: int = 0,
        checkpoint_bandwidth: int | None = None,
        preflight: tuple[str, ...] = (),
        health_listeners: Sequence[socket.socket] = (),
        health_addr: str = defaults.HEALTH_ADDR,
        web: bool = False,
        notifier: Notifier | None = None,
        drain: DrainFlags = NO_DRAIN,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout)
        self._run_record.notifier = self._notifier = notifier
        self._start_method = start_method
        self._pcontext: PContext | None = None
        self._rdzv_handler = spec.rdzv_handler  # as subclassers know it
        self._log_line_prefix_template = log_line_prefix_template
        self._logs_specs = logs_specs
        self._health_check_server = health_check_server
        self._worker_watchdog: FileTimerServer | None = None
        self._hang_timeout = hang_timeout
        self._preload = preload
        self._learner = make_learner(preload, spec.entrypoint, spec.args, logs_specs)
        self._reserve = _make_reserve(standby)
        self._has_titles = proctitle
        self._titles: Titles | None = None  # once there are workers to have some
        self._plan_snapshots(checkpoint_memory, checkpoint_dir, checkpoint_copies, checkpoint_bandwidth)
        self._health_listeners, self._health_addr = list(health_listeners), health_addr
        self._has_page = web
        self._site: Site | None = None
        self._kill_wait_s = _kill_wait(uninterruptible_state_timeout)
        self._signals_to_handle = signals_to_handle
        self._worker_env = worker_env or {}
        self._fell: dict[int, ProcessFailure] = {}  # who failed here after others had elsewhere, and before it was told to stop
        self._quiet_since: float | None = time.monotonic()  # None once all is loaded that there is to load
        self._desk: Desk | None = None
        self._monitor = WorkerMonitor(spec, self._run_record, lambda: self._pcontext, hang_timeout)
        self._leaving = Leaving(drain, spec, self._peers, self._monitor, lambda: self._pcontext, self._is_running)
        self._peers.attendant = _make_attendant(preflight, _log_folder(logs_specs), self._peers)
        if restart_policy is not None:
            self._own_restarts = OwnRestarts(restart_policy)

    def _plan_snapshots(self, memory: int | None, folder: str | None, copies: int, bandwidth: int | None) -> None:
        """What the other nodes have to know of it is whether there are any, and whose copies are kept."""
        self._checkpoint_memory, self._checkpoint_dir = memory, folder
        self._checkpoint_copies, self._checkpoint_bandwidth = copies, bandwidth
        self._snapshots: Snapshots | None = None
        self._is_seated = False  # whether there is a generation in which we have a place
        self._peers.alike = ("checkpoint_memory", "given" if memory else "not given"), ("checkpoint_copies", copies)

    def run(self, role: str = "default") -> RunResult:
        self._reserve_files()
        with outbox.on_duty(), warden_client.keep_wardens() as wardens:
            return self._run_on_record(role, wardens)

    def _run_on_record(self, role: str, wardens: warden_client.keep_wardens) -> RunResult:
        record = self._run_record
        record.began(self._time_outs())
        try:
            self._leaving.open()
            self._setup_healthcheck()
            self._monitor.open(is_asked_for_progress=self._health_check_server is not None)
            try:
                result = super().run(role)
            finally:
                wardens.dismiss()  # it ends while we tidy up
            self._put_end_on_record(record.board.status.why, "failed" if result.is_failed() else "succeeded")
            self._end_snapshots(not result.is_failed())
            return result
        except BaseException as error:  # whatever it was, it ends the run; it is raised again
            state = self._state
            why = state.why if isinstance(state, agent_machine.Done) else f"{type(error).__name__}: {error}"
            self._put_end_on_record(why, "stopped" if isinstance(error, SignalException) else "failed")
            record.keep_story(folders_of(self._logs_specs))
            self._end_snapshots(succeeded=False)
            raise
        finally:
            self._stop_local_watchdog()
            self._leaving.close()
            self._reserve.close()
            self._peers.attendant.close()
            if self._site is not None:
                self._site.close()
            if self._desk is not None:
                self._desk.close()
            if self._learner is not None:
                self._learner.close()
            if self._health_check_server is not None:
                self._health_check_server.stop()
            self._monitor.close()
            if self._snapshots is not None:
                self._snapshots.close()
            record.close(folders_of(self._logs_specs))

    def _put_end_on_record(self, why: str, how: agent_records.Outcome) -> None:
        job = self._peers.job
        end = job.end_error()
        outcome = "stopped" if isinstance(end, JobStoppedError | JobPreemptedError) else how
        self._run_record.ended(outcome, why, job.last_word(self._worker_group.group_rank), job.verdict())

    def _reserve_files(self) -> None:
        """While nothing is started that could fail for want of them."""
        workers, own = self._worker_group.spec.local_world_size, OWN_FILES_AMONG_PEERS if self._peers.act_as_one else OWN_FILES
        passes_us = folders_of(self._logs_specs).keeps_output or (workers > 1 and mixes_lines(Std.OUT))
        each = FILES_PER_WORKER if passes_us else FILES_PER_WORKER_WITHOUT_LOGS
        kept = FILES_OF_COPIED_SNAPSHOTS if self._checkpoint_copies else FILES_OF_SNAPSHOTS if self._checkpoint_memory else 0
        limits.reserve(workers, own + (each + kept) * workers, FILES_PER_WORKER + kept)

    def _time_outs(self) -> dict[str, object]:
        """Those that this agent keeps, for the run's record."""
        return {
            "shutdown_timeout": self._shutdown_timeout,
            "exit_barrier_timeout": self._exit_barrier_timeout,
            "uninterruptible_timeout": self._kill_wait_s or defaults.UNINTERRUPTIBLE_TIMEOUT_S,
            "monitor_interval": self._worker_group.spec.monitor_interval,
            "hang_timeout": self._hang_timeout,
            "health_timeout": defaults.HEALTH_TIMEOUT_S,
            "rendezvous": self._peers.job.settings_in_force(),
        }

    def _setup_healthcheck(self) -> None:
        """Answer health checks where that is asked for; not if we were given a server."""
        if self._health_check_server is not None:
            if self._has_page:
                report.warn("the job has no web page: our own health endpoint serves it, and another one was given to this agent")
            return
        stopping_s = self._shutdown_timeout + (self._kill_wait_s or defaults.UNINTERRUPTIBLE_TIMEOUT_S)
        pages, door = self._make_pages(), self._leaving.make_door(self._site.token if self._site is not None else "")
        if door is not None:
            pages[door.path] = door.answer
        server = self._monitor.make_health_server(self._health_addr, self._health_listeners, stopping_s, pages)
        if server is None:
            return
        try:
            server.start()
        except UsageError as error:  # a port that a flag names was opened, or refused, before
            report.warn(f"the job goes on without a health endpoint: {error}")
            return
        self._health_check_server = server
        report.info(f"health checks are answered at port {server.port}: /healthz, /readyz, /metrics")
        if self._site is not None:
            report.info(f"the job's page: {self._site.address(self._health_addr, server.port)}")
        if door is not None:
            report.info(f"to give this node notice: {door.how_to_ask(self._health_addr, server.port)}")

    def _make_pages(self) -> dict[str, Answer]:
        """The web page of the job, where it is asked for, by the paths that it consists of."""
        if not self._has_page:
            return {}
        from rallypoint.agent.viewing import log_finder, open_site
        from rallypoint.web.rules import PATHS

        find_log = log_finder(self._run_record, folders_of(self._logs_specs))
        self._site = open_site(self._viewer(), lambda: self._desk, self._run_record, find_log)
        return dict.fromkeys(PATHS, self._site.answer)

    def _is_running(self) -> bool:
        return isinstance(self._state, agent_machine.Starting | agent_machine.Running)

    def _signals_to_watch(self) -> str:
        return ",".join(filter(None, (self._signals_to_handle, self._leaving.signals())))

    def _look(self) -> agent_machine.Observation:
        self._leaving.look()
        return self._leaving.see(super()._look())

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        """Watch over file timers, where the environment asks for it, and tell the workers where."""
        server = self._monitor.make_timer_server(envs, self._log_watchdog_event)
        if server is not None:
            self._worker_watchdog = server
            server.start()

    def _stop_local_watchdog(self) -> None:
        watchdog, self._worker_watchdog = self._worker_watchdog, None
        if watchdog is not None:
            watchdog.stop()

    def _log_watchdog_event(self, name: str, request: FileTimerRequest | None) -> None:
        """Under the names and with the facts that dashboards for torchrun know."""
        described = self._construct_event("RUNNING", EventSource.AGENT)
        self._run_record.send(agent_records.timer_event(described, self._get_fq_hostname(), name, request))

    def _get_fq_hostname(self) -> str:
        """The name of this host in those events; to be overridden."""
        return agent_records._get_fq_hostname()

    @prof
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        generation = self._run_record.next_generation(self._peers.job.generation())
        plans, envs = self._plan_workers(worker_group, generation)
        self._leaving.begin(self._peers.job.generation(), envs)
        standby = self._reserve.take()
        kept_files = _both(self._keep_snapshots(worker_group, generation, envs), self._reserve.equip(envs))
        self._setup_local_watchdog(envs=envs)
        prefixes = {plan.local_rank: plan.prefix for plan in plans if plan.prefix is not None}
        ours = {**self._preloading(), "licence_fd": self._peers.job.licence_fd(), "kept_files": kept_files, "standby": standby}
        ours["on_long_wait"] = self._open_desk if self._preload else None
        with self._monitor.starting:
            self._pcontext = start_processes(
                name=spec.role,
                entrypoint=spec.entrypoint or "",
                args={plan.local_rank: plan.args for plan in plans},
                envs=envs,
                logs_specs=self._logs_specs,
                log_line_prefixes=prefixes or None,
                start_method=self._start_method,
                numa_options=spec.numa_options,
                duplicate_stdout_filters=spec.duplicate_stdout_filters,
                duplicate_stderr_filters=spec.duplicate_stderr_filters,
                # Where there is none, what is called is as torch's: programs put their own in its place.
                **{name: value for name, value in ours.items() if value is not None and value not in ((), {})},
            )
        self._reserve.started()
        if self._snapshots is not None:
            self._snapshots.started()
        hold = hold_on(self._pcontext)
        hold.on_long_wait = self._open_desk
        hold.ends_with_failure = False  # it is stopped when others have been told, in the time that is left
        if self._kill_wait_s is not None:
            hold.kill_wait_s = self._kill_wait_s
        self._peers.job.on_fence(hold.kill_at_once)
        folders, pids = folders_of(self._logs_specs), self._pcontext.pids()
        self._run_record.use_folders(folders)
        self._monitor.watch(worker_group, pids, folders.run_folder, self._peers.job)
        if self._has_titles:
            self._name_workers(worker_group, hold.commands, pids)
        self._note_quiet(is_quiet=False)
        if generation > 1:  # of a job that is never quiet one wants to know why
            self._open_desk()
        return pids

    def _plan_workers(self, group: WorkerGroup, generation: int) -> tuple[list[WorkerPlan], dict[int, dict[str, str]]]:
        """Also their environments, with what they have of us."""
        handler = group.spec.rdzv_handler
        plans = plan_workers(
            group,
            restart_count=self._restarts(),
            generation=generation,
            run_id=handler.get_run_id(),
            use_agent_store=bool(handler.use_agent_store),
            signals_to_handle=self._signals_to_handle,
            prefix_template=self._log_line_prefix_template,
            extra_env=self._worker_env,
        )
        return plans, {plan.local_rank: _with_site(self._monitor.add_env(plan.local_rank, plan.env)) for plan in plans}

    def _warm_up(self) -> None:
        """Imports depend on nobody's rank: warm workers find them done however soon the other nodes come."""
        group, spec = self._worker_group, self._worker_group.spec
        preload = self._preloading()["preload"] if self._preload and self._pcontext is None else ()
        if not preload:
            return
        plans, envs = self._plan_workers(group, generation=0)
        args = {plan.local_rank: plan.args for plan in plans}
        warm_up(spec.entrypoint or "", args, envs, self._logs_specs, self._start_method, spec.numa_options, preload)

    def _preloading(self) -> dict[str, Any]:
        """What workers find imported; or what they imported last, and who learns what they import now."""
        if self._learner is None:
            return {"preload": self._preload}
        return {"preload": self._learner.choose(), "learner": self._learner}

    def _name_workers(self, group: WorkerGroup, commands: dict[int, tuple[str, ...]], pids: dict[int, int]) -> None:
        from rallypoint.processes.titles import Title, Titles

        job, entry = group.spec.rdzv_handler.get_run_id(), group.spec.entrypoint
        function = "" if isinstance(entry, str) else group.spec.get_entrypoint_name()
        titles = {
            pids[one.local_rank]: Title(one.global_rank, one.world_size, job, commands[one.local_rank], function)
            for one in group.workers
            if one.local_rank in commands
        }
        self._titles = self._titles or Titles()
        self._titles.name(titles, time.monotonic())

    def _keep_snapshots(
        self, worker_group: WorkerGroup, generation: int, envs: dict[int, dict[str, str]]
    ) -> dict[int, tuple[int, ...]]:
        """Memory for what workers save, if it is asked for; they are told where it is."""
        if not self._checkpoint_memory:
            return {}
        from rallypoint.checkpoint.vault import Group, Snapshots

        if self._snapshots is None:
            workers = worker_group.spec.local_world_size
            self._snapshots = Snapshots(
                self._checkpoint_memory, workers, self._checkpoint_dir, self._checkpoint_copies, self._checkpoint_bandwidth
            )
        group = Group(
            generation=generation,
            node=worker_group.group_rank or 0,
            nodes=worker_group.group_world_size or 1,
            world=worker_group.workers[0].world_size,
            ranks={worker.local_rank: worker.global_rank for worker in worker_group.workers},
            store=worker_group.store,
            address=self._peers.job.own_address(),
        )
        return self._snapshots.prepare(group, envs)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._is_seated = False
        super()._rendezvous(worker_group)
        self._is_seated = True

    def _end_snapshots(self, succeeded: bool) -> None:
        """A job that ends while it waits for the next generation may have lost nodes, whether or not anybody has said so."""
        if self._snapshots is not None:
            verdict = self._peers.job.verdict()
            self._snapshots.end(succeeded, not self._is_seated or (verdict is not None and bool(verdict.lost)))

    @prof
    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        at_once = self._restarting.at_once
        self._shutdown(signal.SIGKILL if at_once else signal.SIGTERM, timeout=0 if at_once else self._shutdown_timeout)

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = defaults.SHUTDOWN_TIMEOUT_S, is_restart: bool = False
    ) -> None:
        self._monitor.stop_watching()
        self._stop_local_watchdog()
        hold = hold_on(self._pcontext)
        hold.hurry_fd, hold.once_told = self._peers.job.fence_fd(), self._tell_sender
        if self._pcontext is not None:
            self._pcontext.close(death_sig, timeout)

    @prof
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        context = self._pcontext
        if context is None:
            return RunResult(WorkerState.UNKNOWN)
        known, running = {worker.id for worker in worker_group.workers}, set(context.pids().values())
        if known != running:
            report.warn(f"role {worker_group.spec.role}: the workers have the process ids {known}, but {running} were started")
            return RunResult(WorkerState.UNKNOWN)
        ended = context.wait(0)
        if ended is None:
            self._monitor.look()
            self._reserve.look(context, time.monotonic())
            if self._learner is not None:
                self._learner.look(time.monotonic())
            return RunResult(WorkerState.HEALTHY)
        global_rank = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        if ended.is_failed():
            return RunResult(WorkerState.FAILED, failures={global_rank[local]: one for local, one in ended.failures.items()})
        return RunResult(WorkerState.SUCCEEDED, {global_rank[local]: value for local, value in ended.return_values.items()})

    def _furthest_step(self, result: RunResult) -> int:
        if not self._own_restarts.wants_step(result.failures) or not self._monitor.is_told_of_steps():
            return -1
        now = time.monotonic()
        pulses = [self._monitor.pulse(worker.local_rank, now) for worker in self._worker_group.workers]
        return max((pulse.step for pulse in pulses if pulse is not None and pulse.step is not None), default=-1)

    def _see_who_follows(self, result: RunResult, may_be_hopeless: bool = False) -> RunResult:
        """A restart that may be left is not put off for that, unless none can help; nor is it of interest where we have ended a
        worker ourselves.
        """
        is_last = self._own_restarts.are_surely_spent(self._remaining_restarts)
        last_failure = self._peers.job.last_failure()
        matters = is_last or may_be_hopeless or self._own_restarts.may_be_hopeless(result.failures, last_failure)
        if not matters or any(one.ended_on_purpose for one in result.failures.values()):
            return result
        self._monitor.stop_watching()  # who is silent now may wait for the one that failed
        hold = hold_on(self._pcontext)
        hold.wants_last_words = True
        hold.await_others(defaults.SAME_FAILURE_WAIT_S, self._peers.job.fence_fd())
        found = self._monitor_workers(self._worker_group).failures
        if not result.is_failed():
            self._fell = found  # whether that is what all began with, and was only seen later, is for the job to decide
            return result
        kinds = {one.kind for one in result.failures.values()}
        only_echoes = self._peers.act_as_one and _are_echoes(result.failures.values())  # of one that took longer to end
        told = {rank: one for rank, one in found.items() if only_echoes or rank in result.failures or one.kind in kinds}
        return RunResult(result.state, failures=told)

    def _hear_last_words(self) -> None:
        global_rank = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        said = hold_on(self._pcontext).last_words
        # A bare exit code is how some stop.
        late = {global_rank[local]: one for local, one in said.items() if one.traceback() or one.looks_hopeless}
        fell, self._fell = self._fell, {}
        if not late and not fell:
            return
        kinds = {one.kind for one in self._last_result.failures.values()}
        alike = {rank: one for rank, one in late.items() if one.kind in kinds}
        self._last_result.failures.update(alike)
        self._run_record.failed(RunResult(WorkerState.FAILED, failures={**fell, **alike}))
        told = RunResult(WorkerState.FAILED, failures={**fell, **self._last_result.failures})
        self._peers.report_failure(told, late, self._furthest_step(told))

    def _use_the_wait(self, licence_fd: int | None) -> None:
        if licence_fd is not None:
            warden_client.entrust(licence_fd)
        inbox.learn_senders()
        self._warm_up()
        self._open_desk()

    def _open_desk(self) -> None:
        """Let this agent be asked. It is done on the way to the first workers only if that takes long: it costs milliseconds."""
        if self._desk is not None:
            return
        job, desk = self._peers.job, None
        try:
            from rallypoint.agent.viewing import log_finder
            from rallypoint.inspection.desk import Desk

            find_log = log_finder(self._run_record, folders_of(self._logs_specs))
            desk = Desk(self._viewer(), job.new_connection, find_log)
            if limits.is_reserved(desk.fileno()):  # the last open files are for the workers
                desk.close()
                return
            desk.open()
        except (ImportError, OSError, RuntimeError) as error:  # rallypoint was moved, or the host has no more; the job goes on
            report.debug(f"this agent cannot be asked: {error}")
            if desk is not None:
                desk.close()
            return
        self._desk = desk
        job.on_asked(desk.hear)

    def _viewer(self) -> Callable[[], NodeView]:
        """Who describes this agent as it is now, for any thread."""
        from rallypoint.agent.viewing import describe_node

        record, spec, monitor, peers = self._run_record, self._worker_group.spec, self._monitor, self._peers

        def view() -> NodeView:
            seen = describe_node(record, spec, monitor, peers.job)
            if seen.workers:
                return seen
            if unfit := peers.attendant.why_unfit:
                return seen.replace(why=f"this machine is not fit: {unfit}")
            if self._preload and monitor.starting.locked():
                return seen.replace(why="the modules of --preload are being imported for the workers")
            return seen

        return view

    def _wish(self) -> agent_machine.Regroup | None:
        why = self._desk.take_request() if self._desk is not None else None
        return None if why is None else agent_machine.Regroup(why)

    def _stopped_by(self) -> str:
        return self._desk.stopped_by if self._desk is not None else ""

    def _licence_over(self) -> str:
        if not hold_on(self._pcontext).licence_expired:
            return ""
        return "this node's workers were killed: the coordination store had not confirmed this node for too long"

    def _wait_for_news(self) -> None:
        """Sleep until a worker, a peer or a signal wakes us; poll only for what cannot wake us."""
        news_fd = news_fd_of(self._pcontext)
        is_ours = type(self)._monitor_workers is LocalElasticAgent._monitor_workers
        must_poll = news_fd is None or not is_ours or self._peers.must_be_polled
        timeouts_s = [self._worker_group.spec.monitor_interval] if must_poll else []
        learn_at = None if self._learner is None else self._learner.next_look_at()
        for look_at in (self._monitor.next_look_at(), self._reserve.next_look_at(), learn_at, *self._leaving.next_looks_at()):
            if look_at is not None:
                timeouts_s.append(look_at - time.monotonic())
        if self._titles is not None and (look_at := self._titles.next_look_at()) is not None:
            timeouts_s.append(look_at - time.monotonic())
        if self._quiet_since is not None:
            timeouts_s.append(self._quiet_since + QUIET_S - time.monotonic())
        fds = [news_fd, self._monitor.news_fd()] if is_ours else []
        fds += [self._peers.wakeup_fd(), inbox.fileno(), *self._reserve.news_fds(), *self._leaving.fds()]
        if self._desk is not None:
            fds.append(self._desk.fileno())
        readable = wait_readable(fds, min(timeouts_s, default=None))
        if self._titles is not None:
            self._titles.look(time.monotonic())
        self._note_quiet(is_quiet=not readable)

    def _note_quiet(self, is_quiet: bool) -> None:
        """When workers run and nothing has happened for a moment, load what their end will need."""
        now = time.monotonic()
        if self._quiet_since is None:
            return
        if not is_quiet:
            self._quiet_since = now
        elif now >= self._quiet_since + QUIET_S:
            self._quiet_since = None
            inbox.learn_senders()
            self._open_desk()
            _load_provisions(self._notifier.provisions if self._notifier is not None else ())


def _are_echoes(failures: Iterable[ProcessFailure]) -> bool:
    """For a verdict, so that what knows of it is loaded."""
    from rallypoint.protocol.verdict import is_echo

    return all(is_echo(one.message) for one in failures)


def _make_reserve(is_wanted: bool) -> NoReserve:
    """What it takes is loaded only where it is used."""
    if not is_wanted:
        return NoReserve()
    from rallypoint.agent.reserve import Reserve

    return Reserve()


def _log_folder(logs_specs: LogsSpecs) -> str:
    """Which the user has named."""
    folders = folders_of(logs_specs)
    return "" if folders.is_temporary or folders.root_log_dir == os.devnull else folders.root_log_dir


def _make_attendant(preflight: tuple[str, ...], log_folder: str, peers: PlainPeers) -> Attendant | NoAttendant:
    """What it takes is loaded only where it is used."""
    if not preflight:
        return NoAttendant()
    from rallypoint.preflight.attendant import Attendant
    from rallypoint.preflight.checks import read_specs
    from rallypoint.preflight.rules import is_of_network

    folders = (log_folder,) if log_folder else ()
    specs = [spec.replace(folders=folders) for spec in read_specs(preflight)]
    attendant = Attendant(specs)
    if peers.act_as_one and any(map(is_of_network, specs)):
        from rallypoint.preflight.neighbours import Neighbours

        attendant.neighbours = Neighbours(peers.job.whereabouts, peers.job.new_connection, attendant.look_again)
        peers.job.on_doubt(attendant.doubt)
    return attendant


def make_learner(
    preload: tuple[str, ...], entrypoint: Callable[..., Any] | str | None, args: Sequence[Any], logs_specs: LogsSpecs
) -> Learner | None:
    """Who knows what the program imported last, where that is asked for."""
    if preload != (defaults.PRELOAD_AUTO,):
        return None
    from rallypoint.processes.learning import Learner, record_path

    return Learner(entrypoint, args, record_path("" if folders_of(logs_specs).is_temporary else logs_specs.root_log_dir))


def _both(some: dict[int, tuple[int, ...]], more: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    return {local_rank: (*some.get(local_rank, ()), *more.get(local_rank, ())) for local_rank in {**some, **more}}


def _with_site(env: dict[str, str]) -> dict[str, str]:
    """Where workers are to find us behind torch's names, their interpreters have to prepare that before the program begins."""
    if env.get(defaults.ENV_COMPAT, environment.own.get(defaults.ENV_COMPAT)) != "1":
        return env
    from rallypoint.worker_site import in_front

    python_path = env.get(defaults.ENV_PYTHONPATH, environment.own.get(defaults.ENV_PYTHONPATH))
    return {**env, defaults.ENV_PYTHONPATH: in_front(python_path)}


def plan_workers(group: WorkerGroup, **job: Any) -> list[WorkerPlan]:
    """The workers of a group whose ranks are known; `job` are the fields of `Group` that the group does not tell."""
    spec = group.spec
    masks: tuple[str, ...] = (defaults.ENV_CUDA_VISIBLE_DEVICES,)
    if spec.virtual_local_rank:
        from rallypoint.hardware.devices import mask_variables

        masks = mask_variables()
    shared = Group(
        role=spec.role,
        group_rank=group.group_rank or 0,
        group_world_size=group.group_world_size or 1,
        local_world_size=spec.local_world_size,
        master_addr=group.master_addr or "",
        master_port=group.master_port or 0,
        max_restarts=spec.max_restarts,
        hostname=os.uname().nodename,
        virtual_local_rank=spec.virtual_local_rank,
        visible_devices=environment.first_of(masks),
        mask_variables=masks,
        inherited=environment.own,
        **job,
    )
    ranks = [WorkerRanks(w.local_rank, w.global_rank, w.role_rank, w.world_size, w.role_world_size) for w in group.workers]
    return [plan_worker(shared, one, spec.args) for one in ranks]


def _kill_wait(given_s: float | None) -> float | None:
    """How long after SIGKILL a process is called unkillable, if somebody said so."""
    text = environment.own.get(defaults.ENV_UNINTERRUPTIBLE_TIMEOUT)
    if given_s is not None or not text:
        return given_s
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{defaults.ENV_UNINTERRUPTIBLE_TIMEOUT} must be a number of seconds, not {text!r}") from None


def _load_provisions(more: Sequence[str] = ()) -> None:
    """Import what is missing. What cannot be had any more is told of, once: it may never be needed."""
    try:
        for name in (*PROVISIONS, *more):
            __import__(name)
    except ImportError as error:
        report.warn(f"rallypoint was upgraded, moved or removed while it runs, and may not end this job well: {error}")
    else:
        report.debug("all that the end of this job may need is loaded")
