"""Jobs that run nowhere, with as many workers as a test wants, for the page to show."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.conftest import PATIENCE_S

from rallypoint.health.server import HealthCheckServer
from rallypoint.inspection.log_ends import LogEnd, LogFile, LogWish, find_end
from rallypoint.inspection.stack_view import BY_SIGNAL, ProcessDump, StacksView, WorkerDump
from rallypoint.inspection.view import Happening, JobView, NodeView, WorkerView, job_of
from rallypoint.web.document import Span
from rallypoint.web.rules import PATHS
from rallypoint.web.site import Job, Site


def make_worker(rank: int, step: int | None = 0, **more: Any) -> WorkerView:
    known: dict[str, Any] = {"state": "running", "silent_s": 0.1, "cpu_s": float(step or 0), "memory_bytes": 1 << 30}
    return WorkerView(rank, rank, 1000 + rank, step=step, **{**known, **more})


def make_node(number: int = 0, workers: tuple[WorkerView, ...] = (), **more: Any) -> NodeView:
    known: dict[str, Any] = {
        "job": "job-7", "node": f"node-{number}", "hostname": f"host-{number}", "pid": 100 + number,
        "command": "python3 train.py", "phase": "running", "phase_s": 60.0, "uptime_s": 100.0, "generation": 2, "max_restarts": 3,
        "restarts": 1, "node_rank": number, "seconds": {"running": 60.0, "starting": 5.0, "waiting": 5.0, "lost": 30.0},
        "history": (Happening(60.0, "restart", "rank 1 (pid 7) failed: exited with code 3"),), "log_dir": "/logs/job-7",
    }  # fmt: skip
    return NodeView(workers=workers, **{**known, **more})


def make_spans(now: float) -> list[Span]:
    return [
        Span("starting", now - 100, now - 95, 0),
        Span("running", now - 95, now - 65, 1, 0.0),
        Span("waiting", now - 65, now - 60, 1),
        Span("running", now - 60, now, 2),
    ]


class MadeJob:
    """A job of nodes with some workers each, all of which are a step further at each look."""

    def __init__(self, nodes: int = 1, workers: int = 4, **of_node: Any) -> None:
        self.size = nodes, workers
        self.of_node = of_node
        self.looks = 0
        self.fails_with: Exception | None = None
        self.stacks = dict.fromkeys(range(4), 'Thread 1 (most recent call first):\n  File "/job/train.py", line 7 in train')
        self.stack_note = ""
        self.logs: dict[tuple[int, str], LogFile] = {}
        self.site = Site(Job(self.look, self.survey, make_spans, self.dump, self.log_end))

    def look(self) -> NodeView:
        return self._node(0)

    def survey(self, by: str, patience_s: float) -> JobView:
        self.looks += 1
        if self.fails_with is not None:
            raise self.fails_with
        return job_of([self._node(number) for number in range(self.size[0])])

    def dump(self) -> StacksView:
        told = [WorkerDump("job-7", "", rank, 1, (ProcessDump(1, BY_SIGNAL, text),)) for rank, text in self.stacks.items()]
        return StacksView(tuple(told), note=self.stack_note)

    def log_end(self, wish: LogWish, node_id: str) -> LogEnd | None:
        return find_end(wish, lambda *which: self.logs.get(which))

    def _node(self, number: int) -> NodeView:
        nodes, workers = self.size
        ranks = range(number * workers, (number + 1) * workers)
        made = tuple(make_worker(rank, 10 * self.looks + 1) for rank in ranks)
        return make_node(number, made, **{"nodes": nodes, "world_size": nodes * workers, **self.of_node})


@contextlib.contextmanager
def served(job: MadeJob) -> Iterator[HealthCheckServer]:
    server = HealthCheckServer(lambda: int(time.time()), 0, 60, pages=dict.fromkeys(PATHS, job.site.answer))
    server.start()
    try:
        yield server
    finally:
        job.site.close()
        server.stop()


class Told(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    text: str

    @property
    def document(self) -> Any:
        return json.loads(self.text)


def ask(port: int, path: str, token: str | None = None, method: str = "GET", headers: dict[str, str] | None = None) -> Told:
    """One request; the token in the header."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(client):
        own = {} if token is None else {"Authorization": f"Bearer {token}"}
        client.request(method, path, headers={**own, **(headers or {})})
        response = client.getresponse()
        return Told(response.status, response.headers, response.read().decode())


class Viewer:
    """Somebody who looks at a job."""

    def __init__(self, port: int, token: str) -> None:
        self._client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        self._client.request("GET", "/web/view", headers={"Authorization": f"Bearer {token}"})
        self.response = self._client.getresponse()

    def next(self) -> tuple[str, Any]:
        """The next event: its name, and what it says."""
        lines = [self.response.readline().decode() for _ in range(3)]
        assert lines[2] == "\n"
        return lines[0].removeprefix("event: ").strip(), json.loads(lines[1].removeprefix("data: "))

    def close(self) -> None:
        self.response.close()
        self._client.close()
