"""Five ways to watch a job of three nodes that loses a worker, and then a node: all tell the same story, and the right one."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S, poll_until
from tests.web.made_jobs import Viewer

from rallypoint import inspect
from rallypoint.tui import lines, model
from rallypoint.tui.source import JobSource

RALLYPOINT = (sys.executable, "-m", "rallypoint")
WORKERS = 4


class PageWatch:
    """Whoever looks at the page, all the time; `latest` is what it shows."""

    def __init__(self, port: int, token: str) -> None:
        self.latest: dict[str, Any] = {}
        self._viewer = Viewer(port, token)
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        with contextlib.suppress(OSError, ValueError, AssertionError):  # it was closed, or the job has ended
            while True:
                _, self.latest = self._viewer.next()

    def close(self) -> None:
        self._viewer.close()
        self._thread.join(PATIENCE_S)


class TopWatch:
    """What ``rallypoint top`` knows and says, without a terminal to draw it on."""

    def __init__(self) -> None:
        self._source = JobSource("a-job")
        self._watch = model.Watch("a-job")

    def look(self) -> tuple[str, str, str]:
        self._watch = self._source.look(self._watch)
        rows = model.rows_of(self._watch, {}, self._source.here)
        first, _ = lines.headlines(self._watch, rows)
        told = " ".join(line[0] for line in lines.timeline(self._watch, self._watch.seen_at, 100))
        return first, told, " ".join(str(one.pid) for one in rows)


@pytest.fixture
def following(tmp_path: Path) -> Iterator[list[str]]:
    """The lines of ``rallypoint logs --follow``, as they come."""
    found: list[str] = []
    process = subprocess.Popen([*RALLYPOINT, "logs", "a-job", "--follow", "--json"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    thread = threading.Thread(target=lambda: found.extend(iter(process.stdout.readline, "")))  # type: ignore[union-attr]
    thread.start()
    yield found
    process.send_signal(signal.SIGINT)
    process.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    process.stdout.close()


def test_all_tell_the_same_story(job: Any, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    flags = ["--max-restarts", "2", "--redirects", "3", "--log-dir", str(tmp_path / "logs")]
    host = job.start_host("--web", *flags, nnodes="2:3", workers=WORKERS)
    nodes = [host, *(job.start(*flags, nnodes="2:3", workers=WORKERS) for _ in range(2))]
    page_at = re.search(r":(\d+)/\?token=(\w+)", host.wait_for_line("the job's page"))
    assert page_at is not None
    host.agent.wait_for(lambda: is_whole(3))
    logs: list[str] = request.getfixturevalue("following")
    top, page = TopWatch(), PageWatch(int(page_at[1]), page_at[2])
    request.addfinalizer(page.close)
    first = inspect.status().generation

    job.order(5, "sys.exit(7)")
    host.agent.wait_for(lambda: inspect.status().generation > first and is_whole(3))
    assert_same(top, page, logs, nodes=3, restarts=1, told="exited with code 7")
    second = inspect.status().generation

    lost = next(node for node in nodes[1:] if node.agent.process.poll() is None)
    lost.kill()
    host.agent.wait_for(lambda: inspect.status().generation > second and is_whole(2))
    assert_same(top, page, logs, nodes=2, restarts=1, told="was lost: its agent was killed")
    for node in nodes:
        if node is not lost:
            node.agent.send_signal(signal.SIGTERM)
    for node in nodes:
        node.agent.process.wait(PATIENCE_S)


def is_whole(size: int) -> bool:
    """Whether so many nodes run, and all have answered."""
    found = inspect.jobs() and inspect.status()
    return bool(found) and found.phase == "running" and len(found.members) == size and not found.silent


def assert_same(top: TopWatch, page: PageWatch, logs: list[str], *, nodes: int, restarts: int, told: str) -> None:
    seen = inspect.status()
    pids = {worker.rank: worker.pid for node in seen.members for worker in node.workers}
    assert (len(seen.members), len(pids), seen.restarts) == (nodes, nodes * WORKERS, restarts)
    assert told in seen.nodes[0].history[-1].why

    listed = subprocess.run([*RALLYPOINT, "ps"], capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    assert listed[1].split()[:5] == ["a-job", "running", str(nodes), str(nodes * WORKERS), str(seen.generation)]
    status = subprocess.run([*RALLYPOINT, "status"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert f"{nodes} nodes, {nodes * WORKERS} workers, generation {seen.generation}, {restarts} of 2 restarts" in status
    assert told in status
    assert all(re.search(rf"^\s+{rank}\s+{pid}\s", status, re.MULTILINE) for rank, pid in pids.items())

    headline, history, rows = top.look()
    assert f"{nodes} nodes, {nodes * WORKERS} ranks, {restarts} of 2 restarts, generation {seen.generation}" in headline
    assert told in " ".join(history.split())
    assert all(str(pid) in rows for pid in pids.values())

    def page_is_up_to_date() -> bool:
        view = page.latest
        return (
            bool(view)
            and view["generation"] == seen.generation
            and sum(len(one["workers"]) for one in view["nodes"]) == len(pids)
        )

    assert poll_until(page_is_up_to_date, PATIENCE_S), page.latest
    view = page.latest
    assert (view["phase"], view["restarts"], view["world_size"]) == ("running", restarts, len(pids))
    assert {row[0]: row[1] for one in view["nodes"] for row in one["workers"]} == pids
    assert told in json.dumps(view["history"])

    def all_starts_are_followed() -> bool:
        said = [json.loads(line) for line in list(logs)]
        found = {(line["rank"], json.loads(line["text"][6:])["pid"]) for line in said if line["text"].startswith("START ")}
        return set(pids.items()) <= found

    assert poll_until(all_starts_are_followed, PATIENCE_S), logs
