"""Workers under a warden: started by it, listened to through the pump, stopped by the rules of `protocol.shutdown`.

The warden holds the workers, and we hold the warden: if it does not answer while they are being stopped, it is killed, and the
kernel kills them with it. Where there is no time for that, they are killed past it.

This is what script workers and function workers share. A subclass says how each worker is launched, and what it returned.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from abc import abstractmethod

from rallypoint.base import defaults, environment, report
from rallypoint.base.records import Value
from rallypoint.base.signals import inbox
from rallypoint.errors import LicenceOverError, UnkillableWorkersError, WorkerStartError, worker_start_error
from rallypoint.output.log_specs import LogsDest, LogsSpecs, Std, file_clerk
from rallypoint.output.outlets import Outlets
from rallypoint.processes import warden_client
from rallypoint.processes.context import PContext, RunProcsResult, wait_readable
from rallypoint.processes.warden_client import Exited, Expired, FailedToStart, Kept, Launch, Lost, Rest, Started, WardenClient

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from rallypoint.failures.memory_kills import MemoryKills
    from rallypoint.failures.process_failure import ProcessFailure
    from rallypoint.output.waits import Wait
    from rallypoint.processes.learning import Learner
    from rallypoint.processes.standby import Standby
    from rallypoint.protocol.shutdown import Send, Stop, Target

__all__ = ["EndReason", "WardedContext"]

START_TIMEOUT_S = 60.0  # forking a few hundred processes takes less than one
SIGNALLED_START_S = 0.5  # what is left for it once a signal has come; only an import in a fork server takes longer
ANSWER_TIMEOUT_S = 5.0  # a warden answers in a millisecond; one that does not is stopped or stuck
QUICK_ANSWER_S = 0.2  # the same, where the workers must be gone by now
SHOWN_TIMEOUT_S = 1.0  # for what ended workers wrote, before their end is told
DRAIN_TIMEOUT_S = 1.0  # for the last lines of ended workers, should the console be slow; it may take them later, too
FILES_TIMEOUT_S = 2.0  # for a disk with log files that does not answer


class EndReason(Value):
    """Why a worker is ended on purpose, how long ago it failed, and where what it did then is written down."""

    why: str = ""
    ago_s: float = 0.0
    stacks_file: str = ""


class WardedContext(PContext):
    """A PContext whose processes are children of a warden."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: Any = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        filters = (duplicate_stdout_filters, duplicate_stderr_filters)
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, *filters)
        self._numa_options = numa_options
        self.cpus: dict[int, tuple[int, ...]] = {}  # by local rank, of those that are bound
        self.kill_wait_s = defaults.UNINTERRUPTIBLE_TIMEOUT_S
        self.hurry_fd: int | None = None  # readable once there is no time left for grace
        self.once_told: Callable[[], None] | None = None  # called when workers have been told to stop, and are not waited for yet
        self.licence_fd: int | None = None  # of the page that says until when the workers may run; None: there is no limit
        self.preload: tuple[str, ...] = ()  # the modules that workers are to find imported
        self.learner: Learner | None = None  # who wants to know what workers import
        self.kept_files: dict[int, tuple[int, ...]] = {}  # by local rank, those of ours that a worker has at the same number
        self.standby: Standby | None = None  # processes that have waited to be the workers
        self.on_long_wait: Callable[[], None] = lambda: None  # called when a start or a stop takes long
        self.expired_at: float | None = None  # when their warden killed them because that was over, of time.monotonic()
        self._warden: WardenClient | None = None
        self._outlets: Outlets | None = None
        self._logs = LogsDest()
        self._inherited_env: dict[str, str] = {}
        self.commands: dict[int, tuple[str, ...]] = {}  # by local rank, what each was started with; nothing if it is a fork
        self._pids: dict[int, int] = {}
        self._exits: dict[int, Exited] = {}
        self._start_error: WorkerStartError | None = None
        self._failures: dict[int, ProcessFailure] = {}
        self._handles = WorkerHandles()
        self._rest: tuple[int, ...] | None = None  # None: not reported yet
        self._look_at_warden_at = self._give_up_at = math.inf  # while it owes us an answer
        self._long_at = math.inf  # when a start or a stop that has begun is one that takes long
        self._memory_kills: MemoryKills | None = None
        self._end_reasons: dict[int, EndReason] = {}  # by process id
        self._stop: Stop | None = None  # while they are being stopped
        self.wants_last_words = False  # whether it matters how workers end that are stopped
        self.last_words: dict[int, ProcessFailure] = {}  # of those that failed only when they were stopped, by local rank

    @abstractmethod
    def _launch_of(self, local_rank: int, env: dict[str, str]) -> Launch:
        """How to start this worker, with this environment; its standard streams are added to it."""

    def _open_warden(self) -> WardenClient:
        return warden_client.take()

    def _return_values(self) -> dict[int, Any]:
        """What the workers returned, once all have succeeded."""
        return dict.fromkeys(self._exits)

    def _release(self) -> None:
        """Let go of what was held for the launches."""

    def pids(self) -> dict[int, int]:
        return dict(self._pids)

    def end_worker(self, local_rank: int, reason: EndReason) -> None:
        """Kill a worker on purpose: what is told of its end is the reason, and that it failed so long ago."""
        self.explain_end(self._pids[local_rank], reason)
        if self._warden is not None and local_rank not in self._exits:
            self._warden.signal_worker(local_rank, signal.SIGKILL)

    def pass_on(self, number: signal.Signals) -> None:
        """Send a signal to each worker, and to nothing that it has started; from any thread."""
        self._handles.send(number)

    @property
    def succeeded(self) -> frozenset[int]:
        """The local ranks that have ended well."""
        return frozenset(rank for rank, ended in self._exits.items() if ended.exitcode == 0)

    def explain_end(self, pid: int, reason: EndReason) -> None:
        """Say why somebody is about to end the worker with this process id; the first reason counts."""
        self._end_reasons.setdefault(pid, reason)

    def await_others(self, timeout_s: float, urgent_fd: int | None) -> None:
        """Until all have ended by themselves, or for this time; for no longer than until a signal or something urgent."""
        give_up_at = time.monotonic() + timeout_s
        while len(self._exits) < self.nprocs and (left_s := give_up_at - time.monotonic()) > 0:
            if wait_readable([self.news_fd(), inbox.fileno(), urgent_fd], left_s) - {self.news_fd()}:
                return
            self._absorb()

    @property
    def licence_expired(self) -> bool:
        """Whether the workers were killed, or not even started, because they may not run any longer."""
        return self.expired_at is not None

    @property
    def staying(self) -> frozenset[int]:
        """The local ranks that have nothing left to do, and stay only until the others have not either."""
        return frozenset()

    def kill_at_once(self) -> None:
        """Kill the workers and their process groups without asking anybody; from any thread."""
        self._handles.kill()

    def news_fd(self) -> int | None:
        return self._warden.fileno() if self._warden else None

    def _start(self) -> None:
        if self._numa_options is not None:
            from rallypoint.affinity import cpus_of_workers

            self.cpus = cpus_of_workers(self._numa_options, self.envs)
        self._warden = self._open_warden() if self.standby is None else self.standby.warden
        self._logs = self._destinations()
        specs = self._logs_specs
        limit, folder = getattr(specs, "log_max_bytes", None), getattr(specs, "run_folder", None)
        is_json = getattr(specs, "log_format", defaults.LOG_FORMAT) == defaults.LOG_FORMAT_JSON
        self._outlets = Outlets(self._logs, self.args.keys(), limit, folder, self.envs if is_json else None)
        self._inherited_env = _inherited()
        warden_client.stop_with_us(self._warden.pid)
        stdin = _input_of_workers()
        try:
            filtered = Std.OUT * bool(self._duplicate_stdout_filters) | Std.ERR * bool(self._duplicate_stderr_filters)
            self._outlets.make_filtered_files(Std(filtered))
            self._outlets.open_files()
            launches = [self._launch(rank, stdin) for rank in sorted(self.args)]
            self.commands = {launch.local_rank: launch.argv if launch.argv[0] else () for launch in launches}
            if self.standby is None:
                self._keep_warm(self._warden, launches)
                self._have_measured(launches)
                self._warden.spawn(launches, self.licence_fd)
            else:
                self._take_over(self.standby, launches)
        finally:
            self._outlets.hand_over()
            if stdin is not None and stdin > 0:
                os.close(stdin)
        self._prepare_for_failures()
        self._await_start()

    def warm_up(self) -> None:
        """Have imported what workers are to find so, as far as that is known before they have their places in the job.

        The idle warden begins with it, while nobody has been started yet. What cannot be done now is done, or told, at the start.
        """
        self._inherited_env = _inherited()
        launches = [self._launch_ahead(rank, self._environment_of(env)) for rank, env in sorted(self.envs.items())]
        if self._why_fresh(launches, self._numa_options is not None):
            return
        try:
            warden = warden_client.take()
        except WorkerStartError:  # there may be more processes by then
            return
        self._order_keeper(warden, launches)
        warden_client.put_back(warden)

    def _launch_ahead(self, local_rank: int, env: dict[str, str]) -> Launch:
        """As far as that is known before the start; nothing is held for it."""
        return self._launch_of(local_rank, env)

    def _take_over(self, standby: Standby, launches: list[Launch]) -> None:
        """Those who have waited are our workers from now on, and their warden is the one that answers for this node."""
        assert self._warden is not None
        warden_client.disown_idle()
        standby.hand_over(launches, self.licence_fd)
        for rank, pid in standby.pids.items():
            self._pids[rank] = pid
            self._handles.add(rank, pid, self._warden.pid)

    def _keep_warm(self, warden: WardenClient, launches: list[Launch]) -> None:
        """Have these workers, and those of later groups, forked from an interpreter that has imported what they need."""
        if not self.preload:
            return
        why = self._why_fresh(launches, bool(self.cpus))
        if why:
            self._tell_fresh(why)
        else:
            self._order_keeper(warden, launches)

    def _order_keeper(self, warden: WardenClient, launches: list[Launch]) -> None:
        from rallypoint.processes.warm_rules import environment_of_all
        from rallypoint.worker_site import in_front

        env = environment_of_all([launch.env for launch in launches])
        env[defaults.ENV_PYTHONPATH] = in_front(env.get(defaults.ENV_PYTHONPATH))
        warden.keep(launches[0].replace(env=env), self.preload)

    def _why_fresh(self, launches: list[Launch], is_bound: bool) -> str:
        from rallypoint.processes.warm_rules import why_fresh

        commands, envs = [launch.argv for launch in launches], [launch.env for launch in launches]
        return why_fresh(commands, envs, sys.executable, is_bound)

    def _have_measured(self, launches: list[Launch]) -> None:
        """Let the first of them tell what it imports, where that could ever be of use."""
        if self.learner is None:
            return
        why = self._why_fresh(launches, bool(self.cpus))
        if not why:
            launches[0] = self.learner.equip(launches[0])
        elif not self.preload:
            report.warn(f"--preload {defaults.PRELOAD_AUTO}: what workers import is not measured: {why}")

    def _import_time_s(self) -> float:
        """How long modules may take to be imported, before workers are fresh interpreters instead."""
        from rallypoint.processes.keeping import IMPORT_TIMEOUT_S

        return IMPORT_TIMEOUT_S

    def _tell_fresh(self, why: str) -> None:
        report.warn(f"workers import {', '.join(self.preload)} themselves: {why}")

    def _note_keeper(self, state: str, why: str, module: str) -> None:
        names = ", ".join(self.preload)
        if state == "refused":
            self._tell_fresh(why)
            if self.learner is not None:
                self.learner.note_refused(module, why)
        elif state == "rebuilt":
            report.info(f"importing {names} again for later workers: {why}")
        else:
            report.debug(f"workers find {names} imported, which took {why}")

    def _prepare_for_failures(self) -> None:
        """What is done while the workers' interpreters start, so that it costs no time: count the kills for memory so far."""
        from rallypoint.failures.memory_kills import MemoryKills

        self._memory_kills = MemoryKills()
        self._memory_kills.snapshot()
        if warden_client.launched_at() is not None:  # then what a killed warden leaves comes to us
            from rallypoint.processes import kernel

            kernel.adopt_orphans()

    def _launch(self, rank: int, stdin: int | None) -> Launch:
        assert self._outlets is not None
        prefix = (self._log_line_prefixes or {}).get(rank, f"[{self.name}{rank}]:")
        own = {**self.envs[rank], defaults.ENV_ERROR_FILE: self._logs.error_files[rank]}
        launch = self._launch_of(rank, self._environment_of(own))
        streams = {
            1: self._outlets.open(rank, Std.OUT, prefix, self._duplicate_stdout_filters),
            2: self._outlets.open(rank, Std.ERR, prefix, self._duplicate_stderr_filters),
        }
        if stdin is not None:
            streams[0] = stdin
        streams |= {fd: fd for fd in self.kept_files.get(rank, ())}
        cpus, may_run_unbound = self.cpus.get(rank, ()), self._may_run_unbound
        return launch.replace(fds={**streams, **launch.fds}, cpus=cpus, may_run_unbound=may_run_unbound)

    def _environment_of(self, own: dict[str, str]) -> dict[str, str]:
        """The whole of it, with what is a worker's own."""
        return {defaults.ENV_FAULTHANDLER: "1", **self._inherited_env, **own}

    @property
    def _may_run_unbound(self) -> bool:
        return bool(getattr(self._numa_options, "should_fall_back_if_binding_fails", False))

    def _await_start(self) -> None:
        """Return when every worker has been started; if one cannot be, none is left.

        A signal waits a little for that, so that those who are just being started are asked to stop as all others are.
        """
        began = time.monotonic()
        give_up_at = began + START_TIMEOUT_S + (self._import_time_s() if self.preload else 0.0)
        self._long_at = began + defaults.LONG_WAIT_S
        with report.meanwhile(lambda: self._told_of_start(began)):
            while len(self._pids) < self.nprocs:
                left = give_up_at - time.monotonic()
                if left <= 0:
                    inbox.raise_pending()
                    raise WorkerStartError(
                        f"{len(self._pids)} of {self.nprocs} workers were started within {START_TIMEOUT_S:g} s"
                    )
                self._wait([self.news_fd(), inbox.fileno()], left)
                self._absorb()
                self._check_start()
                if inbox.collect():
                    give_up_at = min(give_up_at, time.monotonic() + SIGNALLED_START_S)

    def _wait(self, fds: Iterable[int | None], timeout_s: float) -> set[int]:
        """For less, if it shows meanwhile that all of this takes long."""
        readable = wait_readable(fds, min(timeout_s, self._long_at - time.monotonic()))
        if time.monotonic() >= self._long_at:
            self._long_at = math.inf
            self.on_long_wait()
        return readable

    def _check_start(self) -> None:
        if self._start_error is not None:
            raise self._start_error
        if self.licence_expired:
            raise LicenceOverError("no worker was started: the coordination store had not confirmed this node for too long")

    def _told_of_start(self, since: float) -> Wait | None:
        """Nothing once there are workers, which may write where it would be told."""
        from rallypoint.output.waits import Starting

        return None if self._pids else Starting(self.nprocs, self.preload, since)

    def _absorb(self, timeout_s: float = 0.0) -> None:
        """Take in what the warden has reported."""
        assert self._warden is not None
        for news in self._warden.receive(timeout_s):
            match news:
                case Started(rank, pid):
                    self._pids[rank] = pid
                    self._handles.add(rank, pid, self._warden.pid)
                case FailedToStart(rank, errno, reason):
                    from rallypoint.base import limits

                    why = limits.explain(errno) or reason
                    error = worker_start_error(errno, f"{self._rank_text(rank)} could not be started: {why}")
                    self._start_error = self._start_error or error
                case Exited():
                    self._note_exit(news)
                case Rest(pids):
                    self._rest, self._look_at_warden_at = pids, math.inf
                case Expired(at):
                    self.expired_at = at
                case Kept(state, why, module):
                    self._note_keeper(state, why, module)
                case Lost():
                    self._note_lost_warden()

    def _note_exit(self, ended: Exited) -> None:
        assert self._outlets is not None
        self._exits[ended.local_rank] = ended
        self._handles.discard(ended.local_rank)
        self._outlets.worker_ended(ended.local_rank)

    def _note_lost_warden(self) -> None:
        """Without its warden every worker has been killed by the kernel; what they started in their groups is left to us."""
        from rallypoint.processes import kernel

        assert self._warden is not None
        report.warn(f"the warden (process {self._warden.pid}), parent of all workers, was killed, and all workers with it")
        if len(self._pids) < self.nprocs:
            text = "the process that starts the workers ended before they were there; its last words or the system's log say why"
            self._start_error = self._start_error or WorkerStartError(text)
        self._rest, self._look_at_warden_at = (), math.inf
        left = {rank: pid for rank, pid in self._pids.items() if rank not in self._exits}
        self._handles.kill()
        for pid in left.values():
            kernel.kill_if_allowed(-pid, signal.SIGKILL)
        self._handles.await_ends(self.kill_wait_s)
        for rank, pid in left.items():
            self._note_exit(Exited(rank, pid, -signal.SIGKILL, time.time()))
        if warden_client.launched_at() is not None:
            kernel.kill_children(self.kill_wait_s)

    def _poll(self) -> RunProcsResult | None:
        if self._is_open:
            self._absorb()
        for rank, ended in self._exits.items():
            if ended.exitcode != 0 and rank not in self._failures:
                self._failures[rank] = self._describe(ended)
        if self._outlets is not None and (self._failures or len(self._exits) == self.nprocs):
            self._outlets.await_drained(set(self._exits), SHOWN_TIMEOUT_S)
        if self._failures:
            return RunProcsResult(failures=dict(self._failures), stdouts=self._logs.stdouts, stderrs=self._logs.stderrs)
        if len(self._exits) == self.nprocs:
            return RunProcsResult(self._return_values(), stdouts=self._logs.stdouts, stderrs=self._logs.stderrs)
        return None

    def _describe(self, ended: Exited) -> ProcessFailure:
        """What is known of a failure; without what lies in files if those cannot be had."""
        assert self._outlets is not None
        tail = self._outlets.stderr_tail(ended.local_rank)
        try:
            return file_clerk.do(lambda: self._read_failure(ended, self._logs, tail), FILES_TIMEOUT_S)
        except TimeoutError as error:
            report.warn(f"the files of {self._rank_text(ended.local_rank)} do not tell why it failed: {error.strerror}")
            self.wants_last_words = False  # each could take as long
            return self._read_failure(ended, LogsDest(error_files={ended.local_rank: ""}), tail)

    def _read_failure(self, ended: Exited, logs: LogsDest, tail: str) -> ProcessFailure:
        """With what it left behind; `tail` is the last that it wrote to stderr, unless that is in a file."""
        from rallypoint.failures.process_failure import ProcessFailure

        assert self._outlets is not None
        assert self._memory_kills is not None
        rank = ended.local_rank
        error_file, log_file = logs.error_files[rank], logs.stderrs.get(rank, "")
        if log_file in ("", os.devnull):
            log_file = self._outlets.keep_tail(os.path.dirname(error_file), tail)
        else:
            tail = tail or self._outlets.file_tail(log_file)
        reason = self._end_reasons.get(ended.pid, EndReason()) if ended.exitcode < 0 else EndReason()
        is_for_memory = ended.exitcode == -signal.SIGKILL and not reason.why
        return ProcessFailure(
            local_rank=rank,
            pid=ended.pid,
            exitcode=ended.exitcode,
            error_file=error_file,
            stderr_tail=tail,
            log_file=log_file,
            no_log_advice=self._no_log_advice(),
            stacks_file=reason.stacks_file,
            ended_at=ended.at,
            failed_before_s=reason.ago_s,
            killed_for_memory=self._memory_kills.explain(ended.pid) if is_for_memory else "",
            ended_on_purpose=reason.why,
            full_log_folder=self._outlets.full_folder(rank) if log_file and not reason.why else "",
        )

    def _no_log_advice(self) -> str:
        """Where there is a folder for logs already, only the flag is missing that fills it."""
        return (
            ""
            if getattr(self._logs_specs, "is_temporary", True)
            else "it wrote nothing to stderr; add --tee 3 to keep stdout too"
        )

    def _close(self, death_sig: signal.Signals, timeout: float) -> None:
        stuck: tuple[Target, ...] = ()
        try:
            if self._warden is not None and (self._pids or self.licence_expired):
                had_ended = self._had_ended() if self.ends_with_failure else set()
                stuck = self._stop_all(death_sig, timeout)
                self._hear_last_words()
                self._note_failures(had_ended)
            elif self._warden is not None:
                self._warden.kill()  # nobody was started; it may be busy importing what it was to run
        finally:
            self._let_go(keep_warden=not stuck and self._rest == ())
        if stuck:
            pids = [self._pids[target.number] if target.is_worker else target.number for target in stuck]
            raise UnkillableWorkersError(sorted(pids), self.kill_wait_s)

    def _had_ended(self) -> set[int]:
        """Whether or not the warden has told so yet."""
        return self._pids.keys() - self._handles.running()

    def _note_failures(self, had_ended: set[int]) -> None:
        for rank in sorted(had_ended & self._exits.keys() - self._failures.keys()):
            if self._exits[rank].exitcode != 0:
                self._failures[rank] = self._describe(self._exits[rank])

    def _completed(self, result: RunProcsResult) -> RunProcsResult:
        result.failures.update(self._failures)
        return result

    def _hear_last_words(self) -> None:
        """Of workers that ended with an exit code of their own, although they were told to stop; as long as files can be read."""
        for rank, ended in self._exits.items():
            if self.wants_last_words and ended.exitcode > 0 and rank not in self._failures:
                self.last_words[rank] = self._describe(ended)

    def _let_go(self, keep_warden: bool) -> None:
        if self._outlets is not None:
            self._outlets.close(DRAIN_TIMEOUT_S)
        self._handles.close()
        if self.standby is not None:
            self.standby.let_go()
        if self._warden is not None:
            warden_client.stop_alone(self._warden.pid)
            if keep_warden:
                warden_client.put_back(self._warden)
            else:
                self._warden.close(timeout_s=1.0)
            self._warden = None
        self._release()

    def _stop_all(self, death_sig: signal.Signals, grace_s: float) -> tuple[Target, ...]:
        """Tell, kill and wait until nobody is left; those that even SIGKILL does not end are returned."""
        from rallypoint.protocol import shutdown

        self._hide_interrupts_after(death_sig)
        stop = shutdown.begin(death_sig, grace_s, self.kill_wait_s)
        if inbox.received > 1:  # they came together, before we could begin
            stop = shutdown.hurry(stop)
        self._ask_warden(in_a_hurry=stop.grace_s == 0)
        self._stop, began = stop, time.monotonic()
        self._long_at = began + defaults.LONG_WAIT_S
        with report.meanwhile(lambda: self._told_of_stop(began)):
            return self._stop_in_steps(stop)

    def _told_of_stop(self, since: float) -> Wait | None:
        from rallypoint.output.waits import Stopping

        return None if self._stop is None else Stopping(self._stop, self.nprocs, since, may_hurry=inbox.received == 1)

    def _stop_in_steps(self, stop: Stop) -> tuple[Target, ...]:
        from rallypoint.protocol import shutdown

        while True:
            decision = shutdown.step(stop, self._present(), time.monotonic())
            self._send(decision.sends)
            self._say_that_they_are_told()
            stop = self._stop = decision.stop
            match decision.outcome:
                case shutdown.GaveUp(stuck):
                    return stuck
                case shutdown.Gone() if self._rest is not None:
                    return ()
                case shutdown.Waiting(wake_at):
                    readable = self._wait_while_stopping(wake_at)
                case _:  # what there is besides the workers is not known yet
                    readable = self._wait_while_stopping(self._look_at_warden_at)
            is_hurried = self.hurry_fd in readable
            for number in inbox.collect():
                if inbox.received > 1:
                    is_hurried = True
                else:
                    self._hide_interrupts_after(number)
                    self._send(shutdown.pass_on(number, self._present()))
            if is_hurried:
                self.hurry_fd, stop = None, shutdown.hurry(stop)
                self._ask_warden(in_a_hurry=True)

    def _say_that_they_are_told(self) -> None:
        tell, self.once_told = self.once_told, None
        if tell is not None:
            tell()

    def _wait_while_stopping(self, wake_at: float) -> set[int]:
        left_s = min(wake_at, self._look_at_warden_at) - time.monotonic()
        readable = self._wait([self.news_fd(), inbox.fileno(), self.hurry_fd], left_s)
        self._absorb()
        if time.monotonic() >= self._look_at_warden_at:
            self._look_at_warden()
        return readable

    def _hide_interrupts_after(self, sent: signal.Signals) -> None:
        if sent == signal.SIGINT and self._outlets is not None:
            self._outlets.quiet_interrupts()

    def _ask_warden(self, in_a_hurry: bool) -> None:
        """Ask what there is besides the workers, which shows too whether it can answer. In a hurry the workers go first."""
        assert self._warden is not None
        if in_a_hurry:
            self.kill_at_once()
        self._warden.watch_rest()
        asked_at = time.monotonic()
        self._give_up_at = asked_at + ANSWER_TIMEOUT_S
        self._look_at_warden_at = asked_at + QUICK_ANSWER_S if in_a_hurry else self._give_up_at

    def _look_at_warden(self) -> None:
        """It owes us an answer. If it is stopped it gives none, if it is slow it may; the kernel kills its workers with it."""
        from rallypoint.processes.kernel import stat_fields

        assert self._warden is not None
        is_stopped = stat_fields(self._warden.pid)[:1] in ([b"T"], [b"t"])
        if not is_stopped and time.monotonic() < self._give_up_at:
            self._look_at_warden_at = self._give_up_at
            return
        self._look_at_warden_at = math.inf
        self._warden.give_up()
        report.warn(f"process {self._warden.pid}, the parent of the workers, did not answer and was killed with them")
        self._absorb()

    def _present(self) -> list[Target]:
        from rallypoint.protocol.shutdown import Target

        left = {rank: pid for rank, pid in self._pids.items() if rank not in self._exits}
        workers = [Target(True, rank, f"{self._rank_text(rank)} (pid {pid})") for rank, pid in left.items()]
        return workers + [Target(False, pid) for pid in self._rest or ()]

    def _rank_text(self, local_rank: int) -> str:
        """Workers are told of by the rank that they have in the whole job."""
        rank = self.envs[local_rank].get(defaults.ENV_RANK)
        return f"worker {local_rank}" if rank is None else f"rank {rank}"

    def _send(self, sends: tuple[Send, ...]) -> None:
        assert self._warden is not None
        for send in sends:
            if send.target.is_worker:
                self._warden.signal_worker(send.target.number, send.signal)
            else:
                self._warden.signal_rest(send.target.number, send.signal)
            if send.signal == signal.SIGKILL:
                report.info(send.why)


def _inherited() -> dict[str, str]:
    return {name: value for name, value in environment.own.items() if name not in defaults.ENV_SECRETS}


def _input_of_workers() -> int | None:
    """Our own standard input, if we have one. In the background that is nothing, where it is the terminal of somebody's shell.

    They are in sessions of their own, so that the kernel would let them take what is typed there.
    """
    try:
        os.fstat(0)
    except OSError:
        return None
    try:
        is_background = os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # it is not our terminal
        return 0
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) if is_background else 0


class WorkerHandles:
    """A hold on workers that needs no warden: should that be stopped or stuck, they can still be killed, from any thread.

    A worker is a child of the warden, which may reap it at any moment, so its process id alone is worth nothing to anybody else.
    A pidfd is: it stands for this one process. It is opened when the worker is reported to run; that it is the right one shows in
    its parent, which no stranger has. Here are those that have not been reported to have ended, by local rank.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for system calls that do not wait
        self._handles: dict[int, tuple[int, int]] = {}  # pid and pidfd

    def add(self, local_rank: int, pid: int, parent: int) -> None:
        """A worker that has ended in the meantime, or for which there is no file descriptor left, is left to the warden."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return
        with self._lock:
            self._handles[local_rank] = pid, pidfd
        from rallypoint.processes.kernel import stat_fields

        if stat_fields(pid)[1:2] != [b"%d" % parent]:
            self.discard(local_rank)

    def discard(self, local_rank: int) -> None:
        with self._lock:
            _, pidfd = self._handles.pop(local_rank, (0, -1))
            if pidfd >= 0:
                os.close(pidfd)

    def running(self) -> set[int]:
        with self._lock:
            return {rank for rank, (_, pidfd) in self._handles.items() if not wait_readable([pidfd], 0.0)}

    def kill(self) -> None:
        """SIGKILL to each, and to the group that it leads. It is sent when this returns."""
        with self._lock:
            for pid, pidfd in self._handles.values():
                _kill(pid, pidfd)

    def send(self, number: signal.Signals) -> None:
        with self._lock:
            for _, pidfd in self._handles.values():
                try:
                    signal.pidfd_send_signal(pidfd, number)
                except (ProcessLookupError, PermissionError):  # as with SIGKILL
                    pass

    def await_ends(self, timeout_s: float) -> None:
        """Until all of them have ended, or for this time."""
        give_up_at = time.monotonic() + timeout_s
        for _, pidfd in list(self._handles.values()):
            wait_readable([pidfd], give_up_at - time.monotonic())

    def close(self) -> None:
        for local_rank in list(self._handles):
            self.discard(local_rank)


def _kill(pid: int, pidfd: int) -> None:
    """The group first: while its leader lives, nobody else's has its number."""
    if not wait_readable([pidfd], 0.0):  # it has not ended
        try:
            os.kill(-pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has ended; or it has become another user, and can only be waited for
        pass
