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
from rallypoint.inspection.view import JobView
from rallypoint.tui import lines, model
from rallypoint.tui.source import JobSource

RALLYPOINT = (sys.executable, "-m", "rallypoint")
WORKERS = 4
CONF = "last_call_timeout=0.2,keep_alive_interval=5"  # a killed agent is not found to be silent first, however busy the machine


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

    def shows(self, seen: JobView) -> dict[str, Any]:
        """What it shows, if that is this generation, running, with all of its workers."""
        view = self.latest
        workers = sum(len(one["workers"]) for one in view.get("nodes", ()))
        is_same = view and (view["phase"], view["generation"]) == ("running", seen.generation)
        return view if is_same and workers == sum(len(node.workers) for node in seen.members) else {}

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


@pytest.mark.timeout(400)
def test_all_tell_the_same_story(job: Any, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    flags = ["--max-restarts", "2", "--redirects", "3", "--log-dir", str(tmp_path / "logs")]
    host = job.start_host("--web", *flags, nnodes="2:3", workers=WORKERS, conf=CONF)
    nodes = [host, *(job.start(*flags, nnodes="2:3", workers=WORKERS, conf=CONF) for _ in range(2))]
    page_at = re.search(r":(\d+)/\?token=(\w+)", host.wait_for_line("the job's page"))
    assert page_at is not None
    first = host.agent.wait_for(lambda: whole(3))
    logs: list[str] = request.getfixturevalue("following")
    top, page = TopWatch(), PageWatch(int(page_at[1]), page_at[2])
    request.addfinalizer(page.close)

    job.order(5, "sys.exit(7)")
    second = host.agent.wait_for(lambda: whole(3, first.generation))
    assert_same(second, top, page, logs, nodes=3, restarts=1, told="exited with code 7")

    lost = next(node for node in nodes[1:] if node.agent.process.poll() is None)
    lost.kill()
    third = host.agent.wait_for(lambda: whole(2, second.generation))
    assert_same(third, top, page, logs, nodes=2, restarts=1, told="was lost: its agent was killed")
    for node in nodes:
        if node is not lost:
            node.agent.send_signal(signal.SIGTERM)
    for node in nodes:
        node.agent.process.wait(PATIENCE_S)


def whole(size: int, after: int = -1) -> JobView | None:
    """The job as so many nodes run in a later generation and all have answered; None as long as they have not."""
    found = inspect.jobs() and inspect.status()
    if not found or found.phase != "running" or found.silent or found.generation <= after or len(found.members) != size:
        return None
    return found


def printed_by(*words: str) -> str:
    return subprocess.run([*RALLYPOINT, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout


def assert_same(seen: JobView, top: TopWatch, page: PageWatch, logs: list[str], *, nodes: int, restarts: int, told: str) -> None:
    """A look has only so much patience with a node of a busy machine, so each is given the time for one at which all answer."""
    pids = {worker.rank: worker.pid for node in seen.members for worker in node.workers}
    assert (len(seen.members), len(pids), seen.restarts) == (nodes, nodes * WORKERS, restarts)
    assert told in seen.nodes[0].history[-1].why

    listed = printed_by("ps").splitlines()
    assert listed[1].split()[:5] == ["a-job", "running", str(nodes), str(nodes * WORKERS), str(seen.generation)]
    size = f"{nodes} nodes, {nodes * WORKERS} workers, generation {seen.generation}, {restarts} of 2 restarts"
    status = poll_until(lambda: size in (text := printed_by("status")) and text, PATIENCE_S)
    assert status, printed_by("status")
    assert told in status
    assert all(re.search(rf"^\s+{rank}\s+{pid}\s", status, re.MULTILINE) for rank, pid in pids.items())

    headline = f"{nodes} nodes, {nodes * WORKERS} ranks, {restarts} of 2 restarts, generation {seen.generation}"
    drawn = poll_until(lambda: headline in (look := top.look())[0] and look, PATIENCE_S)
    assert drawn, top.look()
    assert told in " ".join(drawn[1].split())
    assert all(str(pid) in drawn[2] for pid in pids.values())

    view = poll_until(lambda: page.shows(seen), PATIENCE_S)
    assert view, page.latest
    assert (view["phase"], view["restarts"], view["world_size"]) == ("running", restarts, len(pids))
    assert {row[0]: row[1] for one in view["nodes"] for row in one["workers"]} == pids
    assert told in json.dumps(view["history"])

    def all_starts_are_followed() -> bool:
        said = [json.loads(line) for line in list(logs)]
        found = {(line["rank"], json.loads(line["text"][6:])["pid"]) for line in said if line["text"].startswith("START ")}
        return set(pids.items()) <= found

    assert poll_until(all_starts_are_followed, PATIENCE_S), logs
