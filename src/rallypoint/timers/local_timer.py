"""Timers of the processes that a program has started itself, over a queue of ``multiprocessing``.

What is in the queue is pickled, as everything that ``multiprocessing`` carries: its other end must be a process that is trusted.
"""

from __future__ import annotations

import os
import queue
import signal
import time

from rallypoint.timers.interface import RELEASED, RequestQueue, TimerBook, TimerClient, TimerRequest, TimerServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]

_FIELDS = ("worker_id", "scope_id", "expiration_time")


class LocalTimerClient(TimerClient):
    """The timers of the calling process, which is known by its process id."""

    def __init__(self, mp_queue: Any) -> None:
        self._mp_queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, RELEASED))


class MultiprocessingRequestQueue(RequestQueue):
    """Requests by way of a queue of ``multiprocessing``. What is no request is passed over."""

    def __init__(self, mp_queue: Any) -> None:
        self._mp_queue = mp_queue

    def size(self) -> int:
        return int(self._mp_queue.qsize())

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        requests: list[TimerRequest] = []
        until = time.monotonic() + timeout
        while len(requests) < size:
            try:
                one = self._mp_queue.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if one is None:  # somebody wakes us
                break
            if all(hasattr(one, name) for name in _FIELDS):
                requests.append(one)
        return requests

    def wake(self) -> None:
        try:
            self._mp_queue.put_nowait(None)
        except (queue.Full, ValueError, AssertionError):  # nobody waits at a queue that is full, nor at one that is closed
            pass


class LocalTimerServer(TimerServer):
    """Kills processes of this host whose timers have expired, as soon as they have."""

    def __init__(self, mp_queue: Any, max_interval: float = 60, daemon: bool = True) -> None:
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon)
        self._book = TimerBook()

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        self._book.register(timer_requests)

    def clear_timers(self, worker_ids: set[int]) -> None:
        self._book.forget(worker_ids)

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        return self._book.expired(deadline)

    def _longest_wait_s(self) -> float:
        return self._book.seconds_to_wait(self._max_interval)

    def _reap_worker(self, worker_id: int) -> bool:
        if worker_id <= 1 or worker_id == os.getpid():
            raise ValueError(f"{worker_id} is the id of no worker")
        try:
            os.kill(worker_id, signal.SIGKILL)
        except ProcessLookupError:  # it has ended by itself
            pass
        return True
