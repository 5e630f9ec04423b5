"""Workers under a warden: started by it, listened to through the pump, stopped by the rules of `core.shutdown`.

This is what script workers and function workers share. A subclass says how each worker is launched, and what it returned.
"""

from __future__ import annotations

import os
import signal
import time
from abc import abstractmethod

from rallypoint import defaults, report
from rallypoint.errors import UnkillableWorkersError, WorkerStartError, worker_start_error
from rallypoint.processes import warden_client
from rallypoint.processes.context import PContext, RunProcsResult, wait_readable
from rallypoint.processes.log_specs import LogsDest, Std, file_clerk
from rallypoint.processes.outlets import Outlets
from rallypoint.processes.signals import inbox
from rallypoint.processes.warden_client import Exited, FailedToStart, Launch, Lost, Rest, Started, WardenClient

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.core.shutdown import Send, Target
    from rallypoint.processes.causes import Causes
    from rallypoint.processes.failures import ProcessFailure

__all__ = ["WardedContext"]

START_TIMEOUT_S = 60.0  # forking a few hundred processes takes less than one
SIGNALLED_START_S = 0.5  # what is left for it once a signal has come; only an import in a fork server takes longer
ANSWER_TIMEOUT_S = 10.0  # a warden answers in a millisecond; one that does not is stopped or stuck
SHOWN_TIMEOUT_S = 1.0  # for what ended workers wrote, before their end is told
DRAIN_TIMEOUT_S = 1.0  # for the last lines of ended workers, should the console be slow; it may take them later, too
FILES_TIMEOUT_S = 2.0  # for a disk with log files that does not answer


class WardedContext(PContext):
    """A PContext whose processes are children of a warden."""

    def __init__(self, *args: Any, numa_options: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._numa_options = numa_options
        self.cpus: dict[int, tuple[int, ...]] = {}  # by local rank, of those that are bound
        self.kill_wait_s = defaults.UNINTERRUPTIBLE_TIMEOUT_S
        self.hurry_fd: int | None = None  # readable once there is no time left for grace
        self._warden: WardenClient | None = None
        self._outlets: Outlets | None = None
        self._logs = LogsDest()
        self._inherited_env: dict[str, str] = {}
        self._pids: dict[int, int] = {}
        self._exits: dict[int, Exited] = {}
        self._start_error: WorkerStartError | None = None
        self._failures: dict[int, ProcessFailure] = {}
        self._rest: tuple[int, ...] | None = None  # None: not reported yet
        self._causes: Causes | None = None

    @abstractmethod
    def _launch_of(self, local_rank: int, error_file: str) -> Launch:
        """How to start this worker; its standard streams are added to it."""

    def _open_warden(self) -> WardenClient:
        return warden_client.take()

    def _return_values(self) -> dict[int, Any]:
        """What the workers returned, once all have succeeded."""
        return dict.fromkeys(self._exits)

    def _release(self) -> None:
        """Let go of what was held for the launches."""

    def pids(self) -> dict[int, int]:
        return dict(self._pids)

    def end_worker(self, local_rank: int, why: str, ago_s: float = 0.0) -> None:
        """Kill a worker on purpose: what is told of its end is the reason, and that it failed so long ago."""
        self.explain_end(self._pids[local_rank], why, ago_s)
        if self._warden is not None and local_rank not in self._exits:
            self._warden.signal_worker(local_rank, signal.SIGKILL)

    def explain_end(self, pid: int, why: str, ago_s: float = 0.0) -> None:
        """Say why somebody is about to end the worker with this process id."""
        if self._causes is not None:
            self._causes.explain(pid, why, ago_s)

    def news_fd(self) -> int | None:
        return self._warden.fileno() if self._warden else None

    def _start(self) -> None:
        if self._numa_options is not None:
            from rallypoint.affinity import cpus_of_workers

            self.cpus = cpus_of_workers(self._numa_options, self.envs)
        self._warden = self._open_warden()
        self._logs = self._destinations()
        specs = self._logs_specs
        self._outlets = Outlets(self._logs, getattr(specs, "log_max_bytes", None), getattr(specs, "run_folder", None))
        self._inherited_env = {name: value for name, value in os.environ.items() if name != defaults.ENV_SECRET}
        try:
            self._outlets.open_files()
            self._warden.spawn([self._launch(rank) for rank in sorted(self.args)])
        finally:
            self._outlets.hand_over()
        self._prepare_for_failures()
        self._await_start()

    def _prepare_for_failures(self) -> None:
        """What is done while the workers' interpreters start, so that it costs no time: count the kills for memory so far."""
        from rallypoint.processes.causes import Causes

        self._causes = Causes()
        if warden_client.this_is_a_launcher():  # then what a killed warden leaves comes to us
            from rallypoint.processes import kernel

            kernel.adopt_orphans()

    def _launch(self, rank: int) -> Launch:
        assert self._outlets is not None
        prefix = (self._log_line_prefixes or {}).get(rank, f"[{self.name}{rank}]:")
        launch = self._launch_of(rank, self._logs.error_files[rank])
        streams = {
            1: self._outlets.open(rank, Std.OUT, prefix, self._duplicate_stdout_filters),
            2: self._outlets.open(rank, Std.ERR, prefix, self._duplicate_stderr_filters),
        }
        if warden_client.is_open(0):
            streams[0] = 0
        may_run_unbound = bool(getattr(self._numa_options, "should_fall_back_if_binding_fails", False))
        return launch.replace(fds={**streams, **launch.fds}, cpus=self.cpus.get(rank, ()), may_run_unbound=may_run_unbound)

    def _await_start(self) -> None:
        """Return when every worker has been started; if one cannot be, none is left.

        A signal waits a little for that, so that those who are just being started are asked to stop as all others are.
        """
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while len(self._pids) < self.nprocs:
            left = give_up_at - time.monotonic()
            if left <= 0:
                inbox.raise_pending()
                raise WorkerStartError(f"{len(self._pids)} of {self.nprocs} workers were started within {START_TIMEOUT_S:g} s")
            wait_readable([self.news_fd(), inbox.fileno()], left)
            self._absorb()
            if self._start_error is not None:
                raise self._start_error
            if inbox.collect():
                give_up_at = min(give_up_at, time.monotonic() + SIGNALLED_START_S)

    def _absorb(self, timeout_s: float = 0.0) -> None:
        """Take in what the warden has reported."""
        assert self._warden is not None
        for news in self._warden.receive(timeout_s):
            match news:
                case Started(rank, pid):
                    self._pids[rank] = pid
                case FailedToStart(rank, errno, reason):
                    error = worker_start_error(errno, f"worker {rank} could not be started: {reason}")
                    self._start_error = self._start_error or error
                case Exited():
                    self._note_exit(news)
                case Rest(pids):
                    self._rest = pids
                case Lost():
                    self._note_lost_warden()

    def _note_exit(self, ended: Exited) -> None:
        assert self._outlets is not None
        self._exits[ended.local_rank] = ended
        self._outlets.worker_ended(ended.local_rank)

    def _note_lost_warden(self) -> None:
        """Without its warden every worker has been killed by the kernel; what they started in their groups is left to us."""
        from rallypoint.processes import kernel

        assert self._warden is not None
        report.warn(f"the warden (process {self._warden.pid}), parent of all workers, was killed, and all workers with it")
        if len(self._pids) < self.nprocs:
            text = "the process that starts the workers ended before they were there; its last words or the system's log say why"
            self._start_error = self._start_error or WorkerStartError(text)
        self._rest = ()
        for rank, pid in self._pids.items():
            if rank not in self._exits:
                kernel.kill_if_allowed(-pid, signal.SIGKILL)
                self._note_exit(Exited(rank, pid, -signal.SIGKILL, time.time()))
        if warden_client.this_is_a_launcher():
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
        causes, outlets, logs = self._causes, self._outlets, self._logs
        assert causes is not None
        assert outlets is not None
        tail = outlets.stderr_tail(ended.local_rank)
        try:
            return file_clerk.do(lambda: causes.describe(ended, logs, outlets, tail), FILES_TIMEOUT_S)
        except TimeoutError as error:
            report.warn(f"the files of worker {ended.local_rank} do not tell why it failed: {error.strerror}")
            return causes.describe(ended, LogsDest(error_files={ended.local_rank: ""}), outlets, tail)

    def _close(self, death_sig: signal.Signals, timeout: float) -> None:
        stuck: tuple[Target, ...] = ()
        try:
            if self._warden is not None and self._pids:
                stuck = self._stop_all(death_sig, timeout)
            elif self._warden is not None:
                self._warden.kill()  # nobody was started; it may be busy importing what it was to run
        finally:
            self._let_go(keep_warden=not stuck and self._rest == ())
        if stuck:
            raise UnkillableWorkersError(sorted(self._pid_of(target) for target in stuck), self.kill_wait_s)

    def _let_go(self, keep_warden: bool) -> None:
        if self._outlets is not None:
            self._outlets.close(DRAIN_TIMEOUT_S)
        if self._warden is not None:
            if keep_warden:
                warden_client.put_back(self._warden)
            else:
                self._warden.close(timeout_s=1.0)
            self._warden = None
        self._release()

    def _stop_all(self, death_sig: signal.Signals, grace_s: float) -> tuple[Target, ...]:
        """Tell, kill and wait until nobody is left; those that even SIGKILL does not end are returned."""
        from rallypoint.core import shutdown

        self._hide_interrupts_after(death_sig)
        self._await_rest()
        stop = shutdown.begin(death_sig, grace_s, self.kill_wait_s)
        if inbox.received > 1:  # they came together, before we could begin
            stop = shutdown.hurry(stop)
        while True:
            decision = shutdown.step(stop, self._present(), time.monotonic())
            self._send(decision.sends)
            stop = decision.stop
            match decision.outcome:
                case shutdown.GaveUp(stuck):
                    return stuck
                case shutdown.Gone():
                    return ()
                case shutdown.Waiting(wake_at):
                    readable = wait_readable([self.news_fd(), inbox.fileno(), self.hurry_fd], wake_at - time.monotonic())
                    self._absorb()
                    if self.hurry_fd in readable:
                        self.hurry_fd, stop = None, shutdown.hurry(stop)
            for number in inbox.collect():
                if inbox.received > 1:
                    stop = shutdown.hurry(stop)
                else:
                    self._hide_interrupts_after(number)
                    self._send(shutdown.pass_on(number, self._present()))

    def _hide_interrupts_after(self, sent: signal.Signals) -> None:
        if sent == signal.SIGINT and self._outlets is not None:
            self._outlets.quiet_interrupts()

    def _await_rest(self) -> None:
        """Learn what there is besides the workers. A warden that does not answer is killed; the kernel kills its workers then."""
        assert self._warden is not None
        self._warden.watch_rest()
        give_up_at = time.monotonic() + ANSWER_TIMEOUT_S
        while self._rest is None:
            left = give_up_at - time.monotonic()
            if left <= 0:
                report.warn(f"process {self._warden.pid}, the parent of the workers, does not answer and is killed with them")
                self._warden.kill()
                left = ANSWER_TIMEOUT_S
            self._absorb(left)

    def _present(self) -> list[Target]:
        from rallypoint.core.shutdown import Target

        workers = [Target(True, rank) for rank in self._pids if rank not in self._exits]
        return workers + [Target(False, pid) for pid in self._rest or ()]

    def _send(self, sends: tuple[Send, ...]) -> None:
        assert self._warden is not None
        for send in sends:
            if send.target.is_worker:
                self._warden.signal_worker(send.target.number, send.signal)
            else:
                self._warden.signal_rest(send.target.number, send.signal)
            if send.signal == signal.SIGKILL:
                report.info(send.why)

    def _pid_of(self, target: Target) -> int:
        return self._pids[target.number] if target.is_worker else target.number
