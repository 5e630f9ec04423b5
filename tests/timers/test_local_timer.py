"""Timers over a queue of multiprocessing, with processes that are forked and spawned."""

from __future__ import annotations

import multiprocessing
import os
import queue as queues
import signal
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
from tests.pace import is_under

from rallypoint.timers import LocalTimerClient, LocalTimerServer, TimerRequest, configure, expires
from rallypoint.timers.local_timer import MultiprocessingRequestQueue


@pytest.fixture(scope="module", autouse=True)
def tracker() -> Iterator[None]:
    """The process that multiprocessing keeps beside every program with a queue; it is there before the tests that use it."""
    resource_tracker.ensure_running()
    yield
    resource_tracker._resource_tracker._stop()


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spawned process imports this file by the name that it has here, from where we find modules."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


@pytest.fixture
def mp_queue(tracker: None) -> Iterator[Queue[Any]]:
    queue: Queue[Any] = multiprocessing.get_context("spawn").Queue()
    yield queue
    queue.put(None)  # the writing end is closed by the thread that the first put starts
    queue.close()
    queue.join_thread()


@pytest.fixture
def server(mp_queue: Queue[Any]) -> Iterator[LocalTimerServer]:
    server = LocalTimerServer(mp_queue, max_interval=60)
    server.start()
    yield server
    server.stop()


def hang_in_scope(queue: Any) -> None:
    configure(LocalTimerClient(queue))
    with expires(after=60, scope="outer"), expires(after=0.3, scope="inner"):
        time.sleep(60)


def finish_in_scope(queue: Any) -> None:
    configure(LocalTimerClient(queue))
    with expires(after=30, scope="quick"):
        pass


def run(method: str, target: Any, queue: Any) -> tuple[int | None, float]:
    """The exit code, and how long it took."""
    process = multiprocessing.get_context(method).Process(target=target, args=(queue,))
    began = time.monotonic()
    process.start()
    process.join(20)
    exitcode = process.exitcode
    process.close()
    return exitcode, time.monotonic() - began


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_that_exceeds_its_time_is_killed_at_once(method: str, server: LocalTimerServer, mp_queue: Queue[Any]) -> None:
    """The longest interval is a minute here, and nobody waits for it."""
    exitcode, seconds = run(method, hang_in_scope, mp_queue)
    assert exitcode == -signal.SIGKILL
    assert seconds < 15


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_that_releases_in_time_lives(
    method: str, server: LocalTimerServer, mp_queue: Queue[Any], wait_until: Any
) -> None:
    assert run(method, finish_in_scope, mp_queue)[0] == 0
    wait_until(lambda: not server.get_expired_timers(time.time() + 100))


def test_it_stops_at_once(server: LocalTimerServer) -> None:
    began = time.monotonic()
    server.stop()
    assert is_under(time.monotonic() - began, 5)


def test_what_is_no_request_is_passed_over(server: LocalTimerServer, mp_queue: Queue[Any]) -> None:
    for garbage in ("text", 7, object):
        mp_queue.put(garbage)
    assert run("fork", hang_in_scope, mp_queue)[0] == -signal.SIGKILL


def test_the_queue_gives_what_there_is_in_time(mp_queue: Queue[Any], wait_until: Any) -> None:
    queue = MultiprocessingRequestQueue(mp_queue)
    assert queue.get(3, 0.01) == []
    client = LocalTimerClient(mp_queue)
    client.acquire("a", 5.0)
    client.release("a")
    wait_until(lambda: queue.size() == 2)
    assert queue.get(1, 5.0) == [TimerRequest(os.getpid(), "a", 5.0)]
    assert queue.get(2, 0.05) == [TimerRequest(os.getpid(), "a", -1)]


def test_a_worker_s_timers_are_replaced_released_and_cleared() -> None:
    server = LocalTimerServer(queues.Queue())
    server.register_timers([TimerRequest(2, "a", 1.0), TimerRequest(2, "b", 5.0), TimerRequest(3, "a", 1.0)])
    assert set(server.get_expired_timers(1.0)) == {2, 3}
    server.register_timers([TimerRequest(2, "a", -1), TimerRequest(3, "a", 9.0)])
    assert server.get_expired_timers(5.0) == {2: [TimerRequest(2, "b", 5.0)]}
    server.clear_timers({2, 77})
    assert set(server.get_expired_timers(100.0)) == {3}


@pytest.mark.parametrize("nobody", [1, 0, -1, None])
def test_only_a_worker_can_be_reaped(nobody: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 1, groups of processes, and the server itself are out of reach, whatever a request says."""

    def refuse(*args: object) -> None:
        raise AssertionError(args)

    monkeypatch.setattr(os, "kill", refuse)
    with pytest.raises(ValueError, match="no worker"):
        LocalTimerServer(queues.Queue())._reap_worker(os.getpid() if nobody is None else nobody)
