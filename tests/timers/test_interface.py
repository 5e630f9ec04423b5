"""`expires`, requests, and the loop that all queue-based servers share."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from rallypoint.timers import TimerClient, TimerRequest, TimerServer, configure, expires, interface
from rallypoint.timers.file_timer import FileTimerRequest
from rallypoint.timers.interface import RequestQueue


class Recorder(TimerClient):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self.calls.append(("acquire", scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        self.calls.append(("release", scope_id))


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(interface, "_client", None)
    return Recorder()


def test_without_a_client_there_are_no_timers(client: Recorder) -> None:
    with pytest.raises(RuntimeError, match="Configure timer client"), expires(after=1):
        pass


def test_a_scope_is_acquired_and_released(client: Recorder) -> None:
    configure(client)
    before = time.time()
    with expires(after=5, scope="step"):
        assert client.calls[0][:2] == ("acquire", "step")
        assert before + 5 <= client.calls[0][2] <= time.time() + 5
        assert len(client.calls) == 1
    assert client.calls[1:] == [("release", "step")]


def test_a_scope_that_raises_is_released(client: Recorder) -> None:
    with pytest.raises(ZeroDivisionError), expires(5, "step", client):
        raise ZeroDivisionError
    assert client.calls[-1] == ("release", "step")


def test_scopes_without_names_are_told_apart_by_their_lines(client: Recorder) -> None:
    with expires(5, client=client), expires(6, client=client):
        pass
    outer, inner = client.calls[0][1], client.calls[1][1]
    assert outer.startswith(f"{__file__}#")
    with expires(5, client=client):
        pass
    assert client.calls[4][1] not in (outer, inner)


def test_it_decorates(client: Recorder) -> None:
    @expires(5, "function", client)
    def double(number: int) -> int:
        return 2 * number

    assert [double(2), double(3)] == [4, 6]
    assert [call[0] for call in client.calls] == ["acquire", "release"] * 2


def test_requests_are_values_without_a_hash() -> None:
    assert TimerRequest(1, "a", 2.0) == TimerRequest(1, "a", 2.0) != TimerRequest(1, "a", 3.0)
    assert FileTimerRequest(1, "a", 2.0, 9) != FileTimerRequest(1, "a", 2.0, 15)
    assert TimerRequest(1, "a", 2.0) != FileTimerRequest(1, "a", 2.0)
    with pytest.raises(TypeError):
        hash(TimerRequest(1, "a", 2.0))
    assert pickle.loads(pickle.dumps(FileTimerRequest(1, "a", 2.0, 9))) == FileTimerRequest(1, "a", 2.0, 9)


def test_a_client_imports_neither_multiprocessing_nor_servers() -> None:
    code = """
import sys
import rallypoint.timers as timer
assert not [name for name in sys.modules if name.startswith("rallypoint.timers.")]
timer.FileTimerClient, timer.configure, timer.expires, timer.LocalTimerClient
heavy = {"multiprocessing", "typing", "dataclasses", "logging", "subprocess", "socket", "rallypoint.timers.file_server"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-S", "-c", code], check=True, timeout=30, env={"PYTHONPATH": ":".join(sys.path)})


def test_signatures_are_those_of_the_contract() -> None:
    import rallypoint.timers as timer
    from rallypoint.timers.local_timer import MultiprocessingRequestQueue

    def names(function: Any) -> list[str]:
        return [one for one in inspect.signature(function).parameters if one != "self"]

    assert names(timer.TimerRequest) == ["worker_id", "scope_id", "expiration_time"]
    assert names(timer.TimerServer.__init__) == ["request_queue", "max_interval", "daemon"]
    assert names(timer.LocalTimerClient) == ["mp_queue"]
    assert names(timer.LocalTimerServer) == ["mp_queue", "max_interval", "daemon"]
    assert names(MultiprocessingRequestQueue.get) == ["size", "timeout"]
    assert names(timer.FileTimerClient) == ["file_path", "signal"]
    assert names(timer.FileTimerRequest) == ["worker_pid", "scope_id", "expiration_time", "signal"]
    assert names(timer.FileTimerServer)[:5] == ["file_path", "run_id", "max_interval", "daemon", "log_event"]
    assert names(timer.expires) == ["after", "scope", "client"]
    assert names(timer.configure) == ["timer_client"]


class SlowQueue(RequestQueue):
    """Gives one request each time; raises instead while it is broken."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, float]] = []
        self.is_broken = False

    def size(self) -> int:
        return 0

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        self.asked.append((size, timeout))
        if self.is_broken:
            raise OSError("broken")
        threading.Event().wait(0.01)
        return [TimerRequest(7, "a", 1.0)]


class Server(TimerServer):
    def __init__(self, queue: RequestQueue, reap: Any) -> None:
        super().__init__(queue, 0.2)
        self.table: dict[int, list[TimerRequest]] = {}
        self.reap = reap

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        for request in timer_requests:
            self.table.setdefault(request.worker_id, []).append(request)

    def clear_timers(self, worker_ids: set[int]) -> None:
        for worker in worker_ids:
            del self.table[worker]

    def get_expired_timers(self, deadline: float) -> dict[int, list[TimerRequest]]:
        return dict(self.table)

    def _reap_worker(self, worker_id: int) -> bool:
        return bool(self.reap(worker_id))


def test_a_worker_that_is_not_reaped_is_tried_again(wait_until: Any) -> None:
    answers = [False, True]
    tried: list[int] = []

    def reap(worker: int) -> bool:
        tried.append(worker)
        return answers.pop(0) if answers else False

    queue = SlowQueue()
    server = Server(queue, reap)
    server.start()
    wait_until(lambda: len(tried) >= 3)
    server.stop()
    assert queue.asked[0] == (1, 0.2)


def test_neither_a_broken_queue_nor_a_failing_reap_ends_the_watch(wait_until: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "RETRY_S", 0.01)
    tried: list[int] = []

    def reap(worker: int) -> bool:
        tried.append(worker)
        raise ValueError("no")

    queue = SlowQueue()
    queue.is_broken = True
    server = Server(queue, reap)
    server.start()
    wait_until(lambda: len(queue.asked) >= 3)
    queue.is_broken = False
    wait_until(lambda: len(tried) >= 2)
    server.stop()
    server.stop()


def test_a_server_can_be_started_again(wait_until: Any) -> None:
    tried: list[int] = []
    server = Server(SlowQueue(), lambda worker: tried.append(worker) or True)
    for _ in range(2):
        tried.clear()
        server.start()
        wait_until(lambda: tried)
        server.stop()
