"""The health endpoint of a real job, whose workers fail again and again."""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests import ports
from tests.pace import is_under

RESTARTS = 20
REQUESTS = 10_000
CLIENTS = 4
LATE_S = 5.0
GROWTH_BYTES = 8 << 20


class Asker:
    """One client, which asks until it is told to stop."""

    def __init__(self, port: int, stopping: threading.Event) -> None:
        self.port = port
        self.stopping = stopping
        self.statuses: collections.Counter[tuple[str, str, int]] = collections.Counter()
        self.slowest_s = 0.0
        self.restarts = 0
        self.thread = threading.Thread(target=self.run)

    @property
    def count(self) -> int:
        return self.statuses.total()

    def run(self) -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=LATE_S)) as client:
            while not self.stopping.is_set():
                for path in ("/healthz", "/readyz"):
                    asked_at = time.monotonic()
                    client.request("GET", path)
                    response = client.getresponse()
                    told = json.loads(response.read())
                    self.slowest_s = max(self.slowest_s, time.monotonic() - asked_at)
                    self.statuses[path, told["phase"], response.status] += 1
                    self.restarts = told["restarts"]


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_p44_ten_thousand_requests_while_the_group_restarts_twenty_times(
    start_rallyrun: Any, script: Any, tmp_path: Path, wait_until: Any
) -> None:
    """No request hangs, every answer is right for the phase that it names, and the agent's memory stays flat."""
    enough = tmp_path / "enough"
    worker = script(
        f"""
        import os, sys, time
        is_last = os.environ["TORCHELASTIC_RESTART_COUNT"] == "{RESTARTS}"
        deadline = time.monotonic() + (60 if is_last else 0.2)
        while time.monotonic() < deadline and not os.path.exists({str(enough)!r}):
            time.sleep(0.01)
        sys.exit(0 if is_last else 1)
        """
    )
    port = ports.free_port()
    options = ["--standalone", "--max-restarts", str(RESTARTS), "--restart-backoff", "0", "--health-port", str(port)]
    job = start_rallyrun([*options, worker])
    job.wait_for(lambda: ports.bound_at(port))
    stopping = threading.Event()
    askers = [Asker(port, stopping) for _ in range(CLIENTS)]
    for asker in askers:
        asker.thread.start()
    try:
        job.wait_for(lambda: askers[0].restarts >= 3, 30)
        before = resident_bytes(job.pid)
        job.wait_for(lambda: askers[0].restarts == RESTARTS and sum(asker.count for asker in askers) >= REQUESTS, 60)
        after = resident_bytes(job.pid)
    finally:
        stopping.set()
        for asker in askers:
            asker.thread.join()
        enough.touch()
    assert job.wait() == 0
    assert after - before < GROWTH_BYTES
    assert is_under(max(asker.slowest_s for asker in askers), LATE_S)
    statuses = {key for asker in askers for key in asker.statuses}
    assert {status for path, _, status in statuses if path == "/healthz"} == {200}
    assert {(phase == "running", status) for path, phase, status in statuses if path == "/readyz"} == {(True, 200), (False, 503)}


def test_a_busy_health_port_is_refused_before_anything_starts_unless_it_was_inherited(
    rallyrun: Any, script: Any, tmp_path: Path
) -> None:
    """A flag was meant for this launcher; the variable is that of all agents of a host, and only one can have the port."""
    worker = script(f"open({str(tmp_path / 'started')!r}, 'w')")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        by_flag = rallyrun(["--standalone", "--health-port", str(port), worker])
        assert not (tmp_path / "started").exists()
        by_environment = rallyrun(["--standalone", worker], env={"TORCHELASTIC_HEALTH_CHECK_PORT": str(port)})
    assert (by_flag.returncode, by_environment.returncode) == (2, 0)
    for ended in (by_flag, by_environment):
        assert f"127.0.0.1 port {port}: the port is taken by process" in ended.stderr
    assert "the job goes on without a health endpoint" in by_environment.stderr
    assert (tmp_path / "started").exists()


@pytest.mark.parametrize("port", ["70000", "eighty"])
def test_a_health_port_that_is_none_is_refused(rallyrun: Any, script: Any, port: str) -> None:
    ended = rallyrun(["--standalone", script("raise SystemExit(9)")], env={"TORCHELASTIC_HEALTH_CHECK_PORT": port})
    assert ended.returncode == 2
    assert "TORCHELASTIC_HEALTH_CHECK_PORT" in ended.stderr
