"""Watches over the timers of workers that write to a named pipe, and signals those whose time is over.

One thread sleeps until something is written, until the next timer expires, or until the longest interval is over, when it looks
which workers have ended. The agent itself is never signalled, nor anybody whom `may_reap` does not know.

Whoever may open the pipe may write anything to it. Only whole lines of a limited length are looked at, only requests
that could come from a worker are made of them, and the rest is passed over.
"""

from __future__ import annotations

import math
import os
import select
import signal
import stat
import threading
import time
from collections.abc import Callable

from rallypoint.base import outbox, report
from rallypoint.base.json_text import from_json
from rallypoint.errors import UsageError
from rallypoint.net.wake_fd import WakeFd
from rallypoint.timers.file_timer import LINE_MAX, FileTimerRequest, describe_expiry
from rallypoint.timers.interface import TimerBook
from rallypoint.timers.timer_table import first_of

__all__ = ["FileTimerServer", "RequestLines", "TimerPipe", "check_timer_file", "parse_request"]

CHUNK_BYTES = 65536
CHUNKS_MAX = 16  # at one go, so that a flood of requests does not keep timers from expiring
PID_MAX = 2**22  # no Linux has more
TIME_MAX = 1e12
INTERVAL_MIN_S, INTERVAL_MAX_S = 0.01, 86400.0
JOIN_S = 5.0
RETRY_S = 1.0

LogEvent = Callable[[str, FileTimerRequest | None], None]


def check_timer_file(path: str) -> None:
    """UsageError if the server could not have its pipe there."""
    name = f"TORCHELASTIC_TIMER_FILE={path}"
    folder = os.path.dirname(path) or "."
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"{name}: no named pipe can be made there: {folder} is no folder that can be written to") from None
        return
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None
    if not stat.S_ISFIFO(mode):
        raise UsageError(f"{name}: this exists and is no named pipe; remove it, or name a file that does not exist")
    if _has_reader(path, name):
        raise UsageError(f"{name}: another process reads this named pipe already; every agent of a host needs one of its own")


def _has_reader(path: str, name: str) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except PermissionError:
        raise UsageError(f"{name}: this named pipe belongs to another user") from None
    except OSError:  # nobody reads it, or it has just gone
        return False
    return True


class TimerPipe:
    """A new named pipe, for this user only, in the place of an old one that nobody reads."""

    def __init__(self, path: str) -> None:
        check_timer_file(path)
        if os.path.lexists(path):
            os.unlink(path)
        os.mkfifo(path, 0o600)
        self._path = path
        self._lines = RequestLines()
        # Opened for writing too: without a writer the pipe would be at its end, and poll would never wait.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def read_requests(self) -> list[FileTimerRequest]:
        """What has come so far, without waiting."""
        lines: list[bytes] = []
        for _ in range(CHUNKS_MAX):
            try:
                lines += self._lines.feed(os.read(self._fd, CHUNK_BYTES))
            except BlockingIOError:
                break
        return [request for request in map(parse_request, lines) if request is not None]

    def close(self) -> None:
        """Close and remove it, unless somebody has put another in its place."""
        mine = os.fstat(self._fd)
        os.close(self._fd)
        try:
            found = os.lstat(self._path)
            if (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino):
                os.unlink(self._path)
        except FileNotFoundError:
            pass


class RequestLines:
    """Cuts a stream into lines, and passes over those that are too long, however long they are."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are whole now."""
        *lines, rest = (self._rest + data).split(b"\n")
        if self._skipping and lines:
            del lines[0]
            self._skipping = False
        self._skipping = self._skipping or len(rest) > LINE_MAX
        self._rest = b"" if self._skipping else rest
        return [line for line in lines if len(line) < LINE_MAX]


def parse_request(line: bytes) -> FileTimerRequest | None:
    """The request that a line holds, or None. The start of one that was never completed may stand before it."""
    start = line.rfind(b'{"version"')  # within a text of JSON the quotes would have backslashes before them
    try:
        match from_json(line[max(0, start) :]):
            case {"pid": int(pid), "scope_id": str(scope), "expiration_time": int() | float() as time, "signal": int(number)}:
                request = FileTimerRequest(pid, scope, time, number)
                return request if _is_possible(request) else None
    except ValueError:
        pass
    return None


def _is_possible(request: FileTimerRequest) -> bool:
    """Process 1 is no worker, and 0 and what is below it would be groups of processes."""
    time = request.expiration_time
    return 1 < request.worker_id <= PID_MAX and (abs(time) <= TIME_MAX or time == math.inf) and 0 <= request.signal < signal.NSIG


class FileTimerServer:
    """A watchdog for the workers of this host.

    `log_event` is told ``watchdog started`` and ``watchdog stopped``, and with the request ``timer expired`` and ``kill worker
    process``. `may_reap` says whether a process id is that of one of our own processes; without it any is, other than this
    process and process 1. `on_reaped` is called just before a worker is signalled, so that the reason is known when it ends.
    """

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: LogEvent | None = None,
        *,
        may_reap: Callable[[int], bool] | None = None,
        on_reaped: Callable[[int, FileTimerRequest], None] | None = None,
    ) -> None:
        self._file_path = file_path
        self._run_id = run_id
        self._max_interval = min(max(max_interval, INTERVAL_MIN_S), INTERVAL_MAX_S)
        self._daemon = daemon
        self._log_event = log_event
        self._may_reap = may_reap
        self._on_reaped = on_reaped
        self._book = TimerBook()
        self._ends: tuple[TimerPipe, WakeFd] | None = None  # what wakes the watchdog, while it runs
        self._watchdog_thread: threading.Thread | None = None
        self._request_count = 0
        self._look_for_dead_at = 0.0
        self._last_progress_time = time.time()

    def start(self) -> None:
        """Make the pipe, which may raise UsageError, and watch it."""
        if self._ends is not None:
            return
        self._ends = (TimerPipe(self._file_path), WakeFd())
        self._request_count = 0
        self._watchdog_thread = threading.Thread(
            target=self._watchdog_loop, args=self._ends, name="rallypoint-timers", daemon=self._daemon
        )
        self._watchdog_thread.start()
        self._tell("watchdog started", None)

    def stop(self) -> None:
        """End at once, remove the pipe, and forget all timers: what workers do from now on cannot be known."""
        if self._ends is not None:
            self._end_thread()
            self._close()
            self._tell("watchdog stopped", None)
            outbox.settle()

    def run_once(self) -> None:
        """Look once at what has come, waiting for the first request for the longest interval; then end, without an event."""
        if self._ends is not None:
            self._end_thread()
            if not self._request_count:
                _wait(*self._ends, self._max_interval)
            self._run_watchdog(self._ends[0])
            self._close()

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Whether there is such a process; one that has ended and is not yet waited for does not run."""
        try:
            with open(f"/proc/{pid}/stat", "rb") as stat:
                return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
        except (FileNotFoundError, ProcessLookupError):
            return False

    def register_timers(self, timer_requests: list[FileTimerRequest]) -> None:
        """Take the requests in, in their order."""
        now = time.time()
        for request in timer_requests:
            request.acquired_at = now
        self._book.register(timer_requests)
        ends = self._ends
        if ends is not None and threading.current_thread() is not self._watchdog_thread:
            ends[1].set()  # it may have to look sooner than it knows

    def clear_timers(self, worker_pids: set[int]) -> None:
        """Forget all timers of these workers, and of those that are no more."""
        self._book.forget(worker_pids | {pid for pid in self._book.workers() if not self.is_process_running(pid)})

    def get_expired_timers(self, deadline: float) -> dict[int, list[FileTimerRequest]]:
        """By worker, the timers that have expired at this time of the wall clock."""
        return self._book.expired(deadline)

    def get_last_progress_time(self) -> int:
        """When the watchdog last looked, by the wall clock: at most the longest interval ago, if it is well."""
        return int(self._last_progress_time)

    # --- the thread ----------------------------------------------------------------------------------------------------

    def _watchdog_loop(self, pipe: TimerPipe, wake_fd: WakeFd) -> None:
        me = threading.current_thread()
        while self._watchdog_thread is me:
            try:
                _wait(pipe, wake_fd, self._book.seconds_to_wait(self._max_interval))
                if self._watchdog_thread is me:
                    self._run_watchdog(pipe)
            except Exception as error:  # not foreseen; a watchdog that dies protects nobody
                report.warn(f"the timers could not be looked at: {error!r}")
                time.sleep(RETRY_S)

    def _run_watchdog(self, pipe: TimerPipe) -> None:
        """One round: take in what has come, signal those whose time is over, forget those that have ended."""
        requests = pipe.read_requests()
        self._request_count += len(requests)
        self.register_timers(requests)
        for pid, expired in self.get_expired_timers(time.time()).items():
            self._reap_worker(pid, first_of(expired))
            self.clear_timers({pid})
        self._clear_dead_workers()
        self._last_progress_time = time.time()

    def _clear_dead_workers(self) -> None:
        """Once in the longest interval is enough: whoever is to be signalled is looked at before."""
        now = time.monotonic()
        if now >= self._look_for_dead_at:
            self._look_for_dead_at = now + self._max_interval
            self.clear_timers(set())

    def _reap_worker(self, pid: int, request: FileTimerRequest) -> None:
        """Signal a worker; the descriptor stands for the process that was asked about, should its id be given to another."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # it has ended
            return
        try:
            if self.is_process_running(pid) and self._is_ours(pid, request):
                self._signal_worker(pidfd, pid, request)
        finally:
            os.close(pidfd)

    def _is_ours(self, pid: int, request: FileTimerRequest) -> bool:
        try:
            if pid not in (1, os.getpid()) and (self._may_reap is None or self._may_reap(pid)):
                return True
        except Exception as error:  # somebody else's code; whom we know nothing about we do not signal
            report.warn(f"may_reap failed: {error!r}")
        report.warn(f"{describe_expiry(request)}: process {pid} is none of this job's workers and is left alone")
        return False

    def _signal_worker(self, pidfd: int, pid: int, request: FileTimerRequest) -> None:
        self._tell("timer expired", request)
        if request.signal <= 0:
            report.warn(f"{describe_expiry(request)}: worker {pid} asked for no signal and goes on")
            return
        report.warn(f"{describe_expiry(request)}: worker {pid} gets signal {int(request.signal)}")
        self._explain(pid, request)
        try:
            signal.pidfd_send_signal(pidfd, request.signal)
        except OSError as error:
            report.warn(f"worker {pid} could not be signalled: {error.strerror}")
        else:
            self._tell("kill worker process", request)

    def _explain(self, pid: int, request: FileTimerRequest) -> None:
        try:
            if self._on_reaped is not None:
                self._on_reaped(pid, request)
        except Exception as error:  # somebody else's code; the worker is signalled all the same
            report.warn(f"on_reaped failed: {error!r}")

    def _tell(self, event: str, request: FileTimerRequest | None) -> None:
        try:
            if self._log_event is not None:
                self._log_event(event, request)
        except Exception as error:  # somebody else's code; the timers matter more
            report.warn(f"log_event failed: {error!r}")

    # --- the end -------------------------------------------------------------------------------------------------------

    def _end_thread(self) -> None:
        thread, self._watchdog_thread = self._watchdog_thread, None
        if self._ends is not None:
            self._ends[1].set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_S)

    def _close(self) -> None:
        ends, self._ends = self._ends, None
        for end in ends or ():
            end.close()
        self._book.forget_all()


def _wait(pipe: TimerPipe, wake_fd: WakeFd, seconds: float) -> None:
    """Until something is written or the descriptor is set, but no longer than this."""
    news = select.poll()
    news.register(pipe, select.POLLIN)
    news.register(wake_fd, select.POLLIN)
    news.poll(seconds * 1000)
    wake_fd.clear()
