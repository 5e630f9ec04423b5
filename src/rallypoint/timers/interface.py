"""What all timers have in common: what is asked for, who asks, who watches, and what those who watch know.

A worker *acquires* a timer for a scope when it enters it and *releases* it when it leaves. A server that has not heard of the
release when the time is over reaps the worker.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rallypoint.base import outbox, report
from rallypoint.timers.timer_table import TimerTable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import _GeneratorContextManager
    from typing import Any

    from rallypoint.timers.timer_table import Request

__all__ = [
    "RELEASED", "RequestQueue", "TimerBook", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires",
    "log_debug_info_for_expired_timers",
]  # fmt: skip

RELEASED = -1  # as an expiration time: the timer is not needed any more
RETRY_S = 1.0  # after a round that failed


def log_debug_info_for_expired_timers(run_id: str, expired_timers: dict[int, list[str]]) -> None:
    """Tell which scopes have expired, by the process that set them; where none has, nothing is told."""
    if expired_timers:
        report.info(f"timers have expired in the run {run_id}: {expired_timers}")


class TimerRequest:
    """A worker's wish: a timer in this scope that expires at this time of the wall clock; a negative time means none any more.

    >>> from rallypoint.timers import TimerRequest
    >>> TimerRequest(worker_id=3, scope_id="checkpoint", expiration_time=1_800_000_000.0).scope_id
    'checkpoint'
    """

    __slots__ = ("expiration_time", "scope_id", "worker_id")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, worker_id: Any, scope_id: str, expiration_time: float) -> None:
        self.worker_id = worker_id
        self.scope_id = scope_id
        self.expiration_time = expiration_time

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._as_tuple() == other._as_tuple()

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._as_tuple()}"

    def _as_tuple(self) -> tuple[object, ...]:
        return (self.worker_id, self.scope_id, self.expiration_time)


class TimerClient(ABC):
    """The worker's side."""

    @abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Start the timer of a scope, or start it anew."""

    @abstractmethod
    def release(self, scope_id: str) -> None:
        """End the timer of a scope."""


class RequestQueue(ABC):
    """How requests come to a server."""

    @abstractmethod
    def size(self) -> int:
        """About how many there are."""

    @abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """At most `size` requests: as soon as there are so many, or what there is after `timeout` seconds."""

    def wake(self) -> None:  # noqa: B027  # most queues cannot
        """Cut short a `get` that waits; a queue that cannot do so lets its server stop when the time of that is over."""


class TimerBook:
    """The table of timers of a server, by the clocks of this host. Each method is one step, whichever threads call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._table = TimerTable()
        self._was_full = False

    def register(self, requests: Iterable[Request]) -> None:
        """Take in requests, in their order; the first of those that there is no room for is reported."""
        with self._lock:
            self._table.follow_clocks(time.time(), time.monotonic())  # what comes now is of the clock as it is now
            refused = sum([not self._table.register(request) for request in requests])
            if refused and not self._was_full:
                report.warn(f"there are too many timers ({len(self._table)}); more are not watched until some are released")
            self._was_full = bool(refused)

    def expired(self, deadline: float) -> dict[Any, list[Any]]:
        with self._lock:
            return self._table.expired(deadline)

    def workers(self) -> set[Any]:
        with self._lock:
            return self._table.workers()

    def forget(self, workers: Iterable[Any]) -> None:
        with self._lock:
            self._table.forget(workers)

    def forget_all(self) -> None:
        with self._lock:
            self._table = TimerTable()

    def seconds_to_wait(self, most_s: float) -> float:
        """How long nothing can expire that has not expired by now."""
        with self._lock:
            return self._table.seconds_to_wait(time.time(), most_s)


class TimerServer(ABC):
    """Watches over timers in a thread, and looks at least every `max_interval` seconds."""

    def __init__(self, request_queue: RequestQueue, max_interval: float, daemon: bool = True) -> None:
        self._request_queue = request_queue
        self._max_interval = max_interval
        self._daemon = daemon
        self._watchdog_thread: threading.Thread | None = None
        self._stop_signaled = threading.Event()

    @abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Take the requests in; those for scopes that have a timer replace it."""

    @abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Forget all timers of these workers."""

    @abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """By worker, the timers that have expired at this time."""

    @abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End a worker whose time is over; False if that has to be tried again."""

    def start(self) -> None:
        """Begin to watch."""
        self._stop_signaled = threading.Event()  # a thread that is still on its way out keeps its own
        self._watchdog_thread = threading.Thread(
            target=self._watchdog_loop, args=(self._stop_signaled,), name="rallypoint-timers", daemon=self._daemon
        )
        self._watchdog_thread.start()

    def stop(self) -> None:
        """Cease to watch, within `max_interval` seconds."""
        thread, self._watchdog_thread = self._watchdog_thread, None
        self._stop_signaled.set()
        if thread is not None and thread is not threading.current_thread():
            self._request_queue.wake()
            thread.join(self._max_interval)
            outbox.settle()

    def _watchdog_loop(self, stop: threading.Event) -> None:
        works = True
        while not stop.is_set():
            try:
                self._run_watchdog()
                works = True
            except Exception as error:  # whatever a queue or a subclass raises: a watchdog that dies protects nobody
                if works:
                    report.warn(f"the timers could not be looked at ({error!r}); it is tried again every {RETRY_S:g} s")
                works = False
                stop.wait(RETRY_S)

    def _run_watchdog(self) -> None:
        """One round."""
        size = max(1, self._request_queue.size())
        self.register_timers(self._request_queue.get(size, self._longest_wait_s()))
        reaped = set()
        for worker_id, timers in self.get_expired_timers(time.time()).items():
            report.warn(f"worker {worker_id} is reaped: expired timers: {', '.join(timer.scope_id for timer in timers)}")
            if self._reap_worker_no_throw(worker_id):
                reaped.add(worker_id)
        self.clear_timers(reaped)

    def _reap_worker_no_throw(self, worker_id: Any) -> bool:
        try:
            return self._reap_worker(worker_id)
        except Exception as error:  # a worker that cannot be reaped must not keep others from being so
            report.warn(f"worker {worker_id} could not be reaped: {error!r}")
            return True

    def _longest_wait_s(self) -> float:
        return self._max_interval


_client: TimerClient | None = None


def configure(timer_client: TimerClient) -> None:
    """Let `expires` use this client where it is given none.

    >>> from rallypoint.timers import FileTimerClient, configure
    >>> configure(FileTimerClient("/run/my-job.timers"))
    """
    global _client
    _client = timer_client


def expires(after: float, scope: str | None = None, client: TimerClient | None = None) -> _GeneratorContextManager[None]:
    """A block, or as a decorator a function, that may take `after` seconds; a scope without a name is named by its line.

    >>> from rallypoint.timers import TimerClient, configure, expires
    >>> class Says(TimerClient):
    ...     def acquire(self, scope_id, expiration_time):
    ...         print("may take a while:", scope_id)
    ...     def release(self, scope_id):
    ...         print("done:", scope_id)
    >>> configure(Says())
    >>> with expires(after=60, scope="checkpoint"):
    ...     print("saves")
    may take a while: checkpoint
    saves
    done: checkpoint
    """
    if scope is None:
        caller = sys._getframe(1)
        scope = f"{caller.f_code.co_filename}#{caller.f_lineno}"
    return _countdown(after, scope, client)


@contextmanager
def _countdown(after: float, scope: str, client: TimerClient | None) -> Iterator[None]:
    client = client or _client
    if client is None:
        raise RuntimeError("Configure timer client before using countdown timers.")
    client.acquire(scope, time.time() + after)
    try:
        yield
    finally:
        client.release(scope)
