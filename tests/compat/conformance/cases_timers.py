"""Timers: requests, clients, servers, and the context manager that sets one."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.compat.conformance.harness import case, folder, outcome, plain, until

QUEUES = multiprocessing.get_context("spawn")


def end_of_child(function: Callable[[], None], stays_s: float) -> int:
    """How a forked child ends that does this and then stays for a while: its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            function()
            time.sleep(stays_s)
            os._exit(0)
        finally:
            os._exit(70)
    return os.waitstatus_to_exitcode(until(lambda: (ended := os.waitpid(pid, os.WNOHANG))[0] and ended)[1])


@case
def a_request() -> dict[str, Any]:
    from torch.distributed.elastic.timer import TimerRequest

    one = TimerRequest(1, "scope", 5.5)
    return {
        "fields": [one.worker_id, one.scope_id, one.expiration_time],
        "equal": [one == TimerRequest(1, "scope", 5.5), one == TimerRequest(2, "scope", 5.5), one == "x"],
        "slots": outcome(setattr, one, "other", 1),
        "hash": outcome(hash, one),
    }


@case
def expires_asks_the_client() -> dict[str, Any]:
    from torch.distributed.elastic.timer import TimerClient, configure, expires

    class Client(TimerClient):  # type: ignore[misc]
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def acquire(self, scope_id: str, expiration_time: float) -> None:
            self.calls.append(("acquire", scope_id, round(expiration_time - time.time())))

        def release(self, scope_id: str) -> None:
            self.calls.append(("release", scope_id))

    given, default = Client(), Client()
    with expires(after=60, scope="mine", client=given):
        pass
    failing = outcome(_fail_within, expires, given)
    configure(default)
    with expires(after=30):
        pass
    scopes = [call[1] for call in default.calls]
    return {
        "calls": plain(given.calls),
        "fails": failing,
        "default": [call[0] for call in default.calls],
        "scope by place": [scope.partition("#")[0].rpartition("/")[2] if scope else scope for scope in scopes],
        "same scope": len(set(scopes)),
    }


def _fail_within(expires: Any, client: Any) -> None:
    with expires(1, "broken", client):
        raise KeyError("x")


@case
def expires_without_a_client() -> dict[str, Any]:
    import torch.distributed.elastic.timer as timers
    from torch.distributed.elastic.timer.api import configure, expires

    configure(None)
    with_default = outcome(expires(after=1).__enter__, words=("configure",))
    return {"enter": with_default, "name": timers.expires is expires}


@case
def abstract_interfaces() -> dict[str, Any]:
    from torch.distributed.elastic.timer import TimerClient, TimerServer
    from torch.distributed.elastic.timer.api import RequestQueue

    return {
        "client": outcome(TimerClient),
        "queue": outcome(RequestQueue),
        "server": outcome(lambda: TimerServer(mock.MagicMock(), 1)),
    }


def served() -> Any:
    """A server of the user's own, with the calls it got."""
    from torch.distributed.elastic.timer import TimerServer

    class Server(TimerServer):  # type: ignore[misc]
        def __init__(self, queue: Any, max_interval: float = 0.05) -> None:
            super().__init__(queue, max_interval)
            self.calls: list[Any] = []
            self.expired: dict[Any, list[Any]] = {}
            self.reaped: list[Any] = []
            self.reap_answer = True

        def register_timers(self, timer_requests: list[Any]) -> None:
            self.calls.append(("register", [one.scope_id for one in timer_requests]))

        def clear_timers(self, worker_ids: set[Any]) -> None:
            self.calls.append(("clear", sorted(worker_ids)))

        def get_expired_timers(self, deadline: float) -> dict[Any, list[Any]]:
            self.calls.append(("expired", abs(deadline - time.time()) < 5))
            return self.expired

        def _reap_worker(self, worker_id: Any) -> bool:
            self.reaped.append(worker_id)
            return self.reap_answer

    return Server


def queue_of(*requests: Any) -> Any:
    from torch.distributed.elastic.timer.api import RequestQueue

    class Queue(RequestQueue):  # type: ignore[misc]
        def __init__(self) -> None:
            self.waiting = list(requests)
            self.asked: list[Any] = []

        def size(self) -> int:
            return len(self.waiting)

        def get(self, size: int, timeout: float) -> list[Any]:
            self.asked.append((size, timeout))
            taken, self.waiting = self.waiting[:size], self.waiting[size:]
            return taken

    return Queue()


@case
def a_server_of_ones_own() -> dict[str, Any]:
    from torch.distributed.elastic.timer import TimerRequest

    queue = queue_of(TimerRequest(1, "a", 5), TimerRequest(2, "b", 6))
    server = served()(queue)
    server._run_watchdog()
    first = plain(server.calls)
    server.expired = {7: [TimerRequest(7, "x", 1)]}
    server.calls.clear()
    server._run_watchdog()
    server.reap_answer = False
    server.calls.clear()
    server._run_watchdog()
    return {"first": first, "asked": plain(queue.asked[:1]), "reaped": plain(server.reaped), "kept": plain(server.calls)}


@case
def a_server_runs_in_its_thread() -> dict[str, Any]:
    server = served()(queue_of())
    threads = threading.active_count()
    server.start()
    running = until(lambda: len(server.calls) > 4)
    more = threading.active_count() - threads
    stopped = outcome(server.stop)
    count = len(server.calls)
    time.sleep(0.15)
    return {
        "runs": bool(running),
        "threads": more,
        "stop": stopped,
        "ended": len(server.calls) - count,
        "stop again": outcome(server.stop),
    }


@case
def the_local_timer_kills() -> dict[str, Any]:
    from torch.distributed.elastic.timer import LocalTimerClient, LocalTimerServer

    queue = QUEUES.Queue()
    server = LocalTimerServer(queue, max_interval=0.05)
    server.start()
    try:

        def releasing() -> None:
            client = LocalTimerClient(queue)
            client.acquire("early", time.time() + 0.2)
            client.release("early")

        killed = end_of_child(lambda: LocalTimerClient(queue).acquire("late", time.time() + 0.1), 10)
        released = end_of_child(releasing, 0.5)
    finally:
        server.stop()
    return {"killed by": killed, "released": released}


@case
def the_local_server_keeps_its_book() -> dict[str, Any]:
    from torch.distributed.elastic.timer import LocalTimerServer, TimerRequest
    from torch.distributed.elastic.timer.local_timer import MultiprocessingRequestQueue

    queue = QUEUES.Queue()
    requests = MultiprocessingRequestQueue(queue)
    empty = [requests.size(), outcome(requests.get, 1, 0.05)]
    queue.put(TimerRequest(1, "q", 3))
    taken = requests.get(1, 5.0)
    server = LocalTimerServer(queue)
    server.register_timers(
        [TimerRequest(1, "a", 10.0), TimerRequest(1, "b", 20.0), TimerRequest(2, "a", 30.0), TimerRequest(3, "gone", -1)]
    )

    def expired(deadline: float) -> Any:
        return {worker: [one.scope_id for one in found] for worker, found in server.get_expired_timers(deadline).items()}

    facts = {
        "empty": empty,
        "taken": [one.scope_id for one in taken],
        "at 5": plain(expired(5)),
        "at 15": plain(expired(15)),
        "at 99": plain(expired(99)),
    }
    server.register_timers([TimerRequest(1, "a", 12.0)])
    facts["moved"] = plain(expired(11))
    server.register_timers([TimerRequest(1, "a", -1)])
    facts["released"] = plain(expired(15))
    server.clear_timers({1})
    facts["cleared"] = plain(expired(99))
    facts["unknown cleared"] = outcome(server.clear_timers, {99})
    return facts


@case
def the_file_request() -> dict[str, Any]:
    from torch.distributed.elastic.timer import FileTimerRequest

    one = FileTimerRequest(worker_pid=5, scope_id="s", expiration_time=1.5, signal=9)
    return {
        "fields": [one.worker_pid, one.scope_id, one.expiration_time, one.signal],
        "json": json.loads(one.to_json()),
        "equal": [one == FileTimerRequest(5, "s", 1.5, 9), one == FileTimerRequest(5, "s", 1.5, 15)],
        "default": FileTimerRequest(5, "s", 1.5).signal,
    }


@case
def the_file_timer_kills() -> dict[str, Any]:
    from torch.distributed.elastic.timer import FileTimerClient, FileTimerServer

    told: list[Any] = []
    with folder() as path:
        name = str(path / "pipe")
        server = FileTimerServer(
            name, "run", max_interval=0.05, log_event=lambda what, request: told.append([what, request is not None])
        )
        server.start()
        try:
            made = os.path.exists(name)

            def releasing() -> None:
                client = FileTimerClient(name)
                client.acquire("early", time.time() + 0.3)
                client.release("early")

            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # torch's server sends it to its own process too
            killed = end_of_child(lambda: FileTimerClient(name, signal=signal.SIGUSR1).acquire("late", time.time() + 0.1), 10)
            released = end_of_child(releasing, 0.6)
        finally:
            server.stop()
        left = os.path.exists(name)
    return {"made": made, "killed by": killed, "released": released, "left": left, "told": plain(told[:2])}


@case
def the_file_server_keeps_its_book() -> dict[str, Any]:
    from torch.distributed.elastic.timer.file_based_local_timer import FileTimerRequest, FileTimerServer

    with folder() as path:
        server = FileTimerServer(str(path / "pipe"), "run")
        above = 2**22  # no process has such an id; a small one may belong to a thread of the kernel
        one, other = above + 11, above + 12
        server.register_timers(
            [FileTimerRequest(one, "a", 10.0, 9), FileTimerRequest(one, "b", 20.0, 9), FileTimerRequest(other, "a", 30.0, 9)]
        )

        def expired(deadline: float) -> Any:
            return {
                worker - above: sorted(timer.scope_id for timer in found)
                for worker, found in server.get_expired_timers(deadline).items()
            }

        facts: dict[str, Any] = {"at 5": plain(expired(5)), "at 25": plain(expired(25))}
        server.register_timers([FileTimerRequest(one, "a", -1)])
        facts["released"] = plain(expired(15))
        server.clear_timers({one})
        facts["cleared"] = plain(expired(99))
        facts["running"] = [FileTimerServer.is_process_running(os.getpid()), FileTimerServer.is_process_running(2**22 + 3)]
        facts["progress"] = type(server.get_last_progress_time()).__name__
        facts["recent"] = abs(server.get_last_progress_time() - time.time()) < 3600 or server.get_last_progress_time() == 0
    return facts


@case
def a_file_client_without_its_server() -> dict[str, Any]:
    from torch.distributed.elastic.timer import FileTimerClient

    with folder() as path:
        client = FileTimerClient(str(path / "nobody"))
        return {"acquire": outcome(client.acquire, "s", time.time() + 5, words=("s",)), "release": outcome(client.release, "s")}


@case
def the_file_server_runs_once() -> dict[str, Any]:
    from torch.distributed.elastic.timer import FileTimerClient, FileTimerServer

    with folder() as path:
        name = str(path / "pipe")
        server = FileTimerServer(name, "run", max_interval=1)
        asking = threading.Thread(target=lambda: FileTimerClient(name).acquire("s", time.time() + 60), daemon=True)
        starter = threading.Timer(0.2, asking.start)
        starter.start()
        answer = outcome(server.run_once)
        return {"answer": answer}


@case
def what_is_logged_of_expired_timers() -> dict[str, Any]:
    from torch.distributed.elastic.timer.debug_info_logging import log_debug_info_for_expired_timers

    return {
        "answer": outcome(log_debug_info_for_expired_timers, "run", {1: ["scope"]}),
        "none": outcome(log_debug_info_for_expired_timers, "run", {}),
    }


@case
def a_server_that_is_gone() -> dict[str, Any]:
    from torch.distributed.elastic.timer import FileTimerClient, expires

    entered = []

    def block(client: Any) -> None:
        with expires(60, "scope", client):
            entered.append(True)

    with folder() as path:
        never = outcome(block, FileTimerClient(str(path / "never")))
        os.mkfifo(path / "left")
        left = outcome(block, FileTimerClient(str(path / "left")))
    return {"never there": never, "left its pipe": left, "entered": len(entered)}
